"""ONNX's operators in numpy, where ``onnx.reference`` has none, is slow or uses only float32.

All compute in the dtype of their inputs, which is that of :class:`Arithmetic`. Products round their
operands first, like a library that was compiled in bf16 or fp16. In such a run, and in float32,
functions whose kernels have errors of more than a few roundings are moved by the bound that
``gtco/tensor/emit/vector_math.py`` states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from gtco.support.dtypes import is_float
from gtco.tensor import special_functions

Array = NDArray[Any]
MICROSOFT = "com.microsoft"

# Bounds that gtco/tensor/emit/vector_math.py states, absolute and relative to |x|.
ERF, GELU, GELU_TANH = 1.2e-7, 4e-7, 1e-6


@dataclass(frozen=True)
class Arithmetic:
    """How an evaluation computes. ``dtype`` is that of all floats. ``operands`` is the format to
    which operands of products are rounded; None if they are not rounded.
    """

    dtype: Any
    operands: Any = None

    @property
    def exact(self) -> bool:
        return bool(np.dtype(self.dtype) == np.float64)


class _Current:
    """The rules of the evaluation that runs now. They are kept here because operators of
    ``onnx.reference`` take no further arguments.
    """

    def __init__(self) -> None:
        self.rules = Arithmetic(np.float64)

    @contextmanager
    def __call__(self, rules: Arithmetic) -> Iterator[None]:
        before, self.rules = self.rules, rules
        try:
            yield
        finally:
            self.rules = before


arithmetic = _Current()


def operand(x: Array) -> Array:
    """An operand of a product, rounded to the format that products take."""
    narrow = arithmetic.rules.operands
    if narrow is None or not is_float(x.dtype):
        return x
    if narrow == np.float16:  # a compiled model that overflows is wrong, not imprecise
        x = np.where(np.isfinite(x), np.clip(x, -65504, 65504), x)
    rounded: Array = x.astype(narrow).astype(x.dtype)
    return rounded


def moved(y: Array, bound: Array | float) -> Array:
    """``y`` moved by the bound, up and down alternately; ``y`` itself in float64."""
    if arithmetic.rules.exact:
        return y
    sign = np.where(np.arange(y.size).reshape(y.shape) % 2 == 0, 1, -1)
    return (y + sign * bound).astype(y.dtype)


# products ---------------------------------------------------------------------------------------
class MatMul(OpRun):
    op_domain = ""

    def _run(self, a, b):  # type: ignore[no-untyped-def]
        return (np.matmul(operand(a), operand(b)),)


class Gemm(OpRun):
    op_domain = ""

    def _run(self, a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0):  # type: ignore[no-untyped-def]
        a, b = (a.T if transA else a), (b.T if transB else b)
        y = _scalar(a, alpha) * np.matmul(operand(a), operand(b))
        return (y if c is None or beta == 0 else y + _scalar(a, beta) * c,)


class Einsum(OpRun):
    op_domain = ""

    def _run(self, *inputs, equation=None):  # type: ignore[no-untyped-def]
        return (np.asarray(np.einsum(equation, *map(operand, inputs), optimize=True)),)


class FusedMatMul(OpRun):
    op_domain = MICROSOFT

    def _run(self, a, b, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):  # type: ignore[no-untyped-def]
        a, b = _transposed(a, transA, transBatchA), _transposed(b, transB, transBatchB)
        return (_scalar(a, alpha) * np.matmul(operand(a), operand(b)),)


def _transposed(x: Array, last: int, batch: int) -> Array:
    """``x`` with its last axes swapped (``last``). With ``batch`` the first axis moves after the
    other leading ones, as ONNX Runtime defines it.
    """
    if batch:
        x = np.moveaxis(x, 0, -2)
    return np.swapaxes(x, -1, -2) if last and x.ndim > 1 else x


# functions of one number ------------------------------------------------------------------------
class Erf(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (moved(special_functions.erf(x), ERF),)


class Sigmoid(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (special_functions.sigmoid(x),)


class Softplus(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (special_functions.softplus(x),)


class HardSwish(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (x * np.clip(x / _scalar(x, 6) + _scalar(x, 0.5), 0, 1),)


class Mish(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (moved(x * np.tanh(special_functions.softplus(x)), GELU_TANH * np.abs(x)),)


class Gelu(OpRun):
    op_domain = ""

    def _run(self, x, approximate="none"):  # type: ignore[no-untyped-def]
        return (_gelu(x, approximate),)


def _gelu(x: Array, approximate: str = "none") -> Array:
    """x Phi(x); the tail by erfc, since 1 + erf cancels."""
    if approximate == "tanh":
        root = _scalar(x, (2 / np.pi) ** 0.5)
        z = root * (x + _scalar(x, 0.044715) * x * x * x)
        return moved(x * special_functions.sigmoid(_scalar(x, 2) * z), GELU_TANH * np.abs(x))
    phi = _scalar(x, 0.5) * special_functions.erfc(-x * _scalar(x, 0.5**0.5))
    return moved(x * phi, GELU * np.abs(x))


class _MicrosoftGelu(OpRun):
    op_domain = MICROSOFT

    def _run(self, x, bias=None):  # type: ignore[no-untyped-def]
        return (_gelu(x if bias is None else x + bias, self.approximate),)

    approximate = "none"


class BiasGelu(_MicrosoftGelu):
    pass


class FastGelu(_MicrosoftGelu):
    approximate = "tanh"


class QuickGelu(OpRun):
    op_domain = MICROSOFT

    def _run(self, x, alpha=1.702):  # type: ignore[no-untyped-def]
        return (x * special_functions.sigmoid(_scalar(x, alpha) * x),)


# softmax: until opset 12 over all axes from one on together ---------------------------------------
class _Softmax(OpRun):
    op_domain = ""

    def _run(self, x, axis=None):  # type: ignore[no-untyped-def]
        if x.size == 0:
            return (x,)
        if self.run_params["opsets"][""] >= 13:
            return (self.over(x, -1 if axis is None else axis),)
        axis = (1 if axis is None else axis) % max(x.ndim, 1)
        rows = x.reshape(int(np.prod(x.shape[:axis])), -1)
        return (self.over(rows, -1).reshape(x.shape),)

    def over(self, x: Array, axis: int) -> Array:
        raise NotImplementedError


class Softmax(_Softmax):
    def over(self, x: Array, axis: int) -> Array:
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        result: Array = e / e.sum(axis=axis, keepdims=True)
        return result


class LogSoftmax(_Softmax):
    def over(self, x: Array, axis: int) -> Array:
        shifted = x - x.max(axis=axis, keepdims=True)
        result: Array = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
        return result


class Hardmax(_Softmax):
    def over(self, x: Array, axis: int) -> Array:
        first = np.expand_dims(x.argmax(axis=axis), axis)
        result = np.zeros_like(x)
        np.put_along_axis(result, first, 1, axis=axis)
        return result


# normalization ----------------------------------------------------------------------------------
def _normal(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = (centred * centred).mean(axis=axes, keepdims=True)
    result: Array = centred / np.sqrt(variance + _scalar(x, epsilon))
    return result


class BatchNormalization(OpRun):
    """BatchNormalization at inference. Until opset 13, ``onnx.reference`` takes the statistics of
    the batch if there is a momentum.
    """

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, scale, bias, mean, variance, epsilon=1e-5, momentum=0.9, training_mode=0, spatial=1
    ):
        if training_mode or not spatial:
            raise NotImplementedError("BatchNormalization in training is not computed")
        along = (-1, *(1,) * (x.ndim - 2))
        factor = scale / np.sqrt(variance + _scalar(x, epsilon))
        return ((x - mean.reshape(along)) * factor.reshape(along) + bias.reshape(along),)


class GroupNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, bias, epsilon=1e-5, num_groups=None, stash_type=1):  # type: ignore[no-untyped-def]
        grouped = x.reshape(x.shape[0], num_groups, -1)
        channels = x.shape[1]
        if len(scale) != channels:  # until opset 20: one per group
            scale, bias = (np.repeat(v, channels // num_groups) for v in (scale, bias))
        y = _normal(grouped, (2,), epsilon).reshape(x.shape)
        along = (channels, *(1,) * (x.ndim - 2))
        return (y * scale.reshape(along) + bias.reshape(along),)


class MeanVarianceNormalization(OpRun):
    op_domain = ""

    def _run(self, x, axes=(0, 2, 3)):  # type: ignore[no-untyped-def]
        axes = tuple(axes)
        centred = x - x.mean(axis=axes, keepdims=True)
        spread = np.sqrt((centred * centred).mean(axis=axes, keepdims=True))
        return (centred / (spread + _scalar(x, 1e-9)),)


class SkipLayerNormalization(OpRun):
    op_domain = MICROSOFT

    def _run(self, x, skip, gamma, beta=None, bias=None, epsilon=1e-12):  # type: ignore[no-untyped-def]
        total = x + skip
        total = total if bias is None else total + bias
        y = _normal(total, (-1,), epsilon) * gamma
        y = y if beta is None else y + beta
        mean = total.mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt(total.var(axis=-1, keepdims=True) + _scalar(x, epsilon))
        return (y, mean, inverse, total)


# types ------------------------------------------------------------------------------------------
class Cast(OpRun):
    """A cast between floats rounds nothing: the rounding of a narrower type is not part of the
    model's meaning.
    """

    op_domain = ""

    def _run(self, x, to=None, saturate=1, round_mode="up"):  # type: ignore[no-untyped-def]
        from onnx.helper import tensor_dtype_to_np_dtype

        return (_cast(x, tensor_dtype_to_np_dtype(to)),)


class CastLike(OpRun):
    op_domain = ""

    def _run(self, x, like, saturate=1, round_mode="up"):  # type: ignore[no-untyped-def]
        return (_cast(x, like.dtype),)


def _cast(x: Array, dtype: Any) -> Array:
    dtype = np.dtype(dtype)
    if is_float(dtype) and dtype.itemsize < 2:
        raise NotImplementedError(f"a cast to {dtype.name} is not computed")
    return x.astype(arithmetic.rules.dtype if is_float(dtype) else dtype)


# movement that onnx.reference does element by element -------------------------------------------
class GatherND(OpRun):
    op_domain = ""

    def _run(self, data, indices, batch_dims=0):  # type: ignore[no-untyped-def]
        lead = tuple(
            np.arange(size).reshape([-1 if i == n else 1 for i in range(indices.ndim - 1)])
            for n, size in enumerate(indices.shape[:batch_dims])
        )
        return (data[(*lead, *np.moveaxis(indices, -1, 0))],)


class GatherElements(OpRun):
    """That of ``onnx.reference`` takes 64 positions along the axis at most."""

    op_domain = ""

    def _run(self, data, indices, axis=0):  # type: ignore[no-untyped-def]
        return (data[_along(data, indices, axis)],)


_AT = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


class ScatterND(OpRun):
    op_domain = ""

    def _run(self, data, indices, updates, reduction="none"):  # type: ignore[no-untyped-def]
        return (_scattered(data, tuple(np.moveaxis(indices, -1, 0)), updates, reduction),)


class ScatterElements(OpRun):
    op_domain = ""

    def _run(self, data, indices, updates, axis=0, reduction="none"):  # type: ignore[no-untyped-def]
        return (_scattered(data, _along(data, indices, axis), updates, reduction),)


def _along(data: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    """Where ``indices`` along the axis point to, each at its own place along the others."""
    index: list[Array] = [*np.indices(indices.shape, sparse=True)]
    index[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
    return tuple(index)


def _scattered(data: Array, index: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    result = data.copy()
    if reduction == "none":
        result[index] = updates
    else:
        _AT[reduction].at(result, index, updates)
    return result


def _scalar(x: Array, value: float) -> Any:
    """The value in x's dtype, so that nothing is widened."""
    return x.dtype.type(value)


_GELU = type("Gelu", (_MicrosoftGelu,), {})
OPERATORS: Sequence[type[OpRun]] = (
    MatMul, Gemm, Einsum, FusedMatMul, Erf, Sigmoid, Softplus, HardSwish, Mish, Gelu, _GELU,
    BiasGelu, FastGelu, QuickGelu, Softmax, LogSoftmax, Hardmax, BatchNormalization,
    GroupNormalization, MeanVarianceNormalization, SkipLayerNormalization, Cast, CastLike,
    GatherND, GatherElements, ScatterND, ScatterElements,
)  # fmt: skip
