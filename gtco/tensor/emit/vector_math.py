"""exp, erf, tanh and related functions as vector arithmetic: polynomials in TIR, without calls of
libm.

Every function takes a float32 value: a scalar (in a vectorized loop, its lanes) or an explicit
vector such as ``float32x16``. It returns a value of the same type. Values used twice are bound by
``em.let``, because TIR expressions are trees.

The coefficients are our own: minimax fits in double precision by Lawson's iteratively reweighted
least squares (C. L. Lawson, 1961) on 2000 Chebyshev nodes, rounded to float32. Bounds are stated in
ulp of the float32 result and tested in ``tests/tensor/test_vector_math.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Emitter, Expr, lanes_of

LN2 = float(np.log(2.0))
LOG2E = 1 / LN2
LN2_HIGH = 0.693359375  # 9 bits of ln 2: its product with any exponent is exact
LN2_LOW = LN2 - LN2_HIGH
ROUND = 1.5 * 2.0**23  # t + ROUND has the integer nearest to t in its low bits
ROUND_BITS = 0x4B400000
BIASED_ROUND = ROUND + 127  # the same with the exponent's bias: those bits << 23 are 2^n
AVX512_LANES = 16  # vectors of so many lanes are AVX-512's, which has an instruction for p 2^n

# exp(r) on |r| <= ln(2)/2 as 1 + r + r^2 P(r): highest power first. Errors: 3.1e-9 and 1.0e-7
# relative.
EXP_6 = (1.3814539e-3, 8.368745e-3, 4.166839e-2, 1.6666521e-1, 4.9999994e-1, 1.0, 1.0)
EXP_5 = (8.312501e-3, 4.189033e-2, 1.6667116e-1, 4.999923e-1, 1.0, 1.0)

# 2^r as 1 + r P(r), by degree, on |r| <= 1/2 (1.1e-7 and 1.0e-4 relative) and on 0 <= r < 1, where
# it is 2 at 1 (1.3e-7 and 8.6e-5).
EXP2 = {
    5: (1.32647273e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1, 1.0),
    3: (5.50089292e-2, 2.42210954e-1, 6.93282902e-1, 1.0),
}
EXP2_FROM_0 = {
    5: (1.89685e-3, 8.94775e-3, 5.5855296e-2, 2.4014712e-1, 6.9315298e-1, 1.0),
    3: (7.706704e-2, 2.27645e-1, 6.9511676e-1, 1.0),
}
FRACTION = "llvm.x86.avx512.mask.reduce.ps.512"  # vreduceps: x less its multiple of 2^-m below
SCALE = "llvm.x86.avx512.mask.scalef.ps.512"  # vscalefps: a 2^floor(b)
DOWN = 0b1001  # vreduceps's immediate: m is 0, rounding goes down, nothing is signalled
AS_SET = 4  # rounding of these instructions: by the CPU's mode


def dtype_of(x: Expr) -> str:
    """Element dtype of an expression, without its lanes."""
    return str(x.ty).split("x")[0]


def constant(x: Expr, value: float, dtype: str = "") -> Expr:
    """``value`` as a constant with as many lanes as ``x``, in its dtype unless another is given."""
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
    """min(max(x, low), high); NaN stays NaN (x86 returns the second operand then)."""
    if low > -inf:
        x = T.max(constant(x, low), x)
    return T.min(constant(x, high), x) if high < inf else x


def _reduced(em: Emitter, x: Expr, shift: float = ROUND) -> tuple[Expr, Expr]:
    """r and the (unsigned) bits of n + ``shift`` for x = n ln(2) + r, |r| <= ln(2)/2 (Cody and
    Waite, 1980).
    """
    shifted = em.let(x * constant(x, LOG2E) + constant(x, shift), "t")
    n = em.let(shifted - constant(x, shift), "n")
    r = em.let(n * constant(x, -LN2_HIGH) + x, "r")
    return em.let(n * constant(x, -LN2_LOW) + r, "r"), bits(shifted)


def exp(em: Emitter, x: Expr) -> Expr:
    """exp over all of float32, denormal results and infinities included; at most 1 ulp (for
    denormals, 1 ulp of theirs).
    """
    x = em.let(clamp(x, -104.0, 89.0), "x")
    if em.lanes == AVX512_LANES:  # vscalefps; for other vectors LLVM emits many instructions
        r, shifted = _reduced(em, x)
        n = tirx.reinterpret(_with_lanes("int32", x), shifted) - constant(x, ROUND_BITS, "int32")
        p = horner(r, EXP_6)
        return em.let(tirx.call_llvm_pure_intrin(str(x.ty), "llvm.ldexp", p, n), "e")
    # 2^n in two factors, for n runs from -150 to 128: half of 2 * 127 + n, and the rest of it
    r, shifted = _reduced(em, x, ROUND + 2 * 127)
    half = em.let(tirx.shift_right(shifted, constant(shifted, 1)), "h")
    value = horner(r, EXP_6) * _power_of_two(half)
    return em.let(value * _power_of_two(shifted - half), "e")


def exp_within(em: Emitter, x: Expr) -> Expr:
    """exp of ``x`` clamped to -87 <= x <= 88, where 2^n is one number; at most 1 ulp."""
    x = em.let(clamp(x, -87.0, 88.0), "x")
    r, shifted = _reduced(em, x, BIASED_ROUND)
    return em.let(horner(r, EXP_6) * _power_of_two(shifted), "e")


def _power_of_two(biased: Expr) -> Expr:
    """2^n, for n + 127 in the low bits of ``biased``. Bits beyond the ninth do not count."""
    return from_bits(tirx.shift_left(biased, constant(biased, 23)))


def exp_nonpositive(em: Emitter, x: Expr) -> Expr:
    """exp for softmax's arguments: ``x <= 0`` or NaN, which stays NaN; at most 2 ulp, and 0 below
    -87 (-inf included), where it is under 1.7e-38.
    """
    x = em.let(x, "x")
    r, shifted = _reduced(em, x, BIASED_ROUND)
    # a product with 2^n, because a sum of exponents' bits would turn some NaNs into numbers
    value = horner(r, EXP_5) * _power_of_two(shifted)
    return em.let(tirx.Select(x < constant(x, -87.0), constant(x, 0.0), value), "e")


def exp2_nonpositive(em: Emitter, x: Expr, degree: int = 5) -> Expr:
    """2^x for ``x <= 0`` or NaN, which stays NaN; at most 3 ulp with a polynomial of degree 5.
    Below -126, where results are not normal numbers, all digits may be wrong; from -150 on it is 0.
    """
    if lanes_of(x) == AVX512_LANES:  # an explicit vector, as intrinsics need
        return _exp2_by_instructions(em, x, EXP2_FROM_0[degree])
    x = em.let(T.max(constant(x, -127.0), x), "x")
    shifted = em.let(x + constant(x, BIASED_ROUND), "s")
    r = em.let(x - (shifted - constant(x, BIASED_ROUND)), "r")
    return em.let(horner(r, EXP2[degree]) * _power_of_two(bits(shifted)), "e")


def _exp2_by_instructions(em: Emitter, x: Expr, polynomial: Sequence[float]) -> Expr:
    """2^x = 2^floor(x) P(x - floor(x)), with AVX-512's instructions for both. -inf is not one of
    their special cases.
    """
    x = em.let(x, "x")
    every, as_set = tirx.const(-1, "int16"), tirx.const(AS_SET, "int32")

    def call(name: str, *operands: Any) -> Any:
        return tirx.call_llvm_pure_intrin(str(x.ty), name, *operands, x, every, as_set)

    r = em.let(call(FRACTION, x, tirx.const(DOWN, "int32")), "r")
    return em.let(call(SCALE, horner(r, polynomial), x), "e")


# erf(x) = x + x P(x^2) on |x| < 1 (1.2e-9 relative) and 1 - exp(Q(|x|)) on 1 <= |x| <= 4 (1.6e-8).
ERF_SMALL = (
    7.85386117e-5, -8.01019357e-4, 5.18832768e-3, -2.68538119e-2, 1.12835851e-1, -3.76126258e-1,
    1.28379166e-1,
)  # fmt: skip
ERFC_LOG = (
    -1.1572213e-3,
    1.48318484e-2,
    -8.87997335e-2,
    -6.54240038e-1,
    -1.11762128,
    -2.61916837e-3,
)
# tanh(x) = x + x^3 P(x^2) on |x| < 0.625 (4.4e-9 relative).
TANH_SMALL = (-5.70498677e-3, 2.0639087e-2, -5.3739715e-2, 1.33314422e-1, -3.33332819e-1)
# log(1 + f) = f - f^2/2 + f^3 P(f) on sqrt(1/2) <= 1 + f <= sqrt(2) (5.8e-9 relative).
LOG = (
    -7.63449653e-2, 1.2761577e-1, -1.31601824e-1, 1.4201758e-1, -1.66233573e-1, 2.00012269e-1,
    -2.5000821e-1, 3.33333317e-1,
)  # fmt: skip
# (Phi(x) - 1/2) / x on |x| <= 5 as a polynomial in v = 2 x^2 / 25 - 1, weighted by |x|, Phi the
# normal distribution's: 1.6e-7. In v the coefficients do not cancel (their magnitudes add up to
# 0.40), so float32 keeps that accuracy.
PHI = (
    6.08727994e-4, -1.61326545e-3, 1.72279761e-3, -2.68557434e-3, 6.41051215e-3, -1.11643399e-2,
    1.64021737e-2, -2.32686525e-2, 3.14421725e-2, -4.04426074e-2, 5.15205223e-2, -7.02962806e-2,
    1.41363788e-1,
)  # fmt: skip
# The same on |x| <= 4 in v = x^2 / 8 - 1, for results that are rounded to 16 bits: 2.1e-5.
PHI_ROUNDED = (
    -3.31514725e-3, 8.69979337e-3, -1.25603024e-2, 2.10850295e-2, -3.67114432e-2, 5.61894029e-2,
    -8.43434706e-2, 1.75942913e-1,
)  # fmt: skip
SIGN = 0x80000000
SQRT_HALF_BITS = 0x3F3504F3
SMALLEST_NORMAL = 2.0**-126


def absolute(x: Expr) -> Expr:
    return from_bits(tirx.bitwise_and(bits(x), constant(x, SIGN - 1, "uint32")))


def with_sign(magnitude: Expr, x: Expr) -> Expr:
    """``magnitude`` (not negative) with the sign of ``x``."""
    sign = tirx.bitwise_and(bits(x), constant(x, SIGN, "uint32"))
    return from_bits(tirx.bitwise_or(bits(magnitude), sign))


def erf(em: Emitter, x: Expr) -> Expr:
    """The error function, at most 2 ulp."""
    x = em.let(x, "x")
    u, a = em.let(x * x, "u"), em.let(absolute(x), "a")
    small = horner(u, ERF_SMALL) * x + x
    complement = exp_nonpositive(em, horner(em.let(clamp(a, -inf, 4.0), "a"), ERFC_LOG))
    large = with_sign(constant(x, 1.0) - complement, x)
    # NaN counts as small: exp_nonpositive may lose it
    return em.let(tirx.Select(a >= constant(x, 1.0), large, small), "erf")


def tanh(em: Emitter, x: Expr) -> Expr:
    """The hyperbolic tangent, at most 2 ulp: a polynomial near 0, else 1 - 2 / (exp(2 |x|) + 1)."""
    x = em.let(x, "x")
    u, a = em.let(x * x, "u"), em.let(absolute(x), "a")
    small = horner(u, TANH_SMALL) * (u * x) + x
    big = exp_within(em, a + a) + constant(x, 1.0)
    large = with_sign(constant(x, 1.0) - constant(x, 2.0) / big, x)
    return em.let(tirx.Select(a < constant(x, 0.625), small, large), "tanh")


def log(em: Emitter, x: Expr) -> Expr:
    """The natural logarithm, denormals included, at most 2 ulp. It is -inf at 0, and NaN below."""
    x = em.let(x, "x")
    tiny = em.let(
        tirx.Select(x < constant(x, SMALLEST_NORMAL), constant(x, 2.0**23), constant(x, 1.0)), "s"
    )
    b = em.let(bits(x * tiny, "int32"), "b")
    exponent = em.let(tirx.shift_right(b - constant(b, SQRT_HALF_BITS), constant(b, 23)), "k")
    f = em.let(from_bits(b - tirx.shift_left(exponent, constant(b, 23))) - constant(x, 1.0), "f")
    shift = tirx.Select(x < constant(x, SMALLEST_NORMAL), constant(x, 23.0), constant(x, 0.0))
    k = em.let(tirx.Cast(_with_lanes("float32", x), exponent) - shift, "k")
    u = em.let(f * f, "u")
    value = horner(f, LOG) * (u * f) + (k * constant(x, LN2_LOW) + u * constant(x, -0.5))
    value = k * constant(x, LN2_HIGH) + (value + f)
    below = tirx.Select(tirx.EQ(x, constant(x, 0.0)), constant(x, -inf), constant(x, float("nan")))
    value = tirx.Select(x > constant(x, 0.0), value, below)
    return em.let(tirx.Select(x < constant(x, inf), value, x), "log")


def gelu(em: Emitter, x: Expr) -> Expr:
    """x Phi(x), in 19 vector instructions without a division. The error is at most 4e-7 |x|. Beyond
    |x| = 5.3 the result is exactly 0 or x.
    """
    return _gelu(em, x, 5.0, PHI)


def gelu_rounded(em: Emitter, x: Expr) -> Expr:
    """The same in 14 vector instructions, for a result that is rounded to bfloat16 or float16. The
    error is at most 3.2e-5 |x|, which is below a tenth of what rounding to float16 adds where x is
    positive. Beyond |x| = 4 the result is 0 or x.
    """
    return _gelu(em, x, 4.0, PHI_ROUNDED)


def _gelu(em: Emitter, x: Expr, end: float, polynomial: Sequence[float]) -> Expr:
    x, square = em.let(x, "x"), end * end
    v = em.let(clamp(x * x, -inf, square) * constant(x, 2 / square) + constant(x, -1.0), "v")
    phi = x * horner(v, polynomial) + constant(x, 0.5)
    return em.let(x * clamp(phi, 0.0, 1.0), "gelu")


def _one_and_exp_minus(em: Emitter, x: Expr) -> Expr:
    """1 + exp(-x). Below -88.4 it is infinity, because the exponent of 2^n is then that of
    infinity.
    """
    x = em.let(clamp(x, -89.0, 87.0), "x")
    shifted = em.let(x * constant(x, -LOG2E) + constant(x, BIASED_ROUND), "t")
    n = em.let(shifted - constant(x, BIASED_ROUND), "n")
    r = em.let(n * constant(x, -LN2_HIGH) - x, "r")
    r = em.let(n * constant(x, -LN2_LOW) + r, "r")
    return horner(r, EXP_6) * _power_of_two(bits(shifted)) + constant(x, 1.0)


def sigmoid(em: Emitter, x: Expr) -> Expr:
    """1 / (1 + exp(-x)): at most 3 ulp above -87, and 0 below -88.4, where it is a denormal."""
    x = em.let(x, "x")
    return em.let(constant(x, 1.0) / _one_and_exp_minus(em, x), "sigmoid")


def silu(em: Emitter, x: Expr) -> Expr:
    """x / (1 + exp(-x)): at most 3 ulp above -87; NaN at -inf, as x sigmoid(x) is."""
    x = em.let(x, "x")
    return em.let(x / _one_and_exp_minus(em, x), "silu")


def gelu_tanh(em: Emitter, x: Expr) -> Expr:
    """0.5 x (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2/pi) (x + 0.044715 x^3): within 1e-6 |x|."""
    x = em.let(x, "x")
    scale = 2 * (2 / np.pi) ** 0.5
    # beyond 12 the sigmoid is 0 or 1, and the cube must not overflow
    t = em.let(clamp(x, -12.0, 12.0), "t")
    z = t * (t * t * constant(x, 0.044715 * scale) + constant(x, scale))
    return em.let(x / _one_and_exp_minus(em, z), "gelu")


def softplus(em: Emitter, x: Expr) -> Expr:
    """max(x, 0) + log1p(exp(-|x|)): at most 4 ulp above -87, within 2e-38 below."""
    x = em.let(x, "x")
    t = exp(em, from_bits(tirx.bitwise_or(bits(x), constant(x, SIGN, "uint32"))))
    one = constant(x, 1.0)
    u = em.let(t + one, "u")
    # log(u) (1 + the relative error that rounding 1 + t to u made)
    log1p = log(em, u) + (t - em.let(u - one, "w")) / u
    return em.let(T.max(constant(x, 0.0), x) + log1p, "softplus")


def mish(em: Emitter, x: Expr) -> Expr:
    """x tanh(log(1 + e^x)) = x n / (n + 2), n = e^x (e^x + 2): within 1e-6 |x|."""
    x = em.let(x, "x")
    e = exp(em, clamp(x, -inf, 20.0))
    n = em.let(e * (e + constant(x, 2.0)), "n")
    return em.let(x * (n / (n + constant(x, 2.0))), "mish")


def expm1(em: Emitter, x: Expr) -> Expr:
    """exp(x) - 1 = 2 t / (1 - t), t = tanh(x / 2), for x <= 0: at most 6 ulp."""
    t = tanh(em, x * constant(x, 0.5))
    return em.let((t + t) / (constant(x, 1.0) - t), "expm1")
