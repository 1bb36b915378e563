"""The maxima of large windows are found along one axis after the other.

before: y = max_pool2d(x, kernel (a, b))
after:  y = max_pool2d(max_pool2d(x, kernel (a, 1)), kernel (1, b))

The maximum of a window is that of its columns' maxima, so the values are the same, NaN among them.
Each element takes a + b comparisons instead of a * b, and the maxima of columns are stored and read
once more. Spatial pyramids (the SPP and SPPF of detectors) pool windows of 5 x 5 to 13 x 13.
"""

from __future__ import annotations

from typing import Any

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.graph.windows import meets_pixels
from gtco.tensor.stage import Operator, TensorType

# The least rows and columns of a window that is taken apart. At 3 x 3 storing the maxima of columns
# takes more time than the comparisons that are left out.
LEAST = 5


def separate_pooling(graph: Graph) -> Graph:
    """Images with their channels last. Where channels come first, or where there is one channel,
    kernels do both axes in one stage.
    """
    return apply_rule(graph, {"max_pool2d"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if op["layout"] != "NHWC" or min(op["kernel"]) < LEAST or not meets_pixels(graph, op):
        return None
    x = op.inputs[0]
    images, _, columns, channels = graph.types[x].shape
    # a pooling of integers, whose casts belong to its kernel
    if channels == 1 or made_by(graph, x, "cast") is not None:
        return None
    made = TensorType((images, op.type.shape[1], columns, channels), op.type.dtype)
    x = graph.add("max_pool2d", (x,), made, name=op.name, **_along(op, 0))
    return graph.add("max_pool2d", (x,), op.type, name=op.name, output=op.output, **_along(op, 1))


def _along(op: Operator, axis: int) -> dict[str, Any]:
    """The attributes of a pooling along one axis of the image alone."""

    def kept(name: str, other: int) -> tuple[int, ...]:
        return tuple(n if place % 2 == axis else other for place, n in enumerate(op[name]))

    return {
        "kernel": kept("kernel", 1),
        "strides": kept("strides", 1),
        "padding": kept("padding", 0),
        "dilation": kept("dilation", 1),
        "layout": op["layout"],
    }
