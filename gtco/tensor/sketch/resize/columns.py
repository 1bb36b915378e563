"""Resizing along contiguous columns (channels first), for axes that do not shrink.

::

    table[x] = first source column of output column x, weights of its taps    # once a call
    for image, channel, output row:
      line = the source rows blended, its ends repeated        # vectors of source columns
      for vector of output columns:
        base = table[its first column]
        out = sum over taps of permute(line[base + tap ...], table[x] - base) * weight

If an axis does not shrink, a vector of outputs reads within a vector of source columns. One load
and one permutation then replace a gather, with a sixteenth of its loads.

An image that is an input of the stage and no narrower than a vector needs no line::

    table[tap, x] = source column of the tap, cut to the row
    for vector of output columns, for tap:
      base = table[tap, its first column], at most the last whole vector
      near = the source rows' vectors from base on, blended  # one for all taps, if it has them
      out += permute(near, table[tap, x] - base) * weight

The values in the line are read back as vectors that begin at other places, and these loads wait for
the stores. For 64 maps of 56x56 to twice that size, on 2 threads of a Zen 5, bilinear takes 51 us
and nearest 33 us with the line, and 35 and 19 us without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr, lanes_of
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.emit.spatial import TAPS, ResizedAxis
from gtco.tensor.sketch.shared.streaming import vector_runs
from gtco.tensor.stage import Operator

PERMUTE = {8: "llvm.x86.avx2.permps", 16: "llvm.x86.avx512.permvar.sf.512"}
PADDING = 16  # floats before the line: taps reach 2 to the left, and the line stays aligned

RowTap = tuple[Expr, Expr | None]  # source row, weight (None for 1)


def fits(size: int, out: int, lanes: int) -> bool:
    """True if the taps of ``lanes`` neighbouring outputs lie within as many source columns."""
    return out >= size and out >= lanes and lanes in PERMUTE


def permuted(em: Emitter, vector: Expr, order: Expr) -> Expr:
    """The lanes of ``vector`` in the order that ``order`` gives."""
    return tirx.call_llvm_pure_intrin(
        f"float32x{em.lanes}", PERMUTE[em.lanes], vector, order
    )


def blended(em: Emitter, terms: Sequence[tuple[Expr, Expr | None]]) -> Expr:
    """The sum of values, or vectors, times their weights (None for 1)."""
    total: Expr = None
    for value, weight in terms:
        if weight is not None:
            value = value * em.splat(weight, lanes_of(value))
        total = value if total is None else total + value
    return total


def lane_by_lane(em: Emitter, vector: Expr, body: Callable[[Expr, Expr], None]) -> None:
    """``body(lane, its value)`` in a vector loop, the form that readers and epilogues need."""
    found = em.registers(em.lanes)
    em.store_vector(found, [0], vector)
    with em.vector(em.lanes) as lane:
        body(lane, em.load(found, [lane]))


@dataclass(frozen=True)
class Columns:
    """The horizontal half of ``resize2d``: the axis of its columns."""

    axis: ResizedAxis
    lanes: int
    direct: bool  # True if the image is read in place, without a line

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
        """The tables, and a line with the extra room that whole vectors read beyond it."""
        if self.direct:
            at = (Piece(f"at{t}", (self.axis.out,), "int32") for t in range(len(self.offsets)))
            weights = (Piece(f"table{t}", (self.axis.out,)) for t in range(1, self.tables))
            return Scratch((*at, *weights))
        tables = tuple(Piece(f"table{t}", (self.axis.out,)) for t in range(self.tables))
        return Scratch((*tables, Piece("line", (PADDING + self.axis.size + 2 + self.lanes,))))

    def fill(self, em: Emitter, held: Mapping[str, Array]) -> None:
        """Fills the tables. Source columns are kept as float32, which is exact below 2^24."""
        with em.loop(self.axis.out, "x") as x:
            weights: list[Expr] = []
            if self.op["method"] == "nearest":
                first = self.axis.nearest(em, x)
            else:
                first, weights = self.axis.located(em, x)
            if self.direct:
                for t, offset in enumerate(self.offsets):
                    em.store(held[f"at{t}"], [x], self.axis.clipped(em, first + offset))
            else:
                em.store(held["table0"], [x], tirx.Cast("float32", first))
            for t, value in enumerate(weights, 1):
                em.store(held[f"table{t}"], [x], value)

    @property
    def together(self) -> bool:
        """True if all taps of neighbouring outputs lie within a vector of source columns."""
        apart = (self.lanes - 1) * self.axis.step + 1  # between their first taps, rounded up
        return apart + len(self.offsets) - 1 <= self.lanes - 1

    def row_in_place(
        self,
        em: Emitter,
        held: Mapping[str, Array],
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
        finish: Callable[[Expr, Expr], None],
    ) -> None:
        """Emits one output row of an image that is read in place. ``source(y, x)`` is the vector
        from column ``x`` on.
        """
        with em.loop(-(-self.axis.out // em.lanes), "block") as block:
            x0 = em.let_index(tirx.min(block * em.lanes, self.axis.out - em.lanes), "x0")
            taps = self.taps_in_place(em, held, rows, source, x0)
            self.store(em, held, x0, taps, finish)

    def taps_in_place(
        self,
        em: Emitter,
        held: Mapping[str, Array],
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
        x0: Expr,
    ) -> Iterator[Expr]:
        """The source columns for the vector of outputs from ``x0`` on: one vector for each tap."""
        base, near = None, None
        for t in range(len(self.offsets)):
            if t == 0 or not self.together:
                first = tirx.min(em.load(held[f"at{t}"], [x0]), self.axis.size - em.lanes)
                base = em.let(first, "base")
                em.bind(base, self.axis.size - em.lanes + 1)
                near = em.let(blended(em, [(source(y, base), w) for y, w in rows]), "near")
            order = em.load_vector(held[f"at{t}"], [x0]) - tirx.Broadcast(base, em.lanes)
            yield permuted(em, near, order)

    def row(
        self,
        em: Emitter,
        held: Mapping[str, Array],
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
        finish: Callable[[Expr, Expr], None],
    ) -> None:
        """Emits one output row. ``source(y, x)`` reads the image, ``finish(x, value)`` stores."""
        line = replace(held["line"], offset=held["line"].offset + PADDING)
        self.blend(em, line, rows, source)
        first, lanes = held["table0"], em.lanes
        with em.loop(-(-self.axis.out // lanes), "block") as block:
            # the last vector overlaps the one before it, so that it is whole
            x0 = em.let_index(tirx.min(block * lanes, self.axis.out - lanes), "x0")
            base = em.let(tirx.Cast("int32", em.load(first, [x0])), "base")
            em.bind(base, self.axis.size + 1, -1)
            columns = tirx.Cast(f"int32x{lanes}", em.load_vector(first, [x0]))
            order = em.let(columns - tirx.Broadcast(base, lanes), "order")
            near = (em.load_vector(line, [base + offset]) for offset in self.offsets)
            self.store(em, held, x0, (permuted(em, vector, order) for vector in near), finish)

    def store(
        self,
        em: Emitter,
        held: Mapping[str, Array],
        x0: Expr,
        taps: Iterable[Expr],
        finish: Callable[[Expr, Expr], None],
    ) -> None:
        """Stores the vector of outputs from ``x0`` on: the weighted sum of the taps, or their sum
        if they have no weights.
        """
        total: Expr = None
        for t, term in enumerate(taps, 1):
            if self.tables > 1:
                term = term * em.load_vector(held[f"table{t}"], [x0])
            total = term if total is None else total + term
        lane_by_lane(em, total, lambda lane, value: finish(x0 + lane, value))

    def blend(
        self,
        em: Emitter,
        line: Array,
        rows: Sequence[RowTap],
        source: Callable[[Expr, Expr], Expr],
    ) -> None:
        """line[x] = sum over rows of weight * source(row, x). The ends of the line are repeated
        twice.
        """
        for begin, count, lanes in vector_runs(self.axis.size, em.lanes):
            with em.loop(count, "part") as part, em.vector(lanes) as lane:
                x = begin + part * lanes + lane
                em.store(line, [x], blended(em, [(source(y, x), weight) for y, weight in rows]))
        first, last = em.let(em.load(line, [0])), em.let(em.load(line, [self.axis.size - 1]))
        for i in (-2, -1):
            em.store(line, [i], first)
            em.store(line, [self.axis.size - 1 - i], last)
