"""Sorts and scatters for GPUs: every element is computed alone, so that each has a thread.

::

    sorts:     for row, i:  rank = how many of the row come before element i
                            out[row, rank] = it
    scatters:  for i:  value = data[i]
                       for u of the updates, in order: if it goes to i: value = ...

This is more work than on a CPU (n^2 comparisons of n elements, and each update is read for each
element). It is one loop of independent iterations, so there is no barrier, and nothing is kept
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.indices import flatten, floordiv, floormod, split_flat
from gtco.tensor.relax.sort import ahead


def _sizes(tensor: Any) -> list[int]:
    return [int(d) for d in tensor.shape]


def _alone(
    shape: Sequence[int], dtype: str, inputs: Sequence[Any], count: int, name: str, body: Any
) -> Any:
    """A tensor whose elements ``body(inputs, out, i)`` stores for ``i`` in ``range(count)``, in any
    order.
    """

    def loop(ins: Any, outs: Any) -> Any:
        with IRBuilder() as builder:
            with T.parallel(0, count) as i:
                body(ins, outs[0], i)
            return builder.get()

    return te.extern(tuple(shape), list(inputs), loop, dtype=dtype, name=name)


def ranked(data: Any, axis: int, descending: bool, k: int, dtype: str) -> Any:
    """The first ``k`` elements along ``axis`` in sorted order: their places as ``dtype``, or the
    elements themselves if ``dtype`` is empty. The order is that of
    :func:`gtco.tensor.relax.sort.order`.
    """
    shape = _sizes(data)
    axis %= len(shape)
    n, kind = shape[axis], str(data.dtype)
    outer = [*shape[:axis], *shape[axis + 1 :]]

    def body(ins: Any, out: Any, flat: Any) -> None:
        row = split_flat(tirx.floordiv(flat, n), outer)
        i = T.Bind(tirx.floormod(flat, n))

        def at(j: Any) -> list[Any]:
            return [*row[:axis], j, *row[axis:]]

        own = ins[0][tuple(at(i))]  # TVM has no variables of bfloat16
        rank = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(rank, 0, [0])
        with T.serial(0, n) as j:
            other = ins[0][tuple(at(j))]
            before = tirx.Select(
                j < i,
                ahead(other, own, descending, kind, ties=True),
                ahead(other, own, descending, kind),
            )
            T.buffer_store(rank, rank[0] + tirx.Cast("int32", before), [0])
        with T.If(rank[0] < k):
            with T.Then():
                T.buffer_store(out, tirx.Cast(dtype, i) if dtype else own, at(rank[0]))

    made = [*shape[:axis], k, *shape[axis + 1 :]]
    return _alone(made, dtype or kind, [data], prod(shape), "ranked", body)


def _topk(b: Any, call: Any) -> Any:
    attrs, (data,) = call.attrs, call.args
    n = int(data.ty.shape[int(attrs.axis)])
    k = min(int(attrs.k), n) if int(attrs.k) > 0 else n
    results = [
        b.call_te(ranked, data, int(attrs.axis), bool(attrs.largest), k, dtype)
        for name, dtype in (("values", ""), ("indices", str(attrs.dtype)))
        if str(attrs.ret_type) in ("both", name)
    ]
    return relax.Tuple(results) if len(results) > 1 else results[0]


def _sort(b: Any, call: Any, dtype: str = "") -> Any:
    axis, descending = int(call.attrs.axis), bool(call.attrs.descending)
    n = int(call.args[0].ty.shape[axis])
    return b.call_te(ranked, call.args[0], axis, descending, n, dtype)


def _combined(reduction: str, old: Any, new: Any, dtype: str) -> Any:
    """What an update makes of an element. A maximum or minimum is NaN if either of the two is."""
    match reduction:
        case "update":
            return new
        case "add":
            return old + new
        case "mul":
            return old * new
        case "mean":
            return (old + new) / 2
    a, b = (tirx.Cast("float32", v) if dtype.endswith("float16") else v for v in (old, new))
    kept = a >= b if reduction == "max" else a <= b
    return tirx.Select(tirx.Or(kept, tirx.isnan(a)) if "float" in dtype else kept, old, new)


def _gathered(
    data: Any, reduction: str, inputs: Sequence[Any], count: int, name: str, update: Any
) -> Any:
    """``data`` with up to ``count`` updates for an element. ``update(inputs, index, u)`` says
    whether the u-th update goes there, and gives it.
    """
    shape = _sizes(data)

    def body(ins: Any, out: Any, flat: Any) -> None:
        index = split_flat(flat, shape)
        value = T.alloc_buffer((1,), str(data.dtype), scope="local")
        T.buffer_store(value, ins[0][tuple(index)], [0])
        with T.serial(0, count) as u:
            hit, new = update(ins, index, u)
            with T.If(hit):
                with T.Then():
                    combined = _combined(reduction, value[0], new, str(data.dtype))
                    T.buffer_store(value, combined, [0])
        T.buffer_store(out, value[0], index)

    return _alone(shape, str(data.dtype), inputs, prod(shape), name, body)


def _points_at(indices: Any, at: Sequence[Any], place: Any, extent: int) -> Any:
    """True if the index at ``at`` (counted from the end if it is negative) is this place."""
    given, place = indices[tuple(at)], tirx.Cast(str(indices.dtype), place)
    return tirx.Or(given == place, given == place - extent)


def scatter_elements(data: Any, indices: Any, updates: Any, axis: int, reduction: str) -> Any:
    """Like ``topi.scatter_elements``; along other axes the updates may be shorter than the data."""
    axis %= len(data.shape)
    sizes = _sizes(indices)

    def update(ins: Any, index: Sequence[Any], u: Any) -> tuple[Any, Any]:
        at = [u if a == axis else i for a, i in enumerate(index)]
        inside = [
            i < size
            for a, (i, size) in enumerate(zip(index, sizes, strict=True))
            if a != axis and size < int(data.shape[a])
        ]
        safe = [
            i if a == axis else tirx.min(i, size - 1)
            for a, (i, size) in enumerate(zip(at, sizes, strict=True))
        ]
        hit = _points_at(ins[1], safe, index[axis], int(data.shape[axis]))
        hit = tirx.all(*inside, hit)
        return hit, ins[2][tuple(safe)]

    inputs = [data, indices, updates]
    return _gathered(data, reduction, inputs, sizes[axis], "scatter_elements", update)


def scatter_nd(data: Any, indices: Any, updates: Any, reduction: str) -> Any:
    """Like ONNX's ScatterND: the last axis of ``indices`` is an index into the data's first
    axes.
    """
    shape, (*many, depth) = _sizes(data), _sizes(indices)

    def update(ins: Any, index: Sequence[Any], u: Any) -> tuple[Any, Any]:
        at = split_flat(u, many)
        hits = [_points_at(ins[1], (*at, d), index[d], shape[d]) for d in range(depth)]
        return tirx.all(*hits), ins[2][(*at, *index[depth:])]

    inputs = [data, indices, updates]
    return _gathered(data, reduction, inputs, prod(many), "scatter_nd", update)


def scatter_rows(
    data: Any,
    indices: Any,
    updates: Any,
    rows: int,
    reduction: str,
    along: tuple[int, int, int] | None = None,
) -> Any:
    """The canonical operator ``scatter``: rows of ``updates`` go to the rows that ``indices`` name
    of the data, which has ``rows`` rows in memory's order. An index outside them is ignored. With
    ``along``, an element looks only at the updates of its own outer and inner index.
    """
    shape, given, new = (_sizes(t) for t in (data, indices, updates))
    length, count = prod(shape) // rows, prod(given)
    extent, taken, inner = along or (1, count, 1)

    def update(ins: Any, index: Sequence[Any], u: Any) -> tuple[Any, Any]:
        flat = flatten(index, shape)
        row, column = floordiv(flat, length), floormod(flat, length)
        inside = []
        if along:
            outer, last = floordiv(flat, extent * inner), count // (taken * inner) - 1
            if last + 1 < prod(shape) // (extent * inner):
                inside = [outer <= last]
                outer = tirx.min(outer, last)
            u = (outer * taken + u) * inner + floormod(flat, inner)
        named = ins[1][tuple(split_flat(u, given))]
        hit = tirx.all(*inside, named == tirx.Cast(str(indices.dtype), row))
        return hit, ins[2][tuple(split_flat(u * length + column, new))]

    inputs = [data, indices, updates]
    return _gathered(data, reduction, inputs, taken, "scatter", update)


APART: dict[str, Callable[[Any, Any], Any]] = {
    "relax.sort": _sort,
    "relax.argsort": lambda b, call: _sort(b, call, str(call.attrs.dtype)),
    "relax.topk": _topk,
    "relax.scatter_elements": lambda b, call: b.call_te(
        scatter_elements, *call.args, int(call.attrs.axis), str(call.attrs.reduction)
    ),
    "relax.scatter_nd": lambda b, call: b.call_te(
        scatter_nd, *call.args, str(call.attrs.reduction)
    ),
}
