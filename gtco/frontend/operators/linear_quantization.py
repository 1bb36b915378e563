"""QuantizeLinear and DequantizeLinear in the forms that TVM's importer lacks, and ConvInteger.

Scales by blocks, types other than float32 for scales and results, and int32 as input are written as
arithmetic of float32. Everything else becomes the operators ``quantize`` and ``dequantize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import onnx
from tvm import relax

from gtco.frontend.operators.arguments import Attributes, Refused
from gtco.frontend.operators.padding import padding

QUANTIZED = ("int8", "uint8", "int16", "uint16")
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class _Parameters:
    """A scale, and a zero point or None, as they broadcast to data of the shape ``data``. With
    blocks this shape has one more axis than the tensor. If the last block is not whole, the scale
    and zero point have the shape of the tensor.
    """

    scale: Any
    zero: Any
    data: Sequence[int]


def dequantize_linear(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """(x - zero) * scale. The result has the scale's type or ``output_dtype``."""
    x, scale, zero = _three(inputs)
    source, made = _dtype(x), _dtype_of(attrs, _dtype(scale))
    if made not in _FLOATS or _dtype(scale) not in _FLOATS:
        raise Refused(
            f"it dequantizes to {made} by a scale of {_dtype(scale)}, and gtco knows "
            f"{', '.join(_FLOATS)}"
        )
    if source not in (*QUANTIZED, "int32"):
        raise Refused(
            f"it dequantizes {source}, and gtco dequantizes {', '.join(QUANTIZED)} and int32 "
            "(int4 as a constant): quantize the model to one of these"
        )
    plain = made == _dtype(scale) == "float32" and not attrs.get("block_size", 0)
    axis = _checked(x, scale, zero, attrs)
    if plain:
        zero = relax.const(0, source) if zero is None else zero
        return relax.op.dequantize(x, scale, zero, axis=axis, out_dtype="float32")
    p = _placed(builder, x, scale, zero, attrs, axis)
    steps = _reshaped(builder, x, p.data)
    steps = builder.emit(relax.op.astype(steps, "int32"))
    if p.zero is not None:
        wide = builder.emit(relax.op.astype(p.zero, "int32"))
        steps = builder.emit(relax.op.subtract(steps, wide))
    y = builder.emit(relax.op.astype(steps, "float32"))
    y = builder.emit(relax.op.multiply(y, _cast(builder, p.scale, "float32")))
    return _cast(builder, _reshaped(builder, y, _shape(x)), made)


def quantize_linear(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """clip(round(x / scale) + zero). ``saturate`` concerns only float8. The division is in float32
    for every ``precision``.
    """
    x, scale, zero = _three(inputs)
    made = _dtype_of(attrs, "uint8" if zero is None else _dtype(zero))
    if zero is not None and _dtype(zero) != made:
        raise Refused(
            f"its zero point is {_dtype(zero)} and its output_dtype {made}: they have to be equal"
        )
    if made not in QUANTIZED:
        raise Refused(
            f"it quantizes to {made}, and gtco quantizes to {', '.join(QUANTIZED)}: quantize the "
            "model to one of these"
        )
    if _dtype(scale) not in _FLOATS or _dtype(x) not in (*_FLOATS, "int32"):
        raise Refused(
            f"it quantizes {_dtype(x)} by a scale of {_dtype(scale)}, and gtco knows "
            f"{', '.join(_FLOATS)}"
        )
    plain = _dtype(x) == _dtype(scale) == "float32" and not attrs.get("block_size", 0)
    axis = _checked(x, scale, zero, attrs)
    if plain:
        zero = relax.const(0, made) if zero is None else zero
        return relax.op.quantize(x, scale, zero, axis=axis, out_dtype=made)
    p = _placed(builder, x, scale, zero, attrs, axis)
    y = _cast(builder, _reshaped(builder, x, p.data), "float32")
    y = builder.emit(relax.op.divide(y, _cast(builder, p.scale, "float32")))
    y = builder.emit(relax.op.round(y))
    if p.zero is not None:
        y = builder.emit(relax.op.add(y, _cast(builder, p.zero, "float32")))
    bounds = numpy.iinfo(made)
    y = builder.emit(relax.op.clip(y, float(bounds.min), float(bounds.max)))
    return _reshaped(builder, _cast(builder, y, made), _shape(x))


def conv_integer(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """The convolution of x - zero with w - zero in int32."""
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    space = len(_shape(x)) - 2
    if space not in (1, 2, 3):
        raise Refused(f"it convolves {space} axes, and gtco convolves 1 to 3")
    outputs = _shape(w)[0]
    x = _shifted(builder, x, x_zero, ())
    by_output = () if w_zero is None or _size(w_zero) == 1 else (outputs, *[1] * (space + 1))
    w = _shifted(builder, w, w_zero, by_output)
    convolve = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[space - 1]
    strides = [int(s) for s in attrs.get("strides", [1] * space)]
    dilation = [int(d) for d in attrs.get("dilations", [1] * space)]
    pads = padding(_shape(x)[2:], _shape(w)[2:], strides, dilation, attrs)
    return convolve(
        x, w, strides=strides, padding=pads, dilation=dilation, groups=attrs.get("group", 1)
    )


def matmul_integer(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """The product of a - zero and b - zero in int32. A zero point of one axis is one for each row
    of a, and one for each column of b.
    """
    a, b, a_zero, b_zero = [*inputs, None, None][:4]
    rows = () if a_zero is None or _size(a_zero) == 1 else tuple(_shape(a_zero))
    columns = () if b_zero is None or _size(b_zero) == 1 else tuple(_shape(b_zero))
    rows = (*rows, 1) if len(rows) == 1 else rows
    a, b = _shifted(builder, a, a_zero, rows), _shifted(builder, b, b_zero, columns)
    return relax.op.matmul(a, b, out_dtype="int32")


def _shifted(builder: Any, x: Any, zero: Any, shape: Sequence[int]) -> Any:
    """x - zero in int32, the zero point in the given shape."""
    x = builder.emit(relax.op.astype(x, "int32"))
    if zero is None:
        return x
    wide = builder.emit(relax.op.astype(_reshaped(builder, zero, shape), "int32"))
    return builder.emit(relax.op.subtract(x, wide))


# scales and zero points ---------------------------------------------------------------------------
def _checked(x: Any, scale: Any, zero: Any, attrs: Attributes) -> int:
    """The axis of the scales, not negative. Raises if the shapes do not fit."""
    shape, given = _shape(x), _shape(scale)
    axis, block = int(attrs.get("axis", 1)), int(attrs.get("block_size", 0))
    if zero is not None and _size(zero) != _size(scale):
        raise Refused(
            f"its scale has the shape {given} and its zero point {_shape(zero)}: give a zero point "
            "for each scale"
        )
    if not block and _size(scale) == 1:
        return 0
    if not -len(shape) <= axis < len(shape):
        raise Refused(f"its axis {axis} is none of the {len(shape)} of its input")
    axis %= len(shape)
    if not block:
        if len(given) != 1 or given[0] != shape[axis]:
            raise Refused(
                f"its scale has the shape {given}: give one scale, or the {shape[axis]} of axis "
                f"{axis} of its input {shape}"
            )
        return axis
    wanted = [-(-n // block) if i == axis else n for i, n in enumerate(shape)] if block > 0 else []
    if given != wanted:
        raise Refused(
            f"its blocks of {block} do not divide its input {shape} along axis {axis}: the scale "
            f"has the shape {given} and has to have {wanted or 'blocks of 1 or more'}"
        )
    return axis


def _placed(
    builder: Any, x: Any, scale: Any, zero: Any, attrs: Attributes, axis: int
) -> _Parameters:
    shape, block = _shape(x), int(attrs.get("block_size", 0))
    if not block:
        along: tuple[int, ...] = (shape[axis], *[1] * (len(shape) - axis - 1))
        along = () if _size(scale) == 1 else along
        scale, zero = (None if t is None else _reshaped(builder, t, along) for t in (scale, zero))
        return _Parameters(scale, zero, shape)
    blocks = _shape(scale)[axis]
    apart = [*shape[:axis], blocks, 1, *shape[axis + 1 :]]
    scale, zero = (None if t is None else _reshaped(builder, t, apart) for t in (scale, zero))
    if blocks * block == shape[axis]:
        return _Parameters(scale, zero, [*apart[: axis + 1], block, *apart[axis + 2 :]])
    wide = [*apart[: axis + 1], block, *apart[axis + 2 :]]

    def spread(t: Any) -> Any:
        t = builder.emit(relax.op.broadcast_to(t, wide))
        t = _reshaped(builder, t, [*shape[:axis], blocks * block, *shape[axis + 1 :]])
        return builder.emit(relax.op.strided_slice(t, [axis], [0], [shape[axis]]))

    return _Parameters(spread(scale), None if zero is None else spread(zero), shape)


def _three(inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
    x, scale, zero = [*inputs, None][:3]
    return x, scale, zero


def _dtype_of(attrs: Attributes, otherwise: str) -> str:
    number = int(attrs.get("output_dtype", 0))
    if not number:
        return otherwise
    name = onnx.TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _dtype(tensor: Any) -> str:
    return str(tensor.ty.dtype)


def _shape(tensor: Any) -> list[int]:
    return [int(dim) for dim in tensor.ty.shape]


def _size(tensor: Any) -> int:
    return int(numpy.prod(_shape(tensor), dtype=int))


def _reshaped(builder: Any, tensor: Any, shape: Sequence[int]) -> Any:
    if _shape(tensor) == list(shape):
        return tensor
    return builder.emit(relax.op.reshape(tensor, tuple(shape)))


def _cast(builder: Any, tensor: Any, dtype: str) -> Any:
    return tensor if _dtype(tensor) == dtype else builder.emit(relax.op.astype(tensor, dtype))
