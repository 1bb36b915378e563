"""Reshapes move after operators that work element by element or row by row, so that they meet the
next reshape.

before: f(reshape(x)), f row by row                 after: reshape(f(x))
before: reshape(f(reshape(x) @ W)), f row by row    after: f(reshape(x) @ W)
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.elementwise import BROADCASTING, UNARY
from gtco.tensor.stage import Operator, TensorType


def sink_reshapes(graph: Graph) -> Graph:
    """Runs one round of every rule. ``simplify_movement`` merges the reshapes and repeats it."""
    graph = apply_rule(graph, UNARY | {"layer_norm", "rms_norm", "softmax"}, _sink_below_rows)
    graph = apply_rule(graph, BROADCASTING, _sink_below_binary)
    graph = apply_rule(graph, {"matmul"}, _sink_below_matmul)
    return apply_rule(graph, {"reshape"}, _rise_above_matmul)


def _row_reshape(graph: Graph, tensor: str) -> Operator | None:
    """The reshape that makes ``tensor`` for only one reader and keeps the last axis as it is."""
    op = made_by(graph, tensor, "reshape")
    if op is None or graph.only_user(tensor) is None:
        return None
    shape = graph.types[op.inputs[0]].shape
    return op if shape and op.type.shape and shape[-1] == op.type.shape[-1] else None


def _sink_below_rows(graph: Graph, op: Operator) -> str | None:
    """f(reshape(x)) -> reshape(f(x)), if f works element by element, or along the last axis, which
    the reshape keeps.
    """
    if op.output in graph.outputs:
        return None
    if op.kind in UNARY:
        inner = made_by(graph, op.inputs[0], "reshape")
        inner = inner if inner is not None and graph.only_user(op.inputs[0]) else None
    else:
        inner = _row_reshape(graph, op.inputs[0])
    if inner is None or (op.kind == "softmax" and op["axis"] != len(op.type.shape) - 1):
        return None
    x = inner.inputs[0]
    shape = graph.types[x].shape
    attrs = dict(op.attrs) | ({"axis": len(shape) - 1} if op.kind == "softmax" else {})
    y = graph.add(
        op.kind, (x, *op.inputs[1:]), TensorType(shape, op.type.dtype), name=op.name, **attrs
    )
    return graph.add("reshape", (y,), op.type, name=inner.name)


def _sink_below_binary(graph: Graph, op: Operator) -> str | None:
    """op(reshape(x), b) -> reshape(op(x, b)) if b spans only the last axis; op(reshape(x),
    reshape(y)) of equal shapes -> reshape(op(x, y)).
    """
    if op.output in graph.outputs or len(op.inputs) != 2:
        return None
    a, b = op.inputs
    left, right = made_by(graph, a, "reshape"), made_by(graph, b, "reshape")
    if (
        left is not None
        and right is not None
        and graph.only_user(a)
        and graph.only_user(b)
        and a != b
    ):
        if (
            left.type.shape == right.type.shape
            and graph.types[left.inputs[0]].shape == graph.types[right.inputs[0]].shape
        ):
            made = TensorType(graph.types[left.inputs[0]].shape, op.type.dtype)
            y = graph.add(op.kind, (left.inputs[0], right.inputs[0]), made, name=op.name)
            return graph.add("reshape", (y,), op.type, name=left.name)
    for index, (moved, other) in enumerate(((a, b), (b, a))):
        inner = _row_reshape(graph, moved)
        if (
            inner is None
            or not graph.is_constant(other)
            or graph.types[moved].shape != op.type.shape
        ):
            continue
        value = graph.constants[other]
        x = inner.inputs[0]
        shape = graph.types[x].shape
        if value.size != 1 and not (value.shape[-1] == value.size == shape[-1]):
            continue
        vector = (
            other
            if value.ndim <= 1
            else graph.add_constant(
                value.reshape(-1) if value.size > 1 else value.reshape(()), other
            )
        )
        y = graph.add(
            op.kind,
            (x, vector) if index == 0 else (vector, x),
            TensorType(shape, op.type.dtype),
            name=op.name,
        )
        return graph.add("reshape", (y,), op.type, name=inner.name)
    return None


def _sink_below_matmul(graph: Graph, op: Operator) -> str | None:
    """matmul(reshape(x), W) -> reshape(matmul(x, W)) for a constant matrix W."""
    a, weight, *scales = op.inputs
    inner = _row_reshape(graph, a)
    if (
        op.output in graph.outputs
        or inner is None
        or len(graph.types[weight].shape) != 2
        or not graph.is_constant(weight)
    ):
        return None
    x = inner.inputs[0]
    if len(graph.types[x].shape) < 2:
        return None
    made = TensorType((*graph.types[x].shape[:-1], op.type.shape[-1]), op.type.dtype)
    y = graph.add("matmul", (x, weight, *scales), made, name=op.name, **dict(op.attrs))
    return graph.add("reshape", (y,), op.type, name=inner.name)


def _rise_above_matmul(graph: Graph, op: Operator) -> str | None:
    """reshape(f(matmul(reshape(x), W))) -> f(matmul(reshape(x), W)). The inner reshape makes the
    rows of the outer one. ``f`` is unary, or adds or multiplies a vector along the last axis.
    """
    chain: list[Operator] = []
    tensor = op.inputs[0]
    while True:
        inner = graph.producer(tensor)
        if (
            inner is None
            or graph.only_user(tensor) is None
            or op.type.shape[-1:] != inner.type.shape[-1:]
        ):
            return None
        if inner.kind == "matmul":
            break
        vector = inner.kind in ("add", "multiply") and _last_axis_constant(graph, inner.inputs[1])
        if not vector and inner.kind not in UNARY:
            return None
        chain.append(inner)
        tensor = inner.inputs[0]
    rows = made_by(graph, inner.inputs[0], "reshape")
    weight = graph.types[inner.inputs[1]].shape
    if (
        rows is None
        or graph.only_user(rows.output) is None
        or len(weight) != 2
        or len(op.type.shape) < 2
    ):
        return None
    made = TensorType((*op.type.shape[:-1], weight[0]), rows.type.dtype)
    y = graph.add(
        "matmul",
        (graph.add("reshape", rows.inputs, made, name=rows.name), *inner.inputs[1:]),
        TensorType((*op.type.shape[:-1], weight[1]), inner.type.dtype),
        name=inner.name,
        **dict(inner.attrs),
    )
    for step in reversed(chain):
        shape = TensorType(op.type.shape, step.type.dtype)
        inputs = (y, *(_as_vector(graph, t) for t in step.inputs[1:]))
        y = graph.add(step.kind, inputs, shape, name=step.name, **dict(step.attrs))
    return y


def _last_axis_constant(graph: Graph, tensor: str) -> bool:
    value = graph.constants.get(tensor)
    return value is not None and (value.size == 1 or value.shape[-1] == value.size)


def _as_vector(graph: Graph, tensor: str) -> str:
    value = graph.constants[tensor]
    if value.ndim <= 1:
        return tensor
    return graph.add_constant(value.reshape(()) if value.size == 1 else value.reshape(-1), tensor)
