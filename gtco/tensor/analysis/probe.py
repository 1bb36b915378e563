"""How a stage's tensors lie in memory along a variable: index maps followed, no code emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.sym import detect_linear_equation

from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.indices import broadcast_index, flatten
from gtco.tensor.analysis.movement import source_index
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage


@dataclass
class Probe:
    """Records where each load of a stage lies, flat, and each condition that a range does not
    decide, of the tensors that are followed.
    """

    stage: Stage
    scope: Scope = field(default_factory=Scope)
    loads: list[tuple[str, Expr]] = field(default_factory=list)
    conditions: list[Expr] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # where the parts of concats begin that are read
    # what was followed already; holds the expressions, so that none gets another's id
    _seen: dict[tuple[object, ...], list[Expr]] = field(default_factory=dict)

    def follow(self, tensor: str, index: Sequence[Expr]) -> None:
        """Everything that ``tensor`` reads at an index."""
        self._follow(tensor, [self.scope.index(i) for i in index])

    def _follow(self, tensor: str, index: list[Expr]) -> None:
        """Through ``tensor`` at an index in simplest form. A tensor that several operators read at
        one symbolic index is followed once.
        """
        if not all(isinstance(i, int) for i in index):
            key = (tensor, *(i if isinstance(i, int) else id(i) for i in index))
            if key in self._seen:
                return
            self._seen[key] = index
        op = self.stage.producers.get(tensor)
        if op is None:
            self._load(tensor, index)
        elif pattern(op.kind) == ELEMENTWISE:
            for x in op.inputs:
                self._follow(x, broadcast_index(index, shape_of(self.stage, x)))
        else:
            self._moved(op, index)

    def _load(self, tensor: str, index: Sequence[Expr]) -> None:
        self.loads.append((tensor, self.scope.index(flatten(index, shape_of(self.stage, tensor)))))

    def _moved(self, op: Operator, index: list[Expr]) -> None:
        source = op.inputs[0]
        match op.kind:
            case "concat":
                self._concatenated(op, index)
            case "pad":
                self._padded(op, index)
            case "gather":
                axis, rank = op["axis"], len(shape_of(self.stage, op.inputs[1]))
                self.follow(op.inputs[1], index[axis : axis + rank])
                self.follow(source, [*index[:axis], 0, *index[axis + rank :]])
            case _:
                self.follow(source, source_index(op, index, shape_of(self.stage, source)))

    def _concatenated(self, op: Operator, index: list[Expr]) -> None:
        known = self.scope.known
        axis, start = op["axis"], 0
        for x in op.inputs:
            stop = start + shape_of(self.stage, x)[axis]
            if known(index[axis] < start) is not True and known(index[axis] >= stop) is not True:
                for condition in (index[axis] >= start, index[axis] < stop):
                    if known(condition) is not True:
                        self.conditions.append(condition)
                self.parts.append(start)
                self.follow(x, [*index[:axis], index[axis] - start, *index[axis + 1 :]])
            start = stop

    def _padded(self, op: Operator, index: list[Expr]) -> None:
        inner = [i - b for i, b in zip(index, op["before"], strict=True)]
        for i, n in zip(inner, shape_of(self.stage, op.inputs[0]), strict=True):
            for condition in (i >= 0, i < n):
                known = self.scope.known(condition)
                if known is False:
                    self.loads.append(("", 0))  # the padding's constant
                    return
                if known is None:
                    self.conditions.append(condition)
        self.follow(op.inputs[0], inner)

    def through(self, tail: Epilogue, index: Sequence[Expr]) -> None:
        """What the epilogue loads for the anchor's element at ``index``, and where its result goes,
        recorded like a load.
        """
        where = tail.positions([self.scope.index(i) for i in index])
        for op in tail.operators:
            for x in op.inputs:
                if x not in where:
                    self.follow(x, broadcast_index(where[op.output], shape_of(self.stage, x)))
        output = tail.stage.output.output
        self._load(output, where[output])

    def strides(self, var: Expr) -> list[int | None]:
        """For each load, how far the next value of ``var`` lies in memory; None where that differs
        from place to place.
        """
        found: list[int | None] = []
        for _, flat in self.loads:
            parts = (0, 0) if isinstance(flat, int) else detect_linear_equation(flat, [var])
            found.append(int(parts[0]) if len(parts) == 2 else None)
        return found

    def apart(self, var: Expr) -> int:
        """How many loads are no vectors along ``var``."""
        return sum(s not in (0, 1) for s in self.strides(var))

    def decided_by(self, var: Expr) -> int:
        """How many conditions depend on ``var``."""
        return sum(depends_on(condition, var) for condition in self.conditions)


def depends_on(expr: Expr, var: Expr) -> bool:
    """Does the variable occur in the expression?"""
    return isinstance(expr, tvm.ir.Expr) and any(
        v.same_as(var) for v in tirx.analysis.undefined_vars(expr)
    )
