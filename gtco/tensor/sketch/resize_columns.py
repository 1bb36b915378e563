"""Resizing along contiguous columns (channels first), for axes that do not shrink.

::

    table[x] = first source column of output column x, weights of its taps    # once a call
    for image, channel, output row:
      line = the source rows blended, its ends repeated        # vectors of source columns
      for vector of output columns:
        base = table[its first column]
        out = sum over taps of permute(line[base + tap ...], table[x] - base) * weight

Where an axis does not shrink, a vector of outputs reads within a vector of source columns: one load
and one permutation do what a gather would, at a sixteenth of its loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from gtco.tensor.emit import Array, Emitter, Expr
from gtco.tensor.scratch import Piece, Scratch
from gtco.tensor.sketch.streaming import vector_runs
from gtco.tensor.spatial import TAPS, ResizedAxis
from gtco.tensor.stage import Operator

PERMUTE = {8: "llvm.x86.avx2.permps", 16: "llvm.x86.avx512.permvar.sf.512"}
PADDING = 16  # floats before the line: taps reach 2 to the left, and the line stays aligned

RowTap = tuple[Expr, Expr | None]  # source row, weight (None for 1)


def fits(size: int, out: int, lanes: int) -> bool:
    """Do the taps of ``lanes`` neighbouring outputs lie within as many source columns?"""
    return out >= size and out >= lanes and lanes in PERMUTE


@dataclass(frozen=True)
class Columns:
    """The horizontal half of ``resize2d``: the axis of its columns."""

    axis: ResizedAxis
    lanes: int

    @property
    def op(self) -> Operator:
        return self.axis.op

    @property
    def offsets(self) -> tuple[int, ...]:
        return TAPS[self.op["method"]]

    @property
    def tables(self) -> int:
        return 1 if self.op["method"] == "nearest" else 1 + len(self.offsets)

    @property
    def scratch(self) -> Scratch:
        """The tables, and a line with what whole vectors read beyond it."""
        tables = tuple(Piece(f"table{t}", (self.axis.out,)) for t in range(self.tables))
        return Scratch((*tables, Piece("line", (PADDING + self.axis.size + 2 + self.lanes,))))

    def fill(self, em: Emitter, held: Mapping[str, Array]) -> None:
        """The tables; source columns are kept as float32, exact below 2^24."""
        with em.loop(self.axis.out, "x") as x:
            weights: list[Expr] = []
            if self.op["method"] == "nearest":
                first = self.axis.nearest(em, x)
            else:
                first, weights = self.axis.located(em, x)
            for t, value in enumerate([tirx.Cast("float32", first), *weights]):
                em.store(held[f"table{t}"], [x], value)

    def row(
        self,
        em: Emitter,
        held: Mapping[str, Array],
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
        finish: Callable[[Expr, Expr], None],
    ) -> None:
        """One output row. ``source(y, x)`` reads the image, ``finish(x, value)`` stores."""
        line = replace(held["line"], offset=held["line"].offset + PADDING)
        self.blend(em, line, rows, source)
        first, lanes = held["table0"], em.lanes
        with em.loop(-(-self.axis.out // lanes), "block") as block:
            # the last vector overlaps the one before it rather than being shorter
            x0 = em.let_index(tirx.min(block * lanes, self.axis.out - lanes), "x0")
            base = em.let(tirx.Cast("int32", em.load(first, [x0])), "base")
            em.bind(base, self.axis.size + 1, -1)
            columns = tirx.Cast(f"int32x{lanes}", em.load_vector(first, [x0]))
            order = em.let(columns - tirx.Broadcast(base, lanes), "order")
            total: Expr = None
            for t, offset in enumerate(self.offsets):
                near = em.load_vector(line, [base + offset])
                term = tirx.call_llvm_pure_intrin(f"float32x{lanes}", PERMUTE[lanes], near, order)
                if self.tables > 1:
                    term = term * em.load_vector(held[f"table{1 + t}"], [x0])
                total = term if total is None else total + term
            found = em.registers(lanes)
            em.store_vector(found, [0], total)
            with em.vector(lanes) as lane:
                finish(x0 + lane, em.load(found, [lane]))

    def blend(
        self,
        em: Emitter,
        line: Array,
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
    ) -> None:
        """line[x] = sum over rows of weight * source(row, x); its ends are repeated twice."""
        for begin, count, lanes in vector_runs(self.axis.size, em.lanes):
            with em.loop(count, "part") as part, em.vector(lanes) as lane:
                x = begin + part * lanes + lane
                total: Expr = None
                for y, weight in rows:
                    value = source(y, x)
                    term = value if weight is None else value * weight
                    total = term if total is None else total + term
                em.store(line, [x], total)
        first, last = em.let(em.load(line, [0])), em.let(em.load(line, [self.axis.size - 1]))
        for i in (-2, -1):
            em.store(line, [i], first)
            em.store(line, [self.axis.size - 1 - i], last)
