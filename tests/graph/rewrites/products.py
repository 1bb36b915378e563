"""What products cost in a graph, and graphs with products."""

from __future__ import annotations

from math import prod
from typing import Any

from gtco.graph.graph import Graph
from gtco.tensor.stage import TensorType
from tests.graphs import weights

PLAIN = {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}


def products(graph: Graph) -> int:
    """The multiply-adds of all contractions by constants."""
    total = 0
    for op in graph.operators.values():
        if op.kind in ("matmul", "conv2d"):
            taps = graph.types[op.inputs[1]].shape
            depth = taps[-2] if op.kind == "matmul" else prod(int(d) for d in taps[1:])
            total += prod(int(d) for d in op.type.shape) * int(depth)
    return total


def convolution(g: Graph, x: str, outputs: int, layout: str = "NCHW", **other: Any) -> str:
    channels = int(g.types[x].shape[1 if layout == "NCHW" else 3])
    attrs = PLAIN | {"layout": layout} | other
    size = attrs.pop("size", 1)
    return g.add("conv2d", (x, weights(g, outputs, channels, size, size)), **attrs)


def resized(g: Graph, x: str, height: int, width: int, layout: str = "NCHW", **other: Any) -> str:
    n, c = (g.types[x].shape[i] for i in (0, 1 if layout == "NCHW" else 3))
    shape = (n, c, height, width) if layout == "NCHW" else (n, height, width, c)
    attrs = {
        "method": "linear",
        "coordinates": "half_pixel",
        "rounding": "round_prefer_floor",
        "cubic_alpha": -0.75,
        "layout": layout,
    }
    return g.add("resize2d", (x,), TensorType(shape, "float32"), **(attrs | other))
