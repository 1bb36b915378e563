"""Folding of columns side by side: vectors run along the last axis, which is kept.

The rows sketch uses it for axes other than the last, and moments are taken with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.fold import ACCUMULATORS, Combine
from gtco.tensor.sketch.shared.streaming import unflatten, vector_runs

CHUNK = 4  # vectors of columns that are folded side by side

Value = Callable[[list[Expr], int, Expr], Expr]  # (index, first column of the run, lane) -> value


class ColumnChunk:
    """``width`` neighbouring columns from ``first`` of a tensor of ``shape``. ``axes`` are folded,
    and ``outer`` is the position along all other axes.
    """

    def __init__(
        self,
        em: Emitter,
        shape: Sequence[int],
        axes: Sequence[int],
        outer: Sequence[Expr],
        first: Expr,
        width: int,
    ) -> None:
        self.em, self.shape, self.axes = em, shape, axes
        self.outer, self.first, self.width = list(outer), first, width
        self.runs = [
            (b + k * n, n) for b, count, n in vector_runs(width, em.lanes) for k in range(count)
        ]

    def each(self, body: Callable[[int, Expr], None]) -> None:
        """``body(begin, lane)`` for every column: column ``begin + lane`` of the chunk."""
        for begin, lanes in self.runs:
            with self.em.vector(lanes) as lane:
                body(begin, lane)

    def at(self, r: Expr, begin: int, lane: Expr) -> list[Expr]:
        """The tensor's index of folded position ``r`` in a column."""
        position = list(self.outer)
        extents = [self.shape[a] for a in self.axes]
        for axis, i in zip(self.axes, unflatten(self.em, r, extents), strict=True):
            position[axis] = i
        return [*position[:-1], self.first + begin + lane]

    def across(self, body: Callable[[list[Expr], int, Expr], None]) -> None:
        """``body(index, begin, lane)`` for every folded position and column."""
        with self.em.loop(prod(self.shape[a] for a in self.axes), "r") as r:
            self.each(lambda begin, lane: body(self.at(r, begin, lane), begin, lane))

    def fold(self, value: Value, combine: Combine, start: float) -> Array:
        """Every column's values combined, from ``start`` on. If there are few columns, several rows
        are taken at a time, so that enough chains hide the latency of an addition.
        """
        em, width = self.em, self.width
        rows = prod(self.shape[a] for a in self.axes)
        side = max(1, min(ACCUMULATORS // len(self.runs), rows))
        acc = em.registers(side * width)

        def into(k: int, r: Expr) -> None:
            def one(begin: int, lane: Expr) -> None:
                at = [k * width + begin + lane]
                part = value(self.at(r, begin, lane), begin, lane)
                em.store(acc, at, combine(em.load(acc, at), part))

            self.each(one)

        for k in range(side):
            self.each(
                lambda begin, lane, k=k: em.store(  # type: ignore[misc]
                    acc, [k * width + begin + lane], tirx.const(start, "float32")
                )
            )
        with em.loop(rows // side, "r") as r:
            for k in range(side):
                into(k, r * side + k)
        for k in range(rows % side):
            into(k, rows // side * side + k)
        for k in range(1, side):
            self.each(
                lambda begin, lane, k=k: em.store(  # type: ignore[misc]
                    acc,
                    [begin + lane],
                    combine(em.load(acc, [begin + lane]), em.load(acc, [k * width + begin + lane])),
                )
            )
        return acc
