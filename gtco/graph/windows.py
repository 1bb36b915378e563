"""The windows of pooling, in the graph."""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.tensor.stage import Operator


def meets_pixels(graph: Graph, op: Operator) -> bool:
    """True if every window of a pooling has a pixel of the image."""
    first = 2 if op["layout"] == "NCHW" else 1  # the axis of the rows
    for axis in (0, 1):
        size = int(graph.types[op.inputs[0]].shape[first + axis])
        for place in range(int(op.type.shape[first + axis])):
            begin = place * op["strides"][axis] - op["padding"][axis]
            taps = (begin + n * op["dilation"][axis] for n in range(op["kernel"][axis]))
            if not any(0 <= tap < size for tap in taps):
                return False
    return True
