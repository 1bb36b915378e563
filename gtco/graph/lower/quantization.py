"""Rules for quantizing, dequantizing and products of small integers: they become arithmetic of
floats.

A product of int8 and uint8 values is computed in float32, which holds every integer up to 2^24. It
is exact in any order as long as the sum of its terms stays below that, so a larger k is cut into
parts.
"""

from __future__ import annotations

from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, Rule, integer
from gtco.graph.lower.context import result_type as _type
from gtco.tensor.stage import TensorType

EXACT = 2**24  # float32 holds all integers up to it
NARROW = ("int8", "uint8", "int16", "uint16")


def _quantize(lowering: Lowering, call: relax.Call) -> Any:
    """clip(round(x / scale) + zero, range of the type), by channels of ``axis``."""
    x, scale, zero = (lowering.value(argument) for argument in call.args)
    made = _type(call)
    if made.dtype not in NARROW or lowering.type(x).dtype != "float32":
        return None
    scale = _along(lowering, scale, call, made)
    zero = _cast(lowering, _along(lowering, zero, call, made), "float32")
    steps = lowering.emit("round", (lowering.emit("divide", (x, scale)),))
    bounds = numpy.iinfo(made.dtype)
    shifted = lowering.emit("add", (steps, zero))
    held = lowering.emit("clip", (shifted,), min=float(bounds.min), max=float(bounds.max))
    return lowering.emit("cast", (held,), made)


def _dequantize(lowering: Lowering, call: relax.Call) -> Any:
    """(x - zero) * scale, by channels of ``axis``."""
    x, scale, zero = (lowering.value(argument) for argument in call.args)
    made, narrow = _type(call), lowering.type(x).dtype
    if made.dtype != "float32" or narrow not in (*NARROW, "int32"):
        return None
    scale = _along(lowering, scale, call, made)
    zero = _along(lowering, zero, call, made)
    x, zero = (_cast(lowering, t, "int32") for t in (x, zero))
    value = lowering.array(zero)
    steps = x if value is not None and not value.any() else lowering.emit("subtract", (x, zero))
    return lowering.emit("multiply", (_cast(lowering, steps, "float32"), scale), made)


def _along(lowering: Lowering, parameter: str, call: relax.Call, made: TensorType) -> str:
    """A scale or a zero point, of one element or of one per channel, in the shape in which it
    broadcasts.
    """
    count = lowering.type(parameter).size
    if count == 1:
        return lowering.reshape(parameter, ())
    axis = integer(call.attrs.axis) % len(made.shape)
    return lowering.reshape(parameter, (count, *[1] * (len(made.shape) - axis - 1)))


def _cast(lowering: Lowering, tensor: str, dtype: str) -> str:
    known = lowering.type(tensor)
    value = lowering.array(tensor)
    if known.dtype == dtype:
        return tensor
    if value is not None:
        return lowering.constant(value, dtype)
    return lowering.emit("cast", (tensor,), TensorType(known.shape, dtype))


def integer_product(lowering: Lowering, a: str, b: str) -> str | None:
    """``a @ b`` of int32 tensors with small values: products in float32, each of a part of k so
    short that it is exact, added as int32. None if the values are not known to be small.
    """
    most = _magnitude(lowering, a) * _magnitude(lowering, b)
    k = int(lowering.type(a).shape[-1])
    if not 0 < most <= EXACT or lowering.type(a).dtype != "int32" or not k:
        return None
    x, y = (_cast(lowering, t, "float32") for t in (a, b))
    total: str | None = None
    step = -(-k // -(-k // (EXACT // most)))  # parts of one size
    for begin in range(0, k, step):
        count = min(step, k - begin)
        parts = [_part(lowering, t, axis, begin, count) for t, axis in ((x, -1), (y, -2))]
        product = lowering.emit("matmul", tuple(parts))
        share = _cast(lowering, product, "int32")
        total = share if total is None else lowering.emit("add", (total, share))
    return total


def _part(lowering: Lowering, tensor: str, axis: int, begin: int, count: int) -> str:
    known = lowering.type(tensor)
    shape = [int(d) for d in known.shape]
    if shape[axis] == count:
        return tensor
    value = lowering.array(tensor)
    where = [slice(None)] * len(shape)
    where[axis] = slice(begin, begin + count)
    if value is not None:
        return lowering.constant(value[tuple(where)], known.dtype)
    first = [0] * len(shape)
    first[axis], shape[axis] = begin, count
    kept = TensorType(tuple(shape), known.dtype)
    return lowering.emit("slice", (tensor,), kept, begin=first, strides=[1] * len(shape))


def _magnitude(lowering: Lowering, tensor: str) -> int:
    """The largest magnitude that an integer tensor may have, found through casts, differences and
    movement; more than ``EXACT`` if no bound is known.
    """
    low, high = _range(lowering, tensor)
    return max(abs(low), abs(high))


def _range(lowering: Lowering, tensor: str) -> tuple[int, int]:
    value, dtype = lowering.array(tensor), lowering.type(tensor).dtype
    if value is not None and value.size and value.dtype.kind in "iu":
        return int(value.min()), int(value.max())
    if dtype in NARROW:
        return int(numpy.iinfo(dtype).min), int(numpy.iinfo(dtype).max)
    op = lowering.graph.producer(tensor)
    if op is not None and op.kind in ("cast", "reshape", "permute", "broadcast", "slice"):
        source = op.inputs[0]
        if lowering.type(source).dtype in (*NARROW, dtype):
            return _range(lowering, source)
    if op is not None and op.kind == "subtract":
        (a, b), (c, d) = (_range(lowering, x) for x in op.inputs)
        return a - d, b - c
    return -(2**31), 2**31


QUANTIZATION_RULES: dict[str, Rule] = {"quantize": _quantize, "dequantize": _dequantize}
