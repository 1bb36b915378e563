"""Constants are folded as the operators define them, and go when nobody reads them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.tensor.stage import TensorType
from tests.graphs import build, number, same, weights


def test_constants_fold_and_unused_ones_go() -> None:
    def body(g: Graph, x: str) -> str:
        weights(g, 3, 3)
        w = g.add("permute", (weights(g, 4, 8),), axes=(1, 0))
        big = g.add("broadcast", (number(g, 1.5),), TensorType((2, 5, 4)))
        return g.add("add", (g.add("matmul", (x, w)), big))

    after = same(build(body), {"add": 1, "matmul": 1})
    assert sorted(c.size for c in after.constants.values()) == [1, 32]


@pytest.mark.parametrize(
    ("kind", "a", "b", "value"),
    [
        ("divide", [1, -1, 0], [0, 0, 0], [np.inf, -np.inf, np.nan]),
        ("divide", [np.inf, 1, np.nan], [np.inf, np.inf, 1], [np.nan, 0, np.nan]),
        ("subtract", [np.inf, 1, 3e38], [np.inf, np.inf, -3e38], [np.nan, -np.inf, np.inf]),
        ("multiply", [0, np.inf, 1e30], [np.inf, -1, 1e30], [np.nan, -np.inf, np.inf]),
        ("maximum", [np.nan, 1, -np.inf], [1, np.nan, 0], [np.nan, np.nan, 0]),
        ("mod", [1, np.inf, 5], [0, 2, np.inf], [np.nan, np.nan, 5]),
    ],
)
def test_constants_fold_as_ieee_says(
    kind: str, a: list[float], b: list[float], value: list[float]
) -> None:
    def body(g: Graph, x: str) -> str:
        left, right = (g.add_constant(np.array(c, np.float32)) for c in (a, b))
        return g.add("where", (g.add("isnan", (x,)), x, g.add(kind, (left, right))))

    (folded,) = (c for c in canonicalize(build(body, (2, 3))).constants.values())
    np.testing.assert_array_equal(folded, np.array(value, np.float32))


@pytest.mark.parametrize("kind", ["divide", "floor_divide", "mod", "floor_mod", "power"])
def test_integers_without_a_value_stay_unfolded(kind: str) -> None:
    divisor = [-1, -2, 3] if kind == "power" else [1, 0, 3]
    vector = TensorType((3,), "int32")
    graph = Graph(("x",), ("y",), {"x": vector})
    a, b = (graph.add_constant(np.array(c, np.int32)) for c in ([4, 5, 6], divisor))
    fine = graph.add("multiply", (b, a), vector)
    graph.add("add", ("x", graph.add("add", (fine, graph.add(kind, (a, b), vector)))), output="y")
    assert canonicalize(graph.prune().check()).histogram() == {"add": 2, kind: 1}


@pytest.mark.parametrize(
    ("kind", "a", "b", "x"),
    [
        ("multiply", 1e30, 1e30, 1e-30),
        ("multiply", 1e-30, 1e-30, 1e30),
        ("add", -3e38, -3e38, 3e38),
    ],
)
def test_constants_that_leave_the_range_together_stay_apart(
    kind: str, a: float, b: float, x: float
) -> None:
    graph = build(lambda g, x: g.add(kind, (g.add(kind, (x, number(g, a))), number(g, b))), (3,))
    inputs = {"x": np.full(3, x, np.float32)}
    wanted = graph.evaluate(inputs)["y"]
    assert np.isfinite(wanted).all() and wanted.all()
    np.testing.assert_array_equal(canonicalize(graph).evaluate(inputs)["y"], wanted)


def test_constants_that_were_computed_on_the_way_go_at_once() -> None:
    """Of eight chains of five operators, memory holds the eight results and little more."""
    count, shape = 8, (256, 1024)

    def body(g: Graph, x: str) -> str:
        for n in range(count):
            w = g.add_constant(np.full((1, 1024), n + 1, np.float32))
            w = g.add("broadcast", (w,), TensorType(shape))
            for kind in ("exp", "negative", "abs", "sqrt", "tanh"):
                w = g.add(kind, (w,))
            x = g.add("add", (x, w))
        return x

    graph = build(body, shape=shape)
    tracemalloc.start()
    after = fold_constants(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert after.histogram() == {"add": count, "identity": 1}
    assert peak < (count + 4) * 4 * shape[0] * shape[1]
