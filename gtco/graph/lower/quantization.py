"""Rules for quantizing and dequantizing: they become arithmetic of floats, from which
:mod:`gtco.graph.rewrites.quantized.integer_products` makes products of integers.
"""

from __future__ import annotations

from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, Rule, integer
from gtco.graph.lower.context import result_type as _type
from gtco.tensor.stage import TensorType

NARROW = ("int8", "uint8", "int16", "uint16")
_SMALL = 1 << 12  # elements of constants that are cast here


def _quantize(lowering: Lowering, call: relax.Call) -> Any:
    """clip(round(x / scale) + zero, range of the type), by channels of ``axis``."""
    x, scale, zero = (lowering.value(argument) for argument in call.args)
    made = _type(call)
    if made.dtype not in NARROW or lowering.type(x).dtype != "float32":
        return None
    scale = _along(lowering, scale, call, made)
    zero = _cast(lowering, _along(lowering, zero, call, made), "float32")
    value = lowering.array(scale)
    if value is None or not (value == 1).all():  # the sums of a product are scaled before
        x = lowering.emit("divide", (x, scale))
    steps = lowering.emit("round", (x,))
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
    shape: tuple[int, ...] = ()
    if count != 1:
        axis = integer(call.attrs.axis) % len(made.shape)
        shape = (count, *[1] * (len(made.shape) - axis - 1))
    value = lowering.array(parameter)
    if value is None or value.shape == shape:
        return lowering.reshape(parameter, shape)
    return lowering.constant(value.reshape(shape), str(value.dtype))


def _cast(lowering: Lowering, tensor: str, dtype: str) -> str:
    known = lowering.type(tensor)
    if known.dtype == dtype:
        return tensor
    # large weights stay in 8 bits until a rewrite makes something of them
    if known.size <= _SMALL and (value := lowering.array(tensor)) is not None:
        return lowering.constant(value, dtype)
    return lowering.emit("cast", (tensor,), TensorType(known.shape, dtype))


QUANTIZATION_RULES: dict[str, Rule] = {"quantize": _quantize, "dequantize": _dequantize}
