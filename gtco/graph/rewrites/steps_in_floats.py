"""A tensor that is quantized and at once dequantized stays in floats, with the same values.

before: q = cast(c) {uint8}; x = cast(cast(q) {int32} - z) {float32}, c = clip(n, 0, 255)
after:  x = c - z

n consists of rounded floats. A q that something else reads too is kept in 8 bits, and read as such.
A NaN stays one, where the cast would make an integer of it.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.stage import Operator

_BYTES = ("int8", "uint8")


def steps_in_floats(graph: Graph) -> Graph:
    return apply_rule(graph, {"cast"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if op.type.dtype != "float32":
        return None
    zero, inner = 0.0, graph.producer(op.inputs[0])
    if inner is not None and inner.kind == "subtract" and inner.type.dtype == "int32":
        known = scalar(graph, inner.inputs[1])
        if known is None:
            return None
        zero, inner = known, graph.producer(inner.inputs[0])
    if inner is not None and inner.kind == "cast" and inner.type.dtype == "int32":
        inner = graph.producer(inner.inputs[0])
    if inner is None or inner.kind != "cast" or inner.type.dtype not in _BYTES:
        return None
    clip = made_by(graph, inner.inputs[0], "clip")
    if clip is None or clip.type != op.type or not _alone(graph, op, inner):
        return None
    bounds = numpy.iinfo(inner.type.dtype)
    if not bounds.min <= clip["min"] <= clip["max"] <= bounds.max:
        return None
    if not _rounded(graph, clip.inputs[0]):
        return None
    if not zero:
        return clip.output
    shift = graph.add_constant(numpy.array(-zero, "float32"), "zero")
    return graph.add("add", (clip.output, shift), op.type, name=op.name)


def _rounded(graph: Graph, tensor: str) -> bool:
    """True for a rounding, and for one to which a whole number was added."""
    op = graph.producer(tensor)
    if op is not None and op.kind == "add":
        shift = scalar(graph, op.inputs[1])
        if shift is None or not shift.is_integer():
            return False
        op = graph.producer(op.inputs[0])
    return op is not None and op.kind == "round"


def _alone(graph: Graph, op: Operator, quantized: Operator) -> bool:
    """True if nothing reads the 8 bits except on the way to ``op``."""
    reader = graph.only_user(quantized.output)
    while reader is not None and reader.output != op.output:
        reader = graph.only_user(reader.output)
    return reader is not None
