"""Element-wise operators, pooling, softmax and concatenation of quantized tensors: the operator
between a DequantizeLinear and a QuantizeLinear; and these two in ONNX Runtime's domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy
import onnx
from onnx import TensorProto

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.products import channels_first, channels_last
from gtco.frontend.expansion.quantized import (
    BYTES,
    FLOAT,
    INT32,
    WHOLE,
    Quantized,
    dequantize,
    inputs,
    is_scalar,
    parameters,
    quantize,
    quantized,
    round_shifted,
    shifted,
)
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer
from gtco.frontend.node_check import DTYPES
from gtco.frontend.operators.padding import auto_pad, whole_windows

_COUNTED = "count_include_pad"
_POOL = ("auto_pad", "ceil_mode", _COUNTED, "kernel_shape", "pads", "strides")
_PER_AXIS_SOFTMAX = 13  # the first opset whose Softmax is over one axis
_BY_AXIS = 13  # the first opset whose DequantizeLinear has an axis


def _output(w: Writer, y: str, scale: str, zero: str, dtype: int) -> str:
    return quantize(w, y, *parameters(w, scale, zero, dtype))


def qlinear_add(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """a r + b t + c in steps of the output, with r = scale_a / scale and t = scale_b / scale. All
    zero points are in c. They count before the rounding, so halves are rounded as ONNX Runtime
    rounds them.
    """
    w = walk.writer
    a, b, scale, zero = _pair(w, node)
    scale, zero = parameters(w, scale, zero, w.dtype(a.x))
    fixed, parts = w.cast(zero, FLOAT), []
    for t in (a, b):
        ratio = w.add("Div", t.scale, scale)
        parts.append(w.add("Mul", w.cast(t.x, FLOAT), ratio))
        fixed = w.add("Sub", fixed, w.add("Mul", ratio, w.cast(t.zero, FLOAT)))
    y = w.add("Add", w.add("Add", parts[0], fixed), parts[1])
    return [round_shifted(w, y, w.dtype(zero))]


def qlinear_mul(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """(a - zero_a) * (b - zero_b), which float32 holds exactly, times one factor."""
    w = walk.writer
    a, b, scale, zero = _pair(w, node)
    scale, zero = parameters(w, scale, zero, w.dtype(a.x))
    factor = w.add("Div", w.add("Mul", a.scale, b.scale), scale)
    y = w.add("Mul", w.add("Mul", shifted(w, a), shifted(w, b)), factor)
    return [round_shifted(w, w.add("Add", y, w.cast(zero, FLOAT)), w.dtype(zero))]


def _pair(w: Writer, node: onnx.NodeProto) -> tuple[Quantized, Quantized, str, str]:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = inputs(node, 8, (2, 5, 7))
    return quantized(w, a, a_scale, a_zero), quantized(w, b, b_scale, b_zero), scale, zero


def qlinear_sigmoid(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    return _unary(walk, node, lambda w, x: w.add("Sigmoid", x))


def qlinear_leaky_relu(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    alpha = float(attributes(node).get("alpha", 0.01))
    return _unary(walk, node, lambda w, x: w.add("LeakyRelu", x, alpha=alpha))


def qlinear_global_average_pool(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The sum of x - zero, which is exact, times one factor."""
    w = walk.writer
    x, x_scale, x_zero, scale, zero = inputs(node, 5, (2, 4))
    rank, last = len(w.shape(x)), attributes(node).get("channels_last", 0)
    if rank < 3:
        raise Unsuitable(f"its input has {rank} axes, and an image has 3 or more")
    axes = list(range(1, rank - 1)) if last else list(range(2, rank))
    t = quantized(w, x, x_scale, x_zero)
    scale, zero = parameters(w, scale, zero, w.dtype(x))
    pixels = float(prod(w.shape(x)[axis] for axis in axes))
    factor = w.add("Div", t.scale, w.scaled(scale, pixels))
    y = w.add("Mul", w.sum(shifted(w, t), axes), factor)
    return [quantize(w, y, w.constant(1.0, FLOAT, "one"), zero)]


def qlinear_average_pool(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    x, x_scale, x_zero, scale, zero = inputs(node, 5, (2, 4))
    scale, zero = parameters(w, scale, zero, w.dtype(x))
    y = dequantize(w, quantized(w, x, x_scale, x_zero))
    last = attrs.get("channels_last", 0)
    y = channels_first(w, y) if last else y
    y = w.add("AveragePool", y, **_whole_windows(attrs, w.shape(y)[2:]))
    y = w.add("Add", w.add("Div", y, scale), w.cast(zero, FLOAT))
    y = round_shifted(w, y, w.dtype(zero))
    return [channels_last(w, y) if last else y]


def _whole_windows(attrs: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """The attributes of an AveragePool. Where padding counts, ONNX Runtime divides by all taps of a
    window, also by those behind the padding that ``ceil_mode`` lets in; so these become padding.
    """
    given = {k: v for k, v in attrs.items() if k in _POOL}
    explicit = auto_pad(given) in ("NOTSET", "VALID")
    if not (explicit and given.get("ceil_mode") and given.get(_COUNTED)):
        return given
    return given | {"auto_pad": "NOTSET", "pads": whole_windows(sizes, given), "ceil_mode": 0}


def qlinear_reduce_mean(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    attrs = attributes(node)

    def mean(w: Writer, x: str) -> str:
        rank = len(w.shape(x))
        axes = sorted({axis % max(rank, 1) for axis in attrs.get("axes", range(rank))})
        y = w.mean(x, axes)
        if attrs.get("keepdims", 1):
            return y
        return w.reshape(y, [n for axis, n in enumerate(w.shape(x)) if axis not in axes])

    return _unary(walk, node, mean)


def qlinear_softmax(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Softmax over one axis, or, as before opset 13, over all axes from ``axis`` on. The attribute
    ``opset`` says which.
    """
    attrs = attributes(node)

    def softmax(w: Writer, x: str) -> str:
        shape = w.shape(x)
        rank = len(shape)
        single = attrs.get("opset", _PER_AXIS_SOFTMAX) >= _PER_AXIS_SOFTMAX
        axis = attrs.get("axis", -1 if single else 1)
        if not -rank <= axis < max(rank, 1):
            raise Unsuitable(f"its axis {axis} is none of the {rank} of its input")
        axis %= max(rank, 1)
        if not single:
            flat = w.reshape(x, (prod(shape[:axis]), prod(shape[axis:])))
            return w.reshape(w.add("Softmax", flat, axis=1), shape)
        order = [*(a for a in range(rank) if a != axis), axis]
        moved = w.transpose(x, order)
        y = w.add("Softmax", moved, axis=rank - 1)
        return w.transpose(y, [order.index(a) for a in range(rank)])

    return _unary(walk, node, softmax)


def _unary(walk: Walk, node: onnx.NodeProto, function: Any) -> Sequence[str]:
    """An operator of one tensor: x, its parameters, and those of the output."""
    w = walk.writer
    x, x_scale, x_zero, scale, zero = inputs(node, 5, (2, 4))
    t = quantized(w, x, x_scale, x_zero)
    return [_output(w, function(w, dequantize(w, t)), scale, zero, w.dtype(x))]


def qlinear_where(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w = walk.writer
    condition, x, x_scale, x_zero, y, y_scale, y_zero, scale, zero = inputs(node, 9)
    parts = (quantized(w, x, x_scale, x_zero), quantized(w, y, y_scale, y_zero))
    chosen = w.add("Where", condition, *(dequantize(w, part) for part in parts))
    return [_output(w, chosen, scale, zero, w.dtype(x))]


def qlinear_concat(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Each tensor in the output's steps, joined. A tensor that has them already stays as it is."""
    w, attrs = walk.writer, attributes(node)
    scale, zero, *rest = node.input
    if not rest or len(rest) % 3 or not all(rest):
        raise Unsuitable(f"it has {len(node.input)} inputs: two, and three for each tensor")
    scale, zero = parameters(w, scale, zero, w.dtype(zero))
    parts = []
    for place in range(0, len(rest), 3):
        t = quantized(w, *rest[place : place + 3])
        same = _equal(w, t.scale, scale) and _equal(w, t.zero, zero)
        parts.append(t.x if same else quantize(w, dequantize(w, t), scale, zero))
    return [w.add("Concat", *parts, axis=attrs.get("axis", 0))]


def _equal(w: Writer, a: str, b: str) -> bool:
    known = [w.values.get(name) for name in (a, b)]
    if known[0] is None or known[1] is None:
        return a == b
    return known[0].dtype == known[1].dtype and bool(numpy.array_equal(known[0], known[1]))


# quantizing and dequantizing ----------------------------------------------------------------------
def quantize_linear(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """ONNX Runtime's QuantizeLinear: by the tensor, or by ``axis`` if there is one."""
    w = walk.writer
    x, scale, zero = inputs(node, 3, (2,))
    dtype = w.dtype(zero) if zero else TensorProto.UINT8
    if dtype not in WHOLE:
        raise Unsuitable(f"it quantizes to {DTYPES[dtype]}, and gtco to integers of 8 and 16 bits")
    scale, zero = _by_axis(w, node, x, scale, zero, dtype)
    return [quantize(w, w.cast(x, FLOAT), scale, zero)]


def dynamic_quantize_linear(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """To uint8 by the tensor's own least and largest number, beside 0. The scale of a tensor of
    zeros is 1, as in ONNX Runtime, where ONNX's definition divides by 0.
    """
    w = walk.writer
    (x,) = inputs(node, 1)
    none, one = w.constant(0.0, FLOAT, "none"), w.constant(1.0, FLOAT, "one")
    steps = w.constant(255.0, FLOAT, "steps")
    least = w.add("Min", w.add("ReduceMin", x, keepdims=0), none)
    most = w.add("Max", w.add("ReduceMax", x, keepdims=0), none)
    scale = w.add("Div", w.add("Sub", most, least), steps)
    scale = w.add("Where", w.add("Equal", most, least), one, scale)
    zero = w.add("Sub", none, w.add("Div", least, scale))
    zero = w.cast(w.add("Round", w.add("Clip", zero, none, steps)), TensorProto.UINT8)
    return [w.add("QuantizeLinear", x, scale, zero), scale, zero]


def dequantize_linear(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """ONNX Runtime's DequantizeLinear. The result has the type of the scale."""
    w = walk.writer
    x, scale, zero = inputs(node, 3, (2,))
    made, source = w.dtype(scale), w.dtype(x)
    if source not in (*WHOLE, INT32):
        raise Unsuitable(f"it dequantizes {DTYPES[source]}, which gtco does not support")
    given = scale, zero
    scale, zero = _by_axis(w, node, x, scale, zero, source)
    if is_scalar(w, scale, zero) and source in (*BYTES, INT32):
        return [w.cast(w.add("DequantizeLinear", x, scale, zero), made)]
    if source in BYTES and w.opset >= _BY_AXIS:  # weights of products stay in 8 bits
        vectors = [w.cast(given[0], FLOAT), *filter(None, given[1:])]
        axis = attributes(node)["axis"]
        return [w.cast(w.add("DequantizeLinear", x, *vectors, axis=axis), made)]
    steps = w.add("Sub", w.cast(x, INT32), w.cast(zero, INT32))
    return [w.cast(w.add("Mul", w.cast(steps, FLOAT), scale), made)]


def _by_axis(
    w: Writer, node: onnx.NodeProto, x: str, scale: str, zero: str, dtype: int
) -> tuple[str, str]:
    """Parameters as they broadcast to x."""
    shape, axis = w.shape(x), attributes(node).get("axis")
    if attributes(node).get("block_size", 0):
        raise Unsuitable(
            "it has blocks, which ONNX Runtime's own operator does not have: write the standard "
            "operator of opset 21"
        )
    if axis is None or not shape:
        return parameters(w, scale, zero, dtype)
    if not -len(shape) <= axis < len(shape):
        raise Unsuitable(f"its axis {axis} is none of the {len(shape)} of its input")
    axis %= len(shape)
    left_out = not zero
    scale, zero = parameters(w, scale, zero, dtype, shape[axis])
    if w.shape(scale) != w.shape(zero) and not left_out:
        raise Unsuitable("its scale and its zero point have different shapes")
    apart = (shape[axis], *[1] * (len(shape) - axis - 1))
    return tuple(v if w.shape(v) == () else w.reshape(v, apart) for v in (scale, zero))  # type: ignore[return-value]
