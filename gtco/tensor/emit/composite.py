"""Element-wise operators that take more than one expression: signs and tests, activations with
attributes, inverse hyperbolic functions, and the float64 forms, by libm, of functions for which
float32 has vector arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, pi

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit import vector_math
from gtco.tensor.emit.arithmetic import (
    absolute,
    expm1,
    extern_erf,
    intrinsic,
    is_float,
    is_nan,
    libm,
    log1p,
    nearest,
)
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.emit.vector_math import LN2, constant
from gtco.tensor.stage import Operator


def negative(em: Emitter, x: Expr, dtype: str) -> Expr:
    return constant(x, -0.0 if dtype.startswith("float") else 0) - x


def sign(em: Emitter, x: Expr, dtype: str) -> Expr:
    x, zero = em.let(x), constant(x, 0)
    below = tirx.Select(x < zero, constant(x, -1), x) if not dtype.startswith("uint") else x
    return tirx.Select(x > zero, constant(x, 1), below)


def isnan(em: Emitter, x: Expr, dtype: str) -> Expr:
    return is_nan(em.let(x)) if is_float(dtype) else constant(x, False, "bool")


def isinf(em: Emitter, x: Expr, dtype: str) -> Expr:
    if not is_float(dtype):
        return constant(x, False, "bool")
    return tirx.EQ(absolute(em, x, dtype), constant(x, inf))


def clip(em: Emitter, op: Operator, x: Sequence[Expr], dtype: str) -> Expr:
    low, high = op["min"], op["max"]
    if is_float(dtype):
        return vector_math.clamp(x[0], low, high)
    bounds = np.iinfo(dtype)
    low, high = int(max(low, bounds.min)), int(min(high, bounds.max))
    return T.min(constant(x[0], high), T.max(constant(x[0], low), x[0]))


def quantize(em: Emitter, op: Operator, x: Sequence[Expr], dtype: str) -> Expr:
    """Whole numbers, as floats."""
    value, (high, low, zero) = em.let(x[0]), x[1:]
    steps = nearest(intrinsic("fma", value, high, value * low)) + zero
    return vector_math.clamp(steps, op["min"], op["max"])


def elu(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    zero = constant(x, 0)
    grown = expm1(em, T.min(zero, x), dtype)
    return tirx.Select(x > zero, x, constant(x, op["alpha"]) * grown)


def leaky_relu(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    return tirx.Select(x >= constant(x, 0), x, x * constant(x, op["alpha"]))


def _log_of_twice(em: Emitter, x: Expr, dtype: str) -> Expr:
    """log(2 x), also where 2 x is beyond the largest float."""
    return (vector_math.log(em, x) if dtype == "float32" else libm("log", x)) + constant(x, LN2)


def asinh(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    """log(a + sqrt(a^2 + 1)), without its cancellation near 0."""
    zero, one = constant(x, 0), constant(x, 1)
    a = em.let(absolute(em, x, dtype))
    b = em.let(T.min(constant(x, 1e9), a))  # a NaN stays one
    near = log1p(em, b + b * b / (one + tirx.sqrt(b * b + one)), dtype)
    far = _log_of_twice(em, a, dtype)
    grown = em.let(tirx.Select(a > b, far, near))
    return tirx.Select(x < zero, zero - grown, grown)


def acosh(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    """log(x + sqrt(x^2 - 1)), without its cancellation near 1; NaN below 1."""
    one = constant(x, 1)
    b = em.let(T.min(constant(x, 1e9), x))  # a NaN stays one
    y = em.let(b - one)
    near = log1p(em, y + tirx.sqrt(y) * tirx.sqrt(b + one), dtype)
    far = _log_of_twice(em, x, dtype)
    return em.let(tirx.Select(x > b, far, near))


def atanh(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    zero, one = constant(x, 0), constant(x, 1)
    a = em.let(absolute(em, x, dtype))
    grown = em.let(constant(x, 0.5) * log1p(em, (a + a) / (one - a), dtype))
    return tirx.Select(x < zero, zero - grown, grown)


# the float64 forms of functions for which float32 has vector arithmetic
def double_sigmoid(em: Emitter, x: Expr) -> Expr:
    one = constant(x, 1)
    return one / (one + libm("exp", constant(x, 0) - x))


def double_silu(em: Emitter, x: Expr) -> Expr:
    return x / (constant(x, 1) + libm("exp", constant(x, 0) - x))


def double_gelu(em: Emitter, x: Expr) -> Expr:
    erf = extern_erf(x * constant(x, 0.5**0.5))
    return constant(x, 0.5) * x * (constant(x, 1) + erf)


def double_gelu_tanh(em: Emitter, x: Expr) -> Expr:
    z = constant(x, (2 / pi) ** 0.5) * (x + constant(x, 0.044715) * x * x * x)
    return constant(x, 0.5) * x * (constant(x, 1) + libm("tanh", z))


def double_softplus(em: Emitter, x: Expr) -> Expr:
    rest = log1p(em, libm("exp", constant(x, 0) - tirx.abs(x)), "float64")
    return em.let(T.max(constant(x, 0), x) + rest)


def double_mish(em: Emitter, x: Expr) -> Expr:
    return x * libm("tanh", double_softplus(em, x))
