"""Sketch rule for stages around one reduction: normalisation, softmax and sums, structure SRS.

Over the trailing axes (``rows``; vectors run along the reduction)::

    for task in chunks of rows:                   # parallel
      for panel of the task's rows:               # in L1; each pass takes some rows side by side
        scratch[row, j] = prologue(row, j)        # unless the input is a plain load
        statistics over j in several accumulators # mean, then variance; maximum, then sum of exp
        output[epilogue's index] = epilogue(f(x[row, j], statistics))

Over other axes (``columns``; vectors run along the last axis, which is kept)::

    for task in outer index x chunks of columns:  # parallel
      for each reduced position: accumulators[column] = combine(accumulators, x)

:mod:`gtco.tensor.sketch.rows.places` finds the places of the extremes of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    anchor,
    float32,
    is_static,
)
from gtco.tensor.analysis.reduction import NORMALISATIONS, PLACES, REDUCTIONS, Reduction
from gtco.tensor.sketch.rows.columns import ColumnLoops
from gtco.tensor.sketch.rows.facts import RowsFacts
from gtco.tensor.sketch.rows.loops import RowsLoops
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import GATHER, grain, in_vectors, streaming_workload
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Workload

# Vector instructions for a vector of the reduced tensor (level 0's ``reduce`` if vectors run along
# the reduction), and those of its exp.
PASSES = {
    "softmax": 2.0, "log_softmax": 2.0, "layer_norm": 9.0, "rms_norm": 6.0,
    "argmax": 6.0, "argmin": 6.0,
}  # fmt: skip
EXPONENTIALS = {"softmax": {"exp": 18.0}, "log_softmax": {"exp": 16.0}}
MOST_PLACES = 1 << 24  # positions are counted in float32, which is exact up to here


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
class Rows(RowsFacts):
    """A reduction on a CPU; see the module's text for the loops."""

    name = "rows"
    structure = "SRS"

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

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = (RowsLoops if self.view.by_rows else ColumnLoops)(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)
