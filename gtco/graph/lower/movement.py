"""Rules for Relax operators that cut, repeat or pad a tensor, or pick slices of it: they become
slices, broadcasts, pads and gathers.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, Rule, integer, integers, tensor_type
from gtco.graph.lower.context import result_type as _type
from gtco.graph.lower.indexing import gather_elements, rows_of_each, signed
from gtco.tensor.stage import TensorType


def _take_slice(
    lowering: Lowering, x: str, axis: int, begin: int, count: int, stride: int = 1
) -> str:
    known = lowering.type(x)
    rank = len(known.shape)
    shape = (*known.shape[:axis], count, *known.shape[axis + 1 :])
    return lowering.emit(
        "slice",
        (x,),
        TensorType(shape, known.dtype),
        begin=[begin if i == axis else 0 for i in range(rank)],
        strides=[stride if i == axis else 1 for i in range(rank)],
    )


def _split(lowering: Lowering, call: relax.Call) -> str | tuple[str, ...]:
    x = lowering.value(call.args[0])
    axis = integer(call.attrs.axis) % len(lowering.type(x).shape)
    parts: list[str] = []
    begin = 0
    apart = isinstance(call.ty, relax.TupleType)  # a single part is a tensor, not a tuple
    for field in call.ty.fields if apart else [call.ty]:
        count = int(tensor_type(field, "split").shape[axis])
        parts.append(_take_slice(lowering, x, axis, begin, count))
        begin += count
    return tuple(parts) if apart else parts[0]


def _strided_slice(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    shape = lowering.type(x).shape
    axes, begins = lowering.value(call.args[1]), lowering.value(call.args[2])
    strides = lowering.value(call.args[4]) if len(call.args) > 4 else (1,) * len(axes)
    begin, stride = [0] * len(shape), [1] * len(shape)
    for axis, first, step in zip(axes, begins, strides, strict=True):
        size = int(shape[axis])
        first = first + size if first < 0 else first
        begin[axis] = min(max(first, 0), size if step > 0 else size - 1)
        stride[axis] = int(step)
    return lowering.emit("slice", (x,), _type(call), begin=begin, strides=stride)


def _flip(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    shape = lowering.type(x).shape
    axis = integer(call.attrs.axis) % len(shape)
    return _take_slice(lowering, x, axis, int(shape[axis]) - 1, int(shape[axis]), -1)


def _gather_elements(lowering: Lowering, call: relax.Call) -> Any:
    """Picks whole rows if the indices are the same for all axes behind (a row's number repeated
    along the row, as detectors pick their queries). Axes before it have rows of their own: the
    table has the rows of all of them. A batch of 1 has the operators of any other.
    """
    x, indices = (lowering.value(argument) for argument in call.args[:2])
    shape = tuple(map(int, lowering.type(x).shape))
    taken = tuple(map(int, lowering.type(indices).shape))
    axis = integer(call.attrs.axis) % len(shape)
    if 0 in taken or shape[:axis] + shape[axis + 1 :] != taken[:axis] + taken[axis + 1 :]:
        return None
    source, places = _origin(lowering, signed(lowering, indices))
    behind = len(shape) - axis - 1
    first: tuple[Any, ...] = (..., *[0] * behind)
    vector = places[first]
    if vector.size != lowering.type(source).size or (vector.ravel() != range(vector.size)).any():
        return None
    if (places != vector.reshape((*vector.shape, *[1] * behind))).any():
        return None
    rows = lowering.reshape(source, vector.shape)
    if axis == 0:
        return lowering.emit("gather", (x, rows), axis=0)
    rows = rows_of_each(lowering, rows, shape[: axis + 1])
    table = lowering.reshape(x, (prod(shape[: axis + 1]), *shape[axis + 1 :]))
    return lowering.emit("gather", (table, rows), axis=0)


def _origin(lowering: Lowering, tensor: str) -> tuple[str, numpy.ndarray]:
    """The tensor that ``tensor`` repeats, and the flat position there of each of its elements."""
    op = lowering.graph.producer(tensor)
    shape = tuple(map(int, lowering.type(tensor).shape))
    if op is None or op.kind not in ("reshape", "broadcast"):
        return tensor, numpy.arange(prod(shape)).reshape(shape)
    source, places = _origin(lowering, op.inputs[0])
    if op.kind == "reshape":
        return source, places.reshape(shape)
    return source, numpy.broadcast_to(places, shape)


def _repeat_to(lowering: Lowering, x: str, repeats: list[int], inner: bool) -> str:
    """Repeats each axis ``repeats`` times: the whole axis (tile) or each element (repeat,
    ``inner``).
    """
    known = lowering.type(x)
    shape = (1,) * (len(repeats) - len(known.shape)) + tuple(map(int, known.shape))
    pairs = [(d, r) if inner else (r, d) for d, r in zip(shape, repeats, strict=True)]
    apart = [(d, 1) if inner else (1, d) for d in shape]
    x = lowering.reshape(x, tuple(d for pair in apart for d in pair))
    x = lowering.emit(
        "broadcast", (x,), TensorType(tuple(d for pair in pairs for d in pair), known.dtype)
    )
    return lowering.reshape(x, tuple(a * b for a, b in pairs))


def _tile(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    repeats = list(integers(call.attrs.repeats))
    repeats = [1] * (len(lowering.type(x).shape) - len(repeats)) + repeats
    return _repeat_to(lowering, x, repeats, inner=False)


def _repeat(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    if call.attrs.axis is None:
        x = lowering.reshape(x, (prod(map(int, lowering.type(x).shape)),))
    rank = len(lowering.type(x).shape)
    axis = 0 if call.attrs.axis is None else integer(call.attrs.axis) % rank
    repeats = [integer(call.attrs.repeats) if i == axis else 1 for i in range(rank)]
    return _repeat_to(lowering, x, repeats, inner=True)


def _pad(lowering: Lowering, call: relax.Call) -> Any:
    widths = integers(call.attrs.pad_width)
    mode = str(call.attrs.pad_mode)
    if mode not in ("constant", *_REPEATED) or any(width < 0 for width in widths):
        return None
    x = lowering.value(call.args[0])
    if mode != "constant":
        for axis, around in enumerate(zip(widths[0::2], widths[1::2], strict=True)):
            x = _pad_repeating(lowering, x, axis, around, _REPEATED[mode])
        return x
    return lowering.emit(
        "pad",
        (x,),
        before=widths[0::2],
        after=widths[1::2],
        value=float(call.attrs.pad_value),
    )


_REPEATED: dict[str, Any] = {
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}  # numpy's names of the modes


def _pad_repeating(
    lowering: Lowering, x: str, axis: int, around: tuple[int, int], mode: Any
) -> str:
    """Pads with the tensor's own elements. The positions of a border form runs, and each run is a
    slice (backwards for a reflection, one element many times for an edge).
    """
    shape = lowering.type(x).shape
    if not any(around):
        return x
    places = numpy.pad(numpy.arange(int(shape[axis])), around, mode=mode).tolist()
    parts: list[str] = []
    begin = 0
    while begin < len(places):
        step = places[begin + 1] - places[begin] if begin + 1 < len(places) else 1
        step = step if step in (-1, 0, 1) else 1
        end = begin + 1
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        count = end - begin
        part = _take_slice(lowering, x, axis, places[begin], count if step else 1, step or 1)
        if not step:
            kind = TensorType((*shape[:axis], count, *shape[axis + 1 :]), lowering.type(x).dtype)
            part = lowering.emit("broadcast", (part,), kind)
        parts.append(part)
        begin = end
    return parts[0] if len(parts) == 1 else lowering.concat(parts, axis)


MOVEMENT_RULES: dict[str, Rule] = {
    "split": _split,
    "strided_slice": _strided_slice,
    "flip": _flip,
    "gather_elements": lambda lowering, call: (
        _gather_elements(lowering, call) or gather_elements(lowering, call)
    ),
    "tile": _tile,
    "repeat": _repeat,
    "nn.pad": _pad,
}
