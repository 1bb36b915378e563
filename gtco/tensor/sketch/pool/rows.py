"""Pooling of images channels first, or of one channel: down the columns in vectors, then along a
row.

::

    for task in images x channels x output rows:             # parallel
      for vector of input columns:
        line[column] = fold of the window's rows             # contiguous; each read once
      for vector of output columns:
        out = fold over kw of line[columns of the tap]       # steps of the stride, by shuffles

The ends of the line hold the value that padding counts as, so no column needs a border case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Protocol

from tvm import tirx

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.window import Geometry
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.emit.transpose import pick
from gtco.tensor.sketch.shared.streaming import tasks_of_rows, unflatten, whole_runs
from gtco.tensor.sketch.shared.window import Taps, kernel_rows

WOVEN = 4  # the longest stride for which vectors are picked from whole ones
ALIGN = 16  # floats of a cache line
UNROLLED = 8  # rows or columns of a window that are folded at once


def units(g: Geometry) -> int:
    """The number of output rows, each of one channel."""
    return g.output[0] * g.output[3] * g.output[1]


def passes(g: Geometry, before: float) -> float:
    """Vector instructions for a vector of the larger of input and output, if reading a vector of
    the input takes ``before``.
    """
    down = g.kernel[0] * g.source[2] * (2 + before)
    along = g.kernel[1] * g.output[2] * (2 * min(g.strides[1], WOVEN) + 1)
    return units(g) * (down + along) / max(prod(g.source), prod(g.output))


class Fold(Taps, Protocol):
    """Combines the elements of a window, in any order. Padding counts as ``start``."""

    def all(self, em: Emitter, values: Sequence[Expr]) -> Expr:
        """The combination of the values, in any order."""
        ...


@dataclass(frozen=True)
class PoolRows:
    """The loops of one config. ``rows`` output rows, each of one channel, are a task."""

    g: Geometry
    source: str
    tail: Epilogue
    rows: int

    @property
    def tasks(self) -> int:
        return ceil(units(self.g) / self.rows)

    @property
    def before(self) -> int:
        """Floats before the line's first column: its padding, in whole cache lines."""
        return -(-self.g.padding[1] // ALIGN) * ALIGN

    @property
    def behind(self) -> int:
        """Columns beyond the last one that windows reach, those that ceil mode adds included."""
        g = self.g
        reach = (g.output[2] - 1) * g.strides[1] - g.padding[1] + (g.kernel[1] - 1) * g.dilation[1]
        return max(0, reach + 1 - g.source[2])

    @property
    def scratch(self) -> Scratch:
        return Scratch((Piece("line", (self.before + self.g.source[2] + self.behind,)),))

    def emit(self, em: Emitter, args: KernelArguments, reader: Reader, fold: Fold) -> None:
        g = self.g
        whole = self.scratch.arrays(args)["line"]
        line = replace(whole, offset=whole.offset + self.before)
        for first, count in ((-self.before, self.before), (g.source[2], self.behind)):
            with em.loop(count, "end") as i:
                em.store(line, [first + i], tirx.const(fold.start, "float32"))
        with tasks_of_rows(em, args, units(self.g), self.rows) as unit:
            n, c, y = unflatten(em, unit, (g.output[0], g.output[3], g.output[1]))
            self.down(em, reader, fold, line, n, c, y)
            self.along(em, args, reader, fold, line, n, c, y)

    def down(
        self, em: Emitter, reader: Reader, fold: Fold, line: Array, n: Expr, c: Expr, y: Expr
    ) -> None:
        """line[x] = fold of the window's rows at column x."""
        g = self.g
        top = em.let_index(y * g.strides[0] - g.padding[0], "top")

        def value(kh: Expr, x: Expr) -> Expr:
            row = em.index(top + kh * g.dilation[0])
            return em.let(reader.value(self.source, g.place(n, row, x, c)))

        def full() -> None:
            for begin, count, lanes in whole_runs(g.source[2], em.lanes):
                with em.loop(count, "part") as part, em.vector(lanes) as lane:
                    x = begin + part * lanes + lane
                    rows = [value(kh, x) for kh in range(g.kernel[0])]
                    em.store(line, [x], fold.all(em, rows))

        def some() -> None:
            start, extent = kernel_rows(em, g, y)
            for begin, count, lanes in whole_runs(g.source[2], em.lanes):
                with em.loop(count, "part") as part:
                    held = em.registers(lanes)
                    em.store_vector(held, [0], em.splat(fold.start, lanes), lanes)
                    with em.loop(extent, "kh") as k, em.vector(lanes) as lane:
                        kh = em.index(start + k)
                        x = value(kh, begin + part * lanes + lane)
                        total = fold.combine(em, em.load(held, [lane]), x, None)
                        em.store(held, [lane], total)
                    first = begin + part * lanes
                    em.store_vector(line, [first], em.load_vector(held, [0], lanes), lanes)

        if g.kernel[0] > UNROLLED:
            some()
        else:
            bottom = top + (g.kernel[0] - 1) * g.dilation[0]
            em.branch(tirx.all(top >= 0, bottom < g.source[1]), full, some)

    def along(
        self,
        em: Emitter,
        args: KernelArguments,
        reader: Reader,
        fold: Fold,
        line: Array,
        n: Expr,
        c: Expr,
        y: Expr,
    ) -> None:
        """Emits the output row: the line folded over kw."""
        g = self.g
        for begin, count, lanes in whole_runs(g.output[2], em.lanes):
            with em.loop(count, "x") as block:
                x0 = em.let_index(begin + block * lanes, "x0")
                held = em.registers(lanes)
                for begun in range(0, g.kernel[1], UNROLLED):
                    some = range(begun, min(begun + UNROLLED, g.kernel[1]))
                    columns = [x0 * g.strides[1] + self.column(kw) for kw in some]
                    taps = [em.let(self.tap(em, line, first, lanes)) for first in columns]
                    before = [em.load_vector(held, [0], lanes)] if begun else []
                    em.store_vector(held, [0], fold.all(em, [*before, *taps]), lanes)
                with em.vector(lanes) as lane:
                    scale = fold.scale(em, y, x0 + lane)
                    value = em.load(held, [lane])
                    value = em.let(value if scale is None else value * scale)
                    reader.finish(self.tail, g.place(n, y, x0 + lane, c), value, args.output)

    def column(self, kw: int) -> int:
        """The column of the line that the first output column reads for tap ``kw``."""
        return kw * self.g.dilation[1] - self.g.padding[1]

    def tap(self, em: Emitter, line: Array, first: Expr, lanes: int) -> Expr:
        """``lanes`` elements of the line from ``first`` on, a stride apart."""
        step = self.g.strides[1]
        if step == 1 or lanes == 1:
            return em.load_vector(line, [first], lanes)
        if step <= WOVEN:
            return pick(em, line, line.offset + first, step, lanes)
        return line.buffer[tirx.Ramp(em.index(line.offset + first), step, lanes)]
