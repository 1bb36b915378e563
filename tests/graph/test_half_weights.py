"""Which constants of a float16 file the graph keeps in float16 without changing any value."""

from __future__ import annotations

from math import inf

import numpy as np

from gtco.graph.graph import Graph
from gtco.graph.half_weights import half_weights
from gtco.tensor.stage import Stage
from tests.graphs import build


def exact(graph: Graph, *shape: int) -> str:
    """A constant with values that float16 holds exactly."""
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)
    return graph.add_constant(values.astype(np.float32), "w")


def network(g: Graph, x: str) -> str:
    """Products by weights that float16 holds and by weights that it does not, and a table."""
    first = g.add("matmul", (x, exact(g, 8, 6)))
    inexact = g.add_constant(np.full((6, 4), 1 / 3, np.float32), "inexact")
    second = g.add("matmul", (first, inexact))
    beyond = g.add_constant(np.full((4, 4), 1e5, np.float32), "beyond")
    third = g.add("matmul", (second, beyond))
    row = g.add_constant(np.array([2, 0, 1, 2, 1]))
    table = g.add("gather", (exact(g, 3, 4), row), axis=0)
    return g.add("add", (third, table))


def values(graph: Graph) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    (value,) = graph.evaluate({graph.inputs[0]: x}, dtype="float64").values()
    return value


def test_what_float16_holds_is_kept_in_it() -> None:
    graph = build(network)
    after = half_weights(graph).check()
    readers = [
        (op.kind, op.type.dtype)
        for op in after.operators.values()
        if any(after.is_constant(x) and after.types[x].dtype == "float16" for x in op.inputs)
    ]
    assert sorted(readers) == [("gather", "float16"), ("matmul", "float32")]
    stored = [after.constants[x] for x in after.constants if after.types[x].dtype == "float16"]
    assert sorted(array.shape for array in stored) == [(3, 4), (8, 6)]
    assert [op.kind for op in after.operators.values()].count("cast") == 1  # of gathered rows
    np.testing.assert_array_equal(values(after), values(graph))


def test_a_product_that_would_be_slower_keeps_its_weights() -> None:
    def cost(stage: Stage) -> float:
        return 2.0 if any(i.type.dtype == "float16" for i in stage.inputs) else 1.0

    def no_kernel(stage: Stage) -> float:
        return inf if any(i.type.dtype == "float16" for i in stage.inputs) else 1.0

    graph = build(network)
    for price in (cost, no_kernel):
        after = half_weights(graph, price)
        assert all(
            after.types[x].dtype != "float16"
            for op in after.operators.values()
            if op.kind == "matmul"
            for x in op.inputs
        )
