"""Element-wise operators as scalar TIR expressions; in a vectorized loop each becomes vector instructions.

Floating-point operators follow numpy (NaN propagates through ``maximum``; ``round`` is to even). Integers follow ONNX:
``divide`` and ``mod`` truncate towards zero, ``floor_divide`` and ``floor_mod`` towards minus infinity, and anything divided
by 0 is 0 as in numpy, where the CPU would trap. float16 computes in float32; float64 calls libm a lane at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, pi

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor import math
from gtco.tensor.emit import Emitter, Expr
from gtco.tensor.math import constant, dtype_of, lanes_of
from gtco.tensor.stage import Operator

NARROW = ("float16", "bfloat16")
COMPARISONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "equal": tirx.EQ,
    "not_equal": tirx.NE,
    "less": tirx.LT,
    "less_equal": tirx.LE,
    "greater": tirx.GT,
    "greater_equal": tirx.GE,
}
LOGICAL: dict[str, Callable[[Expr, Expr], Expr]] = {
    "logical_and": tirx.And,
    "logical_or": tirx.Or,
    "logical_xor": lambda a, b: tirx.Or(tirx.And(a, tirx.Not(b)), tirx.And(tirx.Not(a), b)),
}
BITWISE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "bitwise_and": tirx.bitwise_and,
    "bitwise_or": tirx.bitwise_or,
    "bitwise_xor": tirx.bitwise_xor,
    "left_shift": tirx.shift_left,
    "right_shift": tirx.shift_right,
}
# float32: vector arithmetic of gtco.tensor.math
VECTOR: dict[str, Callable[[Emitter, Expr], Expr]] = {
    name: getattr(math, name)
    for name in "exp log erf tanh sigmoid silu gelu gelu_tanh softplus mish".split()
}
# one call of libm a lane
LIBM = frozenset("exp log erf tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh".split())
ROUNDING: dict[str, Callable[[Expr], Expr]] = {
    "floor": tirx.floor,
    "ceil": tirx.ceil,
    "trunc": tirx.trunc,
    "round": tirx.nearbyint,  # to even, as numpy and ONNX
    "sqrt": tirx.sqrt,
}


def apply(em: Emitter, op: Operator, args: Sequence[Expr], dtypes: Sequence[str]) -> Expr:
    """The operator's value for these argument values; ``dtypes`` are the arguments'.

    ``args`` are scalars (lanes of a vectorized loop) or explicit vectors, all with the same lanes.
    """
    out = op.type.dtype
    if op.kind == "cast":
        return cast(args[0], dtypes[0], out)
    if op.kind == "where":
        condition = cast(args[0], dtypes[0], "bool")
        return tirx.Select(condition, cast(args[1], dtypes[1], out), cast(args[2], dtypes[2], out))
    if op.kind in LOGICAL:
        a, b = (em.let(cast(x, d, "bool")) for x, d in zip(args, dtypes, strict=True))
        return LOGICAL[op.kind](a, b)
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
    if new == "bool":
        return tirx.NE(x, constant(x, 0))
    lanes = lanes_of(x)
    return tirx.Cast(f"{new}x{lanes}" if lanes > 1 else new, x)


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
            return tirx.Select(tirx.NE(a, a), a, choose(a, b))
        case "power":
            if floating:
                return tirx.pow(a, b)
            return cast(tirx.nearbyint(tirx.pow(cast(a, dtype, "float64"), cast(b, dtype, "float64"))), "float64", dtype)
    if op.kind in BITWISE:
        return BITWISE[op.kind](a, b)
    a, b = em.let(a), em.let(b)
    return _float_division(em, op.kind, a, b) if floating else _int_division(em, op.kind, a, b)


def _float_division(em: Emitter, kind: str, a: Expr, b: Expr) -> Expr:
    if kind == "divide":
        return a / b
    if kind == "floor_divide":
        return tirx.floor(a / b)
    remainder = em.let(tirx.fmod(a, b))
    if kind == "mod":
        return remainder
    zero = constant(a, 0)
    differ = tirx.NE(remainder < zero, b < zero)
    return tirx.Select(tirx.And(tirx.NE(remainder, zero), differ), remainder + b, remainder)


def _int_division(em: Emitter, kind: str, a: Expr, b: Expr) -> Expr:
    zero, one = constant(a, 0), constant(a, 1)
    by_zero = tirx.EQ(b, zero)
    trapping, signed = by_zero, not dtype_of(a).startswith("uint")
    if signed:  # the least integer over -1 traps as well
        trapping = tirx.Or(by_zero, tirx.EQ(b, constant(a, -1)))
    safe = em.let(tirx.Select(trapping, one, b))
    quotient = em.let(tirx.truncdiv(a, safe))
    remainder = em.let(a - quotient * safe)
    if signed:
        quotient = tirx.Select(tirx.EQ(b, constant(a, -1)), zero - a, quotient)
        if kind.startswith("floor"):
            down = tirx.And(tirx.NE(remainder, zero), tirx.NE(remainder < zero, b < zero))
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
            return _changed(em, x) if floating else constant(x, False, "bool")
        case "isinf":
            return tirx.EQ(_absolute(em, x, dtype), constant(x, inf)) if floating else constant(x, False, "bool")
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


def _changed(em: Emitter, x: Expr) -> Expr:
    x = em.let(x)
    return tirx.NE(x, x)


def _absolute(em: Emitter, x: Expr, dtype: str) -> Expr:
    if dtype == "float32":
        return math.absolute(x)
    if dtype.startswith("uint"):
        return x
    x = em.let(x)
    return tirx.abs(x) if dtype == "float64" else tirx.Select(x < constant(x, 0), constant(x, 0) - x, x)


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
    x = em.let(x)
    match op.kind:
        case "rsqrt":
            return one / tirx.sqrt(x)
        case "leaky_relu":
            return tirx.Select(x >= zero, x, x * constant(x, op["alpha"]))
        case "elu":
            negative = T.min(zero, x)
            grown = math.expm1(em, negative) if single else libm("expm1", negative)
            return tirx.Select(x > zero, x, constant(x, op["alpha"]) * grown)
        case "hardsigmoid":
            return math.clamp(x * constant(x, op["alpha"]) + constant(x, op["beta"]), 0.0, 1.0)
        case "hardswish":
            return x * math.clamp(x + constant(x, 3), 0.0, 6.0) * constant(x, 1 / 6)
        case "softsign":
            return x / (one + _absolute(em, x, dtype))
    return _double(em, op.kind, x)


def _double(em: Emitter, kind: str, x: Expr) -> Expr:
    """The composite functions in float64, by libm."""
    one = constant(x, 1)
    match kind:
        case "sigmoid":
            return one / (one + libm("exp", constant(x, 0) - x))
        case "silu":
            return x / (one + libm("exp", constant(x, 0) - x))
        case "gelu":
            return constant(x, 0.5) * x * (one + libm("erf", x * constant(x, 0.5**0.5)))
        case "gelu_tanh":
            z = constant(x, (2 / pi) ** 0.5) * (x + constant(x, 0.044715) * x * x * x)
            return constant(x, 0.5) * x * (one + libm("tanh", z))
        case "softplus" | "mish":
            plus = em.let(T.max(constant(x, 0), x) + libm("log1p", libm("exp", constant(x, 0) - tirx.abs(x))))
            return plus if kind == "softplus" else x * libm("tanh", plus)
    raise AssertionError(f"no element-wise meaning of {kind}")


def libm(name: str, x: Expr) -> Expr:
    """A call of the C library's function, a lane at a time in vectors."""
    dtype, lanes = dtype_of(x), lanes_of(x)
    symbol = name if dtype == "float64" else f"{name}f"
    if lanes == 1:
        return tirx.call_pure_extern(dtype, symbol, x)
    parts = [tirx.call_pure_extern(dtype, symbol, tirx.Shuffle([x], [i])) for i in range(lanes)]
    return tirx.Shuffle(parts, list(range(lanes)))
