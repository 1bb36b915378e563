"""Rules for operators that read or write where indices say: they become gathers and scatters of
flat rows. Also rules for the places of a row's best elements.

before: gather_nd(x, i)              after: gather(rows of x, i0 * n1 + i1)
before: gather_elements(x, i, 1)     after: gather(elements of x, i * stride + place of other axes)
before: scatter_nd, scatter_elements after: scatter(x, the same numbers of rows, updates)
before: topk, sort, argsort          after: topk, and a gather of its places
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, Rule, integer
from gtco.graph.lower.context import result_type as _type
from gtco.tensor.stage import TensorType

INDEXED = 2**31  # int32 counts fewer elements than this
PLACES = ("topk", "argmax", "argmin")  # these make numbers that are not negative
ORDERED = ("float32", "int32", "int16", "uint16", "int8", "uint8")


# places of elements ------------------------------------------------------------------------------
def _counting(lowering: Lowering, tensor: str) -> str:
    """The integer dtype that can count the tensor's elements."""
    return "int32" if lowering.type(tensor).size < INDEXED else "int64"


def _shape(lowering: Lowering, tensor: str) -> tuple[int, ...]:
    return tuple(int(d) for d in lowering.type(tensor).shape)


def _as(lowering: Lowering, tensor: str, dtype: str) -> str:
    known, value = lowering.type(tensor), lowering.array(tensor)
    if known.dtype == dtype:
        return tensor
    if value is not None:
        return lowering.constant(value, dtype)
    return lowering.emit("cast", (tensor,), TensorType(known.shape, dtype))


def _times(lowering: Lowering, tensor: str, factor: int) -> str:
    dtype = lowering.type(tensor).dtype
    if factor == 1:
        return tensor
    return lowering.emit("multiply", (tensor, lowering.constant(factor, dtype)))


def _elements(lowering: Lowering, shape: Sequence[int], indices: str, axis: int, dtype: str) -> str:
    """The flat positions, in a tensor of ``shape``, of the elements that ``indices`` name along
    ``axis``. On the other axes each element has the place of its index.
    """
    taken = _shape(lowering, indices)
    strides = [prod(shape[a + 1 :]) for a in range(len(shape))]
    flat = _times(lowering, _as(lowering, indices, dtype), strides[axis])
    for axes in (range(axis), range(axis + 1, len(shape))):
        if not axes:
            continue  # zeros are added nevertheless: a batch of 1 has the operators of any other
        base = numpy.zeros((1,) * len(shape), dtype)
        for a in axes:
            along = numpy.arange(taken[a], dtype=dtype) * strides[a]
            base = base + along.reshape([-1 if b == a else 1 for b in range(len(shape))])
        flat = lowering.emit("add", (flat, lowering.constant(base, dtype)))
    return flat


def _rows(lowering: Lowering, shape: Sequence[int], indices: str, batch: int, dtype: str) -> str:
    """The numbers of the rows that the last axis of ``indices`` names, in a tensor of ``shape``.
    Its first ``batch`` axes are those of the indices too.
    """
    *places, count = _shape(lowering, indices)
    sizes = shape[batch : batch + count]
    total: str | None = None
    for n, one in enumerate(_columns(lowering, indices, sizes)):
        one = _as(lowering, lowering.reshape(one, tuple(places)), dtype)
        one = _times(lowering, one, prod(sizes[n + 1 :]))
        total = one if total is None else lowering.emit("add", (total, one))
    if total is None:  # the whole row of each place of the batch
        total = lowering.constant(numpy.zeros(places), dtype)
    return _in_all(lowering, total, shape[:batch], prod(sizes)) if batch else total


def _in_all(lowering: Lowering, rows: str, places: Sequence[int], count: int) -> str:
    """Numbers of rows, of which each place of the first axes has ``count``, as numbers among those
    of all places.
    """
    known = lowering.type(rows)
    first = numpy.arange(prod(places), dtype=known.dtype) * count
    first = first.reshape((*places, *[1] * (len(known.shape) - len(places))))
    return lowering.emit("add", (rows, lowering.constant(first, known.dtype)))


def _columns(lowering: Lowering, indices: str, sizes: Sequence[int]) -> list[str]:
    """The indices of each axis of these ``sizes``, [..., 1]. Where they were put side by side, what
    was.
    """
    *places, _ = _shape(lowering, indices)
    made = TensorType((*places, 1), lowering.type(indices).dtype)
    op = lowering.graph.producer(signed(lowering, indices))
    if op is not None and op.kind == "concat" and op["axis"] == len(places):
        if all(lowering.type(source) == made for source in op.inputs):
            parts = zip(op.inputs, sizes, strict=True)
            return [_counted_up(lowering, source, size) for source, size in parts]
    return [
        lowering.emit(
            "slice",
            (indices,),
            made,
            begin=[*[0] * len(places), n],
            strides=[1] * (len(places) + 1),
        )
        for n in range(len(sizes))
    ]


def _counted_up(lowering: Lowering, indices: str, extent: int) -> str:
    """The indices with negative ones made positive, if there may be some."""
    if _are_places(lowering, indices):
        return indices
    return _not_negative(lowering, indices, extent)


def _are_places(lowering: Lowering, tensor: str) -> bool:
    """True if the numbers are the places of elements along an axis."""
    op = lowering.graph.producer(tensor)
    while op is not None and op.kind in ("reshape", "cast", "permute"):
        op = lowering.graph.producer(op.inputs[0])
    return op is not None and op.kind in PLACES


def signed(lowering: Lowering, indices: str) -> str:
    """The indices before the importer made the negative ones positive. A gather does
    that itself.
    """
    producer = lowering.graph.producer
    chosen = producer(indices)
    if chosen is None or chosen.kind != "where":
        return indices
    test, counted = producer(chosen.inputs[0]), producer(chosen.inputs[1])
    given = chosen.inputs[2]
    if test is None or counted is None or (test.kind, counted.kind) != ("less", "add"):
        return indices
    zero = lowering.array(test.inputs[1])
    known = all(_same(lowering, op.inputs[0], given) for op in (test, counted))
    return given if known and zero is not None and not zero.any() else indices


def _same(lowering: Lowering, one: str, other: str) -> bool:
    """True if both are one tensor, or constants of the same values: each use of a constant in Relax
    has a name of its own.
    """
    a, b = lowering.array(one), lowering.array(other)
    return one == other or (a is not None and b is not None and numpy.array_equal(a, b))


def _not_negative(lowering: Lowering, indices: str, extent: int) -> str:
    """The indices with negative ones, which count from the end, made positive."""
    dtype = lowering.type(indices).dtype
    value = lowering.array(indices)
    if value is not None:
        return lowering.constant(numpy.where(value < 0, value + extent, value), dtype)
    test = lowering.emit("less", (indices, lowering.constant(0, dtype)))
    wrapped = lowering.emit("add", (indices, lowering.constant(extent, dtype)))
    return lowering.emit("where", (test, wrapped, indices))


def rows_of_each(lowering: Lowering, rows: str, shape: Sequence[int]) -> str:
    """The numbers ``rows`` [..., count] of rows of each place of the first axes as numbers in a
    table of all their rows. ``shape``: those axes, and the number of rows of each.
    """
    *places, count = shape
    dtype = "int32" if prod(shape) < INDEXED else "int64"
    rows = _as(lowering, _counted_up(lowering, rows, count), dtype)
    return _in_all(lowering, rows, places, count)


# reading ------------------------------------------------------------------------------------------
def _taken(lowering: Lowering, x: str, positions: str) -> str:
    """The elements of ``x`` at flat positions."""
    return lowering.emit(
        "gather", (lowering.reshape(x, (lowering.type(x).size,)), positions), axis=0
    )


def gather_elements(lowering: Lowering, call: relax.Call) -> Any:
    x, indices = (lowering.value(argument) for argument in call.args[:2])
    shape = _shape(lowering, x)
    if 0 in (*shape, *_shape(lowering, indices)):
        return None
    axis = integer(call.attrs.axis) % len(shape)
    return _taken(lowering, x, _elements(lowering, shape, indices, axis, _counting(lowering, x)))


def _gather_nd(lowering: Lowering, call: relax.Call) -> Any:
    x, indices = (lowering.value(argument) for argument in call.args[:2])
    batch = integer(call.attrs.batch_dims)
    shape, made = _shape(lowering, x), _type(call)
    if 0 in (*shape, *_shape(lowering, indices)):
        return None
    named = batch + _shape(lowering, indices)[-1]
    rows = _rows(lowering, shape, indices, batch, _counting(lowering, x))
    table = lowering.reshape(x, (prod(shape[:named]), *shape[named:]))
    return lowering.reshape(lowering.emit("gather", (table, rows), axis=0), made.shape)


# writing ------------------------------------------------------------------------------------------
def _scatter(
    lowering: Lowering,
    data: str,
    rows: int,
    index: str,
    updates: str,
    reduction: str,
    **along: tuple[int, ...],
) -> str:
    index = lowering.reshape(index, (lowering.type(index).size,))
    inputs = (data, index, updates)
    return lowering.emit("scatter", inputs, None, rows=rows, reduction=reduction, **along)


def _scatter_elements(lowering: Lowering, call: relax.Call) -> Any:
    data, indices, updates = (lowering.value(argument) for argument in call.args[:3])
    shape, taken = _shape(lowering, data), _shape(lowering, indices)
    reduction = str(call.attrs.reduction)
    if 0 in (*shape, *taken) or reduction not in REDUCTIONS:
        return None
    axis = integer(call.attrs.axis) % len(shape)
    along: dict[str, tuple[int, ...]] = {}
    if taken[1:axis] == shape[1:axis] and taken[axis + 1 :] == shape[axis + 1 :]:
        along["along"] = (shape[axis], taken[axis], prod(shape[axis + 1 :]))
    indices = _not_negative(lowering, indices, shape[axis])
    flat = _elements(lowering, shape, indices, axis, _counting(lowering, data))
    return _scatter(lowering, data, prod(shape), flat, updates, reduction, **along)


def _scatter_nd(lowering: Lowering, call: relax.Call) -> Any:
    data, indices, updates = (lowering.value(argument) for argument in call.args[:3])
    shape = _shape(lowering, data)
    reduction = str(call.attrs.reduction)
    if 0 in (*shape, *_shape(lowering, indices)) or reduction not in REDUCTIONS:
        return None
    named = _shape(lowering, indices)[-1]
    rows = _rows(lowering, shape, indices, 0, _counting(lowering, data))
    return _scatter(lowering, data, prod(shape[:named]), rows, updates, reduction)


REDUCTIONS = ("update", "add", "mul", "max", "min")


# ordering -----------------------------------------------------------------------------------------
def _best(
    lowering: Lowering, x: str, axis: int, k: int, largest: bool
) -> tuple[str, str, tuple[int, ...]] | None:
    """The values and indices of the best ``k`` along the axis, which is moved to the end; and the
    permutation back.
    """
    shape, dtype = _shape(lowering, x), lowering.type(x).dtype
    places = dtype == "int64" and _are_places(lowering, x)  # as in argsort(argsort(x))
    if (dtype not in ORDERED and not places) or 0 in shape or not shape:
        return None
    axis %= len(shape)
    there = (*(a for a in range(len(shape)) if a != axis), axis)
    back = tuple(sorted(range(len(shape)), key=there.__getitem__))
    last = lowering.permute(x, there)
    k = min(k, shape[axis]) if k > 0 else shape[axis]
    ordered = _as(lowering, last, "int32") if places else last
    indices = lowering.emit("topk", (ordered,), k=k, largest=int(largest))
    flat = _elements(
        lowering, _shape(lowering, last), indices, len(shape) - 1, _counting(lowering, x)
    )
    return _taken(lowering, last, flat), indices, back


def _topk(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    found = _best(
        lowering, lowering.value(call.args[0]), integer(a.axis), integer(a.k), bool(a.largest)
    )
    if found is None:
        return None
    values, indices, back = found
    results = {
        "values": lambda: lowering.permute(values, back),
        "indices": lambda: _as(lowering, lowering.permute(indices, back), str(a.dtype)),
    }
    if str(a.ret_type) != "both":
        return results[str(a.ret_type)]()
    return tuple(make() for make in results.values())


def _sort(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    found = _best(lowering, lowering.value(call.args[0]), integer(a.axis), 0, bool(a.descending))
    return None if found is None else lowering.permute(found[0], found[2])


def _argsort(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    found = _best(lowering, lowering.value(call.args[0]), integer(a.axis), 0, bool(a.descending))
    if found is None:
        return None
    return _as(lowering, lowering.permute(found[1], found[2]), str(a.dtype))


INDEXING_RULES: dict[str, Rule] = {
    "gather_nd": _gather_nd,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "topk": _topk,
    "sort": _sort,
    "argsort": _argsort,
}
