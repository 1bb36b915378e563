"""The analysis of what a stage computes, compared with numpy and with counting: groups of axes,
windows, reductions, and axes that run as one in memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tvm import tirx

from gtco.tensor import cost
from gtco.tensor.analysis.axes import Segment, gathers, phase_steps, regular, segments, turned
from gtco.tensor.analysis.filtering import applicable, least_products
from gtco.tensor.analysis.indices import axis_groups, flatten
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.reduction import Reduction
from gtco.tensor.analysis.scope import Scope
from gtco.tensor.analysis.window import Geometry
from gtco.tensor.sketch.shared.streaming import divisor_below, stage_vectors
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

T = TensorType


def one(kind: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], **attrs: Any) -> Stage:
    names = tuple(f"x{i}" for i in range(len(shapes)))
    op = Operator(kind, names, "y", T(out), make_attrs(**attrs))
    return make_stage([op], dict(zip(names, map(T, shapes), strict=True)), [])


def test_a_scope_decides_what_ranges_decide():
    scope = Scope()
    i, j = scope.variables((4, 3))
    assert scope.known(i < 4) is True
    assert scope.known(i >= 4) is False
    assert scope.known(i < j) is None
    assert scope.index(tirx.floordiv(j, 3)) == 0
    low = tirx.Var("low", "int32")
    scope.bind(low, 2, -1)
    assert scope.known(low >= -1) is True
    assert scope.known(low < 0) is None
    scope.bind(7, 1)  # a number needs no bound


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=5), st.data())
def test_groups_of_a_reshape_are_the_smallest(source: list[int], data: st.DataObject):
    target = list(data.draw(st.permutations(source)))
    if len(target) > 1 and data.draw(st.booleans()):
        target = [target[0] * target[1], *target[2:]]
    groups = axis_groups(tuple(source), tuple(target))
    assert [a for left, _ in groups for a in left] == list(range(len(source)))
    assert [a for _, right in groups for a in right] == list(range(len(target)))
    for left, right in groups:
        assert prod(source[a] for a in left) == prod(target[a] for a in right)
        proper = {prod(source[a] for a in left[:n]) for n in range(1, len(left))} & {
            prod(target[a] for a in right[:n]) for n in range(1, len(right))
        }
        assert not proper, "a group that falls into two"


@given(
    *(st.integers(1, 4) for _ in range(2)),
    *(st.integers(0, 3) for _ in range(2)),
    st.integers(1, 9),
    st.booleans(),
)
def test_positions_of_a_window_that_count(
    kernel: int, stride: int, before: int, after: int, size: int, include: bool
):
    """This includes the last window of ceil mode, which may lie beyond the padding."""
    span = size + before + after - kernel
    assume(span >= 0)
    outputs = -(-span // stride) + 1
    g = Geometry(
        (kernel, 1),
        (stride, 1),
        (before, 0, after, 0),
        (1, 1),
        "NHWC",
        (1, size, 1, 1),
        (1, outputs, 1, 1),
    )
    counts = range(-before, size + after) if include else range(size)
    for y in range(outputs):
        start = y * stride - before
        wanted = sum(start + k in counts for k in range(kernel))
        if wanted > 0:  # ONNX has no output for an empty window
            assert int(Scope().index(g.counted(Scope(), start, 0, include))) == wanted


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_reduction_says_where_its_elements_go(shape: list[int], data: st.DataObject):
    rank = len(shape)
    axes = tuple(data.draw(st.sets(st.integers(-rank, rank - 1), max_size=rank)))
    assume(len({a % rank for a in axes}) == len(axes))
    keep = data.draw(st.booleans())
    x = np.arange(prod(shape)).reshape(shape)
    wanted = x.sum(axis=axes or None, keepdims=keep)
    stage = one("sum", [tuple(shape)], wanted.shape, axes=axes, keepdims=keep)
    view = Reduction(stage, stage.output)
    total = np.zeros_like(wanted)
    for index in np.ndindex(*shape):
        total[tuple(view.result_index(index))] += x[index]
    np.testing.assert_array_equal(total, wanted)
    assert view.count == x.size // max(wanted.size, 1)
    rows = prod(view.kept) * (1 if view.by_rows else shape[-1])
    assert rows == wanted.size


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["number", "variable"])), max_size=5))
def test_a_flat_position_is_the_sum_of_every_index_times_its_stride(axes: list[tuple[int, str]]):
    scope = Scope()
    shape = [extent for extent, _ in axes]
    index: list[Any] = scope.variables(shape)
    for n, (extent, kind) in enumerate(axes):
        if kind == "number":
            index[n] = extent - 1
    wanted: Any = sum((i * prod(shape[n + 1 :]) for n, i in enumerate(index)), 0)
    assert scope.index(flatten(index, shape) - wanted) == 0


@given(st.integers(1, 5000), st.integers(1, 200))
def test_the_largest_divisor_up_to_a_bound(n: int, most: int):
    best = max(d for d in range(1, most + 1) if n % d == 0)
    assert divisor_below(n, most) == (best if 4 * best >= most else n)


def summed(inputs: int) -> Stage:
    shape = (4, 3, 8)
    types = {f"x{n}": T(shape) for n in range(inputs)}
    sums = ["x0", *(f"y{n}" for n in range(1, inputs))]
    ops = [Operator("add", (sums[n - 1], f"x{n}"), sums[n], T(shape)) for n in range(1, inputs)]
    return make_stage(ops, types, [])


def test_inputs_that_lie_alike_are_followed_at_the_price_of_one(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    simplify = Scope.index
    monkeypatch.setattr(Scope, "index", lambda scope, x: asked.append(x) or simplify(scope, x))

    def simplified(inputs: int) -> int:
        asked.clear()
        assert regular(summed(inputs), 1)
        return len(asked)

    assert simplified(12) == simplified(2) > 0


def test_the_vectors_of_a_stage_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    stage, counted = summed(4), []
    count = cost.vectors
    monkeypatch.setattr(cost, "vectors", lambda *given: counted.append(given) or count(*given))
    first = stage_vectors(stage, 16)
    assert first.total > 0 and len(counted) == len(stage.operators)
    assert stage_vectors(stage, 16) == first and len(counted) == len(stage.operators)
    assert stage_vectors(stage, 8).total > first.total  # half as wide: it needs its own vector


def test_a_row_is_as_long_as_its_loads_are_even():
    x = (6, 5, 32)
    assert regular(one("add", [x, x], x), 0)
    bias = one("add", [x, (32,)], x)
    assert not regular(bias, 0)
    assert regular(bias, 2)
    swapped = one("permute", [(5, 6, 32)], x, axes=(1, 0, 2))
    assert not regular(swapped, 1)
    assert regular(swapped, 2)
    assert gathers(one("permute", [(6, 32, 5)], x, axes=(0, 2, 1)), 2) == 1


def test_a_concatenation_is_cut_where_its_parts_meet():
    stage = one("concat", [(3, 8), (3, 24)], (3, 32), axis=1)
    assert segments(stage, 1) == (Segment(0, 8), Segment(8, 24))


@given(
    widths=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    extent=st.integers(1, 40),
    first=st.integers(-3, 40),
    step=st.integers(1, 3),
)
def test_the_parts_of_a_concatenation_that_an_index_reads(
    widths: list[int], extent: int, first: int, step: int
):
    """Beside each place that the index takes."""
    stage = one("concat", [(w,) for w in widths], (sum(widths),), axis=0)
    probe = Probe(stage)
    (var,) = probe.scope.variables((extent,))
    index = first + step * var
    probe.follow(stage.output.output, [index])
    followed = dict(probe.loads)
    places = range(first, first + step * extent, step)
    starts = [sum(widths[:n]) for n in range(len(widths))]
    read = 0
    for x, start, width in zip(stage.output.inputs, starts, widths, strict=True):
        if any(start <= place < start + width for place in places):
            read += 1
            assert x in followed
        if x in followed:
            assert probe.scope.index(followed[x] - (index - start)) == 0
    inside = [place for place in places if 0 <= place < sum(widths)]
    if read > 1 or 0 < len(inside) < extent:  # which part, or whether there is one
        assert probe.conditions


def test_blocks_to_turn_are_those_that_a_permutation_turns():
    found = turned(one("permute", [(2, 64, 48)], (2, 48, 64), axes=(0, 2, 1)), 16)
    assert found is not None
    assert (found.first, found.stop, found.cut, found.inputs) == (1, 2, 2, ("x0",))
    assert turned(one("add", [(64, 48), (64, 48)], (64, 48)), 16) is None


def test_no_block_is_turned_where_only_a_condition_keeps_its_reads_inside():
    """The pictures lie one behind the other, so a block of the second one is not a block of the
    first.
    """
    stage = make_stage(
        [
            Operator("permute", ("a",), "t", T((1, 48, 64)), make_attrs(axes=(0, 2, 1))),
            Operator("concat", ("t", "b"), "u", T((3, 48, 64)), make_attrs(axis=0)),
        ],
        {"a": T((1, 64, 48)), "b": T((2, 48, 64))},
        (),
    )
    assert turned(stage, 16) is None


@pytest.mark.parametrize(("most", "wanted"), [(4, (3,)), (2, None)])
def test_phases_run_by_steps(most: int, wanted: tuple[int, ...] | None):
    """If channels are made last, every 3rd position of a row runs by one, and every position runs
    by three.
    """
    planes = one("permute", [(3, 40)], (40, 3), axes=(1, 0))
    assert phase_steps(planes, 0, 3, 1, most) == ()
    interleaved = one("slice", [(120,)], (40,), begin=(0,), strides=(3,))
    assert phase_steps(interleaved, 0, 1, 0, most) == wanted


def filtered(dtype: str = "float32", **changes: Any) -> Operator:
    """A convolution in 8 channels."""
    attrs = {"strides": (1, 1), "dilation": (1, 1), "groups": 1, "padding": (1,) * 4, **changes}
    return Operator("conv2d", ("x", "w"), "y", T((1, 8, 9, 9), dtype), make_attrs(**attrs))


@pytest.mark.parametrize(
    ("op", "weights"),
    [
        (filtered(exact=1), (8, 8, 3, 3)),
        (filtered("int32"), (8, 8, 3, 3)),
        (filtered(), (8, 8, 5, 3)),
        (filtered(groups=2), (8, 4, 3, 3)),
        (filtered(strides=(2, 1)), (8, 8, 3, 3)),
        (filtered(dilation=(1, 2)), (8, 8, 3, 3)),
    ],
    ids=["exact sums", "sums of integers", "5 x 3", "groups", "strides", "dilation"],
)
def test_what_minimal_filtering_does_not_compute_needs_all_its_products(
    op: Operator, weights: tuple[int, ...]
) -> None:
    assert not applicable(op, weights) and least_products(op, weights) == 1


def test_minimal_filtering_needs_a_quarter_of_the_products() -> None:
    """In tiles of 4 x 4 outputs, 6 x 6 products take the place of 9 for each output."""
    assert applicable(filtered(), (8, 8, 3, 3))
    assert least_products(filtered(), (8, 8, 3, 3)) == 36 / (16 * 9)
