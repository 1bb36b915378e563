"""Reductions, normalisations and softmax against the reference, for 8 lanes and 16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.machine.target import target
from gtco.tensor.sketch.rows import cpu as rows
from gtco.tensor.space import Program, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)


def op(kind: str, inputs: str, output: str, shape: Sequence[int], **attrs: object) -> Operator:
    return Operator(
        kind, tuple(inputs.split()), output, TensorType(tuple(shape)), make_attrs(**attrs)
    )


def stage(operators: list[Operator], **shapes: Sequence[int]) -> Stage:
    return make_stage(operators, {k: TensorType(tuple(v)) for k, v in shapes.items()}, ["g", "b"])


def check(
    made: Stage, name: str, scale: float = 1.0, shift: float = 0.0, tolerance: float = 1e-5
) -> None:
    machine = runnable(name)
    sketch = rows.match(made, machine)
    assert sketch is not None
    inputs = [a * np.float32(scale) + np.float32(shift) for a in random_inputs(made, fresh_seed())]
    wanted = reference(made, inputs)
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, tolerance)


def test_where_bytes_come_from() -> None:
    """A tensor may reach the next stage on any core that is free; weights have left the caches."""
    norm = op("layer_norm", "x g b", "y", (197, 192), epsilon=1e-5)
    sketch = rows.match(stage([norm], x=(197, 192), g=(192,), b=(192,)), target("x86-64-v3"))
    assert sketch is not None
    inner, tasks = sketch.workload(next(configs(sketch))).layers
    x, *weights = inner.loads
    moved = inner.iterations * tasks.parallel
    assert x.handed and not x.memory and x.nbytes * moved == pytest.approx(4 * 197 * 192)
    assert [w.memory for w in weights] == ["DRAM", "DRAM"] and not any(w.handed for w in weights)
    assert inner.stores[0].handed


LENGTHS = [1, 3, 7, 16, 49, 100, 197, 768, 1000, 4099]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "softmax", "log_softmax"])
def test_rows(kind: str, length: int, name: str) -> None:
    shape = (2, 5, length)
    inputs, attrs = {
        "softmax": ("x", {"axis": 2}),
        "log_softmax": ("x", {"axis": -1}),
        "rms_norm": ("x g", {"epsilon": 1e-6}),
    }.get(kind, ("x g b", {"epsilon": 1e-5}))
    check(stage([op(kind, inputs, "y", shape, **attrs)], x=shape, g=(length,), b=(length,)), name)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("axes", [(2,), (0, 2), (1,), (0,), (0, 1), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_reductions(kind: str, axes: tuple[int, ...], name: str) -> None:
    shape, keep = (3, 6, 53), kind in ("mean", "max")
    out = [1 if a in axes else n for a, n in enumerate(shape) if keep or a not in axes]
    check(stage([op(kind, "x", "y", out, axes=axes, keepdims=keep)], x=shape), name, tolerance=2e-5)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("last", [1, 3, 4, 8, 9, 16, 17])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_rows_of_short_pieces(kind: str, last: int, name: str) -> None:
    """A reduction over the first and the last axis: a row's pieces are shorter than a vector, or a
    little longer.
    """
    made = op(kind, "x", "y", (1, 6, 1), axes=(0, 2), keepdims=True)
    check(stage([made], x=(16, 6, last)), name, tolerance=2e-5)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 7, 53), 1), ((5, 197), -1), ((9, 3), -1), ((4, 6, 1), 1), ((6, 1, 5), 1), ((2, 4099), 1)],
)
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_where_the_extreme_lies(kind: str, shape: Sequence[int], axis: int, name: str) -> None:
    """The first of several extremes, or the first NaN if there is one, after an addition and before
    a cast. Infinities are extremes like any other value.
    """
    before = Operator("add", ("x", "z"), "s", TensorType(tuple(shape)), make_attrs())
    kept = [n for a, n in enumerate(shape) if a != axis % len(shape)]
    attrs = make_attrs(axis=axis, keepdims=False)
    place = Operator(kind, ("s",), "p", TensorType(tuple(kept), "int64"), attrs)
    narrow = Operator("cast", ("p",), "y", TensorType(tuple(kept), "int32"), make_attrs())
    whole = make_stage([before, place, narrow], {n: TensorType(tuple(shape)) for n in "xz"}, [])
    alone = make_stage(
        [Operator(kind, ("x",), "p", place.type, attrs)], {"x": TensorType(tuple(shape))}, []
    )
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    for made in (whole, alone):
        sketch = rows.match(made, machine)
        assert sketch is not None
        kernels = some_kernels(sketch, machine)
        for special in ((), (np.nan,), (np.inf, -np.inf)):
            x = rng.integers(-3, 4, shape).astype(np.float32)
            for value in special:
                x[rng.random(shape) < 0.1] = value
            if np.inf in special:
                x[..., 0] = -np.inf if kind == "argmax" else np.inf
            inputs = [x, np.zeros_like(x)][: len(made.inputs)]
            wanted = reference(made, inputs)
            for built in kernels:
                np.testing.assert_array_equal(built(*inputs), wanted)


@pytest.mark.parametrize("length", [5, 8, 130])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_softmax_over_another_axis(kind: str, length: int) -> None:
    shape = (2, 9, length)
    check(stage([op(kind, "x", "y", shape, axis=1)], x=shape), "x86-64-v3", scale=5)


@pytest.mark.parametrize("name", targets())
def test_large_offsets(name: str) -> None:
    """Mean 1000 and deviation 1: the variance is taken about the mean."""
    made = stage(
        [op("layer_norm", "x g b", "y", (4, 768), epsilon=1e-6)], x=(4, 768), g=(768,), b=(768,)
    )
    machine = runnable(name)
    sketch = rows.match(made, machine)
    assert sketch is not None
    x, g, b = random_inputs(made, fresh_seed())
    x = x + np.float32(1000)
    got = build(sketch, next(iter(configs(sketch))), machine)(x, g, b)
    assert_close(got, reference(made, [x, g, b]), 1e-3)


@pytest.mark.parametrize("name", targets())
def test_residual_before_and_windows_behind(name: str) -> None:
    """Swin: the residual sum, its layer norm, the roll and the window partition in one kernel."""
    shape = (1, 196, 40)
    check(
        stage(
            [
                op("add", "x r", "s", shape),
                op("layer_norm", "s g b", "n", shape, epsilon=1e-5),
                op("reshape", "n", "i", (1, 14, 14, 40)),
                op("roll", "i", "o", (1, 14, 14, 40), shifts=(0, -3, -3, 0)),
                op("reshape", "o", "w", (2, 7, 2, 7, 40)),
                op("permute", "w", "y", (2, 2, 7, 7, 40), axes=(0, 2, 1, 3, 4)),
            ],
            x=shape,
            r=shape,
            g=(40,),
            b=(40,),
        ),
        name,
    )


@pytest.mark.parametrize("name", targets())
def test_prologue_and_gate(name: str) -> None:
    """A prologue that is used again after the reduction, and a gelu."""
    shape = (3, 5, 50)
    check(
        stage(
            [
                op("multiply", "x r", "s", shape),
                op("softmax", "s", "p", shape, axis=-1),
                op("gelu", "p", "q", shape),
                op("add", "q s", "y", shape),
            ],
            x=shape,
            r=(50,),
        ),
        name,
    )


def test_transposed_input() -> None:
    """The input has its channels first; the layer norm is over the channels (DINO and ConvNeXt)."""
    check(
        stage(
            [
                op("permute", "x", "t", (1, 6, 7, 33), axes=(0, 2, 3, 1)),
                op("layer_norm", "t g b", "y", (1, 6, 7, 33), epsilon=1e-6),
            ],
            x=(1, 33, 6, 7),
            g=(33,),
            b=(33,),
        ),
        "x86-64-v3",
    )


def test_global_pooling_and_scale() -> None:
    """The mean over tokens after the last block of Swin, with an epilogue."""
    check(
        stage(
            [
                op("mean", "x", "m", (1, 77), axes=(1,), keepdims=False),
                op("multiply", "m r", "y", (1, 77)),
            ],
            x=(1, 49, 77),
            r=(77,),
        ),
        "x86-64-v4" if target().lanes == 16 else "x86-64-v3",
    )


def test_masked_softmax() -> None:
    """-inf masks an element. A row whose elements are all masked is NaN, as in the reference."""
    machine = runnable("x86-64-v3")
    made = stage([op("softmax", "x", "y", (3, 21), axis=1)], x=(3, 21))
    sketch = rows.match(made, machine)
    assert sketch is not None
    (x,) = random_inputs(made, fresh_seed())
    x[0, 3:] = -np.inf
    x[1] = -np.inf
    with np.errstate(invalid="ignore"):
        wanted = reference(made, [x])
    got = build(sketch, next(iter(configs(sketch))), machine)(x)
    assert_close(got[[0, 2]], wanted[[0, 2]], 1e-6)
    assert np.isnan(got[1]).all() and (got[0, 3:] == 0).all()


def test_extremes_propagate_nan() -> None:
    machine = runnable("x86-64-v3")
    for kind in ("max", "min"):
        made = stage([op(kind, "x", "y", (4,), axes=(1,), keepdims=False)], x=(4, 37))
        sketch = rows.match(made, machine)
        assert sketch is not None
        (x,) = random_inputs(made, fresh_seed())
        x[0, 0] = x[1, 17] = x[2, 36] = np.nan
        assert np.isnan(build(sketch, next(iter(configs(sketch))), machine)(x)).tolist() == [
            True,
            True,
            True,
            False,
        ]


def test_not_its_business() -> None:
    machine = target("x86-64-v3")
    double = make_stage(
        [
            Operator(
                "sum", ("x",), "y", TensorType((3,), "int64"), make_attrs(axes=(1,), keepdims=False)
            )
        ],
        {"x": TensorType((3, 4), "int64")},
        [],
    )
    assert rows.match(double, machine) is None
    two = stage(
        [op("softmax", "x", "a", (3, 4), axis=1), op("softmax", "a", "y", (3, 4), axis=1)], x=(3, 4)
    )
    assert rows.match(two, machine) is None
    assert rows.match(stage([op("relu", "x", "y", (3, 4))], x=(3, 4)), machine) is None


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "softmax", "log_softmax", "max"])
@pytest.mark.parametrize(("count", "length"), [(157, 24), (71, 33), (13, 1500), (3, 20)])
def test_panels_of_rows(count: int, length: int, kind: str, name: str) -> None:
    """One task has whole panels, a rest of one and single rows; a NaN stays in its row."""
    shape = (count, length)
    inputs, attrs = {
        "softmax": ("x", {"axis": 1}),
        "log_softmax": ("x", {"axis": 1}),
        "rms_norm": ("x g", {"epsilon": 1e-6}),
        "max": ("x", {"axes": (1,), "keepdims": False}),
    }.get(kind, ("x g b", {"epsilon": 1e-5}))
    out = shape[:1] if kind == "max" else shape
    made = stage([op(kind, inputs, "y", out, **attrs)], x=shape, g=(length,), b=(length,))
    machine = runnable(name)
    sketch = rows.match(made, machine)
    assert sketch is not None
    arrays = random_inputs(made, fresh_seed())
    arrays[0][1, length // 2] = np.nan
    arrays[0][count - 1, length - 1] = np.inf
    wanted = reference(made, arrays)
    config = max(configs(sketch), key=lambda c: int(c["rows"]))
    assert_close(build(sketch, config, machine)(*arrays, unaligned=True), wanted)


@pytest.mark.parametrize("name", targets())
def test_a_prologue_of_movement_is_read_again(name: str) -> None:
    """A reshape, a permutation and a slice before the rows: none of them is stored."""
    operators = [
        op("slice", "x", "s", (6, 40, 2, 32), begin=(1, 0, 0, 8), strides=(1, 1, 1, 1)),
        op("permute", "s", "t", (2, 6, 40, 32), axes=(2, 0, 1, 3)),
        op("reshape", "t", "r", (12, 1280)),
        op("layer_norm", "r g b", "y", (12, 1280), epsilon=1e-5),
    ]  # fmt: skip
    made = stage(operators, x=(8, 40, 2, 48), g=(1280,), b=(1280,))
    sketch = rows.match(made, runnable(name))
    assert sketch is not None and sketch.plain and sketch.scratch.nbytes == 0
    check(made, name)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_of_any_length(data: st.DataObject) -> None:
    """Any rest of a vector, few rows and many, after an addition or before a gate or neither. The
    last vector overlaps the one before, or is padded, or rows side by side share it.
    """
    kind = data.draw(st.sampled_from(["softmax", "log_softmax", "layer_norm", "rms_norm", "mean"]))
    machine = runnable(data.draw(st.sampled_from(targets())))
    lanes = machine.lanes
    length = data.draw(st.integers(1, 9)) * lanes + data.draw(st.integers(-2, lanes))
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 23)), max(length, 1))
    out = (*shape[:2], 1) if kind == "mean" else shape
    inputs, attrs = {
        "mean": ("x", {"axes": (2,), "keepdims": True}),
        "rms_norm": ("x g", {"epsilon": 1e-6}),
        "layer_norm": ("x g b", {"epsilon": 1e-5}),
    }.get(kind, ("x", {"axis": 2}))
    operators = [op(kind, inputs, "n", out, **attrs)]
    shapes = {"x": shape, "g": shape[2:], "b": shape[2:]}
    if data.draw(st.booleans()):
        operators = [op("add", "z m", "x", shape), *operators]
        shapes |= {"z": shape, "m": (1, *shape[1:])}
        del shapes["x"]
    if data.draw(st.booleans()):
        operators += [op("sigmoid", "n", "s", out), op("multiply", "n s", "y", out)]
    made = stage(operators, **shapes)
    sketch = rows.match(made, machine)
    assert sketch is not None
    arrays = random_inputs(made, data.draw(st.integers(0, 1 << 30)), scale=3.0)
    config = data.draw(st.sampled_from(list(configs(sketch))))
    got = build(sketch, config, machine)(*arrays, unaligned=True)
    least = 0.1 if kind == "mean" else 1e-30  # the mean of one row may be near zero
    assert_close(got, reference(made, arrays), 2e-5, least)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("length", [4096, 3136, 5003, 4161])
def test_long_rows_keep_their_digits(length: int, name: str) -> None:
    """Moments in one pass, as columns about some of their elements, and the rest of the row. The
    rows have a mean far from zero, first or last elements far from all others, or one value only.
    NaN and infinities stay in their row.
    """
    shape = (5, length)
    made = stage(
        [op("layer_norm", "x g b", "y", shape, epsilon=1e-5)], x=shape, g=(length,), b=(length,)
    )
    machine = runnable(name)
    sketch = rows.match(made, machine)
    assert sketch is not None and sketch.side == 1
    x, g, b = random_inputs(made, fresh_seed())
    first, last, odd = x.copy(), x.copy(), x.copy()
    first[:, :70] *= np.float32(1e3)
    last[:, -1] = 1e4
    odd[0, length // 2], odd[3, -1], odd[4, 0] = np.nan, np.inf, -np.inf
    for built in some_kernels(sketch, machine):
        assert_close(built(x + np.float32(1e3), g, b), reference(made, [x + 1000, g, b]), 1e-3)
        for value in (x, first, last):
            assert_close(built(value, g, b), reference(made, [value, g, b]), 5e-5)
        even = built(np.full_like(x, 3.7), g, b)
        assert np.abs(even - b).max() <= 5e-4
        got = built(odd, g, b)
        assert np.isnan(got[[0, 3, 4]]).all() and np.isfinite(got[1:3]).all()


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("edge", [56, 57, 75])
def test_long_rows_of_an_image_are_read_in_vectors(edge: int, name: str) -> None:
    """InstanceNorm: a reshape makes each image a row. Its quotients and remainders must cancel."""
    image, shape = (2, 3, edge, edge), (2, 3, edge * edge)
    made = stage(
        [op("reshape", "x", "r", shape), op("layer_norm", "r g b", "y", shape, epsilon=1e-5)],
        x=image, g=shape[2:], b=shape[2:],
    )  # fmt: skip
    machine = runnable(name)
    sketch = rows.match(made, machine)
    assert sketch is not None and sketch.side == 1 and not sketch.gathers
    program = sketch.build(next(iter(configs(sketch))), "kernel")
    assert isinstance(program, Program)
    assert "truncmod" not in program.function.script()
    check(made, name)


@pytest.mark.parametrize("name", targets())
def test_rows_read_backwards_through_choices(name: str) -> None:
    """A reflecting pad of a roll, before a roll and a maximum. It reads at ``-i % 2``, of which TVM
    makes ``i % -2 * -1``, which its code generator refuses behind a choice.
    """
    shape = [2, 1, 2, 2, 8]
    pad = [op("roll", "x", "r", shape, shifts=(0, 0, 1, 0, 0))]
    for axis, extent in (0, 2), (2, 2), (3, 2), (4, 2):
        source = pad[-1].output if pad else "x"
        begin = [0] * 5
        begin[axis] = 1 if shape[axis] == 2 else shape[axis] - 2
        strides = [-1 if k == axis else 1 for k in range(5)]
        part = [extent if k == axis else n for k, n in enumerate(shape)]
        pad.append(
            op("slice", source, f"s{axis}", part, begin=tuple(begin), strides=tuple(strides))
        )
        shape[axis] += extent
        first = source if axis == 4 else f"s{axis}"
        pad.append(op("concat", f"{first} s{axis}", f"c{axis}", shape, axis=axis))
    ops = [
        *pad,
        op("roll", "c4", "v", shape, shifts=(0, 0, 0, 0, 6)),
        op("reshape", "v", "t", (4, 4, 4, 10)),
        op("max", "t", "y", (4, 4, 1, 1), axes=(2, 3), keepdims=True),
    ]
    check(stage(ops, x=(2, 1, 2, 2, 8)), name, tolerance=0)
