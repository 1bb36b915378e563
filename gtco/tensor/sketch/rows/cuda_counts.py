"""Sketch rule for sums, products and extremes of whole numbers on a GPU, structure SRS. A team of
threads makes an element of the result, and each position is read alone through the prologue
(``counts.cuh``). It is like :mod:`gtco.tensor.sketch.rows.cuda`, without vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from gtco.machine.gpu import WARP, GpuTarget
from gtco.tensor.analysis.chains import anchor, is_static
from gtco.tensor.analysis.indices import floordiv, floormod
from gtco.tensor.analysis.reduction import Reduction
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda import lambdas
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.cuda.spelling import CTYPES
from gtco.tensor.loops import Line
from gtco.tensor.sketch.rows.cuda import MOST_POSITIONS, START, CudaRows
from gtco.tensor.sketch.shared.cuda_loops import Teams, row_lines
from gtco.tensor.sketch.shared.cuda_streaming import around, launch
from gtco.tensor.sketch.shared.cuda_teams import BESIDE, side, teams
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Stage

FOLDS = {"sum": "WholeSum", "prod": "WholeProduct", "max": "WholeLargest", "min": "WholeSmallest"}
MADE = ("int32", "int64")
READ = (*MADE, "int8", "uint8", "int16", "bool")


def match(stage: Stage, target: GpuTarget) -> Counts | None:
    """The stage as one reduction of whole numbers with a readable prologue and a one-to-one
    epilogue, else None.
    """
    op = anchor(stage, *FOLDS)
    if op is None or not is_static(stage):
        return None
    read, made = stage.types[op.inputs[0]], stage.types[op.output].dtype
    if made not in MADE or read.dtype not in READ or not read.size:
        return None
    tail = around(stage, op)
    if tail is None or max(read.size, Reduction(stage, op).count) >= MOST_POSITIONS:
        return None
    return Counts(stage, target, op, tail)


@dataclass(frozen=True)
class Counts(CudaRows):
    """A reduction of whole numbers on a GPU."""

    name = "counts"

    @property
    def width(self) -> int:
        """The columns that are kept: 1 if rows are reduced."""
        return 1 if self.view.by_rows else self.view.shape[-1]

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order: threads (those that share an element of the result) and rows
        (the elements of a block).
        """
        if "threads" not in chosen:
            return Decision("threads", "parallel", teams(self.length, 1))
        if "rows" not in chosen:
            team, every = int(chosen["threads"]), self.rows * self.width
            return Decision("rows", "block", side(every, team, BESIDE, self.target))
        return None

    def workload(self, config: Config) -> Launch:
        team, threads = config["threads"], config["threads"] * config["rows"]
        blocks = ceil(self.rows * self.width / config["rows"])
        fold = 4.0 * log2(min(team, WARP)) + (10 + team / WARP if team > WARP else 0)
        size = self.rows * self.width * self.length
        # neighbours along a column lie a row apart
        traffic = float(self.stage.input_bytes) * (1.0 if self.view.by_rows else 4.0)
        return launch(
            self.stage,
            threads,
            6.0 * size + blocks * threads * (START + fold),
            BESIDE,
            blocks,
            shared=self._shared(config),
            steps=1 + ceil(self.length / team / 4),
            traffic=traffic + self.stage.output.type.nbytes,
        )

    def _shared(self, config: Config) -> int:
        team, threads = config["threads"], config["threads"] * config["rows"]
        return 8 * (threads // WARP) if team > WARP else 0

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        stage, op, width = self.stage, self.op, self.width
        every, args = self.rows * width, arguments(stage)
        made = stage.types[op.output].dtype

        def read(index: Sequence[Expr]) -> list[Expr]:
            row, j = index
            return self.at(floordiv(row, width), j, floormod(row, width))

        def result(index: Sequence[Expr]) -> list[Expr]:
            return self.result(floordiv(index[0], width), floormod(index[0], width))

        params = (("row", every), ("j", self.length))
        text = [
            lambdas.value(args, stage, op.inputs[0], "value", params, read, dtype=made),
            lambdas.store(args, stage, self.tail, "store", params[:1], result),
        ]
        fold = f"gtco::{FOLDS[op.kind]}<{CTYPES[made]}>"
        shape = f"{every}, {self.length}, {config['threads']}, {config['rows']}"
        call = f"gtco::reduce_whole<{fold}, {shape}>(block, value, store);"
        threads = config["threads"] * config["rows"]
        about = f"{every} rows of {self.length} whole numbers"
        return CudaProgram(
            source(symbol, stage, ("counts.cuh",), text, call, threads, about),
            (ceil(every / config["rows"]), 1, 1),
            threads,
            self._shared(config),
            lines=self._lines(config),
        )

    def _lines(self, config: Config) -> tuple[Line, ...]:
        every = self.rows * self.width
        shared = Teams(every, self.length, config["threads"], config["rows"], 1)
        return row_lines(self.stage, self.op, shared, wide=False)
