"""The projections that feed one attention and read the same tensor become one product.

before: q = x @ Wq + bq; k = x @ Wk + bk; v = x @ Wv + bv
after:  y = x @ [Wq Wk Wv] + [bq bk bv]; q, k, v = slices of y
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, axis_vector, made_by, with_constant
from gtco.tensor.stage import Attrs, Operator, TensorType

_MOVEMENT = ("reshape", "permute", "slice")


@dataclass(frozen=True)
class _Projection:
    product: Operator
    output: str  # the product, or the sum with its bias
    bias: numpy.ndarray | None


def merge_projections(graph: Graph) -> Graph:
    """Merges only the operands of one attention: merging more would keep large tensors alive for
    long.
    """
    return apply_rule(graph, {"attention"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    found = {
        p.output: p
        for p in (_projection(graph, tensor) for tensor in op.inputs[:3])
        if p is not None
    }
    groups: dict[tuple[str, bool, Attrs], list[_Projection]] = {}
    for projection in found.values():
        product = projection.product
        key = product.inputs[0], projection.bias is not None, product.attrs
        groups.setdefault(key, []).append(projection)
    for (x, *_), group in groups.items():
        if len(group) > 1:
            _merge(graph, x, group)
    return None


def _projection(graph: Graph, tensor: str) -> _Projection | None:
    op = graph.producer(tensor)
    while op is not None and op.kind in _MOVEMENT:
        op = graph.producer(op.inputs[0])
    if op is None or op.output in graph.outputs:
        return None
    bias: numpy.ndarray | None = None
    product: Operator | None = op
    if op.kind == "add":
        pair = with_constant(graph, op)
        product = made_by(graph, pair[0], "matmul") if pair is not None else None
        if pair is None or product is None or graph.only_user(product.output) is None:
            return None
        if op.type != product.type:
            return None  # the bias broadcasts the product
        bias = axis_vector(graph, pair[1], len(op.type.shape) - 1, op.type.shape)
        if bias is None:
            return None
    if product is None or product.kind != "matmul" or product.output in graph.outputs:
        return None
    weight = product.inputs[1]
    return (
        _Projection(product, op.output, bias)
        if graph.is_constant(weight) and len(graph.types[weight].shape) == 2
        else None
    )


def _merge(graph: Graph, x: str, group: list[_Projection]) -> None:
    weights = [p.product.inputs[1] for p in group]
    if len({graph.types[w].dtype for w in weights}) > 1:
        return
    weight = graph.add_result("concat", weights, axis=1)
    product = group[0].product
    y = graph.add("matmul", (x, weight), name=product.name, **dict(product.attrs))
    if group[0].bias is not None:
        bias = numpy.concatenate([p.bias for p in group if p.bias is not None])
        y = graph.add(
            "add", (y, graph.add_constant(bias, "bias")), name=graph.operators[group[0].output].name
        )
    made = graph.types[y]
    start = 0
    for projection in group:
        count = int(projection.product.type.shape[-1])
        part = graph.add(
            "slice",
            (y,),
            TensorType((*made.shape[:-1], count), made.dtype),
            name=projection.product.name,
            begin=[0] * (len(made.shape) - 1) + [start],
            strides=[1] * len(made.shape),
        )
        graph.replace_uses(projection.output, part)
        graph.drop_dead(projection.output)
        start += count
