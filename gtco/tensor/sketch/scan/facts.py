"""The facts of a running sum: its rows or columns, and the shuffles that sum a vector's lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.machine.target import CACHE_LINE, Target
from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage

UNIT = 16  # bytes of a vector in which lanes move at the least cost
# Bytes of a row's run in a chunk of columns. With sums in registers, a chunk goes down all rows,
# each of which may be a page of its own. If the tensors are a good part of the last cache, the TLB
# and what fetches ahead lose such pages: then the runs are long, and a few rows are taken at a
# time. Measured on Zen 4, one thread: 64 rows of 16 KB 59 us by runs of 256 bytes, 26 by 1 KB, with
# vectors of 32 and 64 bytes alike; 2048 rows of 8 KB 13 ms by 1 KB, 1.6 by 4 KB and four rows.
NARROW, WIDE = 1024, 4096
FAR = 4  # one part in four of the last cache
FEW = 4  # tasks for each core


@dataclass(frozen=True)
class ScanFacts:
    """A running sum: its axes, and how a task takes them.

    The tensor is [outer, count, inner]: ``count`` elements along the axis, ``inner`` of them side
    by side. By rows, vectors run along both as one; by columns, along the last inner axes.
    """

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.stage, self.op.inputs[0])

    @property
    def axis(self) -> int:
        return int(self.op["axis"])

    @property
    def dtype(self) -> str:
        return self.op.type.dtype

    @property
    def exclusive(self) -> bool:
        return bool(self.op["exclusive"])

    @property
    def reverse(self) -> bool:
        return bool(self.op["reverse"])

    @property
    def inner(self) -> int:
        """The distance of neighbours along the axis."""
        return prod(self.shape[self.axis + 1 :])

    @property
    def full(self) -> int:
        """The lanes of a vector of the dtype."""
        return max(1, self.target.lanes * ITEM_BYTES["float32"] // ITEM_BYTES[self.dtype])

    @cached_property
    def by_rows(self) -> bool:
        """True if a vector has several elements of the axis, which are then added up inside of it.
        Their distance is a power of two, because the steps double it.
        """
        return 2 * self.inner <= self.full and self.inner & (self.inner - 1) == 0

    # rows -----------------------------------------------------------------------------------------
    @property
    def length(self) -> int:
        """The positions of a row."""
        return self.shape[self.axis] * self.inner

    @property
    def lanes(self) -> int:
        """The lanes of a row's vectors: a power of two, and at least two elements of the axis."""
        return min(self.full, 1 << (self.length - 1).bit_length())

    @cached_property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The shuffles of :func:`doubling` for a row's vectors."""
        unit = UNIT // ITEM_BYTES[self.dtype]
        steps = doubling(self.lanes, self.inner, unit)
        return tuple(map(mirrored, steps)) if self.reverse else steps

    @property
    def last(self) -> tuple[int, ...]:
        """The lanes whose sums the next vector begins with, over and over."""
        lanes = tuple(self.lanes - self.inner + lane % self.inner for lane in range(self.lanes))
        return mirrored(lanes) if self.reverse else lanes

    @property
    def before(self) -> tuple[int, ...]:
        """For exclusive sums: the lanes of (the sums that the vector begins with, its own sums)."""
        lanes = range(self.lanes)
        if self.reverse:
            kept = self.lanes - self.inner
            return tuple(x if x >= kept else self.lanes + x + self.inner for x in lanes)
        return tuple(x if x < self.inner else self.lanes + x - self.inner for x in lanes)

    # columns --------------------------------------------------------------------------------------
    @cached_property
    def cut(self) -> int:
        """The first of the axes that vectors run along as one, by columns: the longest trailing
        ones along which every load and store is even; at least the last axis.
        """
        last = len(self.shape) - 1
        even = (cut for cut in range(self.axis + 1, last) if not self.scattered(cut))
        return next(even, last)

    @property
    def columns(self) -> int:
        return prod(self.shape[self.cut :])

    @cached_property
    def wide(self) -> bool:
        """True if a chunk is a few rows at a time, in long runs, with its sums in scratch."""
        return not self.by_rows and 2 * self.op.type.nbytes > self.target.memory[-2].capacity // FAR

    @cached_property
    def chunk(self) -> int:
        """The columns of a task. Few tasks are as many as the cores take at once, if rows begin at
        cache lines. Else two cores would write the line at each end of every run, so that narrow
        rows stay whole.
        """
        vectors, size = ceil(self.columns / self.full), ITEM_BYTES[self.dtype]
        apart = self.inner * size % CACHE_LINE == 0
        run = WIDE if self.wide else NARROW if apart else 2 * NARROW
        most = run // size // self.full
        others = prod(self.shape[: self.axis]) * prod(self.shape[self.axis + 1 : self.cut])
        chunks, cores = ceil(vectors / most), self.target.cores
        if apart and chunks * others < FEW * cores:
            chunks = ceil(ceil(chunks * others / cores) * cores / others)
        return min(self.columns, ceil(vectors / chunks) * self.full)

    @property
    def scratch(self) -> Scratch:
        return Scratch((Piece("sums", (self.chunk,), self.dtype),) if self.wide else ())

    # both -----------------------------------------------------------------------------------------
    @property
    def counted(self) -> tuple[int, ...]:
        """The extents that count the units of work."""
        outer = self.shape[: self.axis]
        if self.by_rows:
            return outer
        return (*outer, *self.shape[self.axis + 1 : self.cut], ceil(self.columns / self.chunk))

    @property
    def units(self) -> int:
        return prod(self.counted)

    @cached_property
    def gathers(self) -> int:
        """Loads and stores that are made lane by lane."""
        return self.scattered(self.axis if self.by_rows else self.cut)

    def scattered(self, cut: int) -> int:
        """The loads and stores that are not vectors along the axes from ``cut`` on as one."""
        probe = Probe(self.stage)
        j, *outer = probe.scope.variables((prod(self.shape[cut:]), *self.shape[:cut]))
        index: Sequence[Expr] = [*outer, *split_flat(j, self.shape[cut:])]
        probe.follow(self.op.inputs[0], index)
        probe.through(self.tail, index)
        return probe.apart(j) + probe.decided_by(j)


def doubling(lanes: int, inner: int, unit: int) -> tuple[tuple[int, ...], ...]:
    """The steps that turn ``lanes`` elements into their running sums, of every ``inner``-th one.
    Each adds to the vector x a shuffle of (x, zeros).

    The first steps shift by s inside of each ``unit`` of lanes, where moving costs least, and make
    runs of 2 s sums. Of the others, each adds the last sums of a run of s to all of the next one::

        a b c d   ->   a  ab  bc  cd   ->   a ab abc abcd           # s = 1, 2: shifts
        ... of four units   ->   u0  u0+u1  u2  u2+u3   ->   ...    # s = 4, 8: sums of runs
    """
    steps, s = [], inner
    while s < lanes:
        step = []
        for lane in range(lanes):
            run, column = lane // s, lane % inner
            if 2 * s <= unit:
                step.append(lane - s if lane % unit >= s else lanes)
            else:
                step.append(run * s - inner + column if run % 2 else lanes)
        steps.append(tuple(step))
        s *= 2
    return tuple(steps)


def mirrored(step: Sequence[int]) -> tuple[int, ...]:
    """The same shuffle of (x, zeros) for lanes that are counted from the end."""
    lanes = len(step)
    turned = [x if x >= lanes else lanes - 1 - x for x in step]
    return tuple(reversed(turned))
