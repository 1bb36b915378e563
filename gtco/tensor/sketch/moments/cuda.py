"""Sketch rules for the two halves of a split normalisation on a GPU, structures SRS.

``moments`` takes a part of the positions (``columns.cuh``). Neighbouring threads take neighbouring
channels, and some rows of threads share the positions. Each thread sums distances from the first of
every 64 positions, so that a mean far from zero costs no digits, and merges block after block. The
threads of a channel meet in shared memory.

``merged_moments`` takes all parts (of one size) and a group's channels (``rows.cuh``). A row is a
group, its elements are the parts' means and variances, and its results are one mean and one scale
for each of its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.machine.gpu import WARP, GpuTarget
from gtco.tensor.analysis.chains import is_static, prologue_readable, shape_of
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import Body
from gtco.tensor.cuda.neighbours import (
    HEADER,
    NearReader,
    each_lane,
    function,
    reading,
    side_by_side,
)
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.sketch.shared.cuda_loops import Teams, column_lines, row_lines
from gtco.tensor.sketch.shared.cuda_streaming import floats, launch, number
from gtco.tensor.sketch.shared.cuda_teams import BESIDE, HELD, columns, side, splits, teams
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage, TensorType

BLOCK = 64  # positions whose distances from their first are summed up
VECTORS = (4, 2, 1)  # channels that a thread may read at once


def match(stage: Stage, target: GpuTarget) -> CudaMoments | CudaMergedMoments | None:
    """The stage, if it ends in float32 moments with a readable prologue; else None."""
    op = stage.output
    if op.kind not in ("moments", "merged_moments") or not is_static(stage):
        return None
    if op.type.dtype != "float32" or not floats(stage, op.inputs):
        return None
    if stage.types[op.inputs[0]].size == 0 or not prologue_readable(stage, op.inputs):
        return None
    return (
        CudaMoments(stage, target, op)
        if op.kind == "moments"
        else CudaMergedMoments(stage, target, op)
    )


@dataclass(frozen=True)
class CudaMoments:
    """Mean and variance along the last axis but one, on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator

    name = "moments"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.stage, self.op.inputs[0])

    @property
    def outer(self) -> int:
        return prod(self.shape[:-2])

    def at(self, outer: Expr, r: Expr, channel: Expr) -> list[Expr]:
        return [*split_flat(outer, self.shape[:-2]), r, channel]

    @cached_property
    def vectors(self) -> tuple[int, ...]:
        def even(lanes: int) -> bool:
            def follow(probe: Probe, outer: Expr, r: Expr, c: Expr, lane: Expr) -> None:
                probe.follow(self.op.inputs[0], self.at(outer, r, c * lanes + lane))

            extents = (self.outer, self.shape[-2], self.shape[-1] // lanes)
            return side_by_side(self.stage, extents, follow, lanes)

        width = self.shape[-1]
        return tuple(n for n in VECTORS if n == 1 or (width % n == 0 and even(n)))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order:

        - vector: channels that a thread reads at once;
        - threads: those that share a channel;
        - rows: threads side by side.
        """
        if "vector" not in chosen:
            return Decision("vector", "registers", self.vectors)
        if "threads" not in chosen:
            return Decision("threads", "parallel", splits(self.shape[-2]))
        if "rows" not in chosen:
            vectors = self.shape[-1] // int(chosen["vector"])
            return Decision("rows", "block", columns(vectors, int(chosen["threads"])))
        return None

    def workload(self, config: Config) -> Launch:
        split, vector = config["threads"], config["vector"]
        return launch(
            self.stage,
            split * config["rows"],
            4.0 * prod(self.shape),
            BESIDE + 8 * vector,
            self._blocks(config),
            shared=self._shared(config),
            steps=2 + ceil(self.shape[-2] / split / 4),
        )

    def _blocks(self, config: Config) -> int:
        return self.outer * ceil(self.shape[-1] / (config["rows"] * config["vector"]))

    def _shared(self, config: Config) -> int:
        """Bytes of shared memory for count, mean and squares of every thread's channels."""
        threads = config["threads"] * config["rows"]
        return 12 * threads * config["vector"] if config["threads"] > 1 else 0

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        stage, vector, split = self.stage, config["vector"], config["threads"]
        args, width = arguments(stage), self.shape[-1]
        outer, r, c = ("outer", self.outer), ("r", self.shape[-2]), ("c", width // vector)

        def index(outer: Expr, r: Expr, c: Expr, v: Expr) -> list[Expr]:
            return self.at(outer, r, c * vector + v)

        def stores(b: Body) -> None:
            def element(reader: NearReader, v: Expr) -> None:
                for which, name in enumerate(("mean", "variance")):
                    at = self.at(b.index[0], which, b.index[1] * vector + v)
                    b.em.store(b.output, at, b.em.load(b.arrays[name], [v]))

            each_lane(b, stage, vector, lambda probe, v: None, element)

        both = TensorType((vector,))
        declared = {f"const float (&{name})": both for name in ("mean", "variance")}
        text = [
            reading(args, stage, self.op.inputs[0], "value", [outer, r, c], index, vector),
            function(args, "store", [outer, c], stores, declared),
        ]
        sizes = (self.outer, self.shape[-2], width, config["rows"], split, vector)
        kind = f"gtco::Columns<{', '.join(map(str, sizes))}>"
        call = f"gtco::moments_columns<{kind}, {BLOCK}>(block, value, store);"
        threads = split * config["rows"]
        about = f"{self.outer} x {width} channels of {self.shape[-2]} positions"
        return CudaProgram(
            source(symbol, stage, ("columns.cuh", HEADER), text, call, threads, about),
            (self._blocks(config), 1, 1),
            threads,
            self._shared(config),
            lines=column_lines(stage, self.op, self._teams(config), width, wide=False),
        )

    def _teams(self, config: Config) -> Teams:
        """What threads share."""
        sizes = config["threads"], config["rows"], config["vector"]
        return Teams(self.outer, self.shape[-2], *sizes)


@dataclass(frozen=True)
class CudaMergedMoments:
    """Merges the moments of parts into one mean and one scale a channel, on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator

    name = "merged_moments"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Batch, parts, 2, channels."""
        return shape_of(self.stage, self.op.inputs[0])

    @property
    def groups(self) -> int:
        return int(self.op["groups"])

    @property
    def size(self) -> int:
        """The channels of a group."""
        return self.shape[3] // self.groups

    @property
    def rows(self) -> int:
        return self.shape[0] * self.groups

    @property
    def length(self) -> int:
        """The number of means of a group, which is that of its variances too."""
        return self.shape[1] * self.size

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order: threads (those that share a group) and rows (the groups of a
        block).
        """
        if "threads" not in chosen:
            return Decision("threads", "parallel", teams(self.length, 1))
        if "rows" not in chosen:
            team = int(chosen["threads"])
            registers = BESIDE + self._held(team)
            return Decision("rows", "block", side(self.rows, team, registers, self.target))
        return None

    def _held(self, team: int) -> int:
        elements = ceil(self.length / team)
        return elements if elements <= HELD else 0

    def workload(self, config: Config) -> Launch:
        team = config["threads"]
        return launch(
            self.stage,
            team * config["rows"],
            6.0 * self.rows * self.length,
            BESIDE + self._held(team),
            ceil(self.rows / config["rows"]),
            shared=self._shared(config),
            steps=4,
        )

    def _shared(self, config: Config) -> int:
        """Bytes of shared memory for three folds between warps."""
        team = config["threads"]
        return 12 * (team * config["rows"] // WARP) if team > WARP else 0

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        stage, team = self.stage, config["threads"]
        args = arguments(stage)
        row, q = ("row", self.rows), ("q", self.length)

        def what(which: int) -> Callable[..., list[Expr]]:
            def index(row: Expr, q: Expr, v: Expr) -> list[Expr]:
                batch, group = split_flat(row, (self.shape[0], self.groups))
                part, channel = split_flat(q, (self.shape[1], self.size))
                return [batch, part, which, group * self.size + channel]

            return index

        def stores(b: Body) -> None:
            batch, group = split_flat(b.index[0], (self.shape[0], self.groups))
            channel = group * self.size + b.index[1]
            for which, name in enumerate(("mean", "scale")):
                b.em.store(b.output, [batch, which, channel], b.given[name])

        x = self.op.inputs[0]
        text = [
            reading(args, stage, x, "value", [row, q], what(0), 1),
            reading(args, stage, x, "spread", [row, q], what(1), 1),
            function(
                args,
                "store",
                [row, ("c", self.size)],
                stores,
                {},
                {"mean": "float32", "scale": "float32"},
            ),
        ]
        held = "true" if self._held(team) else "false"
        kind = f"gtco::Rows<{self.rows}, {self.length}, {team}, {config['rows']}, 1, {held}>"
        epsilon = number(float(self.op["epsilon"]))
        call = f"gtco::merged_moments<{kind}, {self.size}>(block, value, spread, {epsilon}, store);"
        threads = team * config["rows"]
        about = f"{self.rows} groups of {self.size} channels, {self.shape[1]} parts"
        return CudaProgram(
            source(symbol, stage, ("rows.cuh", HEADER), text, call, threads, about),
            (ceil(self.rows / config["rows"]), 1, 1),
            threads,
            self._shared(config),
            lines=row_lines(stage, self.op, self._teams(config), wide=False),
        )

    def _teams(self, config: Config) -> Teams:
        """What threads share."""
        team = config["threads"]
        return Teams(self.rows, self.length, team, config["rows"], 1, bool(self._held(team)))
