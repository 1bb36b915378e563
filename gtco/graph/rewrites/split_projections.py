"""A product of merged projections is split if one of them is read for few rows only.

before: y = x @ [Wq Wk Wv] + [bq bk bv]; q, k, v = slices of y, q along the rows too
after:  q = slice(x) @ Wq + bq; k = x @ Wk + bk; v = x @ Wv + bv

This serves models that come with q, k and v merged and read only the class token, whose slice
``rows_unread`` has moved here. ``merge_projections`` merges k and v again.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, axis_vector, with_constant
from gtco.graph.rewrites.rows_unread import part
from gtco.tensor.stage import Operator


def split_projections(graph: Graph) -> Graph:
    """Splits only if the slices share no column, so that nothing is computed twice."""
    return apply_rule(graph, {"matmul"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    x, known = op.inputs
    if not graph.is_constant(known) or len(graph.types[known].shape) != 2:
        return None
    y, bias = op, numpy.zeros(0)
    add = graph.only_user(op.output)
    if add is not None and add.kind == "add" and add.type == op.type:
        pair = with_constant(graph, add)
        shape = op.type.shape
        vector = axis_vector(graph, pair[1], len(shape) - 1, shape) if pair is not None else None
        if vector is None:
            return None
        y, bias = add, vector
    slices = [o for o in graph.consumers(y.output) if o.kind == "slice" and o["strides"][-1] == 1]
    if y.output in graph.outputs or slices != graph.consumers(y.output) or not _few(y, slices):
        return None
    for one in slices:
        first = one["begin"][-1]
        columns = slice(first, first + int(one.type.shape[-1]))
        rows = [*zip(one["begin"], one["strides"], one.type.shape, strict=True)]
        rows[-1] = (0, 1, graph.types[x].shape[-1])
        weight = graph.add_result(
            "slice",
            (known,),
            replace(graph.types[known], shape=(graph.types[known].shape[0], one.type.shape[-1])),
            begin=[0, first],
            strides=[1, 1],
        )
        made = replace(op.type, shape=one.type.shape)
        rest = part(graph, x, rows), weight
        new = graph.add("matmul", rest, made, name=op.name, **dict(op.attrs))
        if y is not op:
            new = graph.add("add", (new, graph.add_constant(bias[columns], "bias")), name=y.name)
        graph.replace_uses(one.output, new)
        graph.drop_dead(one.output)
    return None


def _few(y: Operator, slices: list[Operator]) -> bool:
    """True if one of these slices takes at most half of the rows, and no two take the
    same column.
    """
    read: list[int] = []
    for o in slices:
        first = o["begin"][-1]
        read += range(first, first + int(o.type.shape[-1]))
    return len(read) == len(set(read)) and any(2 * _rows(o) <= _rows(y) for o in slices)


def _rows(op: Operator) -> int:
    return prod(int(d) for d in op.type.shape[:-1])
