"""The known facts about integers: the ranges of variables, and their consequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer

Expr = Any  # a TIR expression, or a Python number if TIR takes one
Index = Sequence[Expr]


@dataclass
class Scope:
    """Variables with their ranges. The emitter of code is a scope with the loops around it
    (:class:`gtco.tensor.emit.emitter.Emitter`); an analysis makes its own.
    """

    analyzer: Any = field(default_factory=Analyzer, kw_only=True)
    wide: bool = field(default=False, kw_only=True)  # True if indices are int64

    @property
    def index_dtype(self) -> str:
        return "int64" if self.wide else "int32"

    def variable(self, name: str) -> Expr:
        return tirx.Var(name, self.index_dtype)

    def number(self, value: Expr) -> Expr:
        """A number as a constant of the indices' dtype; an expression unchanged."""
        return tirx.const(value, self.index_dtype) if isinstance(value, int) else value

    def bind(self, var: Expr, extent: int, low: int = 0) -> None:
        """Tells the simplifier that low <= var < low + extent. A number needs no range."""
        if isinstance(var, tirx.Var):
            dtype = str(var.ty)
            ends = (tirx.const(end, dtype) for end in (low, low + extent))
            self.analyzer.bind(var, tvm.ir.Range(*ends))

    def variables(self, extents: Sequence[int], name: str = "i") -> list[Expr]:
        """A new variable for each extent."""
        made = [self.variable(name) for _ in extents]
        for var, extent in zip(made, extents, strict=True):
            self.bind(var, extent)
        return made

    def index(self, value: Expr) -> Expr:
        """The integer expression in its simplest form."""
        if isinstance(value, int):
            return value
        simple = self.analyzer.simplify(value)
        return int(simple.value) if isinstance(simple, tirx.IntImm) else simple

    def known(self, condition: Expr) -> bool | None:
        """True or False if the ranges decide the condition, else None."""
        if isinstance(condition, bool):
            return condition
        value = self.analyzer.simplify(condition)
        return bool(value.value) if isinstance(value, tirx.IntImm) else None
