"""Movement in registers: blocks that are turned, neighbours that come from several places."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest

from gtco.codegen.llvm import lower
from gtco.machine.target import target
from gtco.tensor import space
from gtco.tensor.analysis import axes
from gtco.tensor.analysis.axes import longest_row, output_shape
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.sketch.shared.interleaving import Interleaving
from gtco.tensor.space import Program
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)
from tests.sketch.test_elementwise import CASES, concat_last, heads, op, stage


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 56, 9, 24), (0, 3, 1, 2)),
        ((2, 33, 5, 19), (0, 2, 3, 1)),
        ((70, 197), (1, 0)),
        ((3, 16, 128), (0, 2, 1)),
        ((2, 17, 3, 130), (3, 0, 2, 1)),
    ],
)
def test_blocks_turned_in_registers(
    shape: tuple[int, ...], axes: tuple[int, ...], name: str
) -> None:
    """A transposed and a plain operand, with arithmetic after them; no block divides the sizes."""
    machine = runnable(name)
    turned = tuple(shape[a] for a in axes)
    gate = turned[-1:] if turned[-1] >= 16 else (1,)  # otherwise no vector would run along it
    made = make_stage(
        [
            Operator("permute", ("x",), "t", TensorType(turned), make_attrs(axes=axes)),
            Operator("add", ("t", "z"), "s", TensorType(turned)),
            Operator("multiply", ("s", "g"), "y", TensorType(turned)),
        ],
        {"x": TensorType(shape), "z": TensorType(turned), "g": TensorType(gate)},
        [],
    )
    sketch = elementwise.match(made, machine)
    assert sketch is not None
    assert sketch.blocks is not None and sketch.blocks.axes.inputs == ("x",)
    inputs = random_inputs(made, fresh_seed())
    for built in some_kernels(sketch, machine):
        got = built(*inputs, unaligned=True)
        assert_close(got, reference(made, inputs), 1e-6)


@pytest.mark.parametrize("name", targets())
def test_a_permute_of_tokens_to_an_image_is_turned(name: str) -> None:
    """Tokens [1, 196, 40] become [1, 40, 14, 14], and then a flat row for each channel."""
    machine = runnable(name)
    made = make_stage(
        [
            Operator("reshape", ("x",), "i", TensorType((1, 14, 14, 40))),
            Operator(
                "permute", ("i",), "p", TensorType((1, 40, 14, 14)), make_attrs(axes=(0, 3, 1, 2))
            ),
            Operator("reshape", ("p",), "y", TensorType((40, 196))),
        ],
        {"x": TensorType((1, 196, 40))},
        [],
    )
    sketch = elementwise.match(made, machine)
    assert sketch is not None and sketch.blocks is not None
    (x,) = random_inputs(made, fresh_seed())
    got = build(sketch, first_config(sketch), machine)(x)
    np.testing.assert_array_equal(got, reference(made, [x], precise=False))


def image_last(channels: int, height: int = 37, width: int = 23) -> Stage:
    """The channels of an image made last."""
    shape = (1, height, width, channels)
    return stage(
        [op("permute", "x", "t", shape, axes=(0, 2, 3, 1)), op("relu", "t", "y", shape)],
        x=(1, channels, height, width),
    )


def steps_of_a_recurrence() -> Stage:
    """The states of two steps, joined as an LSTM's outputs [steps, directions, batch, size]."""
    return stage(
        [
            op("tanh", "a", "t", (1, 1, 1, 12)),
            op("concat", "t b", "y", (3, 1, 1, 12), axis=0),
        ],
        a=(1, 1, 1, 12),
        b=(2, 1, 1, 12),
    )


def pixel_shuffle(r: int) -> Stage:
    return stage(
        [
            op("reshape", "x", "a", (2, r, r, 5, 19)),
            op("permute", "a", "b", (2, 5, r, 19, r), axes=(0, 3, 1, 4, 2)),
            op("reshape", "b", "y", (2, 5 * r, 19 * r)),
        ],
        x=(2 * r * r, 5, 19),
    )


def pixel_unshuffle(r: int) -> Stage:
    return stage(
        [
            op("reshape", "x", "a", (4, 9, r, 19, r)),
            op("permute", "a", "b", (4, r, r, 9, 19), axes=(0, 2, 4, 1, 3)),
            op("reshape", "b", "y", (4 * r * r, 9, 19)),
        ],
        x=(4, 9 * r, 19 * r),
    )


def channel_shuffle(groups: int, channels: int) -> Stage:
    return stage(
        [
            op("reshape", "x", "a", (5, 7, groups, channels)),
            op("permute", "a", "b", (5, 7, channels, groups), axes=(0, 1, 3, 2)),
            op("reshape", "b", "y", (5, 7, channels * groups)),
        ],
        x=(5, 7, channels * groups),
    )


def rotary_pairs(tokens: int, width: int) -> Stage:
    """Rotary embedding of neighbouring elements: x cos + (-x1, x0, -x3, x2, ...) sin."""
    pairs, half = (3, tokens, width // 2, 2), (3, tokens, width // 2, 1)
    whole, ones = (3, tokens, width), (1, 1, 1, 1)
    return stage(
        [
            op("reshape", "x", "v", pairs),
            op("slice", "v", "b", half, begin=(0, 0, 0, 1), strides=ones),
            op("slice", "v", "a", half, begin=(0, 0, 0, 0), strides=ones),
            op("negative", "b", "m", half),
            op("concat", "m a", "t", pairs, axis=3),
            op("reshape", "t", "r", whole),
            op("multiply", "x c", "p", whole),
            op("multiply", "r s", "q", whole),
            op("add", "p q", "y", whole),
        ],
        x=whole,
        c=(tokens, width),
        s=(tokens, width),
    )


def every(step: int, count: int) -> Stage:
    """Every ``step``-th column, the last one of the tensor among them."""
    return stage(
        [op("slice", "x", "y", (5, count), begin=(0, step - 1), strides=(1, step))],
        x=(5, count * step),
    )


WOVEN = {
    **{f"image_{n}": lambda n=n: image_last(n) for n in (2, 3, 5, 6)},
    "large_image": lambda: image_last(3, 112, 112),
    **{f"pixel_shuffle_{r}": lambda r=r: pixel_shuffle(r) for r in (2, 3, 4)},
    **{f"pixel_unshuffle_{r}": lambda r=r: pixel_unshuffle(r) for r in (2, 3)},
    "channel_shuffle": lambda: channel_shuffle(2, 32),
    "odd_channel_shuffle": lambda: channel_shuffle(3, 17),
    "channel_shuffle_8": lambda: channel_shuffle(8, 12),
    "rotary_pairs": lambda: rotary_pairs(19, 26),
    "rotary_pairs_of_64": lambda: rotary_pairs(5, 64),
    "every_2": lambda: every(2, 21),
    "every_8": lambda: every(8, 21),
    "few": lambda: every(2, 9),
}


def guarded(how: str) -> Stage:
    """Every other column of two tensors, one behind the other; or of one, with rows of zeros around
    it. Where an operator does not choose them, their places lie outside of the tensors.
    """
    half = {"begin": (0, 1), "strides": (1, 2)}
    if how == "pad":
        pad = op("pad", "s", "y", (900, 32), before=(400, 0), after=(497, 0), value=0.0)
        return stage([op("slice", "x", "s", (3, 32), **half), pad], x=(3, 64))
    return stage(
        [
            op("slice", "a", "s", (3, 32), **half),
            op("slice", "b", "t", (900, 32), **half),
            op("concat", "s t", "y", (903, 32), axis=0),
        ],
        a=(3, 64),
        b=(900, 64),
    )


@pytest.mark.parametrize("how", ["concat", "pad"])
@pytest.mark.parametrize("name", targets())
def test_no_load_is_emitted_where_no_operator_chooses_it(name: str, how: str) -> None:
    """Loads by steps come before the choice of a concat's part."""
    machine, made = runnable(name), guarded(how)
    sketch = elementwise.match(made, machine)
    assert sketch is not None and not isinstance(sketch.blocks, Interleaving)
    inputs = random_inputs(made, fresh_seed())
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs), reference(made, inputs), 1e-6)


@pytest.mark.parametrize("make", [*WOVEN.values(), *CASES, steps_of_a_recurrence])
def test_probes_that_give_up_early_know_what_whole_ones_do(make: Callable[[], Stage]) -> None:
    """``even`` is compared with the strides and conditions of all rows, and the longest regular row
    with asking every row.
    """
    made = make()
    output, shape = made.output.output, output_shape(made)
    regular = []
    for cut in range(len(shape)):
        for most in (8, 1):
            whole, asked = Probe(made), Probe(made)
            (j, *outer), (there, *rest) = (
                probe.scope.variables((prod(shape[cut:]), *shape[:cut]))
                for probe in (whole, asked)
            )
            whole.follow(output, [*outer, *split_flat(j, shape[cut:])])
            steps = whole.strides(j)
            wanted = all(s is not None and 0 <= s <= most for s in steps)
            wanted = wanted and not whole.decided_by(j)
            index = [*rest, *split_flat(there, shape[cut:])]
            assert asked.even(output, index, there, most) == wanted
        if wanted:
            regular.append(cut)
    assert longest_row(made) == min(regular, default=None)


def test_axes_of_size_1_are_not_probed_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add nothing to a row. A probe of many joined parts takes 10 ms, which the search for
    stages pays for each of a thousand candidates.
    """
    asked, regular = [], axes.regular
    monkeypatch.setattr(axes, "regular", lambda made, cut: asked.append(cut) or regular(made, cut))
    assert longest_row(steps_of_a_recurrence()) == 1 and asked == [0, 3]


@pytest.mark.parametrize("case", WOVEN)
@pytest.mark.parametrize("name", targets())
def test_neighbours_from_several_places_are_woven(name: str, case: str) -> None:
    """They are woven by shuffles. The last column shows that no load reads past the end of its
    input.
    """
    machine = runnable(name)
    made: Stage = WOVEN[case]()
    sketch = elementwise.match(made, machine)
    assert sketch is not None and isinstance(sketch.blocks, Interleaving)
    inputs = random_inputs(made, fresh_seed())
    wanted = reference(made, inputs)
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, 1e-6)


def test_woven_loads_are_vectors() -> None:
    """This also holds if a row has several axes and a block begins at any place in it."""
    machine = target("x86-64-v4")
    sketch = elementwise.match(rotary_pairs(5, 64), machine)
    assert sketch is not None
    program = space.build(sketch, first_config(sketch), "k")
    assert isinstance(program, Program)
    lowered = str(lower([program.function], machine))
    assert "Shuffle" in lowered and "T.Div(T.Ramp" not in lowered and "% T.Broadcast" not in lowered


def test_what_does_not_run_evenly_is_not_woven() -> None:
    machine = target("x86-64-v4")
    for made in (every(9, 40), concat_last(), image_last(8, 64, 64), heads()):
        sketch = elementwise.match(made, machine)
        assert sketch is not None
        assert not isinstance(sketch.blocks, Interleaving) or sketch.blocks.phases == 8


def test_weaving_and_picking_are_priced_by_their_shuffles() -> None:
    machine = target("x86-64-v4")
    for made, most in ((image_last(3), 3.0), (pixel_shuffle(4), 3.0), (every(2, 64), 4.0)):
        sketch = elementwise.match(made, machine)
        assert sketch is not None and isinstance(sketch.blocks, Interleaving)
        assert 0 < sketch.blocks.shuffles < most
