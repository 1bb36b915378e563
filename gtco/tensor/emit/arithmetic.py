"""Arithmetic of every dtype as TIR expressions, from which the element-wise operators are made.

Floating-point arithmetic follows numpy (NaN propagates through ``maximum``). Integers follow ONNX:
``divide`` and ``mod`` truncate towards zero, ``floor_divide`` and ``floor_mod`` towards minus
infinity. Any integer divided by 0 is 0 as in numpy; the CPU would trap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
from tvm import tirx

from gtco.tensor.emit import vector_math
from gtco.tensor.emit.emitter import Emitter, Expr, lanes_of
from gtco.tensor.emit.vector_math import constant, dtype_of

# The functions for which LLVM calls the C library (in vectors, for each lane), and the cost of one
# call in the time of a vector instruction, measured in kernels on a Zen 5 (two FMA ports).
LIBM: dict[str, float] = {
    "exp": 20,
    "log": 20,
    "erf": 40,
    "tanh": 60,
    "pow": 28,
    "sin": 16,
    "cos": 16,
    "asin": 24,
    "acos": 32,
    "atan": 40,
    "cosh": 41,
    "tan": 72,
    "sinh": 80,
}


def libm(name: str, *args: Expr) -> Expr:
    """A call of the C library's function. In vectors it is called for each lane (LLVM unrolls its
    intrinsic of that name). ``name`` is a row of ``LIBM``.
    """
    assert name in LIBM, f"no cost of the C library's '{name}'"
    return intrinsic(name, *args)


def intrinsic(name: str, *args: Expr) -> Expr:
    """LLVM's intrinsic of that name."""
    return tirx.call_llvm_pure_intrin(str(args[0].ty), f"llvm.{name}", *args)


def nearest(x: Expr) -> Expr:
    """The nearest integer, to even, as numpy and ONNX round. tirx.nearbyint does not vectorize."""
    return intrinsic("nearbyint", x)


def extern_erf(x: Expr) -> Expr:
    """The C library's erf, for scalars only. LLVM has no intrinsic for it."""
    return tirx.call_pure_extern(dtype_of(x), "erf", x)


# conditions and casts -----------------------------------------------------------------------------
def cast(x: Expr, old: str, new: str) -> Expr:
    """``x`` as another dtype: floats to integers towards zero, any dtype to bool by ``!= 0``."""
    if old == new:
        return x
    if new == "bool":  # NaN is true
        return tirx.Not(tirx.EQ(x, constant(x, 0)))
    if old == "bool":  # TVM cannot bind a value that casts a vector of bools
        return tirx.Select(x, constant(x, 1, new), constant(x, 0, new))
    lanes = lanes_of(x)
    return tirx.Cast(f"{new}x{lanes}" if lanes > 1 else new, x)


def both(a: Expr, b: Expr) -> Expr:
    return logical(tirx.bitwise_and, a, b)


def either(a: Expr, b: Expr) -> Expr:
    return logical(tirx.bitwise_or, a, b)


def logical(combine: Callable[[Expr, Expr], Expr], a: Expr, b: Expr) -> Expr:
    """Two conditions, combined as int8. TVM's And and Or do not take vectors of them everywhere."""
    both = combine(cast(a, "bool", "int8"), cast(b, "bool", "int8"))
    return tirx.NE(both, constant(both, 0))


def is_nan(x: Expr) -> Expr:
    """True if ``x`` is NaN. ``x`` must be bound, because it is used twice."""
    return tirx.Not(tirx.EQ(x, x))


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


# integers and floats ------------------------------------------------------------------------------
def absolute(em: Emitter, x: Expr, dtype: str) -> Expr:
    if dtype == "float32":
        return vector_math.absolute(x)
    if dtype.startswith("uint"):
        return x
    x = em.let(x)
    if dtype == "float64":
        return tirx.abs(x)
    return tirx.Select(x < constant(x, 0), constant(x, 0) - x, x)


def extreme(
    em: Emitter, a: Expr, b: Expr, dtype: str, choose: Callable[[Expr, Expr], Expr]
) -> Expr:
    """``choose`` (T.max or T.min), with NaN as the result if one float is NaN."""
    if not is_float(dtype):
        return choose(a, b)
    a = em.let(a)  # max(a, b) is b if either is NaN
    return tirx.Select(is_nan(a), a, choose(a, b))


def power(a: Expr, b: Expr, dtype: str) -> Expr:
    if is_float(dtype):
        return libm("pow", a, b)
    wide = libm("pow", cast(a, dtype, "float64"), cast(b, dtype, "float64"))
    return cast(nearest(wide), "float64", dtype)


def shift(em: Emitter, a: Expr, b: Expr, dtype: str, left: bool) -> Expr:
    """A shift. By the width or more, the result is 0, or the sign if signs are shifted in (as in
    numpy; a CPU would take the count modulo the width).
    """
    a, b = em.let(a), em.let(b)
    width = np.dtype(dtype).itemsize * 8
    beyond = b >= constant(b, width)
    if not left and not dtype.startswith("uint"):
        return tirx.shift_right(a, tirx.Select(beyond, constant(b, width - 1), b))
    shifted = (tirx.shift_left if left else tirx.shift_right)(
        a, tirx.Select(beyond, constant(b, 0), b)
    )
    return tirx.Select(beyond, constant(a, 0), shifted)


def quotient(em: Emitter, a: Expr, b: Expr, dtype: str, floor: bool) -> Expr:
    """a / b. Integers are rounded towards zero, or down for ``floor``."""
    a, b = em.let(a), em.let(b)
    if is_float(dtype):
        return tirx.floor(a / b) if floor else a / b
    by_zero, whole, rest = _int_division(em, a, b)
    if not dtype.startswith("uint"):
        whole = tirx.Select(tirx.EQ(b, constant(a, -1)), constant(a, 0) - a, whole)
        if floor:
            whole = tirx.Select(_opposite(rest, b), whole - constant(a, 1), whole)
    return tirx.Select(by_zero, constant(a, 0), whole)


def remainder(em: Emitter, a: Expr, b: Expr, dtype: str, floor: bool) -> Expr:
    """The remainder of :func:`quotient`. It has the sign of ``a``, or of ``b`` for ``floor``."""
    a, b = em.let(a), em.let(b)
    if is_float(dtype):
        return _float_remainder(em, floor, a, b)
    by_zero, _, rest = _int_division(em, a, b)
    if floor and not dtype.startswith("uint"):
        rest = tirx.Select(_opposite(rest, b), rest + b, rest)
    return tirx.Select(by_zero, constant(a, 0), rest)


def _float_remainder(em: Emitter, floor: bool, a: Expr, b: Expr) -> Expr:
    # in float64 the quotient (below 2^28) and its product with b are exact for float32 operands
    wide_a = em.let(cast(a, dtype_of(a), "float64"))
    wide_b = em.let(cast(b, dtype_of(a), "float64"))
    whole = tirx.trunc(wide_a / wide_b)
    rest = cast(wide_a - whole * wide_b, "float64", dtype_of(a))
    size = [em.let(absolute(em, x, dtype_of(x))) for x in (a, b)]
    endless = constant(b, inf)
    rest = em.let(tirx.Select(both(size[0] < endless, tirx.EQ(size[1], endless)), a, rest))
    if not floor:
        return rest
    return em.let(tirx.Select(_opposite(rest, b), rest + b, rest))


def _opposite(rest: Expr, b: Expr) -> Expr:
    """True if the remainder is not 0 and has another sign than ``b``."""
    zero = constant(b, 0)
    return either(both(rest < zero, b > zero), both(rest > zero, b < zero))


def _int_division(em: Emitter, a: Expr, b: Expr) -> tuple[Expr, Expr, Expr]:
    """Whether ``b`` is 0, and the quotient and remainder of a division that never traps."""
    one = constant(a, 1)
    by_zero = tirx.EQ(b, constant(a, 0))
    trapping = by_zero
    if not dtype_of(a).startswith("uint"):  # the least integer divided by -1 traps as well
        trapping = either(by_zero, tirx.EQ(b, constant(a, -1)))
    safe = em.let(tirx.Select(trapping, one, b))
    whole = em.let(tirx.truncdiv(a, safe))
    return by_zero, whole, em.let(a - whole * safe)


# composite functions ------------------------------------------------------------------------------
def log1p(em: Emitter, x: Expr, dtype: str) -> Expr:
    """log(1 + x), with a correction of the error that rounding 1 + x makes (Kahan)."""
    x = em.let(x)
    one = constant(x, 1)
    u = em.let(x + one)
    value = vector_math.log(em, u) if dtype == "float32" else em.let(libm("log", u))
    rest = (x - em.let(u - one)) / u
    return em.let(tirx.Select(u < constant(x, inf), value + rest, value))


def expm1(em: Emitter, x: Expr, dtype: str) -> Expr:
    """exp(x) - 1, for x <= 0."""
    if dtype == "float32":
        return vector_math.expm1(em, x)
    t = em.let(libm("tanh", x * constant(x, 0.5)))
    return (t + t) / (constant(x, 1) - t)
