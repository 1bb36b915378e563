"""Sketch rule for stages around one reduction on a GPU: normalisation, softmax, sums and extremes,
structure SRS.

Over the trailing axes (``rows.cuh``), a few threads, a warp or several warps share a row, and a
block takes some rows side by side. Values that are read through the prologue stay in registers if
later passes need them again. Threads exchange values by shuffles, and warps through shared memory::

    for row of the block's:                       # block and team of threads
      for vector of the row: held = prologue      # read once, 16 bytes a thread
      statistics over held                        # shuffles; mean, then variance
      for vector of the row: epilogue(f(held, statistics))

Over other axes (``columns.cuh``), neighbouring threads take neighbouring columns. Some rows of
threads share the positions of each column, and meet in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod

from gtco.machine.gpu import WARP, GpuTarget
from gtco.tensor.analysis.chains import Epilogue, anchor, is_static
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.reduction import NORMALISATIONS, PLACES, REDUCTIONS, Reduction
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda import lambdas
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.neighbours import HEADER, reading, side_by_side, storing
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.loops import Line
from gtco.tensor.sketch.shared.cuda_loops import Teams, column_lines, row_lines
from gtco.tensor.sketch.shared.cuda_streaming import around, floats, launch, number, taken
from gtco.tensor.sketch.shared.cuda_teams import BESIDE, HELD, columns, side, splits, teams
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage

VECTORS = (4, 2, 1)  # neighbours that a thread may read at once
MOST_POSITIONS = 1 << 31
# If a thread keeps more than FEW_HELD elements of a row, the compiler loads gain, shift and the
# epilogue's inputs for many of them ahead. That takes as many registers again, and ROOM_AHEAD more.
FEW_HELD, ROOM_AHEAD = 8, 4
START = 30.0  # instructions with which a thread finds its row and the addresses there
# Passes over a row, and instructions of an element in all of them.
PASSES = {"softmax": (3, 14.0), "log_softmax": (3, 14.0), "layer_norm": (3, 6.0),
          "rms_norm": (2, 4.0), "argmax": (1, 6.0), "argmin": (1, 6.0)}  # fmt: skip
FOLDS = {"sum": "Sum", "mean": "Sum", "prod": "Product", "max": "Largest", "min": "Smallest"}


def match(stage: Stage, target: GpuTarget) -> CudaRows | None:
    """The stage as one reduction of floats with a readable prologue and a one-to-one epilogue, else
    None.
    """
    op = anchor(stage, *REDUCTIONS, *PLACES, *NORMALISATIONS)
    if op is None or not is_static(stage) or not floats(stage, op.inputs):
        return None
    if op.kind not in PLACES and not floats(stage, (op.output,)):
        return None
    tail = around(stage, op) if stage.types[op.inputs[0]].size else None
    if tail is None or Reduction(stage, op).count >= MOST_POSITIONS:
        return None
    return CudaRows(stage, target, op, tail)


@dataclass(frozen=True)
class CudaRows:
    """A reduction on a GPU; see the module's text for the loops."""

    stage: Stage
    target: GpuTarget
    op: Operator
    tail: Epilogue

    name = "rows"
    structure = "SRS"

    @cached_property
    def view(self) -> Reduction:
        return Reduction(self.stage, self.op)

    @property
    def rows(self) -> int:
        """The number of rows that are reduced; by columns, the number of rows of columns."""
        return prod(self.view.kept)

    @property
    def length(self) -> int:
        """The number of positions that are reduced to one."""
        return self.view.count

    @property
    def wide(self) -> bool:
        """True if every position has a result."""
        return self.op.kind in NORMALISATIONS

    # indices --------------------------------------------------------------------------------------
    def at(self, outer: Expr, position: Expr, column: Expr = 0) -> list[Expr]:
        """The reduced tensor's index at a position of row ``outer``."""
        view = self.view
        index = split_flat(outer, view.kept)
        extents = [view.shape[a] for a in view.axes]
        for axis, i in zip(view.axes, split_flat(position, extents), strict=True):
            index[axis] = i
        if not view.by_rows:
            index[-1] = column
        return index

    def result(self, outer: Expr, column: Expr = 0) -> list[Expr]:
        """The place of a reduction's element in the operator's own output."""
        index = self.at(outer, 0, column)
        if self.op.kind in PLACES:
            axis = self.op["axis"] % len(index)
            kept = [0] if self.op["keepdims"] else []
            return [*index[:axis], *kept, *index[axis + 1 :]]
        return self.view.result_index(index)

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order:

        - vector: neighbours that a thread reads at once;
        - threads: those that share a row, or a column;
        - rows: rows of a block, or threads for columns side by side.
        """
        if "vector" not in chosen:
            return Decision("vector", "registers", self.vectors)
        vector = int(chosen["vector"])
        if "threads" not in chosen:
            by_rows = self.view.by_rows
            options = teams(self.length, vector) if by_rows else splits(self.length)
            return Decision("threads", "parallel", options)
        if "rows" not in chosen:
            team = int(chosen["threads"])
            if not self.view.by_rows:
                return Decision("rows", "block", columns(self.view.shape[-1] // vector, team))
            registers = BESIDE + self._held(team, vector)
            return Decision("rows", "block", side(self.rows, team, registers, self.target))
        return None

    @cached_property
    def vectors(self) -> tuple[int, ...]:
        """The widths of vectors, the widest first. There is more than one if neighbours are also
        neighbours in memory.
        """
        inner = self.view.length if self.view.by_rows else self.view.shape[-1]
        return tuple(n for n in VECTORS if n == 1 or (inner % n == 0 and self._side_by_side(n)))

    def _side_by_side(self, lanes: int) -> bool:
        by_rows, tail = self.view.by_rows, self.tail

        def follow(probe: Probe, outer: Expr, a: Expr, b: Expr, lane: Expr) -> None:
            position = a * lanes + lane if by_rows else a
            column = 0 if by_rows else b * lanes + lane
            index = self.at(outer, position, column)
            probe.follow(self.op.inputs[0], index)
            if self.wide:
                probe.through(tail, index)
            elif not by_rows:
                probe.through(tail, self.result(outer, column))

        extents = (
            (self.rows, self.length // lanes, 1)
            if by_rows
            else (self.rows, self.length, self.view.shape[-1] // lanes)
        )
        return side_by_side(self.stage, extents, follow, lanes)

    def _held(self, team: int, vector: int) -> int:
        """Registers of a thread for its part of a row; 0 if every pass reads the row again."""
        if not self.view.by_rows or not self.wide:
            return 0
        elements = ceil(self.length // vector / team) * vector
        fits = elements <= HELD and team * (BESIDE + elements) <= self.target.registers_sm
        return elements if fits else 0

    def workload(self, config: Config) -> Launch:
        team, vector, rows = config["threads"], config["vector"], config["rows"]
        passes, each = PASSES.get(self.op.kind, (1, 1.0))
        size = self.rows * self.length * (1 if self.view.by_rows else self.view.shape[-1])
        held = self._held(team, vector)
        pieces = ceil(self.length / team / (vector if self.view.by_rows else 1))
        read = 1 if held else passes
        # four loads of a pass are under way at a time; all of them if the row is kept
        steps = passes + read * ceil(pieces / (pieces if held else 4))
        traffic = read * float(self.stage.input_bytes)
        traffic += self.stage.output.type.nbytes
        ahead = held + ROOM_AHEAD if held > FEW_HELD else 0
        apart = 1.0 if vector > 1 else 1.0 + 3.0 * self._apart
        blocks, threads = self._blocks(config), team * rows
        # an access and its address for a vector of each tensor; a thread's start and its folds
        accesses = 3.0 * (read * len(self.stage.inputs) + self.wide) * size / vector
        fold = 2.0 * log2(min(team, WARP)) + (10 + team / WARP if team > WARP else 0)
        beside = blocks * threads * (START + (2 if self.wide else 1) * fold)
        return launch(
            self.stage,
            threads,
            each * size + accesses + beside,
            taken(BESIDE + (held or 4 * vector) + ahead, threads, self.target),
            blocks,
            shared=self._shared(config),
            steps=steps,
            traffic=apart * traffic,
            # lanes of several teams read several rows at once, each in lines of its own
            lines=accesses / 3.0 / team if self.view.by_rows and team < WARP else 0.0,
        )

    @cached_property
    def _apart(self) -> float:
        """The share of loads and stores whose neighbours along a row do not lie side by side."""
        probe = Probe(self.stage)
        index = probe.scope.variables(self.view.shape)
        inner = [i for i, n in zip(index, self.view.shape, strict=True) if n > 1]
        probe.follow(self.op.inputs[0], index)
        if self.wide:
            probe.through(self.tail, index)
        return probe.apart(inner[-1]) / max(len(probe.loads), 1) if inner else 0.0

    def _blocks(self, config: Config) -> int:
        if self.view.by_rows:
            return ceil(self.rows / config["rows"])
        return self.rows * ceil(self.view.shape[-1] / (config["rows"] * config["vector"]))

    def _shared(self, config: Config) -> int:
        """Bytes of shared memory through which the warps of a row, or the threads of a column,
        exchange values.
        """
        team, threads = config["threads"], config["threads"] * config["rows"]
        folds = 2 if self.wide else 1
        item = 8 if self.op.kind in PLACES else 4
        if self.view.by_rows:
            return folds * item * (threads // WARP) if team > WARP else 0
        return folds * item * threads * config["vector"] if team > 1 else 0

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        text, call = self._by_rows(config) if self.view.by_rows else self._by_columns(config)
        threads = config["threads"] * config["rows"]
        headers = ("rows.cuh" if self.view.by_rows else "columns.cuh", HEADER)
        about = f"{self.rows} rows of {self.length}" + (
            "" if self.view.by_rows else f" x {self.view.shape[-1]} columns"
        )
        return CudaProgram(
            source(symbol, self.stage, headers, text, call, threads, about),
            (self._blocks(config), 1, 1),
            threads,
            self._shared(config),
            lines=self._lines(config),
        )

    def _lines(self, config: Config) -> tuple[Line, ...]:
        """The loops in words."""
        team, vector = config["threads"], config["vector"]
        held = bool(self._held(team, vector))
        shared = Teams(self.rows, self.length, team, config["rows"], vector, held)
        if self.view.by_rows:
            return row_lines(self.stage, self.op, shared, self.wide)
        return column_lines(self.stage, self.op, shared, self.view.shape[-1], self.wide)

    def _by_rows(self, config: Config) -> tuple[list[str], str]:
        stage, op, vector, team = self.stage, self.op, config["vector"], config["threads"]
        args = arguments(stage)
        q = ("q", self.length // vector)
        params = [("row", self.rows), q]

        def index(row: Expr, q: Expr, v: Expr) -> list[Expr]:
            return self.at(row, q * vector + v)

        held = "true" if self._held(team, vector) else "false"
        shape = (self.rows, self.length, team, config["rows"], vector)
        kind = f"gtco::Rows<{', '.join(map(str, shape))}, {held}>"
        text = [reading(args, stage, op.inputs[0], "value", params, index, vector)]
        if not self.wide:
            text.append(
                lambdas.store(
                    args, stage, self.tail, "store", params[:1], lambda i: self.result(i[0])
                )
            )
            return text, self._reduction(kind, "")
        for tensor, name in zip(op.inputs[1:], ("gain", "shift"), strict=False):
            text.append(reading(
                args, stage, tensor, name, [q], lambda q, v: [q * vector + v], vector
            ))  # fmt: skip
        text.append(storing(args, stage, self.tail, "store", params, index, vector))
        given = {
            "layer_norm": "block, value, gain, shift, {}, store",
            "rms_norm": "block, value, gain, {}, store",
        }.get(op.kind, "block, value, store")
        return text, f"gtco::{op.kind}<{kind}>({given.format(number(op.get('epsilon', 0.0)))});"

    def _by_columns(self, config: Config) -> tuple[list[str], str]:
        stage, vector = self.stage, config["vector"]
        args, width = arguments(stage), self.view.shape[-1]
        outer, r, c = ("outer", self.rows), ("r", self.length), ("c", width // vector)

        def index(outer: Expr, r: Expr, c: Expr, v: Expr) -> list[Expr]:
            return self.at(outer, r, c * vector + v)

        shape = (self.rows, self.length, width, config["rows"], config["threads"], vector)
        kind = f"gtco::Columns<{', '.join(map(str, shape))}>"
        text = [reading(args, stage, self.op.inputs[0], "value", [outer, r, c], index, vector)]
        if self.wide:
            text.append(storing(args, stage, self.tail, "store", [outer, r, c], index, vector))
            logarithm = "true" if self.op.kind == "log_softmax" else "false"
            return text, f"gtco::softmax_columns<{kind}, {logarithm}>(block, value, store);"

        def result(outer: Expr, c: Expr, v: Expr) -> list[Expr]:
            return self.result(outer, c * vector + v)

        text.append(storing(args, stage, self.tail, "store", [outer, c], result, vector))
        return text, self._reduction(kind, "_columns")

    def _reduction(self, kind: str, suffix: str) -> str:
        if self.op.kind in PLACES:
            largest = "true" if self.op.kind == "argmax" else "false"
            return f"gtco::place{suffix}<{kind}, {largest}>(block, value, store);"
        scale = number(1.0 / self.length if self.op.kind == "mean" else 1.0)
        fold = f"gtco::{FOLDS[self.op.kind]}"
        return f"gtco::reduce{suffix}<{kind}, {fold}>(block, value, {scale}, store);"
