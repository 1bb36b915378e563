"""Attention becomes one operator (Vaswani et al. 2017, eq. 1), in any order of scale, bias, mask
and reshape.

before: matmul(softmax((matmul(q, permute(k)) * c + b) + m), v)
after:  attention(q, k, v, b + m) {scale=c}

before: matmul(softmax(where(mask, matmul(q, permute(k)), low)), v)
after:  attention(q, k, v, where(mask, 0, low)) {hidden=low}

before: matmul(where(isnan(p), 0, p), v), p = softmax(...)
after:  attention(...) {guarded}

before: matmul(softmax(matmul(q, permute(k)) * t + b), v), t one number a head (Swin V2, eq. 2)
after:  attention(q * t, k, v, b)

Rows whose keys are all hidden, NaN and infinities give the same results as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.analysis.indices import axis_groups
from gtco.tensor.stage import Operator, TensorType

# The largest value that a mask's where() gives for hidden scores.
_MASKED = -1e4
# So low that adding any bias below 1e7 gives the same float32 again.
_ABSORBS = -(2.0**80)
_MOVEMENT = ("reshape", "permute", "slice", "broadcast")


@dataclass(frozen=True)
class _Scores:
    """The operations between the current tensor and the softmax.

    - ``scale`` multiplies the tensor.
    - ``terms`` follow, from the last to the first, in the shape that softmax sees. (t, factor) adds
      t times the factor. (condition, hides) puts ``hidden`` where the condition does not hold, or,
      with ``hides``, where it holds.
    - ``path`` has the reshapes in between, the outermost first.
    - ``factors`` are tensors that multiply whole heads of the product itself, before everything
      else.
    """

    scale: float = 1.0
    terms: tuple[tuple[str, float] | tuple[str, bool], ...] = ()
    hidden: float | None = None
    path: tuple[Operator, ...] = ()
    factors: tuple[str, ...] = ()


def attention(graph: Graph) -> Graph:
    """Makes attentions. ``simplify_movement`` and ``softmax`` must have run before. At the end,
    products on q and k are merged into the scale.
    """
    graph = apply_rule(graph, {"reshape"}, _softmax_outwards)
    graph = apply_rule(graph, {"matmul"}, _rule)
    return apply_rule(graph, {"attention"}, _scale_of_operands)


def _softmax_outwards(graph: Graph, op: Operator) -> str | None:
    """reshape(softmax(s)) -> softmax(reshape(s)) if the last axis stays, also through a guard."""
    soft, guarded = _probabilities(graph, op.inputs[0])
    if soft is None or op.output in graph.outputs:
        return None
    if soft["axis"] != len(soft.type.shape) - 1 or soft.type.shape[-1] != op.type.shape[-1]:
        return None
    moved = graph.add("reshape", soft.inputs, op.type, name=op.name)
    result = graph.add("softmax", (moved,), name=soft.name, axis=len(op.type.shape) - 1)
    if guarded:
        zero = graph.add_constant(numpy.zeros((), op.type.dtype), "zero")
        result = graph.add("where", (graph.add("isnan", (result,)), zero, result))
    return result


def _probabilities(graph: Graph, tensor: str) -> tuple[Operator | None, bool]:
    """The softmax that makes ``tensor`` only for this reader, and whether there is a
    guard between.
    """
    if graph.only_user(tensor) is None:
        return None, False
    guard = made_by(graph, tensor, "where")
    if guard is None:
        return made_by(graph, tensor, "softmax"), False
    condition, instead, kept = guard.inputs
    test, soft = made_by(graph, condition, "isnan"), made_by(graph, kept, "softmax")
    if (
        test is None
        or soft is None
        or test.inputs[0] != soft.output
        or scalar(graph, instead) != 0.0
        or graph.only_user(condition) is None
    ):
        return None, False
    return (soft if len(graph.consumers(kept)) == 2 and kept not in graph.outputs else None), True


def _rule(graph: Graph, op: Operator) -> str | None:
    soft, guarded = _probabilities(graph, op.inputs[0])
    if soft is None or soft["axis"] != len(soft.type.shape) - 1:
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
    for factor in scores.factors:
        q = graph.add("multiply", (q, factor))
    rank = len(graph.types[kt].shape)
    k = graph.add("permute", (kt,), axes=(*range(rank - 2), rank - 1, rank - 2))
    if lead != inner:
        q, k = (
            graph.add(
                "reshape", (t,), TensorType((*lead, *graph.types[t].shape[-2:]), op.type.dtype)
            )
            for t in (q, k)
        )
    bias = _bias(graph, scores, soft.type)
    inputs = (q, k, op.inputs[1]) if bias is None else (q, k, op.inputs[1], bias)
    attrs: dict[str, Any] = {"scale": scores.scale}
    if guarded:
        attrs["guarded"] = True
    if scores.hidden is not None:
        attrs["hidden"] = scores.hidden
    result = graph.add("attention", inputs, name=op.name or soft.name, **attrs)
    assert graph.types[result] == op.type, f"attention of type {graph.types[result]}, not {op.type}"
    return result


def _product(
    graph: Graph, tensor: str, scores: _Scores, shape: tuple[int | str, ...]
) -> tuple[Operator, _Scores] | None:
    """Peels scale, terms and reshapes off ``tensor`` down to q @ k^T."""
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
        return _by_heads(graph, op, scores, shape)
    if op.kind == "reshape" and op.type.shape[-2:] == graph.types[op.inputs[0]].shape[-2:]:
        return _product(graph, op.inputs[0], replace(scores, path=(*scores.path, op)), shape)
    if op.kind == "add":
        for x, term in (op.inputs, op.inputs[::-1]):
            if graph.types[x] == op.type and _reaches_product(graph, x):
                if not _apart(graph, term, scores.scale, scores.hidden):
                    return None
                moved = _outwards(graph, term, op.type.shape, scores.path)
                return _product(
                    graph, x, replace(scores, terms=(*scores.terms, (moved, scores.scale))), shape
                )
        return None
    return _masked(graph, op, scores, shape) if op.kind == "where" else None


def _by_heads(
    graph: Graph, op: Operator, scores: _Scores, shape: tuple[int | str, ...]
) -> tuple[Operator, _Scores] | None:
    """(q @ k^T) * t, where t is one number for all scores of a head, with only scalars between."""
    for x, t in (op.inputs, op.inputs[::-1]):
        heads = graph.types[t].shape
        if graph.types[x] != op.type or any(n != 1 for n in heads[-2:]):
            continue
        found = _product(graph, x, _Scores(), shape)
        if found is None or found[1] != _Scores(found[1].scale, factors=found[1].factors):
            continue
        product, inner = found
        factors = (*scores.factors, *inner.factors, t)
        return product, replace(scores, scale=scores.scale * inner.scale, factors=factors)
    return None


def _apart(graph: Graph, term: str, factor: float, hidden: float | None) -> bool:
    """True if a score with ``factor`` times ``term`` added cannot be confused with a hidden one,
    which is recognised only by its bias: ``hidden`` or less. A sum with a value as low as
    ``hidden`` may differ from its bias, unless ``hidden`` absorbs every finite score.
    """
    if hidden is None or hidden <= _ABSORBS:
        return True
    value = graph.constants.get(term)
    if value is None:
        return False
    added = value * factor
    return bool((numpy.isfinite(added) & (added > hidden / 8)).all())


def _reaches_product(graph: Graph, tensor: str) -> bool:
    """True if peeling can go on at ``tensor`` (checked before anything is added to the graph)."""
    left, seen = [tensor], {tensor}
    while left:
        tensor = left.pop()
        op = graph.producer(tensor)
        if op is None or graph.only_user(tensor) is None:
            continue
        if op.kind == "matmul":
            return True
        if op.kind in ("multiply", "add", "where", "reshape"):
            left += {*op.inputs} - seen
            seen |= {*op.inputs}
    return False


def _masked(
    graph: Graph, op: Operator, scores: _Scores, shape: tuple[int | str, ...]
) -> tuple[Operator, _Scores] | None:
    """where(m, s, low) and where(m, low, s) -> s, with where(m, 0, low) among the terms.

    Values that are added outside move into ``low``. This changes nothing if ``low`` is -inf or
    absorbs them. It also changes nothing after softmax if each row keeps an entry, which a constant
    mask shows.
    """
    condition = op.inputs[0]
    for place, other in ((1, 2), (2, 1)):
        low, x = scalar(graph, op.inputs[other]), op.inputs[place]
        if (
            low is None
            or low > _MASKED
            or scores.scale <= 0
            or scores.hidden is not None
            or graph.types[x] != op.type
            or not _reaches_product(graph, x)
        ):
            continue
        mask = graph.constants.get(condition)
        allowed = mask if mask is None or place == 1 else ~mask
        keeps = allowed is not None and allowed.ndim and bool(allowed.any(axis=-1).all())
        with numpy.errstate(over="ignore"):
            hidden = float(numpy.asarray(low * scores.scale).astype(op.type.dtype))
        if scores.terms and hidden > _ABSORBS and not keeps:
            return None
        if not all(_apart(graph, term, factor, hidden) for term, factor in scores.terms):
            return None
        moved = _outwards(graph, condition, op.type.shape, scores.path)
        terms = (*scores.terms, (moved, place == 2))
        return _product(graph, x, replace(scores, terms=terms, hidden=hidden), shape)
    return None


def _outwards(
    graph: Graph, term: str, shape: tuple[int | str, ...], path: tuple[Operator, ...]
) -> str:
    """``term``, which broadcasts to ``shape``, moved through the reshapes between that place and
    the softmax.
    """
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


def _bias(graph: Graph, scores: _Scores, made: TensorType) -> str | None:
    """The terms as one tensor; constant zeros are left out.

    A hidden score is recognised by a bias of ``hidden`` or less. If ``hidden`` absorbs the values
    that are added outside, every order gives this, and a second mask that is added there may make
    -inf of it. Otherwise the mask's term comes last, wherever it was.
    """

    def constant(value: float) -> str:
        return graph.add_constant(numpy.asarray(value, made.dtype), "bias")

    total: str | None = None
    terms = list(reversed(scores.terms))
    if scores.hidden is not None and scores.hidden > _ABSORBS:
        terms.sort(key=lambda t: isinstance(t[1], bool))
    for term, factor in terms:
        if isinstance(factor, bool):
            assert scores.hidden is not None
            pair = (total or constant(0.0), constant(scores.hidden))
            total = graph.add("where", (term, *(pair[::-1] if factor else pair)))
            continue
        if scalar(graph, term) == 0.0:
            continue
        if factor != 1.0:
            term = graph.add("multiply", (term, constant(factor)))
        total = term if total is None else graph.add("add", (total, term))
    return total


def _scale_of_operands(graph: Graph, op: Operator) -> str | None:
    """attention(q * a, k * b, v) -> attention(q, k, v) with its scale times a * b."""
    q, a = _unscaled(graph, op.inputs[0])
    k, b = _unscaled(graph, op.inputs[1])
    if a == 1.0 and b == 1.0:
        return None
    attrs = dict(op.attrs) | {"scale": op["scale"] * a * b}
    return graph.add("attention", (q, k, *op.inputs[2:]), name=op.name, **attrs)


def _unscaled(graph: Graph, tensor: str) -> tuple[str, float]:
    """The tensor without the scalar factors before it, also behind data movement, and the product
    of these factors.
    """
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
