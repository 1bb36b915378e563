"""The C++ spelling of TIR's parts: types, operators and their precedence, functions, literals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isinf, isnan

import ml_dtypes
import numpy as np
import tvm

from gtco.support.errors import GtcoError
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.emit.scalar import NARROW

CTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "bfloat16": "bf16",
    "int64": "int64_t",
    "int32": "int",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "bool": "bool",
}
NARROW_INTEGERS = ("int8", "int16", "uint8", "uint16")
# The precedence of an expression's outermost operator in C++; larger binds tighter.
CONDITIONAL, OR, AND, BIT_OR, BIT_XOR, BIT_AND = 1, 2, 3, 4, 5, 6
EQUAL, COMPARED, SHIFT, SUM, PRODUCT, UNARY, POSTFIX = 7, 8, 9, 10, 11, 12, 13

BINARY = {
    "Add": ("+", SUM),
    "Sub": ("-", SUM),
    "Mul": ("*", PRODUCT),
    "Div": ("/", PRODUCT),
    "Mod": ("%", PRODUCT),
    "BitwiseAnd": ("&", BIT_AND),
    "BitwiseOr": ("|", BIT_OR),
    "BitwiseXor": ("^", BIT_XOR),
    "LShift": ("<<", SHIFT),
    "RShift": (">>", SHIFT),
    "EQ": ("==", EQUAL),
    "NE": ("!=", EQUAL),
    "LT": ("<", COMPARED),
    "LE": ("<=", COMPARED),
    "GT": (">", COMPARED),
    "GE": (">=", COMPARED),
    "And": ("&&", AND),
    "Or": ("||", OR),
}
# The least precedence of the sides of an operator; more than C++ needs, so that people read it
# easily.
SIDES = {
    PRODUCT: (PRODUCT, UNARY),
    SUM: (SUM, PRODUCT),
    SHIFT: (UNARY, UNARY),
    COMPARED: (SUM, SUM),
    EQUAL: (SUM, SUM),
    BIT_AND: (UNARY, UNARY),
    BIT_XOR: (UNARY, UNARY),
    BIT_OR: (UNARY, UNARY),
    AND: (AND, EQUAL),
    OR: (EQUAL, EQUAL),
}
COMPARING = frozenset({"EQ", "NE", "LT", "LE", "GT", "GE"})
ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "BitwiseNot", "LShift"})  # may leave the width
# Intrinsics of TIR and of LLVM by CUDA's name for double; the name for float has an f at its end.
FUNCTIONS = {
    name: name
    for name in (
        "exp exp2 exp10 log log2 log10 log1p expm1 sin cos tan asin acos atan sinh cosh tanh asinh "
        "acosh atanh sqrt rsqrt erf floor ceil trunc pow fmod hypot atan2 fabs nearbyint copysign "
        "round ldexp nextafter fma"
    ).split()
} | {"rint": "nearbyint"}
ROUNDING = frozenset({"floor", "ceil", "trunc", "nearbyint", "round", "fabs"})  # exact in float32
RESERVED = frozenset(
    (
        "int float double half bf16 bool const auto for if else return while do switch case break "
        "continue char short long unsigned signed void template typename struct class union enum "
        "this new delete operator sizeof static extern inline namespace using volatile register "
        "true false default goto try catch throw public private protected friend virtual explicit "
        "mutable constexpr and or not xor bitand bitor compl blockIdx threadIdx blockDim gridDim "
        "min max gtco warp lane block"
    ).split()
)
# The external function of TIR with which a GPU rounds float32 to a bfloat16's bits.
BFLOAT16_ROUNDING = "gtco_bfloat16_bits"


class PrintError(GtcoError):
    """A program that has no CUDA C++ spelling here."""


def indented(lines: Sequence[str]) -> list[str]:
    return [line if line.startswith("#") else f"  {line}" for line in lines]


def dtype_of(x: Expr) -> str:
    type_ = getattr(x, "ty", None)
    if type_ is None:
        return str(x.dtype)
    text = "handle" if isinstance(type_, tvm.ir.PointerType) else str(type_)
    if re.search(r"\dx\d+$", text):
        raise PrintError(f"a vector, {text}, has no CUDA spelling here")
    return text


def ctype(dtype: str) -> str:
    if dtype not in CTYPES:
        raise PrintError(f"the type {dtype} has no CUDA spelling here")
    return CTYPES[dtype]


def of(dtype: str) -> str:
    """The template argument for cases in which literals would leave the type open."""
    return "" if dtype in ("float32", "float64", "int32", *NARROW) else f"<{ctype(dtype)}>"


def suffix(dtype: str) -> str:
    if dtype not in ("float32", "float64"):
        raise PrintError(f"no function computes in {dtype}")
    return "f" if dtype == "float32" else ""


def integer(value: int, dtype: str) -> tuple[str, int]:
    if dtype == "bool":
        return ("true" if value else "false"), POSTFIX
    if dtype == "int32" and value == -(2**31):
        return "(-2147483647 - 1)", POSTFIX
    if dtype == "int64" and value == -(2**63):
        return "(-9223372036854775807ll - 1)", POSTFIX
    if dtype == "uint64":
        return f"{value % 2**64}ull", POSTFIX
    if dtype == "uint32":
        value %= 2**32
        return (f"{value}u" if value < 1 << 16 else f"{value:#010x}u"), POSTFIX
    text = f"{value}{'ll' if dtype == 'int64' else ''}"
    return text, POSTFIX if value >= 0 else UNARY


def floating(value: float, dtype: str) -> tuple[str, int]:
    if dtype in NARROW:
        number = np.asarray(value, np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
        return f"{ctype(dtype)}{{{int(number.view(np.uint16)):#06x}}}", POSTFIX
    if dtype not in ("float32", "float64"):
        raise PrintError(f"a constant of {dtype} has no CUDA spelling here")
    if isnan(value):
        return f"gtco::nan<{ctype(dtype)}>()", POSTFIX
    if isinf(value):
        sign, strength = ("-", UNARY) if value < 0 else ("", POSTFIX)
        return f"{sign}gtco::infinity<{ctype(dtype)}>()", strength
    text = str(np.float32(value)) if dtype == "float32" else repr(float(value))
    text = text if any(c in text for c in ".e") else f"{text}.0"
    strength = UNARY if text.startswith("-") else POSTFIX
    return text + ("f" if dtype == "float32" else ""), strength
