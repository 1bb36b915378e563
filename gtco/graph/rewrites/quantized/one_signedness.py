"""All activations are quantized to the one signedness that the machine multiplies.

before: q = cast(clip(t, -128, 127)) {int8};  x = cast(q) {int32} - z
after:  u = cast(clip(t + 128, 0, 255)) {uint8};  x = cast(u) {int32} - (z + 128)

t is a rounding, or one to which a whole number was added. So the integers are the same, shifted by
128. Otherwise each product would shift them itself, beside the other readers of q, and q would be
stored again. The kernels of x86-64 multiply uint8, those of AArch64 int8; there the shift is -128.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, constant_value, made_by, scalar
from gtco.machine.target import Machine, Target
from gtco.tensor.intrinsics.table import kinds
from gtco.tensor.stage import Operator, TensorType

_SHIFT = 128


def one_signedness(graph: Graph, machine: Machine) -> Graph:
    """Shifts the quantized tensors, if the machine has micro-kernels for products of integers."""
    if not isinstance(machine, Target) or not kinds(machine, "int8"):
        return graph
    wanted = kinds(machine, "int8")[0].a.dtype
    return apply_rule(graph, {"cast"}, partial(_rule, wanted))


def _rule(wanted: str, graph: Graph, op: Operator) -> str | None:
    """Moves the readers of ``op`` to the shifted tensor. It makes no tensor that replaces ``op``
    itself, which nobody reads afterwards.
    """
    other = "int8" if wanted == "uint8" else "uint8"
    clip = made_by(graph, op.inputs[0], "clip")
    if op.type.dtype != other or clip is None or clip.type.dtype != "float32":
        return None
    bounds, readers = numpy.iinfo(other), graph.consumers(op.output)
    if not bounds.min <= clip["min"] <= clip["max"] <= bounds.max or not _whole(graph, clip):
        return None
    if op.output in graph.outputs or any(not _widens(graph, reader) for reader in readers):
        return None
    shift = _SHIFT if wanted == "uint8" else -_SHIFT
    moved = _plus(graph, clip.inputs[0], shift, op.name)
    held = graph.add(
        "clip", (moved,), name=clip.name, min=clip["min"] + shift, max=clip["max"] + shift
    )
    made = graph.add("cast", (held,), replace(op.type, dtype=wanted), name=op.name)
    for reader in readers:
        wide = graph.add("cast", (made,), reader.type, name=reader.name)
        for user in graph.consumers(reader.output):
            zero = _zero(graph, user, reader.output)
            if zero is not None and user.output not in graph.outputs:
                graph.replace_uses(user.output, _minus(graph, wide, zero + shift, user))
                graph.drop_dead(user.output)
        if graph.consumers(reader.output):
            graph.replace_uses(reader.output, _minus(graph, wide, shift, reader))
        if reader.output in graph.operators:
            graph.drop_dead(reader.output)
    return None


def _whole(graph: Graph, clip: Operator) -> bool:
    """True if the clip bounds a rounding, or one to which a whole number was added."""
    inner = graph.producer(clip.inputs[0])
    if inner is not None and inner.kind == "add":
        zero = scalar(graph, inner.inputs[1])
        if zero is None or not zero.is_integer() or graph.types[inner.inputs[0]] != inner.type:
            return False
        inner = graph.producer(inner.inputs[0])
    return inner is not None and inner.kind == "round"


def _widens(graph: Graph, op: Operator) -> bool:
    return op.kind == "cast" and op.type.dtype == "int32" and op.output not in graph.outputs


def _zero(graph: Graph, op: Operator, wide: str) -> int | None:
    """z of an operator ``wide - z`` with one constant zero point."""
    if op.kind != "subtract" or op.inputs[0] != wide or graph.types[wide] != op.type:
        return None
    value = constant_value(graph, op.inputs[1])
    return int(value.reshape(())) if value is not None and value.size == 1 else None


def _plus(graph: Graph, steps: str, shift: int, name: str) -> str:
    """``steps + shift``, with one addition in all."""
    inner = made_by(graph, steps, "add")
    if inner is not None:
        zero = scalar(graph, inner.inputs[1])
        assert zero is not None
        steps, shift = inner.inputs[0], shift + int(zero)
    if not shift:
        return steps
    constant = graph.add_constant(numpy.array(shift, "float32"), "zero")
    return graph.add("add", (steps, constant), graph.types[steps], name=name)


def _minus(graph: Graph, wide: str, zero: int, op: Operator) -> str:
    if not zero:
        return wide
    constant = graph.add_constant(numpy.array(zero, "int32"), "zero")
    return graph.add("subtract", (wide, constant), TensorType(op.type.shape, "int32"), name=op.name)
