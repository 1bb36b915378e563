"""Element-wise operators as scalar TIR expressions; in a vectorized loop each becomes vector
instructions.

Floating-point operators follow numpy (NaN propagates through ``maximum``; ``round`` is to even).
Integers follow ONNX: ``divide`` and ``mod`` truncate towards zero, ``floor_divide`` and
``floor_mod`` towards minus infinity, and anything divided by 0 is 0 as in numpy, where the CPU
would trap. float16 computes in float32; float64 calls libm a lane at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, pi

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor import math
from gtco.tensor.emit import Emitter, Expr, lanes_of
from gtco.tensor.math import constant, dtype_of
from gtco.tensor.stage import Operator

NARROW = ("float16", "bfloat16")
COMPARISONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "equal": tirx.EQ,
    "not_equal": lambda a, b: tirx.Not(tirx.EQ(a, b)),  # TVM's NE is false for NaN
    "less": tirx.LT,
    "less_equal": tirx.LE,
    "greater": tirx.GT,
    "greater_equal": tirx.GE,
}
LOGICAL: dict[str, Callable[[Expr, Expr], Expr]] = {
    "logical_and": tirx.bitwise_and,
    "logical_or": tirx.bitwise_or,
    "logical_xor": tirx.bitwise_xor,
}
BITWISE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "bitwise_and": tirx.bitwise_and,
    "bitwise_or": tirx.bitwise_or,
    "bitwise_xor": tirx.bitwise_xor,
}
# float32: vector arithmetic of gtco.tensor.math
VECTOR: dict[str, Callable[[Emitter, Expr], Expr]] = {
    name: getattr(math, name)
    for name in "exp log erf tanh sigmoid silu gelu gelu_tanh softplus mish".split()
}
# LLVM's vector intrinsics, which call libm a lane at a time
LIBM = frozenset("exp log tanh sin cos tan asin acos atan sinh cosh".split())
ROUNDING: dict[str, Callable[[Expr], Expr]] = {
    "floor": tirx.floor,
    "ceil": tirx.ceil,
    "trunc": tirx.trunc,
    "round": lambda x: libm("nearbyint", x),  # to even, as numpy; tirx.nearbyint has no vectors
    "sqrt": tirx.sqrt,
}


def apply(em: Emitter, op: Operator, args: Sequence[Expr], dtypes: Sequence[str]) -> Expr:
    """The operator's value for these argument values; ``dtypes`` are the arguments'.

    ``args`` are scalars (lanes of a vectorized loop) or explicit vectors, all with the same lanes.
    """
    out = op.type.dtype
    args = [_unfolded(x) for x in args]
    if op.kind == "cast":
        return cast(args[0], dtypes[0], out)
    if op.kind == "where":
        condition = cast(args[0], dtypes[0], "bool")
        return tirx.Select(condition, cast(args[1], dtypes[1], out), cast(args[2], dtypes[2], out))
    if op.kind in LOGICAL:
        a, b = (cast(x, d, "bool") for x, d in zip(args, dtypes, strict=True))
        return _logical(LOGICAL[op.kind], a, b)
    if op.kind == "logical_not":
        return tirx.Not(cast(args[0], dtypes[0], "bool"))
    if len(args) == 2:
        common = dtypes[0] if dtypes[0] == dtypes[1] else str(np.result_type(*dtypes))
        a, b = (cast(x, d, _computed(common)) for x, d in zip(args, dtypes, strict=True))
        if op.kind in COMPARISONS:
            return COMPARISONS[op.kind](a, b)
        return cast(_binary(em, op, a, b, common), _result(op, common), out)
    computed = _computed(dtypes[0])
    value = _unary(em, op, cast(args[0], dtypes[0], computed), computed)
    return value if op.kind in ("isnan", "isinf") else cast(value, computed, out)


def _unfolded(x: Expr) -> Expr:
    """A float constant, such as a padding's, behind a call that gives it back: TVM would compute
    with it at once, refuses to divide by 0 and takes 0 * x for 0 whatever x is. LLVM folds the call
    and what follows as IEEE 754 says.
    """
    return libm("copysign", x, x) if isinstance(x, tirx.FloatImm) else x


def _computed(dtype: str) -> str:
    """The dtype that arithmetic on this dtype runs in; bool counts as 0 and 1."""
    if dtype in NARROW:
        return "float32"
    return "int8" if dtype == "bool" else dtype


def _result(op: Operator, common: str) -> str:
    return _computed(common)


def cast(x: Expr, old: str, new: str) -> Expr:
    """``x`` as another dtype: floats to integers towards zero, anything to bool by ``!= 0``."""
    if old == new:
        return x
    if new == "bool":  # NaN is true
        return tirx.Not(tirx.EQ(x, constant(x, 0)))
    if old == "bool":  # TVM binds no value that casts a vector of them
        return tirx.Select(x, constant(x, 1, new), constant(x, 0, new))
    lanes = lanes_of(x)
    return tirx.Cast(f"{new}x{lanes}" if lanes > 1 else new, x)


def _logical(combine: Callable[[Expr, Expr], Expr], a: Expr, b: Expr) -> Expr:
    """Two conditions combined as int8: TVM's And and Or do not take vectors of them everywhere."""
    both = combine(cast(a, "bool", "int8"), cast(b, "bool", "int8"))
    return tirx.NE(both, constant(both, 0))


def both(a: Expr, b: Expr) -> Expr:
    return _logical(tirx.bitwise_and, a, b)


def either(a: Expr, b: Expr) -> Expr:
    return _logical(tirx.bitwise_or, a, b)


def is_nan(x: Expr) -> Expr:
    """``x`` must be bound: it is used twice."""
    return tirx.Not(tirx.EQ(x, x))


def _binary(em: Emitter, op: Operator, a: Expr, b: Expr, dtype: str) -> Expr:
    floating = dtype.startswith(("float", "bfloat"))
    match op.kind:
        case "add":
            return a + b
        case "subtract":
            return a - b
        case "multiply":
            return a * b
        case "maximum" | "minimum":
            choose = T.max if op.kind == "maximum" else T.min
            if not floating:
                return choose(a, b)
            a = em.let(a)  # max(a, b) is b where either is NaN
            return tirx.Select(is_nan(a), a, choose(a, b))
        case "power":
            if floating:
                return libm("pow", a, b)
            wide = libm("pow", cast(a, dtype, "float64"), cast(b, dtype, "float64"))
            return cast(libm("nearbyint", wide), "float64", dtype)
    if op.kind in BITWISE:
        return BITWISE[op.kind](a, b)
    a, b = em.let(a), em.let(b)
    if op.kind.endswith("shift"):
        return _shift(op.kind, a, b, dtype)
    return _float_division(em, op.kind, a, b) if floating else _int_division(em, op.kind, a, b)


def _shift(kind: str, a: Expr, b: Expr, dtype: str) -> Expr:
    """By the width or more: 0, or the sign where that is shifted in (numpy's; a CPU would take the
    count modulo).
    """
    width = np.dtype(dtype).itemsize * 8
    beyond = b >= constant(b, width)
    if kind == "right_shift" and not dtype.startswith("uint"):
        return tirx.shift_right(a, tirx.Select(beyond, constant(b, width - 1), b))
    shifted = (tirx.shift_left if kind == "left_shift" else tirx.shift_right)(
        a, tirx.Select(beyond, constant(b, 0), b)
    )
    return tirx.Select(beyond, constant(a, 0), shifted)


def _float_division(em: Emitter, kind: str, a: Expr, b: Expr) -> Expr:
    if kind == "divide":
        return a / b
    if kind == "floor_divide":
        return tirx.floor(a / b)
    # in float64 the quotient (below 2^28) and its product with b are exact for float32 operands
    wide_a, wide_b = (
        em.let(cast(a, dtype_of(a), "float64")),
        em.let(cast(b, dtype_of(a), "float64")),
    )
    whole = tirx.trunc(wide_a / wide_b)
    remainder = cast(wide_a - whole * wide_b, "float64", dtype_of(a))
    infinite = tirx.EQ(_absolute(em, b, dtype_of(b)), constant(b, inf))
    remainder = em.let(tirx.Select(infinite, a, remainder))
    if kind == "mod":
        return remainder
    return em.let(tirx.Select(_opposite(remainder, b), remainder + b, remainder))


def _opposite(remainder: Expr, b: Expr) -> Expr:
    """Is the remainder not 0 and of the other sign than ``b``?"""
    zero = constant(b, 0)
    return either(both(remainder < zero, b > zero), both(remainder > zero, b < zero))


def _int_division(em: Emitter, kind: str, a: Expr, b: Expr) -> Expr:
    zero, one = constant(a, 0), constant(a, 1)
    by_zero = tirx.EQ(b, zero)
    trapping, signed = by_zero, not dtype_of(a).startswith("uint")
    if signed:  # the least integer over -1 traps as well
        trapping = either(by_zero, tirx.EQ(b, constant(a, -1)))
    safe = em.let(tirx.Select(trapping, one, b))
    quotient = em.let(tirx.truncdiv(a, safe))
    remainder = em.let(a - quotient * safe)
    if signed:
        quotient = tirx.Select(tirx.EQ(b, constant(a, -1)), zero - a, quotient)
        if kind.startswith("floor"):
            down = _opposite(remainder, b)
            quotient = tirx.Select(down, quotient - one, quotient)
            remainder = tirx.Select(down, remainder + b, remainder)
    return tirx.Select(by_zero, zero, quotient if kind.endswith("divide") else remainder)


def _unary(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    floating = dtype.startswith("float")
    zero = constant(x, 0)
    match op.kind:
        case "relu":
            return T.max(zero, x)
        case "negative":
            return constant(x, -0.0) - x if floating else zero - x
        case "bitwise_not":
            return tirx.bitwise_not(x)
        case "clip":
            low, high = op["min"], op["max"]
            if not floating:
                bounds = np.iinfo(dtype)
                low, high = max(low, bounds.min), min(high, bounds.max)
                return T.min(constant(x, int(high)), T.max(constant(x, int(low)), x))
            return math.clamp(x, low, high)
        case "isnan":
            return _is_nan(em, x) if floating else constant(x, False, "bool")
        case "isinf":
            return (
                tirx.EQ(_absolute(em, x, dtype), constant(x, inf))
                if floating
                else constant(x, False, "bool")
            )
        case "abs":
            return _absolute(em, x, dtype)
        case "sign":
            x = em.let(x)
            below = tirx.Select(x < zero, constant(x, -1), x) if not dtype.startswith("uint") else x
            return tirx.Select(x > zero, constant(x, 1), below)
    if not floating:
        if op.kind in ("floor", "ceil", "round", "trunc"):
            return x
        return cast(_unary(em, op, cast(x, dtype, "float32"), "float32"), "float32", dtype)
    return _float_unary(em, op, x, dtype)


def _is_nan(em: Emitter, x: Expr) -> Expr:
    return is_nan(em.let(x))


def _absolute(em: Emitter, x: Expr, dtype: str) -> Expr:
    if dtype == "float32":
        return math.absolute(x)
    if dtype.startswith("uint"):
        return x
    x = em.let(x)
    return (
        tirx.abs(x)
        if dtype == "float64"
        else tirx.Select(x < constant(x, 0), constant(x, 0) - x, x)
    )


def _float_unary(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    """Operators of floats alone, float32 or float64."""
    single = dtype == "float32"
    zero, one = constant(x, 0), constant(x, 1)
    if op.kind in ROUNDING:
        return ROUNDING[op.kind](x)
    if single and op.kind in VECTOR:
        return VECTOR[op.kind](em, x)
    if op.kind in LIBM:
        return libm(op.kind, x)
    if op.kind == "erf":
        return tirx.call_pure_extern(dtype, "erf", x)
    x = em.let(x)
    match op.kind:
        case "rsqrt":
            return one / tirx.sqrt(x)
        case "leaky_relu":
            return tirx.Select(x >= zero, x, x * constant(x, op["alpha"]))
        case "elu":
            negative = T.min(zero, x)
            grown = (math.expm1 if single else _expm1)(em, negative)
            return tirx.Select(x > zero, x, constant(x, op["alpha"]) * grown)
        case "hardsigmoid":
            return math.clamp(x * constant(x, op["alpha"]) + constant(x, op["beta"]), 0.0, 1.0)
        case "hardswish":
            return x * math.clamp(x + constant(x, 3), 0.0, 6.0) * constant(x, 1 / 6)
        case "softsign":
            return x / (one + _absolute(em, x, dtype))
        case "asinh":  # log(a + sqrt(a^2 + 1)), without its cancellation near 0
            a = em.let(_absolute(em, x, dtype))
            b = em.let(T.min(constant(x, 1e9), a))  # a NaN stays one
            near = _log1p(em, b + b * b / (one + tirx.sqrt(b * b + one)), single)
            far = (math.log(em, a) if single else libm("log", a)) + constant(x, math.LN2)
            grown = em.let(tirx.Select(a > b, far, near))
            return tirx.Select(x < zero, zero - grown, grown)
        case "acosh":
            y = em.let(x - one)
            return _log1p(em, y + tirx.sqrt(y * (x + one)), single)
        case "atanh":
            a = em.let(_absolute(em, x, dtype))
            grown = em.let(constant(x, 0.5) * _log1p(em, (a + a) / (one - a), single))
            return tirx.Select(x < zero, zero - grown, grown)
    return _double(em, op.kind, x)


def _log1p(em: Emitter, x: Expr, single: bool) -> Expr:
    """log(1 + x) with the error that rounding 1 + x makes put right (Kahan's correction)."""
    x = em.let(x)
    one = constant(x, 1)
    u = em.let(x + one)
    value = math.log(em, u) if single else em.let(libm("log", u))
    rest = (x - em.let(u - one)) / u
    return em.let(tirx.Select(u < constant(x, inf), value + rest, value))


def _expm1(em: Emitter, x: Expr) -> Expr:
    t = em.let(libm("tanh", x * constant(x, 0.5)))
    return (t + t) / (constant(x, 1) - t)


def _double(em: Emitter, kind: str, x: Expr) -> Expr:
    """The composite functions in float64, by libm."""
    one = constant(x, 1)
    match kind:
        case "sigmoid" | "silu":
            return (one if kind == "sigmoid" else x) / (one + libm("exp", constant(x, 0) - x))
        case "gelu":
            half = constant(x, 0.5)
            return (
                half
                * x
                * (one + tirx.call_pure_extern("float64", "erf", x * constant(x, 0.5**0.5)))
            )
        case "gelu_tanh":
            z = constant(x, (2 / pi) ** 0.5) * (x + constant(x, 0.044715) * x * x * x)
            return constant(x, 0.5) * x * (one + libm("tanh", z))
        case "softplus" | "mish":
            rest = _log1p(em, libm("exp", constant(x, 0) - tirx.abs(x)), False)
            plus = em.let(T.max(constant(x, 0), x) + rest)
            return plus if kind == "softplus" else x * libm("tanh", plus)
    raise AssertionError(f"no element-wise meaning of {kind}")


def vectorizable(op: Operator, dtypes: Sequence[str]) -> bool:
    """May the operator stand in a vectorized loop? float64's erf calls libm, which TVM makes a loop
    of its own for.
    """
    return not (op.kind in ("erf", "gelu") and dtypes[0] == "float64")


def libm(name: str, *args: Expr) -> Expr:
    """A call of the C library's function, a lane at a time in vectors (LLVM's intrinsic of that
    name, unrolled).
    """
    return tirx.call_llvm_pure_intrin(str(args[0].ty), f"llvm.{name}", *args)
