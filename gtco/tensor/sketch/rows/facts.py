"""The facts of a reduction: its rows or columns, how many a task takes side by side, and which are
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
    ancestors,
)
from gtco.tensor.analysis.reduction import NORMALISATIONS, PLACES, Reduction
from gtco.tensor.emit.emitter import Array, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.sketch.shared.columns import CHUNK
from gtco.tensor.sketch.shared.lockstep import Lockstep
from gtco.tensor.stage import Operator, Stage

MOVED = frozenset({"identity", "reshape", "permute", "slice", "broadcast"})  # change only addresses
PANEL = 4  # a panel of rows takes one part in four of L1
MOST_GROUPS = 16


@dataclass(frozen=True)
class RowsFacts:
    """A reduction: its view, its epilogue, and how a task takes its rows."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    @cached_property
    def view(self) -> Reduction:
        return Reduction(self.stage, self.op)

    @property
    def moved(self) -> Epilogue | None:
        """The operators that each position of a row goes through. Those on the few elements of a
        reduced row do not count.
        """
        return self.tail if self.op.kind in NORMALISATIONS else None

    @cached_property
    def piece(self) -> int:
        """The positions of a row that vector loops run over."""
        return self.view.piece(self.target.lanes, self.moved)

    @property
    def _vectors(self) -> int:
        """Vectors of columns that are made side by side. Places keep two numbers of each column in
        registers.
        """
        return self.target.registers // 4 if self.op.kind in PLACES else CHUNK

    @property
    def chunk(self) -> int:
        """The columns of a task, if columns are reduced."""
        return min(self.view.shape[-1], self._vectors * self.target.lanes)

    @cached_property
    def beside(self) -> Lockstep:
        """The axes that count the rows of columns. Places take so many neighbouring rows together
        that the registers are full, because each image is then read in longer runs.
        """
        kept = self.view.kept
        if self.view.by_rows or self.op.kind not in PLACES:
            return Lockstep(kept)
        most = max(1, self._vectors // ceil(self.view.shape[-1] / self.target.lanes))
        side = max(n for n in range(1, most + 1) if kept[-2] % n == 0)
        return Lockstep(kept, len(kept) - 2, len(kept) - 1, side)

    @property
    def units(self) -> int:
        rows = prod(self.beside.counted)
        return rows if self.view.by_rows else rows * ceil(self.view.shape[-1] / self.chunk)

    @cached_property
    def plain(self) -> bool:
        """True if reading the reduced tensor again costs as little as reading an input: it is moved
        at most, and read in vectors. Then it is not kept.
        """
        before = ancestors(self.stage, self.op.inputs[0])
        return not before or (
            all(op.kind in MOVED for op in before) and not (self.view.by_rows and self.gathers)
        )

    @cached_property
    def gathers(self) -> int:
        """Loads and stores that are made lane by lane."""
        return self.view.scattered(self.piece, self.moved)

    @property
    def _fitting(self) -> int:
        """Rows that a part of L1 holds, beside the next rows and the results."""
        return max(1, self.target.memory[0].capacity // PANEL // (4 * max(self.view.length, 1)))

    @property
    def side(self) -> int:
        """Rows that are taken side by side. Their chains hide each other's latency, and their lanes
        are folded together.
        """
        return min(4, 1 << (self._fitting.bit_length() - 1))

    @property
    def groups(self) -> int:
        """Groups of such rows in a panel. The statistics that one pass over the panel finds are
        ready when the next pass needs them.
        """
        return min(MOST_GROUPS, max(1, self._fitting // self.side))

    @cached_property
    def scratch(self) -> Scratch:
        """The rows of a panel, if they must be kept, each in cache lines of its own."""
        needs = (
            self.view.by_rows
            and self.op.kind in (*NORMALISATIONS, *PLACES)
            and (not self.plain or self.op.kind == "softmax")
        )
        padded = -(-self.view.length // 16) * 16
        return Scratch((Piece("rows", (self.side * self.groups, padded)),) if needs else ())

    def finish(self, reader: Reader, outer: list[Expr], value: Expr, output: Array) -> None:
        """Takes one reduced element through the epilogue."""
        if self.op.kind == "mean":
            value = value * tirx.const(1.0 / self.view.count, "float32")
        if self.op.kind in PLACES:
            value = tirx.Cast("int64", tirx.Cast("int32", value))
        at = self.view.result_index(outer)
        reader.finish(self.tail, at, reader.emitter.let(value), output)
