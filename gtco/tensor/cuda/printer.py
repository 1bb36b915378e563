"""TIR as CUDA C++ text: what the shared analysis makes of a stage's expressions and loops, printed
for a GPU.

A node that this does not know raises :class:`PrintError`; nothing is printed that means something
else. What C++ would read otherwise than TIR does is printed as a call of ``gtco/math.cuh``: floor
division of what may be negative, ``min`` and ``max`` with TIR's answer for NaN, casts of what does
not fit. Integers narrower than ``int`` are cut back to their width after each operation.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isinf, isnan, prod
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from gtco.errors import GtcoError
from gtco.tensor.analysis.indices import flatten
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.scalar import NARROW
from gtco.tensor.stage import ITEM_BYTES

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
# How strongly an expression's outermost operator binds, as C++ has it; larger binds tighter.
CONDITIONAL, OR, AND, BIT_OR, BIT_XOR, BIT_AND = 1, 2, 3, 4, 5, 6
EQUAL, COMPARED, SHIFT, SUM, PRODUCT, UNARY, POSTFIX = 7, 8, 9, 10, 11, 12, 13

_BINARY = {
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
# What the sides of an operator must bind at least; more than C++ asks, for people.
_SIDES = {
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
_COMPARING = frozenset({"EQ", "NE", "LT", "LE", "GT", "GE"})
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "BitwiseNot", "LShift"})  # may leave the width
# Intrinsics of TIR and of LLVM by CUDA's name for double; float's has an f behind it.
_FUNCTIONS = {
    name: name
    for name in (
        "exp exp2 exp10 log log2 log10 log1p expm1 sin cos tan asin acos atan sinh cosh tanh asinh "
        "acosh atanh sqrt rsqrt erf floor ceil trunc pow fmod hypot atan2 fabs nearbyint copysign "
        "round ldexp nextafter"
    ).split()
} | {"rint": "nearbyint"}
_ROUNDING = frozenset({"floor", "ceil", "trunc", "nearbyint", "round", "fabs"})  # exact in float32
_RESERVED = frozenset(
    (
        "int float double half bf16 bool const auto for if else return while do switch case break "
        "continue char short long unsigned signed void template typename struct class union enum "
        "this new delete operator sizeof static extern inline namespace using volatile register "
        "true false default goto try catch throw public private protected friend virtual explicit "
        "mutable constexpr and or not xor bitand bitor compl blockIdx threadIdx blockDim gridDim "
        "min max gtco warp lane"
    ).split()
)


class PrintError(GtcoError):
    """A program that has no CUDA C++ spelling here."""


@dataclass
class Printer:
    """The names of one function's variables and buffers, and what is known of their ranges.

    ``names`` of variables and buffers that are there already; ``bfloat16`` the buffers whose
    elements are ``bf16`` where TIR sees ``uint16``; ``returned`` a buffer a store to which is the
    function's value, or with ``places`` the place of the element that is stored; ``called`` buffers
    that are a function of their indices.
    """

    scope: Scope = field(default_factory=Scope)
    names: dict[Any, str] = field(default_factory=dict)
    bfloat16: set[Any] = field(default_factory=set)
    returned: Any = None
    places: bool = False
    called: dict[Any, str] = field(default_factory=dict)
    stack_bytes: int = 4096  # the largest array that a thread may have for itself
    taken: set[str] = field(default_factory=set)

    # names ----------------------------------------------------------------------------------------
    def name(self, what: Any, wanted: str) -> str:
        """A name for a variable or buffer that no other has."""
        wanted = re.sub(r"\W", "_", wanted) or "x"
        if wanted in _RESERVED or keyword.iskeyword(wanted) or wanted[0].isdigit():
            wanted = f"{wanted}_"
        taken, found, n = self.taken | set(self.names.values()), wanted, 1
        while found in taken:
            n += 1
            found = f"{wanted}{n}" if not wanted[-1].isdigit() else f"{wanted}_{n}"
        self.taken.add(found)
        self.names[what] = found
        return found

    def known_name(self, what: Any) -> str:
        if what not in self.names:
            raise PrintError(f"'{what}' is used and nowhere defined")
        return self.names[what]

    # statements -----------------------------------------------------------------------------------
    def lines(self, statement: Any) -> list[str]:
        """The statement's lines, from the left margin."""
        kind = type(statement).__name__
        printer = getattr(self, f"_print_{kind.lower()}", None)
        if printer is None:
            raise PrintError(f"a statement of kind {kind} has no CUDA spelling here")
        found: list[str] = printer(statement)
        return found

    def _print_seqstmt(self, s: Any) -> list[str]:
        return [line for part in s.seq for line in self.lines(part)]

    def _print_bind(self, s: Any) -> list[str]:
        value = self.expression(s.value)
        dtype = _dtype(s.var)
        if dtype == "handle":
            self.names[s.var] = value
            return []
        if dtype.startswith(("int", "uint")) and isinstance(s.value, tvm.ir.Expr):
            bound = self.scope.analyzer.const_int_bound(s.value)
            extent = bound.max_value + 1 - bound.min_value
            if bound.min_value > -(2**31) and extent < 2**31:
                self.scope.bind(s.var, extent, bound.min_value)
        return [f"const {_ctype(dtype)} {self.name(s.var, _hint(s.var))} = {value};"]

    def _print_declbuffer(self, s: Any) -> list[str]:
        """A view: another name of memory of the same type, else a pointer of its own."""
        data, dtype = self.expression(s.data), str(s.buffer.dtype)
        offset = s.buffer.elem_offset
        if offset is not None and not _is_zero(offset):
            data = f"{data} + {self.expression(offset, SUM)}"
        elif data in self._narrow and dtype == "uint16":
            self.bfloat16.add(s.buffer)
            self.names[s.buffer] = data
            return []
        elif _pointee(s.data) == dtype:
            self.names[s.buffer] = data
            return []
        ctype, name = _ctype(dtype), self.name(s.buffer, s.buffer.name)
        return [f"{ctype}* const {name} = ({ctype}*)({data});"]

    @property
    def _narrow(self) -> set[str]:
        return {self.names[b] for b in self.bfloat16 if b in self.names}

    def _print_allocbuffer(self, s: Any) -> list[str]:
        size = prod(int(d) for d in s.buffer.shape)
        dtype = str(s.buffer.dtype)
        nbytes = size * ITEM_BYTES.get(dtype, 8)
        if nbytes > self.stack_bytes:
            raise PrintError(f"an array of {nbytes} bytes is more than a thread has")
        return [f"{_ctype(dtype)} {self.name(s.buffer, s.buffer.name)}[{max(size, 1)}];"]

    def _print_bufferstore(self, s: Any) -> list[str]:
        if self.returned is not None and s.buffer.same_as(self.returned):
            written: Callable[[Expr], str] = self.expression
            if self.places:
                written = self._place
            elif s.buffer in self.bfloat16:
                written = self._as_bfloat16
            return [f"return {written(s.value)};"]
        place = f"{self.known_name(s.buffer)}[{self._flat(s.buffer, s.indices)}]"
        if s.buffer in self.bfloat16:
            return [f"{place} = {self._as_bfloat16(s.value)};"]
        return [f"{place} = {self.expression(s.value)};"]

    def _print_for(self, s: Any) -> list[str]:
        return self.loop(s, self.lines)

    def loop(self, s: Any, body: Callable[[Any], list[str]]) -> list[str]:
        """The loop as a serial one."""
        var, step = s.loop_var, getattr(s, "step", None)
        if step is not None and not _is_one(step):
            raise PrintError("a loop whose step is not 1 has no CUDA spelling here")
        extent, low = self.scope.index(s.extent), self.scope.index(s.min)
        if isinstance(extent, int) and isinstance(low, int):
            self.scope.bind(var, extent, low)
        name, ctype = self.name(var, _hint(var)), _ctype(_dtype(var))
        end = self.expression(self.scope.index(s.min + s.extent), COMPARED + 1)
        head = f"for ({ctype} {name} = {self.expression(low)}; {name} < {end}; ++{name}) {{"
        unrolled = ["#pragma unroll"] if s.kind == tirx.ForKind.UNROLLED else []
        return [*unrolled, head, *indented(body(s.body)), "}"]

    def _print_ifthenelse(self, s: Any) -> list[str]:
        found = [f"if ({self.expression(s.condition)}) {{", *indented(self.lines(s.then_case))]
        if s.else_case is not None:
            found += ["} else {", *indented(self.lines(s.else_case))]
        return [*found, "}"]

    def _print_while(self, s: Any) -> list[str]:
        return [f"while ({self.expression(s.condition)}) {{", *indented(self.lines(s.body)), "}"]

    def _print_evaluate(self, s: Any) -> list[str]:
        if isinstance(s.value, tirx.IntImm) or isinstance(s.value, int):
            return []
        return [f"{self.expression(s.value)};"]

    # expressions ----------------------------------------------------------------------------------
    def expression(self, x: Expr, least: int = 0) -> str:
        """The expression, in parentheses where its operator binds less than ``least``."""
        text, strength = self._expression(x)
        return text if strength >= least else f"({text})"

    def _expression(self, x: Expr) -> tuple[str, int]:
        if isinstance(x, bool):
            return ("true" if x else "false"), POSTFIX
        if isinstance(x, int):
            return _integer(x, "int32")
        if isinstance(x, float):
            return _float(x, "float32")
        kind = type(x).__name__
        match kind:
            case "Var":
                return self.known_name(x), POSTFIX
            case "IntImm":
                return _integer(int(x.value), _dtype(x))
            case "FloatImm":
                return _float(float(x.value), _dtype(x))
            case "StringImm":
                raise PrintError("a string has no CUDA spelling here")
            case "TensorLoad":
                return self._load(x), POSTFIX
            case "Cast":
                return self._cast(x)
            case "Select":
                return self._choice(x.condition, x.true_value, x.false_value)
            case "Not":
                return self._not(x.a)
            case "Min" | "Max":
                a, b = self.expression(x.a), self.expression(x.b)
                return f"gtco::{kind.lower()}{_of(_dtype(x))}({a}, {b})", POSTFIX
            case "FloorDiv" | "FloorMod":
                return self._floor(x, kind)
            case "BitwiseNot":
                return self._cut(f"~{self.expression(x.a, UNARY)}", UNARY, _dtype(x))
            case "Call":
                return self._call(x)
            case "Let":
                raise PrintError("a value bound inside an expression has no CUDA spelling here")
        if kind in _BINARY:
            return self._binary(x, kind)
        raise PrintError(f"an expression of kind {kind} has no CUDA spelling here")

    def _binary(self, x: Expr, kind: str) -> tuple[str, int]:
        operator, strength = _BINARY[kind]
        dtype = _dtype(x)
        polynomial = self._polynomial(x) if kind == "Add" else None
        if polynomial is not None:
            return polynomial, POSTFIX
        inside = _dtype(x.a)
        if inside in NARROW:  # exact enough: float32 has twice the bits and two more
            a, b = (f"gtco::to_float({self.expression(v)})" for v in (x.a, x.b))
            if kind in _COMPARING:
                return f"{a} {operator} {b}", strength
            return f"gtco::from_float<{_ctype(inside)}>({a} {operator} {b})", POSTFIX
        if kind == "Mod" and inside.startswith("float"):
            return f"fmod{_suffix(inside)}({self.expression(x.a)}, {self.expression(x.b)})", POSTFIX
        left, right = _SIDES[strength]
        a, b = self.expression(x.a, left), self.expression(x.b, right)
        return self._cut(f"{a} {operator} {b}", strength, dtype if kind in _ARITHMETIC else "")

    def _cut(self, text: str, strength: int, dtype: str) -> tuple[str, int]:
        """C++ computes in int what is narrower; TIR in the dtype's own width."""
        if dtype in NARROW_INTEGERS:
            return f"({_ctype(dtype)})({text})", UNARY
        return text, strength

    def _polynomial(self, x: Expr) -> str | None:
        """A sum of Horner's scheme as one call: ``gtco::polynomial(x, highest, ..., constant)``."""
        coefficients: list[str] = []
        over: Any = None
        while isinstance(x, tirx.Add) and isinstance(x.b, tirx.FloatImm):
            if not isinstance(x.a, tirx.Mul) or _dtype(x) != "float32":
                return None
            if not isinstance(x.a.b, tirx.Var) or (over is not None and not x.a.b.same_as(over)):
                return None
            over = x.a.b
            coefficients.append(self.expression(x.b))
            x = x.a.a
        if len(coefficients) < 2 or not isinstance(x, tirx.FloatImm):
            return None
        terms = [self.expression(x), *reversed(coefficients)]
        return f"gtco::polynomial({self.known_name(over)}, {', '.join(terms)})"

    def _not(self, x: Expr) -> tuple[str, int]:
        if isinstance(x, tirx.EQ):  # true for NaN, which TIR's NE is not meant for
            return self._binary(x, "NE")
        return f"!{self.expression(x, UNARY)}", UNARY

    def _choice(self, condition: Expr, a: Expr, b: Expr) -> tuple[str, int]:
        parts = (condition, a, b)
        first, then, other = (
            self.expression(part, least)
            for part, least in zip(parts, (OR, OR, CONDITIONAL), strict=True)
        )
        return f"{first} ? {then} : {other}", CONDITIONAL

    def _floor(self, x: Expr, kind: str) -> tuple[str, int]:
        """C++ truncates: the same where nothing is negative."""
        division = kind == "FloorDiv"
        bounds = [self.scope.analyzer.const_int_bound(v) for v in (x.a, x.b)]
        if bounds[0].min_value >= 0 and bounds[1].min_value > 0:
            a, b = self.expression(x.a, PRODUCT), self.expression(x.b, PRODUCT + 1)
            return f"{a} {'/' if division else '%'} {b}", PRODUCT
        a, b = self.expression(x.a), self.expression(x.b)
        name = f"floor_{'div' if division else 'mod'}{_of(_dtype(x))}"
        return f"gtco::{name}({a}, {b})", POSTFIX

    def _flat(self, buffer: Any, indices: Sequence[Expr], least: int = 0) -> str:
        return self.expression(self.scope.index(flatten(indices, list(buffer.shape))), least)

    def _element(self, x: Expr) -> str:
        if x.source in self.called:
            at = ", ".join(self.expression(self.scope.index(i)) for i in x.indices)
            return f"{self.called[x.source]}({at})"
        return f"{self.known_name(x.source)}[{self._flat(x.source, x.indices)}]"

    def _place(self, x: Expr) -> str:
        """The address of an element that is read."""
        if not _is_load(x):
            raise PrintError("what is computed lies nowhere")
        where = self._flat(x.source, x.indices, SUM)
        return self.known_name(x.source) + (f" + {where}" if where != "0" else "")

    def _load(self, x: Expr) -> str:
        return self._element(x) + (".bits" if x.source in self.bfloat16 else "")

    def _as_bfloat16(self, x: Expr) -> str:
        """An expression of bits, as the number."""
        match x:
            case _ if _is_load(x) and x.source in self.bfloat16:
                return self._element(x)
            case tirx.Select():
                parts = (x.true_value, x.false_value)
                a, b = (self._as_bfloat16(v) for v in parts)
                return f"({self.expression(x.condition, OR)} ? {a} : {b})"
            case tvm.ir.Call() if x.op.name == "prim.if_then_else":
                a, b = (self._as_bfloat16(v) for v in x.args[1:])
                return f"({self.expression(x.args[0], OR)} ? {a} : {b})"
            case _ if _is_extern(x, BFLOAT16_ROUNDING):
                return self.expression(x).removesuffix(".bits")
        return f"bf16{{(uint16_t){self.expression(x, UNARY)}}}"

    def _cast(self, x: Expr) -> tuple[str, int]:
        old, new = _dtype(x.value), _dtype(x)
        value = self.expression(x.value)
        if old == new:
            return self._expression(x.value)
        if old in NARROW:
            value = f"gtco::to_float({value})"
            if new == "float32":
                return value, POSTFIX
            if new == "float64":
                return f"(double){value}", UNARY
            old = "float32"
        if new in NARROW:
            if old == "float64":
                value = f"gtco::to_odd({value})"
            elif old != "float32":
                value = f"(float)({value})"
            return f"gtco::from_float<{_ctype(new)}>({value})", POSTFIX
        if old == "float32" and new == "bool" and _dtype(x.value) in NARROW:
            return f"{value} != 0.0f", EQUAL
        if old.startswith("float") and not new.startswith("float") and new != "bool":
            return f"gtco::to_integer<{_ctype(new)}>({value})", POSTFIX
        if _dtype(x.value) in NARROW:
            return f"({_ctype(new)}){value}", UNARY
        return f"({_ctype(new)}){self.expression(x.value, UNARY)}", UNARY

    def _reinterpreted(self, x: Expr) -> tuple[str, int]:
        old, new, value = _dtype(x.args[0]), _dtype(x), x.args[0]
        if old == new:
            return self._expression(value)
        if new == "float32" and (known := self._float_bits(value)) is not None:
            return known, POSTFIX
        if {old, new} == {"int32", "uint32"}:
            return f"({_ctype(new)}){self.expression(value, UNARY)}", UNARY
        name = {"uint32": "gtco::bits", "float32": "gtco::from_bits"}.get(new)
        name = name if {old, new} == {"uint32", "float32"} else f"gtco::reinterpret<{_ctype(new)}>"
        return f"{name}({self.expression(value)})", POSTFIX

    def _float_bits(self, x: Expr) -> str | None:
        """The float32 of these bits by the name that C++ has for it, where it has one: what vector
        code spells as integer instructions.
        """
        wide = _shifted_up(x)
        if wide is not None and _is_load(wide) and wide.source in self.bfloat16:
            return f"gtco::to_float({self._element(wide)})"
        if wide is not None and _is_extern(wide, BFLOAT16_ROUNDING):
            return f"gtco::to_float({self._as_bfloat16(wide)})"
        if (value := _masked(x, 0x7FFFFFFF)) is not None:
            return f"fabsf({self.expression(value)})"
        if isinstance(x, tirx.BitwiseOr):
            magnitude, sign = _bits_of(x.a), _masked(x.b, 0x80000000)
            if magnitude is not None and sign is not None:
                return f"copysignf({self.expression(magnitude)}, {self.expression(sign)})"
        return None

    def _call(self, x: Expr) -> tuple[str, int]:
        name = x.op.name.removeprefix("tirx.").removeprefix("prim.")
        args = list(x.args)
        match name:
            case "reinterpret":
                return self._reinterpreted(x)
            case "if_then_else":
                return self._choice(*args)
            case "likely":
                return self._expression(args[0])
            case "shift_left" | "shift_right" | "bitwise_and" | "bitwise_or" | "bitwise_xor":
                raise PrintError(f"a call of {name} has no CUDA spelling here")
            case "call_llvm_pure_intrin" | "call_llvm_intrin":
                name = llvm_get_intrinsic_name(int(args[0])).removeprefix("llvm.").split(".")[0]
                args = args[1:]
            case "call_pure_extern":
                name, args = args[0].value, args[1:]
            case "call_extern" if args[0].value.startswith("gtco::"):
                given = ", ".join(self.expression(a) for a in args[1:])
                return f"{args[0].value}({given})", POSTFIX
            case "buffer_data":
                return self.known_name(args[0]), POSTFIX
            case "address_of":
                return self._place(args[0]), SUM
            case "isnan":
                value = self.expression(args[0])
                return f"gtco::is_nan({value})", POSTFIX
            case "isinf" | "isfinite":
                return f"gtco::is_{name[2:]}({self.expression(args[0])})", POSTFIX
            case "popcount":
                return f"__popc({self.expression(args[0])})", POSTFIX
            case "sigmoid":
                return f"gtco::sigmoid({self.expression(args[0])})", POSTFIX
        return self._function(name, args, _dtype(x)), POSTFIX

    def _function(self, name: str, args: Sequence[Expr], dtype: str) -> str:
        if name == "copysign" and len(args) == 2 and args[0].same_as(args[1]):
            return self.expression(args[0], POSTFIX)
        if name == BFLOAT16_ROUNDING:
            return f"gtco::from_float<bf16>({self.expression(args[0])}).bits"
        name = {"erff": "erf"}.get(name, name)
        if name not in _FUNCTIONS:
            raise PrintError(f"the function '{name}' has no CUDA spelling here")
        if dtype in NARROW:
            given = ", ".join(f"gtco::to_float({self.expression(a)})" for a in args)
            return f"gtco::from_float<{_ctype(dtype)}>({_FUNCTIONS[name]}f({given}))"
        given = ", ".join(self.expression(a) for a in args)
        return f"{_FUNCTIONS[name]}{_suffix(dtype)}({given})"


# What a GPU rounds float32 to a bfloat16's bits by, as an external function of TIR.
BFLOAT16_ROUNDING = "gtco_bfloat16_bits"


def indented(lines: Sequence[str]) -> list[str]:
    return [line if line.startswith("#") else f"  {line}" for line in lines]


def _dtype(x: Expr) -> str:
    type_ = getattr(x, "ty", None)
    if type_ is None:
        return str(x.dtype)
    text = "handle" if isinstance(type_, tvm.ir.PointerType) else str(type_)
    if re.search(r"\dx\d+$", text):
        raise PrintError(f"a vector, {text}, has no CUDA spelling here")
    return text


def _ctype(dtype: str) -> str:
    if dtype not in CTYPES:
        raise PrintError(f"the type {dtype} has no CUDA spelling here")
    return CTYPES[dtype]


def _of(dtype: str) -> str:
    """The argument of a template that literals would leave in doubt."""
    return "" if dtype in ("float32", "float64", "int32", *NARROW) else f"<{_ctype(dtype)}>"


def _pointee(x: Expr) -> str | None:
    if isinstance(x, tvm.ir.Call) and x.op.name.endswith("buffer_data"):
        return str(x.args[0].dtype)
    type_ = getattr(x, "ty", None)
    return str(type_.element_type) if isinstance(type_, tvm.ir.PointerType) else None


def _hint(var: Any) -> str:
    return str(getattr(var, "name", None) or getattr(var, "name_hint", "x"))


def _suffix(dtype: str) -> str:
    if dtype not in ("float32", "float64"):
        raise PrintError(f"no function computes in {dtype}")
    return "f" if dtype == "float32" else ""


def _is_load(x: Expr) -> bool:
    return type(x).__name__ == "TensorLoad"


def _is_zero(x: Expr) -> bool:
    return (isinstance(x, int) and x == 0) or (isinstance(x, tirx.IntImm) and int(x.value) == 0)


def _is_one(x: Expr) -> bool:
    return (isinstance(x, int) and x == 1) or (isinstance(x, tirx.IntImm) and int(x.value) == 1)


def _integer(value: int, dtype: str) -> tuple[str, int]:
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


def _float(value: float, dtype: str) -> tuple[str, int]:
    if dtype in NARROW:
        number = np.asarray(value, np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
        return f"{_ctype(dtype)}{{{int(number.view(np.uint16)):#06x}}}", POSTFIX
    if dtype not in ("float32", "float64"):
        raise PrintError(f"a constant of {dtype} has no CUDA spelling here")
    if isnan(value):
        return f"gtco::nan<{_ctype(dtype)}>()", POSTFIX
    if isinf(value):
        sign, strength = ("-", UNARY) if value < 0 else ("", POSTFIX)
        return f"{sign}gtco::infinity<{_ctype(dtype)}>()", strength
    text = str(np.float32(value)) if dtype == "float32" else repr(float(value))
    text = text if any(c in text for c in ".e") else f"{text}.0"
    strength = UNARY if text.startswith("-") else POSTFIX
    return text + ("f" if dtype == "float32" else ""), strength


def _shifted_up(x: Expr) -> Expr | None:
    """What was cast to uint32 and shifted by 16."""
    if not isinstance(x, tirx.LShift) or not isinstance(x.a, tirx.Cast):
        return None
    return x.a.value if isinstance(x.b, tirx.IntImm) and int(x.b.value) == 16 else None


def _bits_of(x: Expr) -> Expr | None:
    """The float32 whose bits these are."""
    if not isinstance(x, tvm.ir.Call) or x.op.name != "tirx.reinterpret":
        return None
    return x.args[0] if _dtype(x.args[0]) == "float32" and _dtype(x) == "uint32" else None


def _masked(x: Expr, mask: int) -> Expr | None:
    """The float32 of whose bits these are the ones in the mask."""
    if not isinstance(x, tirx.BitwiseAnd) or not isinstance(x.b, tirx.IntImm):
        return None
    return _bits_of(x.a) if int(x.b.value) % 2**32 == mask else None


def _is_extern(x: Expr, name: str) -> bool:
    if not isinstance(x, tvm.ir.Call) or x.op.name != "tirx.call_pure_extern":
        return False
    return str(x.args[0].value) == name
