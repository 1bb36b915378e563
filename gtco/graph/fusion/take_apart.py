"""Attention as the operators that it stands for, so that a partition may make stages of its parts.

    before: a = attention(q, k, v, bias) {scale}
    after:  t = permute(k)    s = matmul(q * scale, t)    p = softmax(s + bias)    a = matmul(p, v)

The scale multiplies the smaller of q and the scores. Hidden scores are the bias itself, and NaN of
a guarded softmax become 0, as in :mod:`gtco.graph.rewrites.attention`, which made one attention of
these operators.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy

from gtco.graph.constants import Constants
from gtco.graph.graph import Graph
from gtco.graph.infer import broadcast_shapes
from gtco.graph.rewrites.apply import apply_rule
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.rewrites.name_outputs import name_outputs
from gtco.graph.rewrites.simplify_movement import simplify_movement
from gtco.tensor.stage import Operator, TensorType, make_stage


def kinds_of_attention(graph: Graph) -> list[tuple[Graph, tuple[str, ...]]]:
    """Each kind of attention: one of that kind as a graph of its own, and the tensors that all of
    that kind make.
    """
    kinds: dict[str, list[Operator]] = {}
    for op in graph.operators.values():
        if op.kind == "attention":
            alone = make_stage((op,), graph.types, graph.constants)
            kinds.setdefault(alone.key, []).append(op)
    return [(_alone(graph, ops[0]), tuple(op.output for op in ops)) for ops in kinds.values()]


def _alone(graph: Graph, op: Operator) -> Graph:
    constants = Constants({i: graph.constants[i] for i in op.inputs if graph.is_constant(i)})
    inputs = dict.fromkeys(i for i in op.inputs if i not in constants)
    types = {tensor: graph.types[tensor] for tensor in (*op.inputs, op.output)}
    return Graph(tuple(inputs), (op.output,), types, constants, {op.output: op})


def taken_apart(graph: Graph, attentions: Collection[str]) -> Graph:
    """The graph with these attentions, named by the tensors they make, as products and
    a softmax.
    """

    def rule(graph: Graph, op: Operator) -> str | None:
        return _parts(graph, op) if op.output in attentions else None

    graph = apply_rule(graph, {"attention"}, rule)
    return name_outputs(simplify_movement(fold_constants(graph)))


def _parts(graph: Graph, op: Operator) -> str:
    """Adds the operators of an attention to the graph. Returns the tensor that they make."""
    q, k, v = op.inputs[:3]

    def add(kind: str, *inputs: str, **attrs: Any) -> str:
        return graph.add(kind, inputs, name=op.name, **attrs)

    def product(a: str, b: str) -> str:
        """The product in the dtype in which the attention sums, which is wider than float16
        operands.
        """
        before, behind = graph.types[a].shape, graph.types[b].shape
        shape = (*broadcast_shapes(before[:-2], behind[:-2]), before[-2], behind[-1])
        return graph.add("matmul", (a, b), TensorType(shape, op.type.dtype), name=op.name)

    def constant(value: float, like: str) -> str:
        return graph.add_constant(numpy.asarray(value, graph.types[like].dtype), "scale")

    narrow = graph.types[q].dtype
    rank = len(graph.types[k].shape)
    transposed = add("permute", k, axes=(*range(rank - 2), rank - 1, rank - 2))
    # products of narrow operands are float32; scaling an operand would round it once more
    keys, width = (int(d) for d in graph.types[k].shape[-2:])
    early = narrow == "float32" and width <= keys
    if op["scale"] != 1.0 and early:
        q = add("multiply", q, constant(op["scale"], q))
    scores = product(q, transposed)
    if op["scale"] != 1.0 and not early:
        scores = add("multiply", scores, constant(op["scale"], scores))
    if len(op.inputs) > 3:
        bias, attrs = op.inputs[3], dict(op.attrs)
        total = add("add", scores, bias)
        if "hidden" in attrs:
            low = constant(attrs["hidden"], bias)
            total = add("where", add("less_equal", bias, low), bias, total)
        scores = total
    weights = add("softmax", scores, axis=len(graph.types[scores].shape) - 1)
    if dict(op.attrs).get("guarded"):
        weights = add("where", add("isnan", weights), constant(0.0, weights), weights)
    if narrow != "float32":
        weights = graph.add(
            "cast", (weights,), TensorType(graph.types[weights].shape, narrow), name=op.name
        )
    return product(weights, v)
