"""Sketch rule for stages around one reduction: normalisation, softmax and sums, structure SRS.

Over the trailing axes (``rows``; vectors run along the reduction)::

    for task in chunks of rows:                   # parallel
      for panel of the task's rows:               # in L1; each pass takes some rows side by side
        scratch[row, j] = prologue(row, j)        # where the input is no plain load
        statistics over j in several accumulators # mean, then variance; maximum, then sum of exp
        output[epilogue's index] = epilogue(f(x[row, j], statistics))

Over other axes (``columns``; vectors run along the last axis, which is kept)::

    for task in outer index x chunks of columns:  # parallel
      for each reduced position: accumulators[column] = combine(accumulators, x)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
    ancestors,
    anchor,
    float32,
    is_static,
    shape_of,
)
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.scratch import Piece, Scratch
from gtco.tensor.sketch.columns import CHUNK
from gtco.tensor.sketch.program import program
from gtco.tensor.sketch.rows_loops import REDUCTIONS, RowsLoops
from gtco.tensor.sketch.streaming import GATHER, in_vectors, rows_per_task, streaming_workload
from gtco.tensor.space import Config, Decision, Option, Program, Rejection, Workload
from gtco.tensor.stage import Operator, Stage

MOVED = frozenset({"identity", "reshape", "permute", "slice", "broadcast"})  # addresses alone
PANEL = 4  # the share of L1 that a panel of rows takes: one part of so many
MOST_GROUPS = 16
NORMALISATIONS = ("layer_norm", "rms_norm", "softmax", "log_softmax")


def match(stage: Stage, target: Target) -> Rows | None:
    """The stage as one float32 reduction with a readable prologue and a one-to-one epilogue, else
    None.
    """
    op = anchor(stage, *REDUCTIONS, *NORMALISATIONS)
    if op is None or not is_static(stage) or not float32(stage, (*op.inputs, op.output)):
        return None
    tail = in_vectors(stage, op) if stage.types[op.inputs[0]].size else None
    return Rows(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class Rows:
    """A reduction on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "rows"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the reduced tensor."""
        return shape_of(self.stage, self.op.inputs[0])

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The reduced axes; axes of extent 1 do not count."""
        if self.op.kind in REDUCTIONS:
            wanted = {a % len(self.shape) for a in self.op["axes"]} or set(range(len(self.shape)))
        elif self.op.kind in ("softmax", "log_softmax"):
            wanted = {self.op["axis"] % len(self.shape)}
        else:
            wanted = {len(self.shape) - 1}
        return tuple(sorted(a for a in wanted if self.shape[a] > 1))

    @cached_property
    def trailing(self) -> int:
        """The first of the trailing axes that are all reduced: vectors run along their product."""
        cut = len(self.shape)
        while cut > 0 and (cut - 1 in self.axes or self.shape[cut - 1] == 1):
            cut -= 1
        return cut

    @property
    def by_rows(self) -> bool:
        """Do vectors run along the reduction? Also where nothing is reduced, and for a last axis of
        extent 1.
        """
        return any(a >= self.trailing for a in self.axes) or not self.axes

    @property
    def length(self) -> int:
        """Positions that one vector loop reduces."""
        return prod(self.shape[self.trailing :])

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Extents of the axes that count rows: neither reduced nor, by columns, the last one;
        others are 1.
        """
        last = len(self.shape) if self.by_rows else len(self.shape) - 1
        return tuple(1 if a in self.axes or a >= last else n for a, n in enumerate(self.shape))

    @property
    def chunk(self) -> int:
        """Columns of a task, by columns."""
        return min(self.shape[-1], CHUNK * self.target.lanes)

    @property
    def units(self) -> int:
        return prod(self.kept) * (1 if self.by_rows else ceil(self.shape[-1] / self.chunk))

    @cached_property
    def plain(self) -> bool:
        """Is the reduced tensor as good as an input: moved at most, and in vectors? Then it is read
        again rather than kept.
        """
        before = ancestors(self.stage, self.op.inputs[0])
        return not before or (
            all(op.kind in MOVED for op in before) and not (self.by_rows and self.gathers)
        )

    @cached_property
    def piece(self) -> int:
        """The longest piece of a row in which neighbours are neighbours in everything that is read
        and written: it is what vector loops run over. The whole row where none is long enough.
        """
        if not self.by_rows:
            return self.length
        lanes = self.target.lanes
        sizes = {self.length}
        for known in self.stage.types.values():
            shape = [int(d) for d in known.shape]
            sizes |= {prod(shape[k:]) for k in range(len(shape))}
        fitting = sorted(
            (n for n in sizes if n and self.length % n == 0 and n >= lanes), reverse=True
        )
        return next((n for n in fitting if not self.scattered(n)), self.length)

    @cached_property
    def gathers(self) -> int:
        """Loads and stores that are made lane by lane."""
        return self.scattered(self.piece)

    def scattered(self, piece: int) -> int:
        """How many loads and stores are no vectors in a piece of ``piece`` positions."""
        probe = Probe(self.stage)
        i, p = probe.scope.variables((piece, self.length // piece))
        kept = self.kept[: self.trailing]
        axes = probe.scope.variables(kept)
        outer = [axis if extent > 1 else 0 for axis, extent in zip(axes, kept, strict=True)]
        j = i if piece == self.length else p * piece + i
        index = [*outer, *split_flat(j, self.shape[self.trailing :])]
        probe.follow(self.op.inputs[0], index)
        if self.op.kind in NORMALISATIONS:
            probe.through(self.tail, index)
        return probe.apart(i) + probe.decided_by(i)

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "rows" not in chosen:
            work = prod(self.shape) // self.units
            return Decision("rows", "grain", rows_per_task(self.units, work, self.target.cores))
        return None

    def workload(self, config: Config) -> Workload:
        passes = {"softmax": 20.0, "log_softmax": 18.0, "layer_norm": 9.0, "rms_norm": 6.0}.get(
            self.op.kind, 1.5
        )
        if self.by_rows:
            passes += self.gathers * GATHER * self.target.lanes
        return streaming_workload(
            self.stage, self.target, ceil(self.units / config["rows"]), passes
        )

    # the program ----------------------------------------------------------------------------------
    @property
    def _fitting(self) -> int:
        """Rows that a part of L1 holds, beside the next ones and what is made of them."""
        return max(1, self.target.memory[0].capacity // PANEL // (4 * max(self.length, 1)))

    @property
    def side(self) -> int:
        """Rows that are taken side by side: their chains hide each other's latency, and their lanes
        are folded together.
        """
        return min(4, 1 << (self._fitting.bit_length() - 1))

    @property
    def groups(self) -> int:
        """Groups of such rows in a panel: what one pass over it finds is there when the next pass
        asks.
        """
        return min(MOST_GROUPS, max(1, self._fitting // self.side))

    @cached_property
    def scratch(self) -> Scratch:
        """The rows of a panel where they must be kept, each on cache lines of its own."""
        needs = (
            self.by_rows
            and self.op.kind in NORMALISATIONS
            and (not self.plain or self.op.kind == "softmax")
        )
        padded = -(-self.length // 16) * 16
        return Scratch((Piece("rows", (self.side * self.groups, padded)),) if needs else ())

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = RowsLoops(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)
