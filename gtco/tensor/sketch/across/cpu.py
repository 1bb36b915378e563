"""Sketch rule for normalisation of rows whose elements lie apart: vectors run across the rows.

Channels-first LayerNorm is an example: its row is a pixel, whose channels lie an image apart::

    for task in outer index x chunks of columns:   # parallel; a column is a row of the operator
      for r in the row: kept[r, column] = x[r, column]; that added to the column's moments
      for r in the row: output[epilogue's index] = epilogue(f(kept[r, column]))

The image is read once, and the part that a task needs is kept side by side in scratch. In the image
itself the elements of a column are often a power of two apart, so they would share a few sets of
every cache. If the registers cannot hold the moments of enough columns, one pass takes the mean and
another pass takes the distances from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import Epilogue, anchor, float32, is_static, shape_of
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.fold import add
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.sketch.rows.cpu import EXPONENTIALS
from gtco.tensor.sketch.shared.column_moments import column_moments
from gtco.tensor.sketch.shared.columns import ColumnChunk
from gtco.tensor.sketch.shared.interleaving import SteppedReader, step_of
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    grain,
    in_vectors,
    streaming_workload,
    tasks_of_rows,
    unflatten,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

PASSES = 7.0  # vector instructions for a vector of the tensor, if it takes no exp
LINE = 16  # floats of a cache line
# Cache lines of a row's piece. The first number is for pieces that stay in L1. The second is for
# the others: in L2 the passes cost more, and longer runs of the image are worth more. Measured on
# Zen 5, 2 threads: 96 channels of 56x56 pixels 33 us by 2 or 4 lines, 49 by 8 and 16; 256 channels
# of 64x64 pixels, 16 KB apart, 401 us by 2 lines, 293 by 4, 191 by 8, 178 by 16, 210 by 32. For
# moments in one pass, whose registers hold at most 8 lines, see docs/memory-bound.md.
NARROW, WIDE = 4, 16
MOMENTS = 4  # registers of a vector of columns: the origin of distances, sum, squares, one spare


def match(stage: Stage, target: Target) -> Across | None:
    """The stage as one float32 normalisation whose rows, read and written, are vectors along the
    last axis but one; else None.
    """
    op = anchor(stage, "layer_norm", "rms_norm")
    if op is None or not any(other.kind == "permute" for other in stage.operators):
        return None
    if not is_static(stage) or not float32(stage, (*op.inputs, op.output)):
        return None
    shape = shape_of(stage, op.inputs[0])
    if len(shape) < 2 or shape[-2] < target.lanes or shape[-1] < 2:
        return None
    tail = in_vectors(stage, op)
    if tail is None:
        return None
    sketch = Across(stage, target, op, tail)
    return sketch if sketch.even else None


@dataclass(frozen=True)
class Across:
    """A normalisation on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "across"
    structure = "SRS"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The outer axes, the columns, and the positions of a row."""
        return shape_of(self.stage, self.op.inputs[0])

    @cached_property
    def even(self) -> bool:
        """True if neighbouring columns lie side by side in everything that is read and written."""
        probe = Probe(self.stage)
        column, r, *outer = probe.scope.variables((*self.shape[:-3:-1][::-1], *self.shape[:-2]))
        index = [*outer, column, r]
        probe.follow(self.op.inputs[0], index)
        probe.through(self.tail, index)
        return not probe.apart(column) and not probe.decided_by(column)

    @property
    def width(self) -> int:
        """The columns of a task."""
        kept = 4 * NARROW * LINE * self.shape[-1]  # bytes
        fits = 4 * kept <= 3 * self.target.memory[0].capacity
        lines = NARROW if fits else WIDE
        if self.op.kind == "layer_norm":
            held = self.target.registers // MOMENTS * self.target.lanes // LINE  # lines
            lines = min(lines, held) if fits or 2 * held >= WIDE else WIDE
        return min(self.shape[-2], lines * LINE)

    @property
    def in_one_pass(self) -> bool:
        """True if the registers hold the moments of a task's columns."""
        return self.width <= self.target.registers // MOMENTS * self.target.lanes

    @property
    def chunks(self) -> int:
        return ceil(self.shape[-2] / self.width)

    @property
    def units(self) -> int:
        return prod(self.shape[:-2]) * self.chunks

    @property
    def scratch(self) -> Scratch:
        return Scratch((Piece("kept", (self.shape[-1], self.width)),))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, self.shape[-1] * self.width, self.target)

    def workload(self, config: Config) -> Workload:
        tasks = ceil(self.units / config["rows"])
        exps = EXPONENTIALS.get(self.op.kind, {})
        passes = 2.0 if exps else PASSES
        return streaming_workload(self.stage, self.target, tasks, passes, others=exps)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        def body(em: Emitter, args: KernelArguments) -> None:
            loops = _Loops(self, em, args)
            with tasks_of_rows(em, args, self.units, config["rows"]) as unit:
                *outer, chunk = unflatten(em, unit, (*self.shape[:-2], self.chunks))
                first = em.index(chunk * self.width)
                rest = self.shape[-2] - (self.chunks - 1) * self.width
                em.branch(
                    chunk < (self.chunks - 1 if rest < self.width else self.chunks),
                    lambda: loops.columns(outer, first, self.width),
                    lambda: loops.columns(outer, first, rest),
                )

        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, body, self.scratch)


class _Loops:
    """The emitter of one config."""

    def __init__(self, sketch: Across, em: Emitter, args: KernelArguments) -> None:
        self.sketch, self.op, self.em, self.args = sketch, sketch.op, em, args
        self.at = em.variable("at")
        em.bind(self.at, sketch.shape[-2])
        self.reader = SteppedReader(sketch.stage, em, args.inputs, at=self.at)
        self.kept = sketch.scratch.arrays(args)["kept"]

    def columns(self, outer: list[Expr], first: Expr, width: int) -> None:
        """Emits ``width`` neighbouring columns from ``first`` on."""
        em, op, length = self.em, self.op, self.sketch.shape[-1]
        shape = (*self.sketch.shape[:-2], length, self.sketch.shape[-2])
        chunk = ColumnChunk(em, shape, [len(shape) - 2], [*outer, 0, 0], first, width)

        def keep(index: list[Expr], begin: int, lane: Expr) -> Expr:
            value = em.let(self.reader.value(op.inputs[0], self.index(index, first, begin, lane)))
            em.store(self.kept, [index[-2], begin + lane], value)
            return value

        def average(total: Array) -> Array:
            chunk.each(
                lambda begin, lane: em.store(
                    total,
                    [begin + lane],
                    em.load(total, [begin + lane]) * tirx.const(1.0 / length, "float32"),
                )
            )
            return total

        centred = op.kind == "layer_norm"
        mean: Array | None = None
        scale: Array | None = None
        if centred and self.sketch.in_one_pass:

            def read(r: Expr, begin: int, lane: Expr) -> Expr:
                return keep(chunk.at(r, begin, lane), begin, lane)

            mean, scale = column_moments(chunk, length, read)
        elif centred:
            mean = average(chunk.fold(keep, add, 0.0))

        def distance(index: list[Expr], begin: int, lane: Expr) -> Expr:
            x = em.load(self.kept, [index[-2], begin + lane])
            return em.let(x - em.load(mean, [begin + lane]) if mean is not None else x, "d")

        def square(index: list[Expr], begin: int, lane: Expr) -> Expr:
            d = distance(index, begin, lane) if centred else keep(index, begin, lane)
            return d * d

        if scale is None:
            scale = average(chunk.fold(square, add, 0.0))

        def invert(begin: int, lane: Expr) -> None:
            variance = em.load(scale, [begin + lane])
            deviation = tirx.sqrt(variance + tirx.const(float(op["epsilon"]), "float32"))
            em.store(scale, [begin + lane], tirx.const(1.0, "float32") / deviation)

        chunk.each(invert)

        output = self.args.output
        whole = Array(output.buffer, (prod(output.shape),), output.dtype)

        def write(index: list[Expr], begin: int, lane: Expr) -> None:
            affine = [self.reader.value(p, [index[-2]]) for p in op.inputs[1:]]
            d = distance(index, begin, lane) * em.load(scale, [begin + lane]) * affine[0]
            value = em.let(d + affine[1] if centred else d)
            where = self.index(index, first, begin, lane)
            result, place = self.reader.through(self.sketch.tail, where, value)
            step, origin = step_of(em.index(self.args.output.flat(place)), self.at)
            em.store(whole, [origin + (first + begin + lane) * step], result)

        chunk.across(write)

    def index(self, index: list[Expr], first: Expr, begin: int, lane: Expr) -> list[Expr]:
        """The operator's index for an index of the chunk. Its column is expressed by the name that
        the reader follows.
        """
        self.reader.first, self.reader.lane = first + begin, lane
        return [*index[:-2], self.at, index[-2]]
