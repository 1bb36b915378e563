"""What is known of integers: the ranges of variables, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer

Expr = Any  # a TIR expression, or a Python number where TIR takes one
Index = Sequence[Expr]


@dataclass
class Scope:
    """Variables with their ranges. What emits code is one, with the loops around it
    (:class:`gtco.tensor.emit.emitter.Emitter`); what only asks makes its own.
    """

    analyzer: Any = field(default_factory=Analyzer, kw_only=True)

    def bind(self, var: Expr, extent: int, low: int = 0) -> None:
        """Let the simplifier know that low <= var < low + extent; a number is known already."""
        if isinstance(var, tirx.Var):
            self.analyzer.bind(var, tvm.ir.Range(low, low + extent))

    def variables(self, extents: Sequence[int], name: str = "i") -> list[Expr]:
        """A new variable for each extent."""
        made = [tirx.Var(name, "int32") for _ in extents]
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
        """True or False where the ranges decide the condition, else None."""
        if isinstance(condition, bool):
            return condition
        value = self.analyzer.simplify(condition)
        return bool(value.value) if isinstance(value, tirx.IntImm) else None
