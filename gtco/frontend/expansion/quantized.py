"""Quantized tensors: what the rules for quantized operators share.

A quantized tensor is (x - zero) * scale with x in 8 bits. Scales and zero points are constants or
computed; a zero point that is left out is 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import onnx
from onnx import TensorProto

from gtco.frontend.expansion.writer import Unsuitable, Writer
from gtco.frontend.node_check import DTYPES

FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32
BYTES = (TensorProto.INT8, TensorProto.UINT8)
_RANGES = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535),
}
WHOLE = tuple(_RANGES)  # what QuantizeLinear makes
_OF_16_BITS = 21  # the first opset whose QuantizeLinear and DequantizeLinear take 16 bits
_ROUND = 11  # the first opset with Round


@dataclass(frozen=True)
class Quantized:
    """The names of a tensor, its scale and its zero point. The last two are scalars if they have
    one element.
    """

    x: str
    scale: str
    zero: str


def inputs(node: onnx.NodeProto, count: int, optional: Collection[int] = ()) -> list[str]:
    """The node's inputs, ``count`` of them; "" for each that is left out. ``optional``: the places
    where that is allowed.
    """
    given = [*node.input, *[""] * (count - len(node.input))]
    missing = [place for place, name in enumerate(given) if not name and place not in optional]
    if len(given) > count or missing:
        raise Unsuitable(
            f"it has the inputs {list(node.input)}, and its definition has {count}, of which "
            f"{len(optional)} may be left out"
        )
    return given


def quantized(w: Writer, x: str, scale: str, zero: str, most: int = 1) -> Quantized:
    """A tensor of 8 bits with its parameters, checked. ``most``: how many scales it may have."""
    if w.dtype(x) not in BYTES:
        raise Unsuitable(f"its input '{x}' is {DTYPES[w.dtype(x)]}, and has to be int8 or uint8")
    return Quantized(x, *parameters(w, scale, zero, w.dtype(x), most))


def parameters(
    w: Writer, scale: str, zero: str, dtype: int, most: int | Collection[int] = 1
) -> tuple[str, str]:
    """A scale and a zero point of the type ``dtype``, each of one element or of as many as the
    tensor's rows or columns are (``most``).
    """
    if w.dtype(scale) not in (FLOAT, TensorProto.FLOAT16):
        raise Unsuitable(
            f"its scale '{scale}' is {DTYPES[w.dtype(scale)]}, and has to be a float32"
        )
    zero = zero or w.constant(0, dtype, "zero_point")
    if w.dtype(zero) != dtype:
        raise Unsuitable(
            f"its zero point '{zero}' is {DTYPES[w.dtype(zero)]} and its tensor {DTYPES[dtype]}: "
            "they have to be equal"
        )
    allowed = {1, most} if isinstance(most, int) else {1, *most}
    for name in (scale, zero):
        if prod(w.shape(name)) not in allowed:
            raise Unsuitable(
                f"its '{name}' has the shape {list(w.shape(name))}: the elements have to be "
                f"{' or '.join(map(str, sorted(allowed)))}"
            )
    return scalar(w, w.cast(scale, FLOAT)), scalar(w, zero)


def scalar(w: Writer, name: str) -> str:
    """The tensor without axes if it has one element; otherwise the tensor."""
    return w.reshape(name, ()) if prod(w.shape(name)) == 1 else name


def is_scalar(w: Writer, *names: str) -> bool:
    return all(w.shape(name) == () for name in names)


def shifted(w: Writer, t: Quantized) -> str:
    """x - zero, of one zero point, as float32. Such small integers are exact."""
    return w.add("Sub", w.cast(t.x, FLOAT), w.cast(t.zero, FLOAT))


def dequantize(w: Writer, t: Quantized) -> str:
    """(x - zero) * scale, of one scale."""
    return w.add("DequantizeLinear", t.x, t.scale, t.zero)


def quantize(w: Writer, y: str, scale: str, zero: str) -> str:
    """clip(round(y / scale) + zero) in the zero point's type. Parameters of several elements have
    to broadcast to y.
    """
    dtype = w.dtype(zero)
    if dtype not in WHOLE:
        raise Unsuitable(f"it quantizes to {DTYPES[dtype]}, and gtco to integers of 8 and 16 bits")
    if is_scalar(w, scale, zero) and (dtype in BYTES or w.opset >= _OF_16_BITS):
        return w.add("QuantizeLinear", y, scale, zero)
    if w.opset < _ROUND:
        raise Unsuitable(f"it needs opset {_ROUND}, and the file has {w.opset}: export with it")
    steps = w.add("Round", w.add("Div", y, scale))
    shifted_steps = w.add("Add", steps, w.cast(zero, FLOAT))
    least, most = (w.constant(bound, FLOAT, "bound") for bound in _RANGES[dtype])
    held = w.add("Min", w.add("Max", shifted_steps, least), most)
    return w.cast(held, dtype)


def round_shifted(w: Writer, y: str, dtype: int) -> str:
    """clip(round(y)) of steps to which the zero point was added. Some of ONNX Runtime's kernels
    round so: an odd zero point moves halves to the other side.
    """
    none = w.constant(0, dtype, "zero_point")
    return quantize(w, y, w.constant(1.0, FLOAT, "one"), none)


def requantize(w: Writer, sums: str, factor: str, scale: str, zero: str) -> str:
    """clip(round(sums * (factor / scale)) + zero) of sums in int32. This is how ONNX Runtime
    rounds: the factor is one float32.
    """
    scaled = w.add("Mul", w.cast(sums, FLOAT), w.add("Div", factor, scale))
    return quantize(w, scaled, w.constant(1.0, FLOAT, "one"), zero)


def along(w: Writer, name: str, axis: int, rank: int) -> str:
    """A vector for each index of ``axis``, in the shape in which it broadcasts; a scalar stays."""
    shape = w.shape(name)
    if len(shape) != 1:
        return name
    return w.reshape(name, (shape[0], *[1] * (rank - axis - 1)))
