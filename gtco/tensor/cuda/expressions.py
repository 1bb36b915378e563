"""TIR's expressions as CUDA C++ text.

An expression without a known spelling raises :class:`PrintError`, so the text never means something
else. If C++ would give another result than TIR, the text is a call of ``gtco/math.cuh``: floor
division of a number that may be negative, ``min`` and ``max`` with TIR's result for NaN, casts of
values that do not fit. Integers narrower than ``int`` are cut back to their width after each
operation.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from gtco.tensor.analysis.indices import flatten
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.cuda.spelling import (
    ARITHMETIC,
    BFLOAT16_ROUNDING,
    BINARY,
    COMPARING,
    CONDITIONAL,
    EQUAL,
    FUNCTIONS,
    NARROW_INTEGERS,
    OR,
    POSTFIX,
    PRODUCT,
    RESERVED,
    SIDES,
    SUM,
    UNARY,
    PrintError,
    ctype,
    dtype_of,
    floating,
    integer,
    of,
    suffix,
)
from gtco.tensor.emit.scalar import NARROW


@dataclass
class Expressions:
    """The names of one function's variables and buffers, and their known ranges.

    - ``names``: names of variables and buffers that exist already;
    - ``bfloat16``: the buffers whose elements are ``bf16`` in the text and ``uint16`` in TIR;
    - ``called``: buffers that are a function of their indices.
    """

    scope: Scope = field(default_factory=Scope)
    names: dict[Any, str] = field(default_factory=dict)
    bfloat16: set[Any] = field(default_factory=set)
    called: dict[Any, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    # names ----------------------------------------------------------------------------------------
    def name(self, what: Any, wanted: str) -> str:
        """A name for a variable or buffer that no other one has."""
        wanted = re.sub(r"\W", "_", wanted) or "x"
        if wanted in RESERVED or keyword.iskeyword(wanted) or wanted[0].isdigit():
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

    # expressions ----------------------------------------------------------------------------------
    def expression(self, x: Expr, least: int = 0) -> str:
        """The expression, in parentheses if its operator binds less than ``least``."""
        text, strength = self._expression(x)
        return text if strength >= least else f"({text})"

    def _expression(self, x: Expr) -> tuple[str, int]:
        if isinstance(x, bool):
            return ("true" if x else "false"), POSTFIX
        if isinstance(x, int):
            return integer(x, "int32")
        if isinstance(x, float):
            return floating(x, "float32")
        kind = type(x).__name__
        match kind:
            case "Var":
                return self.known_name(x), POSTFIX
            case "IntImm":
                return integer(int(x.value), dtype_of(x))
            case "FloatImm":
                return floating(float(x.value), dtype_of(x))
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
                return f"gtco::{kind.lower()}{of(dtype_of(x))}({a}, {b})", POSTFIX
            case "FloorDiv" | "FloorMod":
                return self._floor(x, kind)
            case "BitwiseNot":
                return self._cut(f"~{self.expression(x.a, UNARY)}", UNARY, dtype_of(x))
            case "Call":
                return self._call(x)
            case "Let":
                raise PrintError("a value bound inside an expression has no CUDA spelling here")
        if kind in BINARY:
            return self._binary(x, kind)
        raise PrintError(f"an expression of kind {kind} has no CUDA spelling here")

    def _binary(self, x: Expr, kind: str) -> tuple[str, int]:
        operator, strength = BINARY[kind]
        dtype = dtype_of(x)
        polynomial = self._polynomial(x) if kind == "Add" else None
        if polynomial is not None:
            return polynomial, POSTFIX
        inside = dtype_of(x.a)
        if inside in NARROW:  # exact enough: float32 has two bits more than twice as many
            a, b = (f"gtco::to_float({self.expression(v)})" for v in (x.a, x.b))
            if kind in COMPARING:
                return f"{a} {operator} {b}", strength
            return f"gtco::from_float<{ctype(inside)}>({a} {operator} {b})", POSTFIX
        if kind == "Mod" and inside.startswith("float"):
            return f"fmod{suffix(inside)}({self.expression(x.a)}, {self.expression(x.b)})", POSTFIX
        left, right = SIDES[strength]
        a, b = self.expression(x.a, left), self.expression(x.b, right)
        return self._cut(f"{a} {operator} {b}", strength, dtype if kind in ARITHMETIC else "")

    def _cut(self, text: str, strength: int, dtype: str) -> tuple[str, int]:
        """The text, cut to its dtype's width: C++ computes narrow integers in int, TIR in their own
        width.
        """
        if dtype in NARROW_INTEGERS:
            return f"({ctype(dtype)})({text})", UNARY
        return text, strength

    def _polynomial(self, x: Expr) -> str | None:
        """A sum of Horner's scheme as one call: ``gtco::polynomial(x, highest, ..., constant)``."""
        coefficients: list[str] = []
        over: Any = None
        while isinstance(x, tirx.Add) and isinstance(x.b, tirx.FloatImm):
            if not isinstance(x.a, tirx.Mul) or dtype_of(x) != "float32":
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
        if isinstance(x, tirx.EQ):  # true for NaN, unlike TIR's NE
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
        """A floor division or remainder. C++ truncates, which is the same if nothing is
        negative.
        """
        division = kind == "FloorDiv"
        bounds = [self.scope.analyzer.const_int_bound(v) for v in (x.a, x.b)]
        if bounds[0].min_value >= 0 and bounds[1].min_value > 0:
            a, b = self.expression(x.a, PRODUCT), self.expression(x.b, PRODUCT + 1)
            return f"{a} {'/' if division else '%'} {b}", PRODUCT
        a, b = self.expression(x.a), self.expression(x.b)
        name = f"floor_{'div' if division else 'mod'}{of(dtype_of(x))}"
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
        if not is_load(x):
            raise PrintError("what is computed lies nowhere")
        where = self._flat(x.source, x.indices, SUM)
        return self.known_name(x.source) + (f" + {where}" if where != "0" else "")

    def _load(self, x: Expr) -> str:
        return self._element(x) + (".bits" if x.source in self.bfloat16 else "")

    def _as_bfloat16(self, x: Expr) -> str:
        """An expression of bits, as a number."""
        match x:
            case _ if is_load(x) and x.source in self.bfloat16:
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
        old, new = dtype_of(x.value), dtype_of(x)
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
            return f"gtco::from_float<{ctype(new)}>({value})", POSTFIX
        if old == "float32" and new == "bool" and dtype_of(x.value) in NARROW:
            return f"{value} != 0.0f", EQUAL
        if old.startswith("float") and not new.startswith("float") and new != "bool":
            return f"gtco::to_integer<{ctype(new)}>({value})", POSTFIX
        if dtype_of(x.value) in NARROW:
            return f"({ctype(new)}){value}", UNARY
        return f"({ctype(new)}){self.expression(x.value, UNARY)}", UNARY

    def _reinterpreted(self, x: Expr) -> tuple[str, int]:
        old, new, value = dtype_of(x.args[0]), dtype_of(x), x.args[0]
        if old == new:
            return self._expression(value)
        if new == "float32" and (known := self._float_bits(value)) is not None:
            return known, POSTFIX
        if {old, new} == {"int32", "uint32"}:
            return f"({ctype(new)}){self.expression(value, UNARY)}", UNARY
        name = {"uint32": "gtco::bits", "float32": "gtco::from_bits"}.get(new)
        name = name if {old, new} == {"uint32", "float32"} else f"gtco::reinterpret<{ctype(new)}>"
        return f"{name}({self.expression(value)})", POSTFIX

    def _float_bits(self, x: Expr) -> str | None:
        """The float32 of these bits by its name in C++, if it has one. Vector code computes it by
        integer instructions.
        """
        wide = _shifted_up(x)
        if wide is not None and is_load(wide) and wide.source in self.bfloat16:
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
        return self._function(name, args, dtype_of(x)), POSTFIX

    def _function(self, name: str, args: Sequence[Expr], dtype: str) -> str:
        if name == "copysign" and len(args) == 2 and args[0].same_as(args[1]):
            return self.expression(args[0], POSTFIX)
        if name == BFLOAT16_ROUNDING:
            return f"gtco::from_float<bf16>({self.expression(args[0])}).bits"
        name = {"erff": "erf"}.get(name, name)
        if name not in FUNCTIONS:
            raise PrintError(f"the function '{name}' has no CUDA spelling here")
        if dtype in NARROW:
            given = ", ".join(f"gtco::to_float({self.expression(a)})" for a in args)
            return f"gtco::from_float<{ctype(dtype)}>({FUNCTIONS[name]}f({given}))"
        given = ", ".join(self.expression(a) for a in args)
        return f"{FUNCTIONS[name]}{suffix(dtype)}({given})"


def is_load(x: Expr) -> bool:
    return type(x).__name__ == "TensorLoad"


def _shifted_up(x: Expr) -> Expr | None:
    """The value that was cast to uint32 and shifted by 16; None if ``x`` is not such."""
    if not isinstance(x, tirx.LShift) or not isinstance(x.a, tirx.Cast):
        return None
    return x.a.value if isinstance(x.b, tirx.IntImm) and int(x.b.value) == 16 else None


def _bits_of(x: Expr) -> Expr | None:
    """The float32 whose bits these are; None if they are not bits of one."""
    if not isinstance(x, tvm.ir.Call) or x.op.name != "tirx.reinterpret":
        return None
    return x.args[0] if dtype_of(x.args[0]) == "float32" and dtype_of(x) == "uint32" else None


def _masked(x: Expr, mask: int) -> Expr | None:
    """The float32 whose bits these are, under the mask; None if they are not such bits."""
    if not isinstance(x, tirx.BitwiseAnd) or not isinstance(x.b, tirx.IntImm):
        return None
    return _bits_of(x.a) if int(x.b.value) % 2**32 == mask else None


def _is_extern(x: Expr, name: str) -> bool:
    if not isinstance(x, tvm.ir.Call) or x.op.name != "tirx.call_pure_extern":
        return False
    return str(x.args[0].value) == name
