"""The loops of any kernel as lines, read from its TIR as it was emitted: before TVM unrolls and
vectorizes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from gtco.tensor.loops import STEPS, THREADS, UNROLLED, VECTOR, Line

MOST_LINES = 120  # lines of a program; the rest is counted
_LONGEST = 44  # characters of an expression that is shown as it is


def program_lines(function: Any, tasks: int) -> tuple[Line, ...]:
    """The loops of a kernel's function, and what they store. Equal stores that follow each other
    are one line. ``tasks``: the extent of the range that the threads share.
    """
    lines = list(_Walk(function, tasks).lines(function.body, 0))
    left = len(lines) - MOST_LINES
    if left <= 1:
        return tuple(lines)
    return (*lines[:MOST_LINES], Line(0, text=f"and {left} more lines"))


class _Walk:
    """The function, and the variables of its range of tasks."""

    def __init__(self, function: Any, tasks: int) -> None:
        self.tasks = tasks
        *_, output, _, begin, end = function.params
        self.ranged = {begin, end}
        # places of parameters and buffers; all others lie in scratch
        self.places: dict[Any, str] = {output: "output"}
        self.shared = False  # is the loop over tasks found?

    def lines(self, statement: Any, depth: int) -> Iterator[Line]:
        """The lines of a statement."""
        stores: list[_Stores] = []
        for part in self.parts(statement):
            if (found := self.stores(part)) is not None:
                for one in found:
                    if stores and stores[-1].alike(one):
                        stores[-1] = replace(one, count=stores[-1].count + one.count)
                    else:
                        stores.append(one)
                continue
            yield from (Line(depth, text=str(one)) for one in stores)
            stores.clear()
            if isinstance(part, tirx.For):
                yield from self.loop(part, depth)
            elif isinstance(part, tirx.IfThenElse):
                yield from self.choice(part, depth)
            elif isinstance(part, tirx.While):
                yield Line(depth, text=f"while {_short(part.condition) or 'something holds'}:")
                yield from self.lines(part.body, depth + 1)
        yield from (Line(depth, text=str(one)) for one in stores)

    def parts(self, statement: Any) -> Iterator[Any]:
        """The loops, choices and stores of a statement, in order. Notes what is declared before
        them.
        """
        match statement:
            case tirx.SeqStmt():
                for part in statement.seq:
                    yield from self.parts(part)
            case tirx.Bind():
                if self._of_range(statement.value):
                    self.ranged.add(statement.var)
            case tirx.DeclBuffer():
                # a parameter, or another buffer's data
                source = getattr(statement.data, "args", [statement.data])[0]
                if place := self.places.get(source):
                    self.places[statement.buffer] = place
            case tirx.AllocBuffer():
                local = statement.buffer.scope() == "local"
                self.places[statement.buffer] = "registers" if local else "the stack"
            case tirx.For() | tirx.IfThenElse() | tirx.While() | tirx.BufferStore():
                yield statement
            case _ if hasattr(statement, "body"):
                yield from self.parts(statement.body)

    def stores(self, part: Any) -> list[_Stores] | None:
        """What a store writes, or the stores of a loop over lanes; None for all else."""
        if isinstance(part, tirx.BufferStore):
            dtype, _, lanes = str(part.value.ty).partition("x")
            return [_Stores(1, int(lanes or 1), dtype, self.place(part.buffer))]
        if not isinstance(part, tirx.For) or part.kind != tirx.ForKind.VECTORIZED:
            return None
        found: list[_Stores] = []
        for one in self.parts(part.body):
            if (inner := self.stores(one)) is None:
                return None
            found += [replace(s, lanes=s.lanes * int(part.extent)) for s in inner]
        return found

    def loop(self, loop: Any, depth: int) -> Iterator[Line]:
        inner = tuple(self.lines(loop.body, depth + 1))
        name, extent = str(loop.loop_var.name), loop.extent
        many = int(extent) if isinstance(extent, tirx.IntImm) else None
        kinds = {tirx.ForKind.VECTORIZED: VECTOR, tirx.ForKind.UNROLLED: UNROLLED}
        runs, text = kinds.get(loop.kind, STEPS), ""
        if not self.shared and (self._of_range(loop.min) or self._of_range(extent)):
            self.shared, runs, many = True, THREADS, self.tasks
        elif many is None:
            many, text = _choice(extent)
        if inner:  # loops that only prefetch are left out
            yield Line(depth, name, many, 1, runs, text)
            yield from inner

    def choice(self, choice: Any, depth: int) -> Iterator[Line]:
        # a kernel does nothing where its range is empty: that choice is worth no line
        alone = self._of_range(choice.condition) and not self.shared
        inside = depth if alone else depth + 1
        then, other = (
            tuple(self.lines(branch, inside)) if branch is not None else ()
            for branch in (choice.then_case, choice.else_case)
        )
        if alone:
            yield from (*then, *other)
            return
        condition = _short(choice.condition)
        if then:
            yield Line(depth, text=f"if {condition}:" if condition else "in some iterations:")
            yield from then
        if other:
            yield Line(depth, text="otherwise:" if then else f"unless {condition}:")
            yield from other

    def place(self, buffer: Any) -> str:
        """Where a buffer lies: in registers, on the stack, in the output, or in the thread's
        scratch.
        """
        return self.places.get(buffer, "scratch")

    def _of_range(self, value: Any) -> bool:
        """True if the value depends on the range of tasks."""
        return not self.ranged.isdisjoint(tirx.analysis.undefined_vars(value, []))


@dataclass(frozen=True)
class _Stores:
    """Equal stores that follow each other. ``lanes``: neighbours that each of them writes."""

    count: int
    lanes: int
    dtype: str
    place: str

    def alike(self, other: _Stores) -> bool:
        return (self.lanes, self.dtype, self.place) == (other.lanes, other.dtype, other.place)

    def __str__(self) -> str:
        """``26 vectors of 16 float32 -> registers``"""
        if self.lanes == 1:
            what = f"{self.count} {self.dtype}"
        else:
            what = f"{self.count} vector{'s' * (self.count > 1)} of {self.lanes} {self.dtype}"
        return f"{what} -> {self.place}"


def _choice(extent: Any) -> tuple[int | None, str]:
    """The most iterations, and in words what decides, for an extent that is not a constant."""
    if isinstance(extent, tirx.Select):
        both = extent.true_value, extent.false_value
        if all(isinstance(one, tirx.IntImm) for one in both):
            first, second = sorted(map(int, both), reverse=True)
            return first, f"or {second}"
    return None, _short(extent)


def _short(value: Any) -> str:
    """The expression as TVM prints it, if that is short enough to be read."""
    text = str(value).splitlines()[-1].strip()
    return text if len(text) <= _LONGEST and "T." not in text else ""
