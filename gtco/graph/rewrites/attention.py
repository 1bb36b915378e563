"""Attention becomes one operator (Vaswani et al. 2017, eq. 1), whatever order of scale, bias, mask
and reshape led to it.

before: matmul(softmax((matmul(q, permute(k)) * c + b) + m), v)        after: attention(q, k, v, b +
m), scale c
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.graph.rewrites.axis_groups import axis_groups
from gtco.tensor.stage import Operator, TensorType

# A masked score this low is exp(...) = 0 in float32 beside any score that a model makes.
_MASKED = -1e4
_MOVEMENT = ("reshape", "permute", "slice", "broadcast")


@dataclass(frozen=True)
class _Scores:
    """scale * (the tensor being looked at) + sum of terms, in the shape that softmax sees."""

    scale: float = 1.0
    terms: tuple[tuple[str, float], ...] = ()
    path: tuple[Operator, ...] = field(
        default=()
    )  # reshapes between the tensor and the softmax, outermost first


def attention(graph: Graph) -> Graph:
    """Needs ``simplify_movement`` and ``softmax`` before; ends with products on q and k merged into
    the scale."""
    graph = apply_rule(graph, {"reshape"}, _softmax_outwards)
    graph = apply_rule(graph, {"matmul"}, _rule)
    return apply_rule(graph, {"attention"}, _scale_of_operands)


def _softmax_outwards(graph: Graph, op: Operator) -> str | None:
    """reshape(softmax(s)) -> softmax(reshape(s)) where the last axis stays."""
    soft = made_by(graph, op.inputs[0], "softmax")
    if soft is None or graph.only_user(soft.output) is None or op.output in graph.outputs:
        return None
    if soft["axis"] != len(soft.type.shape) - 1 or soft.type.shape[-1] != op.type.shape[-1]:
        return None
    moved = graph.add("reshape", soft.inputs, op.type, name=op.name)
    return graph.add("softmax", (moved,), name=soft.name, axis=len(op.type.shape) - 1)


def _rule(graph: Graph, op: Operator) -> str | None:
    soft = made_by(graph, op.inputs[0], "softmax")
    if (
        soft is None
        or soft["axis"] != len(soft.type.shape) - 1
        or graph.only_user(soft.output) is None
    ):
        return None
    found = _product(graph, soft.inputs[0], _Scores(), soft.type.shape)
    if found is None:
        return None
    product, scores = found
    q, kt = product.inputs
    lead, inner = soft.type.shape[:-2], product.type.shape[:-2]
    if soft.type.shape[-2:] != product.type.shape[-2:]:
        return None
    if lead != inner and (
        graph.types[q].shape[:-2] != inner or graph.types[kt].shape[:-2] != inner
    ):
        return None
    rank = len(graph.types[kt].shape)
    k = graph.add("permute", (kt,), name=product.name, axes=(*range(rank - 2), rank - 1, rank - 2))
    if lead != inner:
        q, k = (
            graph.add(
                "reshape", (t,), TensorType((*lead, *graph.types[t].shape[-2:]), op.type.dtype)
            )
            for t in (q, k)
        )
    bias = _bias(graph, scores.terms, soft.type)
    inputs = (q, k, op.inputs[1]) if bias is None else (q, k, op.inputs[1], bias)
    result = graph.add("attention", inputs, name=op.name or soft.name, scale=scores.scale)
    assert graph.types[result] == op.type, f"attention of type {graph.types[result]}, not {op.type}"
    return result


def _product(
    graph: Graph, tensor: str, scores: _Scores, shape: tuple[int | str, ...]
) -> tuple[Operator, _Scores] | None:
    """Peel scale, terms and reshapes off ``tensor`` down to q @ k^T."""
    op = graph.producer(tensor)
    if op is None or graph.only_user(tensor) is None:
        return None
    if op.kind == "matmul":
        return op, scores
    if op.kind == "multiply":
        for x, c in (op.inputs, op.inputs[::-1]):
            factor = scalar(graph, c)
            if factor is not None and graph.types[x] == op.type:
                return _product(graph, x, replace(scores, scale=scores.scale * factor), shape)
        return None
    if op.kind == "reshape" and op.type.shape[-2:] == graph.types[op.inputs[0]].shape[-2:]:
        return _product(graph, op.inputs[0], replace(scores, path=(*scores.path, op)), shape)
    if op.kind == "add":
        for x, term in (op.inputs, op.inputs[::-1]):
            if graph.types[x] == op.type and _reaches_product(graph, x):
                moved = _outwards(graph, term, op.type.shape, scores.path)
                return _product(
                    graph, x, replace(scores, terms=(*scores.terms, (moved, scores.scale))), shape
                )
        return None
    return _masked(graph, op, scores, shape) if op.kind == "where" else None


def _reaches_product(graph: Graph, tensor: str) -> bool:
    """Whether peeling can go on at ``tensor`` (checked before anything is added to the graph)."""
    op = graph.producer(tensor)
    if op is None or graph.only_user(tensor) is None:
        return False
    if op.kind == "matmul":
        return True
    if op.kind in ("multiply", "add", "where", "reshape"):
        return any(_reaches_product(graph, source) for source in op.inputs)
    return False


def _masked(
    graph: Graph, op: Operator, scores: _Scores, shape: tuple[int | str, ...]
) -> tuple[Operator, _Scores] | None:
    """where(m, s, low) and where(m, low, s) -> s + where(m, 0, low).

    With a finite ``low`` that is equal after softmax where each row keeps an entry, which a
    constant mask shows; with
    -inf it is equal always.
    """
    condition = op.inputs[0]
    for place, other in ((1, 2), (2, 1)):
        low, x = scalar(graph, op.inputs[other]), op.inputs[place]
        if (
            low is None
            or low > _MASKED
            or scores.scale <= 0
            or graph.types[x] != op.type
            or not _reaches_product(graph, x)
        ):
            continue
        mask = graph.constants.get(condition)
        allowed = mask if mask is None or place == 1 else ~mask
        if low != -numpy.inf and (
            allowed is None or not allowed.ndim or not bool(allowed.any(axis=-1).all())
        ):
            return None
        zero = graph.add_constant(numpy.zeros((), op.type.dtype), "zero")
        order = (
            (condition, zero, op.inputs[other])
            if place == 1
            else (condition, op.inputs[other], zero)
        )
        term = _outwards(graph, graph.add("where", order, name=op.name), op.type.shape, scores.path)
        return _product(
            graph, x, replace(scores, terms=(*scores.terms, (term, scores.scale))), shape
        )
    return None


def _outwards(
    graph: Graph, term: str, shape: tuple[int | str, ...], path: tuple[Operator, ...]
) -> str:
    """``term``, which broadcasts to ``shape``, through the reshapes between there and the
    softmax."""
    for op in reversed(path):
        source, target = tuple(map(int, shape)), tuple(map(int, op.type.shape))
        known = tuple(map(int, graph.types[term].shape))
        known = (1,) * (len(source) - len(known)) + known
        wide, after = list(known), [1] * len(target)
        for left, right in axis_groups(source, target):
            if all(known[a] == 1 for a in left):
                continue
            for a in left:
                wide[a] = source[a]
            for a in right:
                after[a] = target[a]
        dtype = graph.types[term].dtype
        if graph.types[term].shape != known:
            term = graph.add("reshape", (term,), TensorType(known, dtype))
        if tuple(wide) != known:
            term = graph.add("broadcast", (term,), TensorType(tuple(wide), dtype))
        if tuple(after) != tuple(wide):
            assert prod(after) == prod(wide)
            term = graph.add("reshape", (term,), TensorType(tuple(after), dtype))
        shape = op.type.shape
    return term


def _bias(graph: Graph, terms: tuple[tuple[str, float], ...], made: TensorType) -> str | None:
    """The sum of the terms; constant zeros are left out."""
    total: str | None = None
    for term, factor in reversed(terms):
        if scalar(graph, term) == 0.0:
            continue
        if factor != 1.0:
            term = graph.add(
                "multiply", (term, graph.add_constant(numpy.asarray(factor, made.dtype), "scale"))
            )
        total = term if total is None else graph.add("add", (total, term))
    return total


def _scale_of_operands(graph: Graph, op: Operator) -> str | None:
    """attention(q * a, k * b, v) -> attention(q, k, v) with its scale times a * b."""
    q, a = _unscaled(graph, op.inputs[0])
    k, b = _unscaled(graph, op.inputs[1])
    if a == 1.0 and b == 1.0:
        return None
    return graph.add("attention", (q, k, *op.inputs[2:]), name=op.name, scale=op["scale"] * a * b)


def _unscaled(graph: Graph, tensor: str) -> tuple[str, float]:
    """The tensor without the scalar factors on its way, through data movement, and their
    product."""
    op = graph.producer(tensor)
    if op is None or (op.kind != "multiply" and op.kind not in _MOVEMENT):
        return tensor, 1.0
    if op.kind == "multiply":
        for x, c in (op.inputs, op.inputs[::-1]):
            factor = scalar(graph, c)
            if factor is not None and factor != 0.0 and graph.types[x] == op.type:
                inner, rest = _unscaled(graph, x)
                return inner, rest * factor
        return tensor, 1.0
    inner, factor = _unscaled(graph, op.inputs[0])
    if factor == 1.0:
        return tensor, 1.0
    return graph.add(op.kind, (inner,), op.type, name=op.name, **dict(op.attrs)), factor
