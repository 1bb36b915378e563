"""Taps of a convolution that read only padding are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.convolutions.padding_taps import padding_taps
from gtco.support.later import Later
from tests.graph.rewrites.products import PLAIN
from tests.graphs import RNG, build, weights

SHAPES = {"NCHW": (2, 4, 7, 5), "NHWC": (2, 7, 5, 4)}  # 7 rows and 5 columns


def convolution(size: tuple[int, int], layout: str = "NHWC", **other: Any) -> Graph:
    def body(g: Graph, x: str) -> str:
        attrs = PLAIN | {"layout": layout} | other
        w = weights(g, 8, 4 // attrs["groups"], *size)
        return g.add("relu", (g.add("conv2d", (x, w), **attrs),))

    return build(body, SHAPES[layout])


def kernel_after(graph: Graph) -> tuple[int, ...]:
    """The filter's size, and a check that nothing else changed."""
    after = padding_taps(graph).check()
    assert after.histogram() == graph.histogram()
    x = {"x": RNG.standard_normal(graph.types["x"].shape).astype(np.float32)}
    wanted, found = (g.evaluate(x, dtype="float64")["y"] for g in (graph, after))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    (op,) = (op for op in after.operators.values() if op.kind == "conv2d")
    return after.types[op.inputs[1]].sizes[2:]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(
    ("size", "other", "wanted"),
    [
        ((3, 3), {"padding": (8, 8, 8, 8), "dilation": (8, 8)}, (1, 1)),
        ((3, 3), {"padding": (6, 6, 6, 6), "dilation": (6, 6)}, (3, 1)),
        ((15, 15), {"padding": (7, 7, 7, 7), "groups": 4}, (13, 9)),
        ((3, 3), {"padding": (8, 8, 8, 8), "dilation": (8, 8), "strides": (2, 2)}, (1, 1)),
        ((3, 1), {"padding": (8, 0, 8, 0), "dilation": (8, 1), "groups": 2}, (1, 1)),
        ((2, 1), {"padding": (9, 0, 0, 0), "dilation": (8, 1)}, (1, 1)),  # a border stays
    ],
)
def test_taps_outside_the_image_are_left_out(
    layout: str, size: tuple[int, int], other: dict[str, Any], wanted: tuple[int, int]
) -> None:
    assert kernel_after(convolution(size, layout, **other)) == wanted


@pytest.mark.parametrize(
    ("size", "other"),
    [
        ((3, 3), {"padding": (1, 1, 1, 1)}),
        ((3, 3), {"padding": (2, 2, 2, 2), "dilation": (2, 2)}),
        ((1, 1), {"padding": (1, 1, 1, 1)}),  # the border is 0, and its pixels are outputs
        ((3, 1), {"padding": (8, 0, 6, 0), "dilation": (8, 1)}),  # would cut rows off
    ],
)
def test_others_stay(size: tuple[int, int], other: dict[str, Any]) -> None:
    graph = convolution(size, **other)
    (kept,) = (graph.types[name].sizes[2:] for name in graph.constants)
    assert kernel_after(graph) == kept


def test_weights_that_are_computed_when_they_are_read_stay_so() -> None:
    graph = convolution((3, 3), padding=(8, 8, 8, 8), dilation=(8, 8))
    (name,) = graph.constants
    array = graph.constants[name]
    graph.constants[name] = Later(array.shape, array.dtype, lambda: array)
    assert kernel_after(graph) == (1, 1)
    after = padding_taps(graph)
    assert [after.constants.is_later(x) for x in after.constants] == [True]
