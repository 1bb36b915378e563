"""erf, erfc, sigmoid and related functions, which numpy does not have, in the dtype of the given
array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gtco.tensor.stage import Operator

Array = np.ndarray

# Rational approximations of erf on [0, 1] and of erfc on [1, 8] (Cody, Math. Comp. 23, 1969; the
# coefficients are those of Moshier's Cephes library). Error below 2e-16 absolute.
_ERF_T = (
    9.60497373987051638749e0,
    9.00260197203842689217e1,
    2.23200534594684319226e3,
    7.00332514112805075473e3,
    5.55923013010394962768e4,
)
_ERF_U = (
    1.0,
    3.35617141647503099647e1,
    5.21357949780152679795e2,
    4.59432382970980127987e3,
    2.26290000613890934246e4,
    4.92673942608635921086e4,
)
_ERF_P = (
    2.46196981473530512524e-10,
    5.64189564831068821977e-1,
    7.46321056442269912687e0,
    4.86371970985681366614e1,
    1.96520832956077098242e2,
    5.26445194995477358631e2,
    9.34528527171957607540e2,
    1.02755188689515710272e3,
    5.57535335369399327526e2,
)
_ERF_Q = (
    1.0,
    1.32281951154744992508e1,
    8.67072140885989742329e1,
    3.54937778887819891062e2,
    9.75708501743205489753e2,
    1.82390916687909736289e3,
    2.24633760818710981792e3,
    1.65666309194161350182e3,
    5.57535340817727675546e2,
)


def erf(x: Array) -> Array:
    """The error function, computed in float64 and returned in ``x``'s dtype."""
    wide = np.asarray(x, np.float64)
    a = np.abs(wide)
    small = np.minimum(a, 1.0)
    near = small * np.polyval(_ERF_T, small * small) / np.polyval(_ERF_U, small * small)
    large = np.clip(a, 1.0, 8.0)
    far = 1.0 - np.exp(-large * large) * np.polyval(_ERF_P, large) / np.polyval(_ERF_Q, large)
    result = np.copysign(np.where(a <= 1.0, near, far), wide)
    return np.where(np.isnan(wide), wide, result).astype(x.dtype)


def erfc(x: Array) -> Array:
    """1 - erf(x), computed in float64 without the cancellation. Relative errors are below 1e-6
    beyond 8, where only the first terms of the asymptotic series are used.
    """
    wide = np.asarray(x, np.float64)
    a = np.abs(wide)
    large = np.clip(a, 1.0, 8.0)
    scaled = np.polyval(_ERF_P, large) / np.polyval(_ERF_Q, large)
    beyond = np.maximum(a, 8.0)
    inverse = 1 / (2 * beyond * beyond)
    series = (1 - inverse * (1 - 3 * inverse * (1 - 5 * inverse))) / (beyond * np.pi**0.5)
    tail = np.exp(-a * a) * np.where(a <= 8.0, scaled, series)
    result = np.where(a <= 1.0, 1 - erf(wide), np.where(wide > 0, tail, 2 - tail))
    return np.where(np.isnan(wide), wide, result).astype(x.dtype)


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def gelu(x: Array) -> Array:
    return of_dtype(x, 0.5) * x * (1 + erf(x * of_dtype(x, 0.5**0.5)))


def gelu_tanh(x: Array) -> Array:
    z = of_dtype(x, (2 / np.pi) ** 0.5) * (x + of_dtype(x, 0.044715) * x * x * x)
    return of_dtype(x, 0.5) * x * (1 + np.tanh(z))


def divide(a: Array, b: Array) -> Array:
    """Division. Integers are divided towards zero, as in ONNX and C; by 0 the result is 0."""
    if a.dtype.kind in "iu":
        quotient = np.abs(a) // np.where(b == 0, 1, np.abs(b))
        return quotient * np.sign(a) * np.sign(b)
    return a / b


def multiply_pair(x: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """x * (high + low), in float64 and rounded once to x's dtype."""
    return (x.astype(np.float64) * (high.astype(np.float64) + low)).astype(x.dtype)


def quantize(op: Operator, x: Array, high: Array, low: Array, zero: Array) -> Array:
    """x in whole steps of 1 / (high + low), plus a zero point, within the operator's bounds."""
    steps = np.rint(multiply_pair(x, high, low)) + zero
    return np.clip(steps, op["min"], op["max"]).astype(op.type.dtype)


def dequantize(x: Array, scale: Array, zero: Array) -> Array:
    """The numbers that such steps stand for, in the dtype of the scale."""
    return (x.astype(scale.dtype) - zero) * scale


def of_dtype(x: Array, value: float) -> Any:
    """A scalar in x's dtype, so that numpy does not widen float16."""
    return x.dtype.type(value)
