"""Removes data movement that does nothing or undoes itself. The rest becomes as late and as little
as possible.

before: reshape(reshape(x))                         after: reshape(x)
before: permute(permute(x))                         after: permute(x), or x
before: reshape(permute(x)), only units change      after: permute(reshape(x))
before: reshape(permute(reshape(x))), axes split    after: permute(reshape(x))
before: add(x, broadcast(y)), of x's shape          after: add(x, y)
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.infer import broadcast_shapes
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.graph.rewrites.sink_reshapes import sink_reshapes
from gtco.tensor.analysis.indices import axis_groups
from gtco.tensor.elementwise import BROADCASTING
from gtco.tensor.stage import Dim, Operator, TensorType

_ROUNDS = 20


def simplify_movement(graph: Graph) -> Graph:
    """Runs the rules until they change nothing, or so many rounds."""
    for _ in range(_ROUNDS):
        before = graph.operators
        graph = apply_rule(graph, _RULES, lambda g, op: _RULES[op.kind](g, op))
        graph = apply_rule(graph, BROADCASTING, _of_narrow)
        graph = sink_reshapes(graph)
        if graph.operators == before:
            break
    return graph


def _identity(graph: Graph, op: Operator) -> str | None:
    return op.inputs[0]


def _reshape(graph: Graph, op: Operator) -> str | None:
    source = op.inputs[0]
    if graph.types[source] == op.type:
        return source
    inner = made_by(graph, source, "reshape")
    if inner is not None:
        return graph.add("reshape", inner.inputs, op.type, name=op.name)
    inner = made_by(graph, source, "permute")
    if (
        inner is not None
        and _no_units(inner.type.shape) == _no_units(op.type.shape)
        and graph.only_user(source)
    ):
        return _units_before_permute(graph, inner, op)
    if inner is not None and graph.only_user(source) and made_by(graph, inner.inputs[0], "reshape"):
        return _split_before_permute(graph, inner, op)
    return None


def _split_before_permute(graph: Graph, permute: Operator, op: Operator) -> str | None:
    """reshape(permute(x)) that only splits axes: each axis is split before the permute, where there
    already is a reshape.
    """
    groups = axis_groups(tuple(map(int, permute.type.shape)), tuple(map(int, op.type.shape)))
    if any(len(left) != 1 for left, _ in groups):
        return None
    # axis of x -> axes of the output
    parts = {permute["axes"][left[0]]: right for left, right in groups}
    order = [axis for source in sorted(parts) for axis in parts[source]]
    shape = tuple(op.type.shape[axis] for axis in order)
    x = graph.add("reshape", permute.inputs, TensorType(shape, op.type.dtype), name=op.name)
    axes = [order.index(axis) for axis in range(len(order))]
    return graph.add("permute", (x,), name=permute.name, axes=axes)


def _no_units(shape: tuple[Dim, ...]) -> list[Dim]:
    return [d for d in shape if d != 1]


def _units_before_permute(graph: Graph, permute: Operator, op: Operator) -> str:
    """reshape(permute(x)) that only moves axes of size 1: each gets its final place before the
    permute.
    """
    shape = graph.types[permute.inputs[0]].shape
    # full axes of x, in the output's order
    order = [axis for axis in permute["axes"] if shape[axis] != 1]
    rank = len(op.type.shape)
    # places of the full axes: they are the same before the permute
    places = [i for i in range(rank) if op.type.shape[i] != 1]
    at = dict(zip(sorted(order), places, strict=True))  # axis of x -> its place before the permute
    before: list[Dim] = [1] * rank
    for axis, place in at.items():
        before[place] = shape[axis]
    axes = list(range(rank))
    for place, axis in zip(places, order, strict=True):
        axes[place] = at[axis]
    x = graph.add("reshape", permute.inputs, TensorType(tuple(before), op.type.dtype), name=op.name)
    return graph.add("permute", (x,), name=permute.name, axes=axes)


def _permute(graph: Graph, op: Operator) -> str | None:
    axes = op["axes"]
    if axes == tuple(range(len(axes))):
        return op.inputs[0]
    inner = made_by(graph, op.inputs[0], "permute")
    if inner is not None:
        return graph.add(
            "permute", inner.inputs, name=op.name, axes=[inner["axes"][a] for a in axes]
        )
    shape = graph.types[op.inputs[0]].shape
    full = [a for a in axes if shape[a] != 1]
    if full == sorted(full):  # only axes of size 1 move
        return graph.add("reshape", op.inputs, op.type, name=op.name)
    return None


_WIDENS = {
    ("float16", "float32"),
    ("float16", "float64"),
    ("float32", "float64"),
    ("bfloat16", "float32"),
    ("int32", "int64"),
    ("bool", "int64"),
    ("bool", "int32"),
    ("bool", "float32"),
    ("int8", "int32"),
}


def _cast(graph: Graph, op: Operator) -> str | None:
    source = op.inputs[0]
    known = graph.types[source].dtype
    if known == op.type.dtype:
        return source
    inner = made_by(graph, source, "cast")
    if inner is not None:
        first = graph.types[inner.inputs[0]].dtype
        if (first, known) in _WIDENS:  # the cast between lost nothing
            return (
                inner.inputs[0]
                if first == op.type.dtype
                else graph.add("cast", inner.inputs, op.type, name=op.name)
            )
    return None


def _broadcast(graph: Graph, op: Operator) -> str | None:
    return op.inputs[0] if graph.types[op.inputs[0]] == op.type else None


def _of_narrow(graph: Graph, op: Operator) -> str | None:
    """The operator of what its inputs are broadcast from, where it broadcasts them anyway."""
    inputs = list(op.inputs)
    for n, tensor in enumerate(inputs):
        wide = made_by(graph, tensor, "broadcast")
        if wide is not None:
            narrow = [*inputs[:n], *wide.inputs, *inputs[n + 1 :]]
            if broadcast_shapes(*(graph.types[x].shape for x in narrow)) == op.type.shape:
                inputs = narrow
    if tuple(inputs) == op.inputs:
        return None
    return graph.add(op.kind, inputs, op.type, name=op.name, **dict(op.attrs))


def _pad(graph: Graph, op: Operator) -> str | None:
    return op.inputs[0] if not any(op["before"]) and not any(op["after"]) else None


def _roll(graph: Graph, op: Operator) -> str | None:
    if not any(op["shifts"]):
        return op.inputs[0]
    inner = made_by(graph, op.inputs[0], "roll")
    if inner is None or not graph.only_user(inner.output):
        return None
    shifts = [
        (a + b) % max(int(n), 1)
        for a, b, n in zip(op["shifts"], inner["shifts"], op.type.shape, strict=True)
    ]
    return graph.add("roll", inner.inputs, name=op.name, shifts=shifts)


_RULES = {
    "identity": _identity,
    "reshape": _reshape,
    "permute": _permute,
    "cast": _cast,
    "broadcast": _broadcast,
    "pad": _pad,
    "roll": _roll,
}
