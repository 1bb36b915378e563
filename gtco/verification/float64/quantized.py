"""Quantized operators in numpy: those of ONNX that ``onnx.reference`` rounds in its own way, and
those of ONNX Runtime.

Integers are summed in float64, which holds every sum exactly. A result is rounded to a whole step
before its zero point is added, as in ONNX's QuantizeLinear, or after that, where ONNX Runtime's
kernels do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from gtco.support.dtypes import is_float
from gtco.tensor import special_functions
from gtco.verification.float64.operators import MICROSOFT, arithmetic, moved, operand
from gtco.verification.float64.spatial import averages, convolution

Array = NDArray[Any]
_PER_AXIS_SOFTMAX = 13
# What a compiled model and its reference may differ by before a rounding, relative to the largest
# value of the tensor: a few roundings of float32. A value so near to the middle of two steps may
# become either. The layers behind spread that, so an evaluation in float32 shows its cost.
STEP = 2.0**-18


def _steps(x: Array, zero: Array | None, axis: int | None = None) -> Array:
    """x - zero in float64, the zero point along ``axis`` if it has several elements."""
    wide: Array = x.astype(np.float64)
    return wide if zero is None else wide - _along(zero, wide.ndim, axis).astype(np.float64)


def _along(v: Array, rank: int, axis: int | None) -> Array:
    if v.size == 1:
        return v.reshape(())
    if v.ndim != 1 or axis is None:
        return v
    return v.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def _real(x: Array, scale: Array, zero: Array | None) -> Array:
    """The dequantized tensor, in the dtype of the evaluation."""
    real: Array = _steps(x, zero).astype(arithmetic.rules.dtype) * _along(scale, x.ndim, None)
    return real


def _quantized(y: Array, zero: Array | None, dtype: Any) -> Array:
    """clip(round(y) + zero); y is in steps, moved by what rounding before costs."""
    bounds = ml_dtypes.iinfo(dtype)
    y = moved(np.asarray(y), STEP * np.abs(y).max(initial=0.0))
    shift = 0 if zero is None else _along(zero, y.ndim, None).astype(np.float64)
    held: Array = np.clip(np.rint(y) + shift, bounds.min, bounds.max).astype(dtype)
    return held


def _rounded_shifted(y: Array, zero: Array | None, dtype: Any) -> Array:
    """clip(round(y + zero)), as ONNX Runtime's sums, products and averages are rounded."""
    shift = 0 if zero is None else _along(zero, y.ndim, None).astype(np.float64)
    return _quantized(y.astype(np.float64) + shift, None, dtype)


def _rows(v: Array | None) -> Array | None:
    """A scale or zero point for each row, as it broadcasts to the rows."""
    return v[:, None] if v is not None and v.ndim == 1 and v.size > 1 else v


def _product(a: Array, b: Array, a_zero: Array | None, b_zero: Array | None) -> Array:
    result: Array = np.matmul(_steps(a, _rows(a_zero)), _steps(b, b_zero))
    return result


class MatMulInteger(OpRun):
    op_domain = ""

    def _run(self, a, b, a_zero=None, b_zero=None):  # type: ignore[no-untyped-def]
        return (_product(a, b, a_zero, b_zero).astype(np.int64).astype(np.int32),)


class QLinearMatMul(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero
    ):
        factor = _one(_rows(a_scale)) * _one(b_scale) / _one(_rows(y_scale))
        y = _product(a, b, a_zero, b_zero) * factor
        return (_quantized(y, _rows(y_zero), y_zero.dtype),)


def _one(v: Array | None) -> Any:
    return v.reshape(()) if v is not None and v.size == 1 else v


class ConvInteger(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, x_zero=None, w_zero=None, auto_pad="NOTSET", dilations=None, group=1,
        kernel_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        given = (auto_pad, dilations, group, pads, strides)
        y = convolution(_steps(x, x_zero), _steps(w, w_zero, 0), *given)
        return (y.astype(np.int32),)


class QLinearConv(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b=None, auto_pad="NOTSET",
        channels_last=0, dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        x = np.moveaxis(x, -1, 1) if channels_last else x
        given = (auto_pad, dilations, group, pads, strides)
        y = convolution(_steps(x, x_zero), _steps(w, w_zero, 0), *given)
        if b is not None:
            y = y + _along(b, y.ndim, 1)
        y = y * (_one(x_scale) * _along(w_scale, y.ndim, 1) / _one(y_scale))
        y = _quantized(y, y_zero, y_zero.dtype)
        return (np.moveaxis(y, 1, -1) if channels_last else y,)


class QGemm(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, a, a_scale, a_zero, b, b_scale, b_zero, c=None, y_scale=None, y_zero=None, alpha=1.0,
        transA=0, transB=0,
    ):  # fmt: skip
        y = _product(a.T if transA else a, b.T if transB else b, a_zero, b_zero)
        y = (y if c is None else y + c) * (alpha * _one(a_scale) * _one(b_scale))
        if y_scale is None:
            return (y.astype(arithmetic.rules.dtype),)
        return (_quantized(y / _one(y_scale), y_zero, y_zero.dtype),)


class MatMulIntegerToFloat(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, a, b, a_scale, b_scale, a_zero=None, b_zero=None, bias=None
    ):
        y = _product(a, b, a_zero, b_zero) * (_one(a_scale) * _one(b_scale))
        return ((y if bias is None else y + bias).astype(arithmetic.rules.dtype),)


class DynamicQuantizeMatMul(OpRun):
    op_domain = MICROSOFT

    def _run(self, a, b, b_scale, b_zero=None, bias=None):  # type: ignore[no-untyped-def]
        q, scale, zero = _dynamic(a)
        y = np.matmul(_steps(q, zero), _steps(b, b_zero)) * (scale * _one(b_scale))
        return ((y if bias is None else y + bias).astype(arithmetic.rules.dtype),)


class DynamicQuantizeLinear(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return _dynamic(x)


def _dynamic(x: Array) -> tuple[Array, Array, Array]:
    """x in uint8 by its own least and largest number, the scale and the zero point."""
    most, least = max(0.0, float(x.max(initial=0))), min(0.0, float(x.min(initial=0)))
    scale = (most - least) / 255 or 1.0
    zero = np.asarray(np.rint(np.clip(-least / scale, 0, 255))).astype(np.uint8)
    return _quantized(x / scale, zero, np.uint8), np.asarray(scale, arithmetic.rules.dtype), zero


class MatMulNBits(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, a, b, scales, zeros=None, g_idx=None, bias=None, K=0, N=0, accuracy_level=0, bits=4,
        block_size=0, weight_prepacked=0,
    ):  # fmt: skip
        if g_idx is not None or weight_prepacked:
            raise NotImplementedError("MatMulNBits with an order of its own is not computed")
        blocks = -(-K // block_size)
        steps = _unpacked(b.reshape(N, -1), bits).reshape(N, blocks, block_size)
        if zeros is None:
            middle = np.full((N, blocks), 2.0 ** (bits - 1))
        elif zeros.dtype == np.uint8:
            middle = _unpacked(zeros.reshape(N, -1), bits)[:, :blocks]
        else:
            middle = zeros.reshape(N, blocks)
        weights = (steps - middle[..., None]) * scales.reshape(N, blocks, 1)
        weights = weights.reshape(N, -1)[:, :K].astype(a.dtype)
        y = np.matmul(operand(a), operand(weights).T)
        return (y if bias is None else y + bias,)


class GatherBlockQuantized(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, data, indices, scales, zeros=None, bits=4, block_size=128, gather_axis=0,
        quantize_axis=1,
    ):  # fmt: skip
        packed = data.dtype == np.uint8
        steps = _unpacked(data, bits) if packed else data.astype(np.float64)
        middle = np.asarray(2.0 ** (bits - 1) if packed else 0.0)
        if zeros is not None:
            middle = _unpacked(zeros, bits) if packed else zeros.astype(np.float64)
            middle = middle[..., : scales.shape[-1]]
        scale, shift = (
            _spread(v, steps.shape, quantize_axis, block_size) for v in (scales, middle)
        )
        table = ((steps - shift) * scale).astype(arithmetic.rules.dtype)
        return (table.take(indices, gather_axis),)


class QAttention(OpRun):
    """softmax(q @ k^T * scale + mask) @ v of projections by integers: [B, rows, width]."""

    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, weight, bias, x_scale, w_scale, mask=None, x_zero=None, w_zero=None, past=None,
        do_rotary=0, mask_filter_value=-10000.0, num_heads=1, past_present_share_buffer=0,
        scale=None, unidirectional=0,
    ):  # fmt: skip
        if past is not None or do_rotary:
            raise NotImplementedError("QAttention with a past or with positions is not computed")
        y = np.matmul(_steps(x, x_zero), _steps(weight, w_zero)) * (x_scale * _one(w_scale)) + bias
        (batch, rows), width = x.shape[:2], bias.size // 3
        q, k, v = y.reshape(batch, rows, 3, num_heads, -1).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) * (scale or (width // num_heads) ** -0.5)
        if mask is not None:  # lengths of the batch, or a flag for each key
            seen = mask > 0 if mask.ndim > 1 else np.arange(rows) < mask[:, None]
            scores = scores + np.where(seen, 0.0, mask_filter_value)[:, None, None, :]
        if unidirectional:
            scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        joined = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, rows, width)
        return (joined.astype(arithmetic.rules.dtype),)


def _unpacked(array: Array, bits: int) -> Array:
    """The numbers in each byte as float64, side by side; the first is in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (array[..., None] >> shifts) & np.uint8(2**bits - 1)
    wide: Array = parts.reshape(*array.shape[:-1], -1).astype(np.float64)
    return wide


# between dequantizing and quantizing --------------------------------------------------------------
class QLinearAdd(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, a, a_scale, a_zero, b, b_scale, b_zero, scale, zero=None
    ):
        y = (_real(a, a_scale, a_zero) + _real(b, b_scale, b_zero)) / _one(scale)
        return (_rounded_shifted(y, zero, a.dtype),)


class QLinearMul(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, a, a_scale, a_zero, b, b_scale, b_zero, scale, zero=None
    ):
        y = _steps(a, a_zero) * _steps(b, b_zero) * (_one(a_scale) * _one(b_scale) / _one(scale))
        return (_rounded_shifted(y, zero, a.dtype),)


class QLinearWhere(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, condition, x, x_scale, x_zero, y, y_scale, y_zero, scale, zero
    ):
        chosen = np.where(condition, _real(x, x_scale, x_zero), _real(y, y_scale, y_zero))
        return (_quantized(chosen / _one(scale), zero, x.dtype),)


class QLinearConcat(OpRun):
    op_domain = MICROSOFT

    def _run(self, scale, zero, *parts, axis=0):  # type: ignore[no-untyped-def]
        triples = zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
        real = np.concatenate([_real(*triple) for triple in triples], axis=axis)
        return (_quantized(real / _one(scale), zero, zero.dtype),)


class QLinearSigmoid(OpRun):
    op_domain = MICROSOFT

    def _run(self, x, x_scale, x_zero, scale, zero=None):  # type: ignore[no-untyped-def]
        y = special_functions.sigmoid(_real(x, x_scale, x_zero))
        return (_quantized(y / _one(scale), zero, x.dtype),)


class QLinearLeakyRelu(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, scale, zero=None, alpha=0.01
    ):
        y = _real(x, x_scale, x_zero)
        y = np.where(y < 0, y.dtype.type(alpha) * y, y)
        return (_quantized(y / _one(scale), zero, x.dtype),)


class QLinearSoftmax(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, scale, zero, axis=None, opset=_PER_AXIS_SOFTMAX
    ):
        y, single = _real(x, x_scale, x_zero), opset >= _PER_AXIS_SOFTMAX
        axis = (-1 if single else 1) if axis is None else axis
        axes = (axis,) if single else tuple(range(axis % max(x.ndim, 1), x.ndim))
        e = np.exp(y - y.max(axis=axes, keepdims=True))
        y = e / e.sum(axis=axes, keepdims=True)
        return (_quantized(y / _one(scale), zero, x.dtype),)


class QLinearReduceMean(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, scale, zero=None, axes=None, keepdims=1
    ):
        which = None if axes is None else tuple(axes)
        y = _real(x, x_scale, x_zero).mean(axis=which, keepdims=bool(keepdims))
        return (_quantized(y / _one(scale), zero, x.dtype),)


class QLinearGlobalAveragePool(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, scale, zero, channels_last=0
    ):
        axes = tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))
        y = _real(x, x_scale, x_zero).mean(axis=axes, keepdims=True)
        return (_quantized(y / _one(scale), zero, x.dtype),)


class QLinearAveragePool(OpRun):
    op_domain = MICROSOFT

    def _run(  # type: ignore[no-untyped-def]
        self, x, x_scale, x_zero, scale, zero=None, auto_pad="NOTSET", ceil_mode=0, channels_last=0,
        count_include_pad=0, kernel_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        y = _real(np.moveaxis(x, -1, 1) if channels_last else x, x_scale, x_zero)
        given = (ceil_mode, count_include_pad, None, kernel_shape, pads, strides)
        y = averages(y, auto_pad, *given, behind=True)
        y = _rounded_shifted(y / _one(scale), zero, x.dtype)
        return (np.moveaxis(y, 1, -1) if channels_last else y,)


# quantizing and dequantizing, of both domains ----------------------------------------------------
class QuantizeLinear(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, scale, zero=None, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1
    ):
        from onnx.helper import tensor_dtype_to_np_dtype

        scale, zero = (_spread(v, x.shape, axis, block_size) for v in (scale, zero))
        dtype = np.dtype(np.uint8) if zero is None else zero.dtype
        if zero is None and output_dtype:
            dtype = tensor_dtype_to_np_dtype(output_dtype)
        if is_float(dtype):
            raise NotImplementedError(f"quantizing to {dtype.name} is not computed")
        return (_quantized(x / scale, zero, dtype),)


class DequantizeLinear(OpRun):
    op_domain = ""

    def _run(self, x, scale, zero=None, axis=1, block_size=0, output_dtype=0):  # type: ignore[no-untyped-def]
        scale, zero = (_spread(v, x.shape, axis, block_size) for v in (scale, zero))
        return (_steps(x, zero).astype(arithmetic.rules.dtype) * scale,)


def _spread(v: Array | None, shape: Sequence[int], axis: int, block: int) -> Any:
    """A scale or zero point as it broadcasts to a tensor of this shape."""
    if v is None or v.size == 1:
        return None if v is None else v.reshape(())
    if block:
        return np.repeat(v, block, axis=axis)[tuple(slice(n) for n in shape)]
    return _along(v, len(shape), axis)


# These have the same meaning in ONNX Runtime's domain.
_SAME = (QLinearConv, QuantizeLinear, DequantizeLinear)
QUANTIZED: Sequence[type[OpRun]] = (
    MatMulInteger, QLinearMatMul, ConvInteger, QLinearConv, QGemm, MatMulIntegerToFloat,
    DynamicQuantizeLinear, DynamicQuantizeMatMul, MatMulNBits, GatherBlockQuantized, QAttention,
    QLinearAdd, QLinearMul, QLinearWhere,
    QLinearConcat, QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax, QLinearReduceMean,
    QLinearGlobalAveragePool, QLinearAveragePool, QuantizeLinear, DequantizeLinear,
    *(type(kind.__name__, (kind,), {"op_domain": MICROSOFT}) for kind in _SAME),
)  # fmt: skip
