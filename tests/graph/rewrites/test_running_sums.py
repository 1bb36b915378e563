"""Running sums: what ONNX's CumSum becomes, sums from the end, and sums of one element."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from gtco.graph.graph import Graph
from gtco.tensor.stage import TensorType
from tests.graph.lower.test_lower import lowered
from tests.graphs import build, number, same


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_cumsum_is_one_operator(axis: int, reverse: int, exclusive: int) -> None:
    node = helper.make_node("CumSum", ["x", "a"], ["y"], reverse=reverse, exclusive=exclusive)
    graph, found, wanted = lowered([node], {"a": np.array(axis)}, (4, 3, 5))
    assert graph.histogram() == {"cumsum": 1}
    assert graph.operators["y"]["axis"] == axis % 3
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)


def flipped(g: Graph, x: str, axis: int) -> str:
    shape = g.types[x].shape
    begin = [int(d) - 1 if a == axis else 0 for a, d in enumerate(shape)]
    strides = [-1 if a == axis else 1 for a in range(len(shape))]
    return g.add("slice", (x,), g.types[x], begin=begin, strides=strides)


def sums(g: Graph, x: str, axis: int, exclusive: bool = False, reverse: bool = False) -> str:
    return g.add("cumsum", (x,), axis=axis, exclusive=exclusive, reverse=reverse)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_between_two_flips_the_order_is_the_other(exclusive: bool, reverse: bool) -> None:
    def body(g: Graph, x: str) -> str:
        return flipped(g, sums(g, flipped(g, x, 1), 1, exclusive, reverse), 1)

    after = same(build(body), {"cumsum": 1})
    assert after.operators["y"]["reverse"] is not reverse


def test_flips_of_another_axis_or_one_alone_stay() -> None:
    other = build(lambda g, x: flipped(g, sums(g, flipped(g, x, 2), 1), 2))
    same(other, {"cumsum": 1, "slice": 2})
    same(build(lambda g, x: sums(g, flipped(g, x, 1), 1)), {"cumsum": 1, "slice": 1})
    same(build(lambda g, x: flipped(g, sums(g, x, 1), 1)), {"cumsum": 1, "slice": 1})


def test_sums_that_are_read_twice_are_made_twice() -> None:
    def body(g: Graph, x: str) -> str:
        forward = sums(g, flipped(g, x, 1), 1)
        return g.add("multiply", (forward, flipped(g, forward, 1)))

    same(build(body), {"cumsum": 2, "slice": 1, "multiply": 1})


@pytest.mark.parametrize(("exclusive", "left"), [(False, {"relu": 1}), (True, {"identity": 1})])
def test_sums_of_one_element(exclusive: bool, left: dict[str, int]) -> None:
    def body(g: Graph, x: str) -> str:
        return g.add("relu", (sums(g, x, 1, exclusive),))

    after = same(build(body, (3, 1, 4)), left)
    assert after.types["y"] == TensorType((3, 1, 4))


def test_a_permutation_and_a_part_pass_sums_along_another_axis() -> None:
    def body(g: Graph, x: str) -> str:
        turned = g.add("permute", (x,), axes=(0, 2, 1))
        made = g.add("multiply", (sums(g, turned, 1), number(g, 2)))
        back = g.add("permute", (made,), axes=(0, 2, 1))
        return g.add("slice", (back,), TensorType((2, 1, 8)), begin=(0, 3, 0), strides=(1, 1, 1))

    after = same(build(body), {"cumsum": 1, "multiply": 1, "slice": 1, "reshape": 2})
    (made,) = (op for op in after.operators.values() if op.kind == "cumsum")
    assert made.type.size == 16
