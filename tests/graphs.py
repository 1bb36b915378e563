"""Small graphs for tests of rewrites: builds them, and checks that the values stay the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import TensorType

RNG = np.random.default_rng(0)


def build(body: Callable[[Graph, str], str], shape: tuple[int, ...] = (2, 5, 8)) -> Graph:
    """A graph of one input 'x' and one output 'y'."""
    graph = Graph(("x",), (), {"x": TensorType(shape)})
    result = body(graph, "x")
    graph.add("identity", (result,), graph.types[result], output="y")
    graph.outputs = ("y",)
    return graph.prune().check()


def weights(graph: Graph, *shape: int, scale: float = 0.3) -> str:
    return graph.add_constant((RNG.standard_normal(shape) * scale).astype(np.float32), "weight")


def number(graph: Graph, value: float) -> str:
    return graph.add_constant(np.float32(value), "number")


def same(graph: Graph, wanted: dict[str, int], tolerance: float = 1e-6) -> Graph:
    """Canonicalizes the graph. The kinds must be ``wanted``, and the values (in float64) must stay
    the same.
    """
    after = canonicalize(graph)
    assert after.histogram() == wanted
    for name in graph.inputs:
        assert name in after.inputs
    inputs = {n: RNG.standard_normal(graph.types[n].shape).astype(np.float32) for n in graph.inputs}
    before = graph.evaluate(inputs, dtype="float64")
    for name, value in after.evaluate(inputs, dtype="float64").items():
        np.testing.assert_allclose(value, before[name], rtol=tolerance, atol=tolerance)
    return after
