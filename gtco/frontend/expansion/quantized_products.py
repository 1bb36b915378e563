"""Products and convolutions of quantized tensors: integer products, and what scales their sums.

QLinearMatMul(a, b)  ->  quantize(float(MatMulInteger(a, b)) * (scale_a scale_b / scale_y))
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.products import channels_first, channels_last
from gtco.frontend.expansion.quantized import (
    FLOAT,
    INT32,
    Quantized,
    along,
    inputs,
    is_scalar,
    parameters,
    quantized,
    requantize,
    scalar,
)
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer

_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def qlinear_matmul(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """a may have a scale for each row, b one for each column."""
    w = walk.writer
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs(node, 8)
    left = _rows(w, quantized(w, a, a_scale, a_zero, _count(w, a, -2)))
    right = quantized(w, b, b_scale, b_zero, _count(w, b, -1))
    sums = _product(w, left, right)
    rows = prod(w.shape(sums)[:-1])
    y_scale, y_zero = parameters(w, y_scale, y_zero, w.dtype(y_zero), {rows, _count(w, a, -2)})
    if not is_scalar(w, y_scale, y_zero):
        y_scale, y_zero = (_as_rows(w, v) for v in (y_scale, y_zero))
    return [requantize(w, sums, w.add("Mul", left.scale, right.scale), y_scale, y_zero)]


def _count(w: Writer, x: str, axis: int) -> int:
    """How many scales a matrix, or a batch of them, may have along the axis."""
    shape = w.shape(x)
    if len(shape) < 2:
        return 1
    return shape[axis] if len(shape) == 2 else prod(shape[:-2]) * shape[axis]


def _rows(w: Writer, t: Quantized) -> Quantized:
    """With a scale for each row as it broadcasts to the rows."""
    return Quantized(t.x, _as_rows(w, t.scale), t.zero)


def _as_rows(w: Writer, name: str) -> str:
    shape = w.shape(name)
    return w.reshape(name, (*shape, 1)) if len(shape) == 1 else name


def _product(w: Writer, a: Quantized, b: Quantized) -> str:
    return w.add("MatMulInteger", a.x, b.x, a.zero, b.zero)


def qlinear_conv(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """A convolution with scales of the weights for the tensor or for each output channel. The bias
    is int32, in steps of scale_x scale_w.
    """
    w, attrs = walk.writer, attributes(node)
    x, x_scale, x_zero, weight, w_scale, w_zero, y_scale, y_zero, bias = inputs(node, 9, (8,))
    rank = len(w.shape(weight))
    if rank < 3 or len(w.shape(x)) != rank:
        raise Unsuitable(f"its input has {len(w.shape(x))} axes and its weights {rank}")
    outputs = w.shape(weight)[0]
    last = attrs.get("channels_last", 0)
    image = quantized(w, channels_first(w, x) if last else x, x_scale, x_zero)
    filters = quantized(w, weight, w_scale, w_zero, outputs)
    given = {k: v for k, v in attrs.items() if k in _CONVOLUTION}
    sums = w.add("ConvInteger", image.x, filters.x, image.zero, filters.zero, **given)
    if bias:
        if w.dtype(bias) != INT32 or prod(w.shape(bias)) != outputs:
            raise Unsuitable(f"its bias '{bias}' has to be {outputs} numbers of int32")
        flat = w.reshape(bias, (outputs, *[1] * (rank - 2)))
        sums = w.add("Add", sums, flat)
    y_scale, y_zero = parameters(w, y_scale, y_zero, w.dtype(y_zero))
    factor = w.add("Mul", image.scale, along(w, filters.scale, 1, rank))
    y = requantize(w, sums, factor, y_scale, y_zero)
    return [channels_last(w, y) if last else y]


def qgemm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """alpha * (a @ b + c), c of int32 in steps of scale_a scale_b; float32 without y_scale."""
    w, attrs = walk.writer, attributes(node)
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = inputs(node, 9, (6, 7, 8))
    if len(w.shape(a)) != 2 or len(w.shape(b)) != 2:
        raise Unsuitable("its operands are not matrices")
    a = w.transpose(a, [1, 0]) if attrs.get("transA", 0) else a
    b = w.transpose(b, [1, 0]) if attrs.get("transB", 0) else b
    left, right = quantized(w, a, a_scale, a_zero), _by_column(w, b, b_scale, b_zero)
    sums = _product(w, left, right)
    if c:
        if w.dtype(c) != INT32:
            raise Unsuitable(f"its bias '{c}' has to be int32")
        sums = w.add("Add", sums, c)
    factor = w.add("Mul", w.scaled(left.scale, float(attrs.get("alpha", 1.0))), right.scale)
    if not y_scale:
        return [w.add("Mul", w.cast(sums, FLOAT), factor)]
    if not y_zero:
        raise Unsuitable("it has a scale of its output and no zero point")
    return [requantize(w, sums, factor, *parameters(w, y_scale, y_zero, w.dtype(y_zero)))]


def _by_column(w: Writer, b: str, scale: str, zero: str) -> Quantized:
    return quantized(w, b, scale, zero, _count(w, b, -1))


def matmul_integer_to_float(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The sums times both scales, plus a bias."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = inputs(node, 7, (4, 5, 6))
    return [to_float(walk.writer, a, a_scale, a_zero, b, b_scale, b_zero, bias)]


def to_float(
    w: Writer, a: str, a_scale: str, a_zero: str, b: str, b_scale: str, b_zero: str, bias: str
) -> str:
    """The product of a and b, which may have a scale for each column, plus a bias."""
    left = quantized(w, a, a_scale, a_zero)
    return _to_float(w, left, _by_column(w, b, b_scale, b_zero), bias, w.dtype(a_scale))


def dynamic_quantize_matmul(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """a is quantized to uint8 by its own least and largest number."""
    w = walk.writer
    a, b, b_scale, b_zero, bias = inputs(node, 5, (3, 4))
    left = Quantized(*w.several("DynamicQuantizeLinear", 3, a))
    return [_to_float(w, left, _by_column(w, b, b_scale, b_zero), bias, FLOAT)]


def _to_float(w: Writer, a: Quantized, b: Quantized, bias: str, dtype: int) -> str:
    sums = w.cast(_product(w, a, b), FLOAT)
    y = w.add("Mul", sums, w.add("Mul", a.scale, scalar(w, b.scale)))
    y = w.cast(y, dtype)
    return w.add("Add", y, bias) if bias else y
