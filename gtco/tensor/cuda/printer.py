"""TIR's statements as CUDA C++ text: the loops of a stage, printed for a GPU. A statement without a
known spelling raises :class:`PrintError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import tirx

from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.expressions import Expressions
from gtco.tensor.cuda.spelling import (
    COMPARED,
    SUM,
    PrintError,
    ctype,
    dtype_of,
    indented,
)
from gtco.tensor.stage import ITEM_BYTES


@dataclass
class Printer(Expressions):
    """The statements of one function.

    - ``returned``: a buffer; a store to it is the function's value;
    - ``places``: the value is the place of the stored element instead;
    - ``stack_bytes``: the largest array that a thread may have for itself.
    """

    returned: Any = None
    places: bool = False
    stack_bytes: int = 4096

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
        dtype = dtype_of(s.var)
        if dtype == "handle":
            self.names[s.var] = value
            return []
        if dtype.startswith(("int", "uint")) and isinstance(s.value, tvm.ir.Expr):
            bound = self.scope.analyzer.const_int_bound(s.value)
            extent = bound.max_value + 1 - bound.min_value
            narrower = bound.max_value < tirx.max_value(dtype).value  # a range's end is a value too
            if bound.min_value > -(2**31) and extent < 2**31 and narrower:
                self.scope.bind(s.var, extent, bound.min_value)
        return [f"const {ctype(dtype)} {self.name(s.var, hint(s.var))} = {value};"]

    def _print_declbuffer(self, s: Any) -> list[str]:
        """A view: another name for memory of the same type, else a pointer of its own."""
        data, dtype = self.expression(s.data), str(s.buffer.dtype)
        offset = s.buffer.elem_offset
        if offset is not None and not is_zero(offset):
            data = f"{data} + {self.expression(offset, SUM)}"
        elif data in self._narrow and dtype == "uint16":
            self.bfloat16.add(s.buffer)
            self.names[s.buffer] = data
            return []
        elif pointee(s.data) == dtype:
            self.names[s.buffer] = data if data.isidentifier() else f"({data})"
            return []
        kind, name = ctype(dtype), self.name(s.buffer, s.buffer.name)
        return [f"{kind}* const {name} = ({kind}*)({data});"]

    @property
    def _narrow(self) -> set[str]:
        return {self.names[b] for b in self.bfloat16 if b in self.names}

    def _print_allocbuffer(self, s: Any) -> list[str]:
        size = prod(int(d) for d in s.buffer.shape)
        dtype = str(s.buffer.dtype)
        nbytes = size * ITEM_BYTES.get(dtype, 8)
        if nbytes > self.stack_bytes:
            raise PrintError(f"an array of {nbytes} bytes is more than a thread has")
        return [f"{ctype(dtype)} {self.name(s.buffer, s.buffer.name)}[{max(size, 1)}];"]

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
        if step is not None and not is_one(step):
            raise PrintError("a loop whose step is not 1 has no CUDA spelling here")
        extent, low = self.scope.index(s.extent), self.scope.index(s.min)
        if isinstance(extent, int) and isinstance(low, int):
            self.scope.bind(var, extent, low)
        name, kind = self.name(var, hint(var)), ctype(dtype_of(var))
        end = self.expression(self.scope.index(s.min + s.extent), COMPARED + 1)
        head = f"for ({kind} {name} = {self.expression(low)}; {name} < {end}; ++{name}) {{"
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


def pointee(x: Expr) -> str | None:
    if isinstance(x, tvm.ir.Call) and x.op.name.endswith("buffer_data"):
        return str(x.args[0].dtype)
    type_ = getattr(x, "ty", None)
    return str(type_.element_type) if isinstance(type_, tvm.ir.PointerType) else None


def hint(var: Any) -> str:
    return str(getattr(var, "name", None) or getattr(var, "name_hint", "x"))


def is_zero(x: Expr) -> bool:
    return (isinstance(x, int) and x == 0) or (isinstance(x, tirx.IntImm) and int(x.value) == 0)


def is_one(x: Expr) -> bool:
    return (isinstance(x, int) and x == 1) or (isinstance(x, tirx.IntImm) and int(x.value) == 1)
