"""Quantizing and dequantizing become one operator each.

before: q = cast(clip(round(multiply_pair(x, h, l)) + z, 0, 255)) {uint8}
after:  q = quantize(x, h, l, z), with min 0, max 255

before: x = cast(cast(q) {int32} - z) {float32} * s
after:  x = dequantize(q, s, z)

z is a float. The values are the same: whole numbers of this size are exact. The fusion search would
otherwise price stages that end in the middle of either.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.stage import Operator

_BYTES = ("int8", "uint8")
_LARGEST = 2.0**16  # the largest zero point or bound: sums with 8 bits are exact in float32


def quantizations(graph: Graph) -> Graph:
    graph = apply_rule(graph, {"cast"}, _quantize)
    return apply_rule(graph, {"multiply"}, _dequantize)


def _quantize(graph: Graph, op: Operator) -> str | None:
    clip = made_by(graph, op.inputs[0], "clip")
    if op.type.dtype not in _BYTES or clip is None or clip.type.dtype != "float32":
        return None
    zero, inner = 0.0, graph.producer(clip.inputs[0])
    if inner is not None and inner.kind == "add":
        known = scalar(graph, inner.inputs[1])
        if known is None or not known.is_integer() or graph.types[inner.inputs[0]] != inner.type:
            return None
        zero, inner = known, graph.producer(inner.inputs[0])
    pair = made_by(graph, inner.inputs[0], "multiply_pair") if inner is not None else None
    if inner is None or inner.kind != "round" or pair is None:
        return None
    if max(abs(zero), abs(clip["min"]), abs(clip["max"])) > _LARGEST:
        return None
    inputs = (*pair.inputs, _constant(graph, zero))
    named = {"name": op.name, "output": op.output}
    return graph.add("quantize", inputs, op.type, **named, min=clip["min"], max=clip["max"])


def _constant(graph: Graph, zero: float) -> str:
    return graph.add_constant(numpy.array(zero, "float32"), "zero")


def _dequantize(graph: Graph, op: Operator) -> str | None:
    for x, scale in (op.inputs, op.inputs[::-1]):
        found = _steps(graph, x)
        if found is None:
            continue
        q, zero = found
        if graph.types[q].shape == op.type.shape and graph.types[scale].dtype == "float32":
            inputs = (q, scale, _constant(graph, zero))
            return graph.add("dequantize", inputs, op.type, name=op.name, output=op.output)
    return None


def _steps(graph: Graph, tensor: str) -> tuple[str, float] | None:
    """q of 8 bits and z, if the tensor is cast(cast(q) {int32} - z) {float32}."""
    op, zero = made_by(graph, tensor, "cast"), 0.0
    if op is None or op.type.dtype != "float32":
        return None
    if graph.types[op.inputs[0]].dtype in _BYTES:
        return op.inputs[0], 0.0
    inner = graph.producer(op.inputs[0])
    if inner is not None and inner.kind == "subtract" and inner.type.dtype == "int32":
        known = scalar(graph, inner.inputs[1])
        if known is None or graph.types[inner.inputs[0]] != inner.type or abs(known) > _LARGEST:
            return None
        zero, inner = known, graph.producer(inner.inputs[0])
    if inner is None or inner.kind != "cast" or inner.type.dtype != "int32":
        return None
    q = inner.inputs[0]
    return (q, zero) if graph.types[q].dtype in _BYTES else None
