"""Two products in a row become one where that multiplies less."""

from __future__ import annotations

import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import TensorType
from tests.graph.rewrites.products import PLAIN, convolution, products
from tests.graphs import build, same, weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", ["matmul", "conv2d"])
@pytest.mark.parametrize("second", ["matmul", "conv2d"])
def test_products_in_a_row(first: str, second: str, bias: bool) -> None:
    """Through a bias and, if channels are last, a reshape."""

    def body(g: Graph, x: str) -> str:
        if first == "matmul":
            y = g.add("matmul", (x, weights(g, 5, 40)))
        else:
            y = convolution(g, x, 40, "NHWC", size=3, padding=(1, 1, 1, 1))
        y = g.add("add", (y, weights(g, 1, 40))) if bias else y
        y = g.add("reshape", (y,), TensorType((3, 8, 2, 40), "float32"))
        if second == "matmul":
            return g.add("matmul", (y, weights(g, 40, 6)))
        return convolution(g, y, 6, "NHWC")

    shape = (3, 16, 5) if first == "matmul" else (3, 4, 4, 5)
    after = same(build(body, shape), {first: 1, "reshape": 1} | ({"add": 1} if bias else {}), 1e-5)
    assert products(after) == 48 * 6 * (5 if first == "matmul" else 45)


def test_convolutions_in_a_row_with_channels_first() -> None:
    def body(g: Graph, x: str) -> str:
        y = convolution(g, x, 40, size=3, strides=(2, 2))
        return convolution(g, g.add("add", (y, weights(g, 40, 1, 1))), 7)

    same(build(body, (2, 5, 9, 9)), {"conv2d": 1, "add": 1}, 1e-5)


def test_biases_on_both_sides_of_a_reshape() -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("add", (g.add("matmul", (x, weights(g, 8, 40))), weights(g, 40)))
        y = g.add("reshape", (y,), TensorType((10, 40), "float32"))
        return g.add("matmul", (g.add("add", (y, weights(g, 40))), weights(g, 40, 6)))

    same(build(body), canonicalize(build(body)).histogram(), 1e-5)


@pytest.mark.parametrize("case", ["groups", "3x3"])
def test_convolutions_in_a_row_that_stay_two(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        if case == "groups":
            known = weights(g, 40, 3, 1, 1)
            y = g.add("conv2d", (x, known), **PLAIN | {"groups": 2}, layout="NHWC")
            return convolution(g, y, 2, "NHWC")
        y = g.add("matmul", (x, weights(g, 6, 40)))
        return convolution(g, y, 2, "NHWC", size=3)

    graph = build(body, (2, 5, 5, 6))
    kinds = {"conv2d": 2} if case == "groups" else {"matmul": 1, "conv2d": 1}
    assert products(same(graph, kinds, 1e-5)) == products(graph)


@pytest.mark.parametrize("case", ["narrow", "relu", "read", "output", "map", "axis"])
def test_products_that_stay_two(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("matmul", (x, weights(g, 8, 3 if case == "narrow" else 40)))
        match case:
            case "relu":
                y = g.add("relu", (y,))
            case "map":  # a bias of each position
                y = g.add("add", (y, weights(g, 5, 40)))
            case "axis":
                y = g.add("reshape", (y,), TensorType((2, 10, 20), "float32"))
        z = g.add("matmul", (y, weights(g, int(g.types[y].shape[-1]), 6)))
        again = g.add("mean", (y,), axes=(2,), keepdims=True)
        return g.add("add", (z, again)) if case == "read" else z

    graph = build(body)
    if case == "output":
        graph.outputs = ("y", graph.operators["y"].inputs[0])
        inner = next(op for op in graph.operators.values() if op.kind == "matmul")
        graph.outputs = ("y", inner.output)
    assert products(canonicalize(graph)) == products(graph)
