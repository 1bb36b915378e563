"""Sketch rules for the two halves of a normalisation that is split over tasks, structures SRS.

``moments`` takes a part of the positions and reads each once::

    for task in outer index x chunks of columns:  # parallel
      for block of rows:                          # sums in registers
        for row: d = x - first row of the block; total[column] += d; squared[column] += d^2
        mean[column], squares[column] = merged with those of the block
      variance[column] = squares[column] / R

``merged_moments`` merges all parts (of one size) and a group's columns; it reads little::

    for task in batch x blocks of groups:         # parallel
      for column: mean of the parts' means; mean of their variances and of their means' deviations
      for group: the same over its columns; output mean and 1/sqrt(variance + epsilon)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import is_static, prologue_readable, shape_of
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.fold import add, fold
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.sketch.shared.column_moments import column_moments
from gtco.tensor.sketch.shared.columns import CHUNK, ColumnChunk
from gtco.tensor.sketch.shared.interleaving import SteppedReader
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    grain,
    streaming_workload,
    tasks_of_rows,
    unflatten,
    vector_runs,
    vectorizable,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

BLOCK = 64  # least channels of a merging task, if there are so many


def match(stage: Stage, target: Target) -> Moments | MergedMoments | None:
    """The stage, if it ends in float32 moments with a readable prologue; else None."""
    op = stage.output
    if op.kind not in ("moments", "merged_moments") or not is_static(stage):
        return None
    if op.type.dtype != "float32" or stage.types[op.inputs[0]].size == 0:
        return None
    if not prologue_readable(stage, op.inputs) or not vectorizable(stage):
        return None
    return Moments(stage, target, op) if op.kind == "moments" else MergedMoments(stage, target, op)


@dataclass(frozen=True)
class Moments:
    """Mean and variance along the last axis but one, on a CPU."""

    stage: Stage
    target: Target
    op: Operator

    name = "moments"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.stage, self.op.inputs[0])

    @property
    def chunk(self) -> int:
        """The columns of a task: as many as the registers hold sums of."""
        return min(self.shape[-1], self.target.registers // 4 * self.target.lanes)

    @property
    def chunks(self) -> int:
        return ceil(self.shape[-1] / self.chunk)

    @cached_property
    def even(self) -> bool:
        """True if every load runs evenly along the columns, also if a reshape lies between."""
        probe = Probe(self.stage)
        column, *outer = probe.scope.variables((self.shape[-1], *self.shape[:-1]))
        return probe.even(self.op.inputs[0], [*outer, column], column, 1)

    @property
    def units(self) -> int:
        return prod(self.shape[:-2]) * self.chunks

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, self.shape[-2] * self.chunk, self.target)

    def workload(self, config: Config) -> Workload:
        tasks = ceil(self.units / config["rows"])
        return streaming_workload(self.stage, self.target, tasks, 3.0)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        def body(em: Emitter, args: KernelArguments) -> None:
            reader = Reader(self.stage, em, args.inputs)
            if self.even:
                reader = SteppedReader(self.stage, em, args.inputs, at=em.variable("at"))
                em.bind(reader.at, self.shape[-1])
            with tasks_of_rows(em, args, self.units, config["rows"]) as unit:
                *outer, chunk = unflatten(em, unit, (*self.shape[:-2], self.chunks))
                first = chunk * self.chunk
                rest = self.shape[-1] - (self.chunks - 1) * self.chunk
                em.branch(
                    chunk < (self.chunks - 1 if rest < self.chunk else self.chunks),
                    lambda: self.columns(em, args, reader, outer, first, self.chunk),
                    lambda: self.columns(em, args, reader, outer, first, rest),
                )

        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, body)

    def columns(
        self,
        em: Emitter,
        args: KernelArguments,
        reader: Reader,
        outer: list[Expr],
        first: Expr,
        width: int,
    ) -> None:
        chunk = ColumnChunk(em, self.shape, [len(self.shape) - 2], [*outer, 0, 0], first, width)

        def read(r: Expr, begin: int, lane: Expr) -> Expr:
            index = chunk.at(r, begin, lane)
            if isinstance(reader, SteppedReader):
                index[-1], reader.first, reader.lane = reader.at, first + begin, lane
            return reader.value(self.op.inputs[0], index)

        mean, variance = column_moments(chunk, self.shape[-2], read)

        def finish(begin: int, lane: Expr) -> None:
            for k, held in enumerate((mean, variance)):
                at = [*outer, k, first + begin + lane]
                em.store(args.output, at, em.load(held, [begin + lane]))

        chunk.each(finish)


@dataclass(frozen=True)
class MergedMoments:
    """Merges the moments of parts into one mean and one scale a channel, on a CPU."""

    stage: Stage
    target: Target
    op: Operator

    name = "merged_moments"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Batch, parts, 2, channels."""
        return shape_of(self.stage, self.op.inputs[0])

    @property
    def size(self) -> int:
        """The channels of a group."""
        return self.shape[3] // int(self.op["groups"])

    @cached_property
    def block(self) -> int:
        """The groups that one task takes together."""
        groups = int(self.op["groups"])
        return next(n for n in range(1, groups + 1) if groups % n == 0 and (
            n * self.size >= BLOCK or n == groups
        ))  # fmt: skip

    @property
    def width(self) -> int:
        """The channels of a task."""
        return self.block * self.size

    @property
    def units(self) -> int:
        return self.shape[0] * (self.shape[3] // self.width)

    @property
    def scratch(self) -> Scratch:
        """Room for mean and variance of a task's channels."""
        return Scratch((Piece("mean", (self.width,)), Piece("variance", (self.width,))))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, self.shape[1] * 2 * self.width, self.target)

    def workload(self, config: Config) -> Workload:
        tasks = ceil(self.units / config["rows"])
        return streaming_workload(self.stage, self.target, tasks, 6.0)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        def body(em: Emitter, args: KernelArguments) -> None:
            reader = Reader(self.stage, em, args.inputs)
            blocks = self.shape[3] // self.width
            held = self.scratch.arrays(args)
            with tasks_of_rows(em, args, self.units, config["rows"]) as unit:
                batch, block = unflatten(em, unit, (self.shape[0], blocks))
                self.columns(em, held, reader, batch, block * self.width)
                self.groups(em, args, held, batch, block * self.width)

        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, body, self.scratch)

    def columns(
        self, em: Emitter, held: dict[str, Array], reader: Reader, batch: Expr, first: Expr
    ) -> None:
        """Merges the parts of every channel, into scratch."""
        share = tirx.const(1.0 / self.shape[1], "float32")
        x = self.op.inputs[0]
        for begin, count, width in vector_runs(self.width, CHUNK * em.lanes):
            with em.loop(count, "chunk") as n:
                start = em.index(begin + n * width)
                chunk = ColumnChunk(em, self.shape, [1], [batch, 0, 0, 0], first + start, width)
                mean = chunk.fold(lambda index, b, lane: reader.value(x, index), add, 0.0)
                chunk.each(
                    lambda b, lane, m=mean: em.store(  # type: ignore[misc]
                        m, [b + lane], em.load(m, [b + lane]) * share
                    )
                )

                def spread(index: list[Expr], b: int, lane: Expr, m: Expr = mean) -> Expr:
                    d = em.let(reader.value(x, index) - em.load(m, [b + lane]), "d")
                    inside = reader.value(x, [*index[:2], 1, index[3]])
                    return inside + d * d

                total = chunk.fold(spread, add, 0.0)

                def keep(
                    b: int, lane: Expr, at: Expr = start, m: Expr = mean, v: Expr = total
                ) -> None:
                    em.store(held["mean"], [at + b + lane], em.load(m, [b + lane]))
                    em.store(held["variance"], [at + b + lane], em.load(v, [b + lane]) * share)

                chunk.each(keep)

    def groups(
        self,
        em: Emitter,
        args: KernelArguments,
        held: dict[str, Array],
        batch: Expr,
        first: Expr,
    ) -> None:
        """Merges the channels of every group, and writes the result for each of them."""
        means, variances = held["mean"], held["variance"]
        epsilon = tirx.const(float(self.op["epsilon"]), "float32")
        one = tirx.const(1.0, "float32")
        if self.size == 1:
            for begin, count, lanes in vector_runs(self.width, em.lanes):
                with em.loop(count, "block") as block, em.vector(lanes) as lane:
                    j = begin + block * lanes + lane
                    em.store(args.output, [batch, 0, first + j], em.load(means, [j]))
                    deviation = tirx.sqrt(em.load(variances, [j]) + epsilon)
                    em.store(args.output, [batch, 1, first + j], one / deviation)
            return
        share = tirx.const(1.0 / self.size, "float32")
        with em.loop(self.block, "group") as group:
            start = em.let_index(group * self.size, "start")
            mean = em.let(
                fold(em, self.size, lambda j: em.load(means, [start + j]), add, 0.0) * share,
                "mean",
            )

            def spread(j: Expr) -> Expr:
                d = em.let(em.load(means, [start + j]) - mean, "d")
                return em.load(variances, [start + j]) + d * d

            variance = fold(em, self.size, spread, add, 0.0) * share
            scale = em.let(one / tirx.sqrt(variance + epsilon), "scale")
            for begin, count, lanes in vector_runs(self.size, em.lanes):
                with em.loop(count, "block") as block, em.vector(lanes) as lane:
                    j = first + start + begin + block * lanes + lane
                    em.store(args.output, [batch, 0, j], mean)
                    em.store(args.output, [batch, 1, j], scale)
