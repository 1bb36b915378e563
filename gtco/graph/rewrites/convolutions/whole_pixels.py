"""Few channels of an image are padded with zeros, so that a pixel is a whole piece of 16 bytes.

before: y = conv2d(x {NHWC, 3 channels}, w), whose windows overlap
after:  y = conv2d(pad(x), pad(w)), with 8 channels of float16 each, or 4 of float32

A kernel for GPUs copies operands to shared memory by asynchronous copies of 16 bytes, while it
multiplies. From an image of three channels it would gather each element of a window, with some 50
integer operations for each. Copies bring more zeros than elements, and Tensor Cores multiply them
in the meantime. Patches, whose windows do not overlap, have few such elements, and their rows are
often whole pieces.
"""

from __future__ import annotations

from functools import partial
from math import prod

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.graph.rewrites.convolutions.more_channels import with_more_channels
from gtco.tensor.stage import ITEM_BYTES, Operator

PIECE = 16  # bytes
FLOATS = ("float32", "float16", "bfloat16")


def whole_pixels(graph: Graph, narrow: str) -> Graph:
    """``narrow``: the dtype in which convolutions of float32 will be multiplied."""
    return apply_rule(graph, {"conv2d"}, partial(_rule, narrow=narrow))


def _rule(graph: Graph, op: Operator, narrow: str) -> str | None:
    w, image = graph.constants.get(op.inputs[1]), graph.types[op.inputs[0]]
    if w is None or image.dtype not in FLOATS or op["layout"] != "NHWC" or op["groups"] != 1:
        return None
    if prod(w.shape[2:]) <= prod(op["strides"]):
        return None
    operand = narrow if image.dtype == "float32" else image.dtype
    pixel = PIECE // ITEM_BYTES[operand]
    missing = pixel - w.shape[1]
    if missing <= 0:
        return None
    return with_more_channels(graph, op, missing)
