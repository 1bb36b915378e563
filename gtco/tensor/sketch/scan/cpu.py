"""Sketch rule for running sums (CumSum), structure SRS.

Over the last axis, or one whose neighbours are a few elements apart (``rows``)::

    for task in chunks of rows:                 # parallel
      for vector of the row:                    # from its end, if the sums are reversed
        x = prologue(vector)
        for s = 1, 2, 4, ... lanes:             # a shuffle and an addition each
          x += x, moved by s lanes
        output[epilogue's index] = epilogue(carried + x)
        carried += last lane of x               # the only chain from vector to vector

Over other axes (``columns``; vectors run along the last axes)::

    for task in outer index x chunks of columns:    # parallel
      for r along the axis:                         # of wide chunks, a few at a time
        sums[column] += prologue(r, column)         # in registers, or in scratch if they are wide
        output[epilogue's index] = epilogue(sums[column])

A row has one task, so a single row, however long, runs on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import anchor, is_static
from gtco.tensor.sketch.scan.facts import ScanFacts
from gtco.tensor.sketch.scan.loops import ScanLoops
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import GATHER, grain, in_vectors, streaming_workload
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Workload

SUMMED = ("float32", "float64", "int32", "int64", "uint32", "uint64")


def match(stage: Stage, target: Target) -> Scan | None:
    """The stage as one running sum with a readable prologue and a one-to-one epilogue, or None."""
    op = anchor(stage, "cumsum")
    if op is None or not is_static(stage) or op.type.dtype not in SUMMED:
        return None
    if op.type.size == 0 or op.type.shape[op["axis"]] == 1:
        return None
    tail = in_vectors(stage, op)
    return None if tail is None else Scan(stage, target, op, tail)


@dataclass(frozen=True)
class Scan(ScanFacts):
    """A running sum on a CPU; see the module's text for the loops."""

    name = "scan"
    structure = "SRS"

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, prod(self.shape) // self.units, self.target)

    def workload(self, config: Config) -> Workload:
        parts = self.target.lanes / self.full  # vectors of the dtype for one of float32
        passes = self.gathers * GATHER * self.target.lanes + parts
        others = {}
        if self.by_rows:
            short = self.lanes / self.length if self.length < self.lanes else 1.0
            others["shuffle"] = short * parts * (len(self.steps) + 1 + self.exclusive)
            passes += short * parts * (len(self.steps) + 1)
        tasks = ceil(self.units / config["rows"])
        return streaming_workload(self.stage, self.target, tasks, passes, others=others)

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = ScanLoops(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)
