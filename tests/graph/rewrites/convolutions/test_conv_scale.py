"""A batch normalisation goes into the weights of the convolution before it."""

from __future__ import annotations

from gtco.graph.graph import Graph
from tests.graph.rewrites.products import convolution
from tests.graphs import build, same, weights


def test_frozen_batch_norm_goes_into_the_convolution() -> None:
    def body(g: Graph, x: str) -> str:
        y = convolution(g, x, 6, size=3, padding=(1, 1, 1, 1))
        y = g.add("add", (y, weights(g, 1, 6, 1, 1)))
        y = g.add("multiply", (y, weights(g, 1, 6, 1, 1)))
        return g.add("relu", (g.add("add", (y, weights(g, 1, 6, 1, 1))),))

    same(build(body, (1, 3, 8, 8)), {"add": 1, "conv2d": 1, "relu": 1}, 1e-5)


def test_scale_of_another_axis_stays_outside_the_convolution() -> None:
    def body(g: Graph, x: str) -> str:
        y = convolution(g, x, 8, size=3, padding=(1, 1, 1, 1))
        return g.add("multiply", (y, weights(g, 1, 1, 1, 8)))

    same(build(body, (1, 3, 8, 8)), {"conv2d": 1, "multiply": 1})
