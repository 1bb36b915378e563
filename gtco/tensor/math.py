"""exp, erf, tanh and their kin as vector arithmetic: polynomials and rationals in TIR, no call into libm a lane.

Every function takes a float32 value, a scalar (in a vectorized loop its lanes) or an explicit vector such as
``float32x16``, and returns one of the same type. Values used twice are bound by ``em.let``: TIR expressions are trees.

The coefficients are our own: minimax fits in double precision by Lawson's iteratively reweighted least squares (C. L.
Lawson, 1961) on 2000 Chebyshev nodes, rationals by the same on the linearised error ``P - f Q`` (Sanathanan and Koerner,
1963), rounded to float32. Bounds are stated in ulp of the float32 result and tested in ``tests/unit/test_math.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit import Emitter, Expr

LOG2E = 1 / log(2)
LN2_HIGH = 0.693359375  # 9 bits of ln 2: its product with any exponent is exact
LN2_LOW = log(2) - LN2_HIGH
ROUND = 1.5 * 2.0**23  # t + ROUND has the integer nearest to t in its low bits
ROUND_BITS = 0x4B400000
ONE_BITS = 127 << 23

# exp(r) on |r| <= ln(2)/2 as 1 + r + r^2 P(r): highest power first. Errors: 3.1e-9 and 1.0e-7 relative.
EXP_6 = (1.3814539e-3, 8.368745e-3, 4.166839e-2, 1.6666521e-1, 4.9999994e-1, 1.0, 1.0)
EXP_5 = (8.312501e-3, 4.189033e-2, 1.6667116e-1, 4.999923e-1, 1.0, 1.0)


def dtype_of(x: Expr) -> str:
    """Element dtype of an expression, without its lanes."""
    return str(x.ty).split("x")[0]


def lanes_of(x: Expr) -> int:
    _, _, lanes = str(x.ty).partition("x")
    return int(lanes) if lanes else 1


def constant(x: Expr, value: float, dtype: str = "") -> Expr:
    """``value`` as a constant with as many lanes as ``x``, of its dtype unless another is named."""
    dtype = dtype or dtype_of(x)
    if dtype == "float32":
        value = float(np.float32(value))
    scalar = tirx.const(value, dtype)
    lanes = lanes_of(x)
    return tirx.Broadcast(scalar, lanes) if lanes > 1 else scalar


def bits(x: Expr, dtype: str = "uint32") -> Expr:
    """The float32's bits as an integer."""
    return tirx.reinterpret(_with_lanes(dtype, x), x)


def from_bits(x: Expr) -> Expr:
    """The float32 with these bits."""
    return tirx.reinterpret(_with_lanes("float32", x), x)


def _with_lanes(dtype: str, x: Expr) -> str:
    lanes = lanes_of(x)
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """The polynomial in ``x``, highest power first; a fused multiply-add a step."""
    value: Any = constant(x, coefficients[0])
    for c in coefficients[1:]:
        value = value * x + constant(x, c)
    return value


def clamp(x: Expr, low: float, high: float) -> Expr:
    """min(max(x, low), high); NaN stays NaN (x86's max and min return their second operand then)."""
    if low > -inf:
        x = T.max(constant(x, low), x)
    return T.min(constant(x, high), x) if high < inf else x


def _reduced(em: Emitter, x: Expr) -> tuple[Expr, Expr]:
    """r and the (unsigned) bits of n + ROUND for x = n ln(2) + r, |r| <= ln(2)/2 (Cody and Waite, 1980)."""
    shifted = em.let(x * constant(x, LOG2E) + constant(x, ROUND), "t")
    n = em.let(shifted - constant(x, ROUND), "n")
    r = em.let(n * constant(x, -LN2_HIGH) + x, "r")
    return em.let(n * constant(x, -LN2_LOW) + r, "r"), bits(shifted)


def exp(em: Emitter, x: Expr) -> Expr:
    """exp over all of float32, denormal results and infinities included; at most 1 ulp (denormals: 1 of theirs)."""
    x = em.let(clamp(x, -104.0, 89.0), "x")
    r, shifted = _reduced(em, x)
    # 2^n in two factors, for n runs from -150 to 128
    n = em.let(tirx.reinterpret(_with_lanes("int32", x), shifted) - constant(x, ROUND_BITS, "int32"), "n")
    half = em.let(tirx.shift_right(n, constant(n, 1)), "h")
    value = horner(r, EXP_6) * _power_of_two(half)
    return em.let(value * _power_of_two(n - half), "e")


def _power_of_two(n: Expr) -> Expr:
    return from_bits(tirx.shift_left(n, constant(n, 23)) + constant(n, ONE_BITS))


def exp_nonpositive(em: Emitter, x: Expr) -> Expr:
    """exp for softmax's arguments: ``x <= 0`` (or NaN); at most 2 ulp, and 0 below -87, where it is under 1.7e-38."""
    x = em.let(x, "x")
    r, shifted = _reduced(em, x)
    # 2^n is added to the exponent's bits (ROUND_BITS << 23 is 0); unsigned, for LLVM may assume that int32 does not wrap
    value = from_bits(bits(horner(r, EXP_5)) + tirx.shift_left(shifted, constant(shifted, 23)))
    return em.let(tirx.Select(x < constant(x, -87.0), constant(x, 0.0), value), "e")
