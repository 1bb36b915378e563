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

from dataclasses import replace
from functools import partial
from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.stage import ITEM_BYTES, Operator

PIECE = 16  # bytes
FLOATS = ("float32", "float16", "bfloat16")


def whole_pixels(graph: Graph, narrow: str) -> Graph:
    """``narrow``: the dtype in which convolutions of float32 will be multiplied."""
    return apply_rule(graph, {"conv2d"}, partial(_rule, narrow=narrow))


def _rule(graph: Graph, op: Operator, narrow: str) -> str | None:
    x, weights = op.inputs[:2]
    w, image = graph.constants.get(weights), graph.types[x]
    if w is None or image.dtype not in FLOATS or op["layout"] != "NHWC" or op["groups"] != 1:
        return None
    if prod(w.shape[2:]) <= prod(op["strides"]):
        return None
    operand = narrow if image.dtype == "float32" else image.dtype
    pixel = PIECE // ITEM_BYTES[operand]
    missing = pixel - w.shape[1]
    if missing <= 0:
        return None
    padded = graph.add(
        "pad",
        (x,),
        replace(image, shape=(*image.shape[:-1], pixel)),
        name=op.name,
        before=(0, 0, 0, 0),
        after=(0, 0, 0, missing),
        value=0,
    )
    wide = numpy.pad(w, ((0, 0), (0, missing), (0, 0), (0, 0)))
    inputs = (padded, graph.add_constant(wide, weights), *op.inputs[2:])
    return graph.add(op.kind, inputs, op.type, name=op.name, output=op.output, **dict(op.attrs))
