"""Sketch rule for stages of element-wise and data-movement operators alone, structure SS.

::

    for task in chunks of rows:                  # parallel; a row: the axes one loop can cover
      for row in the task's rows:
        for segment of the row:                  # between them the source changes (concat, pad)
          for block of lanes, then the rest:     # vectors
            output[row, j] = expression

If inputs run along another axis than the output, the loops are those of
:mod:`gtco.tensor.sketch.elementwise.transposing`. If neighbours come from a few places in turn,
they are those of :mod:`gtco.tensor.sketch.shared.interleaving`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, prod

from gtco.machine.target import Target
from gtco.tensor.analysis.axes import (
    Segment,
    gathers,
    longest_piece,
    longest_row,
    output_shape,
    picks,
    segments,
)
from gtco.tensor.analysis.chains import is_static, readable, shape_of
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.elementwise.picking import emit_picked
from gtco.tensor.sketch.elementwise.transposing import Tiling, emit_tiles, tiling
from gtco.tensor.sketch.shared.interleaving import (
    Interleaving,
    SteppedReader,
    emit_interleaved,
    interleaving,
)
from gtco.tensor.sketch.shared.lockstep import Lockstep, lockstep
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    GATHER,
    TASK_ELEMENTS,
    divisor_below,
    grain,
    streaming_workload,
    tasks_of_rows,
    unflatten,
    vector_runs,
    vectorizable,
    vectors_at_once,
    wide_runs,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Workload


def match(stage: Stage, target: Target) -> Elementwise | None:
    """The stage, if all its operators are readable and its shapes are known; else None."""
    if not is_static(stage) or not all(readable(op) for op in stage.operators):
        return None
    if stage.output.type.size == 0:
        return None
    return Elementwise(stage, target)


@dataclass(frozen=True)
class Grid:
    """The loops over the output: ``rows`` along the outer axes, and the ``inner`` axes of one row
    cut into ``pieces`` of ``length`` positions.

    - ``regular``: one segment covers a piece;
    - ``unbroken``: one segment covers a piece, and one covers the row.
    """

    rows: Lockstep
    inner: tuple[int, ...]
    pieces: int
    regular: bool
    unbroken: bool = False

    @property
    def outer(self) -> tuple[int, ...]:
        return self.rows.outer

    @property
    def length(self) -> int:
        return prod(self.inner) // self.pieces

    @property
    def work(self) -> int:
        """The elements of one unit: one piece of each row that is made side by side."""
        return self.length * self.rows.side

    @property
    def units(self) -> int:
        return prod(self.rows.counted) * self.pieces


@dataclass(frozen=True)
class Elementwise:
    """Element-wise and injective operators on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target

    name = "elementwise"
    structure = "SS"

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        cut = self.blocks or self.grid
        return grain(chosen, cut.units, cut.work, self.target)

    @cached_property
    def blocks(self) -> Tiling | Interleaving | None:
        """The blocks to be turned if the stage transposes, or to be woven if neighbours come from a
        few places. None if vectors run along the last axis, or if lanes are gathered.
        """
        if self.grid.regular or not vectorizable(self.stage):
            return None
        turned = tiling(self.stage, self.target.lanes)
        if turned is not None or not (self.gathers or self.grid.length < self.target.lanes):
            return turned
        woven = interleaving(self.stage, self.target.lanes)
        if woven is None:
            return None
        return replace(woven, rows=lockstep(self.stage, self.target, woven.rows.outer))

    @cached_property
    def grid(self) -> Grid:
        """The longest run of trailing axes along which every load is regular, as one axis. If there
        is none, the last axis, in pieces along which every load is regular (merged heads); else the
        last axis cut at the places where loads are not.
        """
        shape = output_shape(self.stage)
        cut = longest_row(self.stage)
        if cut is None:
            piece = longest_piece(self.stage, self.target.lanes)
            pieces = shape[-1] // piece if piece else 1
            rows = lockstep(self.stage, self.target, shape[:-1])
            return Grid(rows, shape[-1:], pieces, not shape or piece is not None)
        outer, inner = shape[:cut], shape[cut:]
        rows, length = lockstep(self.stage, self.target, outer), prod(inner)
        few = prod(rows.counted) < 8 * self.target.cores and length > TASK_ELEMENTS
        piece = divisor_below(length, TASK_ELEMENTS) if few else length
        return Grid(rows, inner, length // piece, True, True)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a row's piece."""
        grid = self.grid
        if grid.regular:
            return (Segment(0, grid.length),)
        return segments(self.stage, len(grid.outer))

    def workload(self, config: Config) -> Workload:
        lanes = self.target.lanes
        if self.blocks is not None:
            tasks = ceil(self.blocks.units / config["rows"])
            moved = (
                (lanes.bit_length() + 1) * len(self.blocks.axes.inputs)
                if isinstance(self.blocks, Tiling)
                else self.blocks.shuffles
            )
            exchanged = {"shuffle": float(moved)}
            return streaming_workload(self.stage, self.target, tasks, 1.0, others=exchanged)
        tasks = ceil(self.grid.units / config["rows"])
        short = lanes / min(lanes, self.grid.length)  # vectors that take the place of a whole one
        passes = short + (self.gathers + self.picks) * GATHER * lanes
        return streaming_workload(self.stage, self.target, tasks, passes)

    @cached_property
    def gathers(self) -> int:
        """The number of loads that are made lane by lane, if no block is turned. A load that jumps
        only between vectors (a concat) does not count.
        """
        return 0 if self.grid.regular else gathers(self.stage, len(self.grid.outer))

    @cached_property
    def picks(self) -> bool:
        """True if a gather reads each position of a row from another place."""
        return self.grid.regular and picks(self.stage, len(self.grid.outer))

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> Program | Rejection:
        grid, rows = self.blocks, config["rows"]
        body: Callable[[Emitter, KernelArguments], None]
        if isinstance(grid, Tiling):
            body = partial(emit_tiles, stage=self.stage, grid=grid, per_task=rows)
            tasks = ceil(grid.units / rows)
        elif grid is not None:
            body = partial(emit_interleaved, stage=self.stage, grid=grid, per_task=rows)
            tasks = ceil(grid.units / rows)
        else:
            loops = ElementwiseLoops(self, rows)
            body, tasks = loops.emit, loops.tasks
        return program(symbol, self.stage, self.target, tasks, body)


class ElementwiseLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: Elementwise, rows: int) -> None:
        self.stage, self.grid, self.rows = sketch.stage, sketch.grid, rows
        self.segments, self.picks = sketch.segments, sketch.picks
        self.tasks = ceil(self.grid.units / rows)
        self.vectors = vectorizable(self.stage)

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        self.em, self.args = em, args
        grid = self.grid
        if grid.regular and self.vectors:
            self.even(em, args)
            return
        self.reader = Reader(self.stage, em, args.inputs)
        with tasks_of_rows(em, args, grid.units, self.rows) as unit:
            piece: Expr = 0
            if grid.pieces > 1:
                piece = em.let_index(unit % grid.pieces, "piece")
                unit = em.let_index(unit // grid.pieces, "row")
            rows = [*grid.rows.rows(em, unflatten(em, unit, grid.rows.counted))]
            for outer in rows:
                for segment in self.segments:
                    with em.loop(segment.repeat, "k") as k:
                        start = piece * grid.length + segment.begin + k * segment.length
                        self.run(outer, em.index(start), segment)

    def even(self, em: Emitter, args: KernelArguments) -> None:
        """Emits rows along which every load runs evenly.

        The index map of a load is followed once a row, along one variable, because the analysis saw
        that this one is even. It does not always see that a sum of several variables is even; then
        every lane would have its own address.
        """
        grid, output = self.grid, self.stage.output
        reader = SteppedReader(self.stage, em, args.inputs)
        whole = Array(args.output.buffer, (output.type.size,), output.type.dtype)
        with tasks_of_rows(em, args, grid.units, self.rows) as unit:
            *group, piece = unflatten(em, unit, (*grid.rows.counted, grid.pieces))
            rows = [*grid.rows.rows(em, group)]
            reader.at, ahead = em.variable("at"), piece * grid.length
            if grid.unbroken:  # followed along the whole row, as it was probed
                em.bind(reader.at, prod(grid.inner))
                position = split_flat(reader.at, grid.inner)
            else:
                em.bind(reader.at, grid.length)
                position, ahead = split_flat(ahead + reader.at, grid.inner), 0
            side = vectors_at_once(self.stage, em.lanes)
            runs = wide_runs(grid.length, em.lanes, side)
            indices = [[*outer, *position][: len(output.type.shape)] for outer in rows]
            begins = [
                (unit if len(rows) == 1 else self.unit(outer, piece)) * grid.length
                for outer in rows
            ]
            left = [*zip(indices, begins, strict=True)]
            if self.picks:  # a vector would be split into lanes for its loads
                left = [
                    (index, row)
                    for index, row in left
                    if not emit_picked(em, reader, index, ahead, grid.length, whole, row)
                ]
                runs = [(0, grid.length, 1)] if left else []
            for begin, count, lanes in runs:
                with em.loop(count, "block") as block:
                    within = begin + block * lanes
                    reader.first = ahead + within
                    for index, row in left:
                        with em.vector(lanes) as reader.lane:
                            value = reader.value(output.output, index)
                            em.store(whole, [row + within + reader.lane], value)

    def unit(self, outer: list[Expr], piece: Expr) -> Expr:
        """The number of a row's piece among all pieces, in the output's order."""
        number: Expr = 0
        for extent, i in zip(self.grid.outer, outer, strict=True):
            number = number * extent + i
        return number * self.grid.pieces + piece

    def run(self, outer: list[Expr], start: Expr, segment: Segment) -> None:
        em = self.em
        if not (segment.smooth and self.vectors):
            with em.loop(segment.length, "j") as j:
                self.element(outer, start + j)
            return
        for begin, count, lanes in vector_runs(segment.length, em.lanes):
            with em.loop(count, "block") as block, em.vector(lanes) as lane:
                self.element(outer, start + begin + block * lanes + lane)

    def element(self, outer: list[Expr], position: Expr) -> None:
        index = [*outer, *split_flat(position, self.grid.inner)]
        output = self.stage.output.output
        shape = shape_of(self.stage, output)
        value = self.reader.value(output, index[: len(shape)])
        self.em.store(self.args.output, index[: len(shape)], value)
