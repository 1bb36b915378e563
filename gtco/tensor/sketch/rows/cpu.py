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

Where the extremes of columns lie, :mod:`gtco.tensor.sketch.rows.places` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
    ancestors,
    anchor,
    float32,
    is_static,
)
from gtco.tensor.analysis.reduction import NORMALISATIONS, PLACES, REDUCTIONS, Reduction
from gtco.tensor.emit.emitter import Array, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.sketch.rows.columns import ColumnLoops
from gtco.tensor.sketch.rows.loops import RowsLoops
from gtco.tensor.sketch.shared.columns import CHUNK
from gtco.tensor.sketch.shared.lockstep import Lockstep
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import GATHER, grain, in_vectors, streaming_workload
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

# Vector instructions of a vector of the reduced tensor (level 0's ``reduce`` where vectors run
# along the reduction), and those of its exp.
PASSES = {
    "softmax": 2.0, "log_softmax": 2.0, "layer_norm": 9.0, "rms_norm": 6.0,
    "argmax": 6.0, "argmin": 6.0,
}  # fmt: skip
EXPONENTIALS = {"softmax": {"exp": 18.0}, "log_softmax": {"exp": 16.0}}
MOVED = frozenset({"identity", "reshape", "permute", "slice", "broadcast"})  # addresses alone
PANEL = 4  # the share of L1 that a panel of rows takes: one part of so many
MOST_GROUPS = 16
MOST_PLACES = 1 << 24  # positions are counted in float32, exactly so far


def match(stage: Stage, target: Target) -> Rows | None:
    """The stage as one float32 reduction with a readable prologue and a one-to-one epilogue, else
    None.
    """
    op = anchor(stage, *REDUCTIONS, *PLACES, *NORMALISATIONS)
    if op is None or not is_static(stage) or not float32(stage, op.inputs):
        return None
    if op.kind not in PLACES and not float32(stage, (op.output,)):
        return None
    tail = in_vectors(stage, op) if stage.types[op.inputs[0]].size else None
    if tail is None or (op.kind in PLACES and Reduction(stage, op).count > MOST_PLACES):
        return None
    return Rows(stage, target, op, tail)


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
    def view(self) -> Reduction:
        return Reduction(self.stage, self.op)

    @property
    def moved(self) -> Epilogue | None:
        """What each position of a row goes through: a reduced one's few elements do not count."""
        return self.tail if self.op.kind in NORMALISATIONS else None

    @cached_property
    def piece(self) -> int:
        """The positions of a row that vector loops run over."""
        return self.view.piece(self.target.lanes, self.moved)

    @property
    def _vectors(self) -> int:
        """Vectors of columns side by side: places keep two numbers of each column in registers."""
        return self.target.registers // 4 if self.op.kind in PLACES else CHUNK

    @property
    def chunk(self) -> int:
        """Columns of a task, by columns."""
        return min(self.view.shape[-1], self._vectors * self.target.lanes)

    @cached_property
    def beside(self) -> Lockstep:
        """What counts the rows of columns; places take so many neighbouring ones together that
        the registers are full: longer runs of each image that is read.
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
        """Is the reduced tensor as good as an input: moved at most, and in vectors? Then it is read
        again rather than kept.
        """
        before = ancestors(self.stage, self.op.inputs[0])
        return not before or (
            all(op.kind in MOVED for op in before) and not (self.view.by_rows and self.gathers)
        )

    @cached_property
    def gathers(self) -> int:
        """Loads and stores that are made lane by lane."""
        return self.view.scattered(self.piece, self.moved)

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, prod(self.view.shape) // self.units, self.target)

    def workload(self, config: Config) -> Workload:
        passes, others = PASSES.get(self.op.kind, 1.5), EXPONENTIALS.get(self.op.kind, {})
        if self.view.by_rows:
            others = {**others, "reduce": passes}
            passes = self.gathers * GATHER * self.target.lanes
        tasks = ceil(self.units / config["rows"])
        return streaming_workload(self.stage, self.target, tasks, passes, others=others)

    # the program ----------------------------------------------------------------------------------
    @property
    def _fitting(self) -> int:
        """Rows that a part of L1 holds, beside the next ones and what is made of them."""
        return max(1, self.target.memory[0].capacity // PANEL // (4 * max(self.view.length, 1)))

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
            self.view.by_rows
            and self.op.kind in (*NORMALISATIONS, *PLACES)
            and (not self.plain or self.op.kind == "softmax")
        )
        padded = -(-self.view.length // 16) * 16
        return Scratch((Piece("rows", (self.side * self.groups, padded)),) if needs else ())

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = (RowsLoops if self.view.by_rows else ColumnLoops)(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)

    def finish(self, reader: Reader, outer: list[Expr], value: Expr, output: Array) -> None:
        """One reduced element through the epilogue."""
        if self.op.kind == "mean":
            value = value * tirx.const(1.0 / self.view.count, "float32")
        if self.op.kind in PLACES:
            value = tirx.Cast("int64", tirx.Cast("int32", value))
        at = self.view.result_index(outer)
        reader.finish(self.tail, at, reader.emitter.let(value), output)
