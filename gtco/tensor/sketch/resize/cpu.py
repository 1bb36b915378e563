"""Sketch rule for resizing images, structure SS: separable taps, found once a column and once a
row.

::

    scratch[tap, x] = source column and weight of every output column     # once a call
    for task in chunks of images x output rows (x channels, first):       # parallel
      taps of the row: source rows and weights                            # once a row
      for output column:                    # channels last: vectors of channels; first: of columns
        output = sum over taps of weight_y * weight_x * source

For channels first and widths that do not shrink, see :mod:`gtco.tensor.sketch.resize.columns`.
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
    anchor,
    float32,
    is_static,
    shape_of,
)
from gtco.tensor.analysis.images import nhwc, place
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.emit.spatial import ResizedAxis
from gtco.tensor.sketch.resize.columns import Columns, fits
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    grain,
    in_vectors,
    streaming_workload,
    tasks_of_rows,
    unflatten,
    vector_runs,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

Tap = tuple[Expr, Expr | None]  # source position, weight (None for 1)
LARGEST = 1 << 24  # positions are kept as float32


def match(stage: Stage, target: Target) -> Resize | None:
    """The stage as one float32 ``resize2d``, else None."""
    op = anchor(stage, "resize2d")
    if op is None or not is_static(stage) or not float32(stage, (*op.inputs, op.output)):
        return None
    if op.type.size == 0 or max(shape_of(stage, op.inputs[0])) >= LARGEST:
        return None
    tail = in_vectors(stage, op)
    return Resize(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class Resize:
    """Nearest, linear or cubic resizing on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "resize"
    structure = "SS"

    @property
    def last(self) -> bool:
        """True if the channels are the last axis."""
        return bool(self.op["layout"] == "NHWC")

    def place(self, n: Expr, y: Expr, x: Expr, c: Expr) -> list[Expr]:
        return place(self.op["layout"], n, y, x, c)

    @cached_property
    def output(self) -> tuple[int, int, int, int]:
        """Images, height, width, channels."""
        return nhwc(self.op.type.shape, self.op["layout"])

    @cached_property
    def source(self) -> tuple[int, int, int, int]:
        return nhwc(shape_of(self.stage, self.op.inputs[0]), self.op["layout"])

    def axis(self, axis: int) -> ResizedAxis:
        """The rows (axis 0) or columns (axis 1)."""
        return ResizedAxis(self.op, self.source[1 + axis], self.output[1 + axis])

    @property
    def taps(self) -> int:
        """The number of source positions along each axis."""
        return {"nearest": 1, "linear": 2, "cubic": 4}[self.op["method"]]

    @cached_property
    def columns(self) -> Columns | None:
        """The loops that find a row's columns by permuting vectors, for channels first; None if
        they cannot be used.
        """
        axis = self.axis(1)
        if self.last or not fits(axis.size, axis.out, self.target.lanes):
            return None
        given = any(self.op.inputs[0] == i.name for i in self.stage.inputs)
        return Columns(axis, self.target.lanes, given and axis.size >= self.target.lanes)

    @property
    def units(self) -> int:
        n, y, _, c = self.output
        return n * y * (1 if self.last else c)

    @property
    def scratch(self) -> Scratch:
        """The tables: source columns, and their weights if there are several."""
        if self.columns is not None:
            return self.columns.scratch
        columns = tuple(Piece(f"at{t}", self.output[2:3]) for t in range(self.taps))
        weights = tuple(Piece(f"weight{t}", self.output[2:3]) for t in range(self.taps))
        return Scratch(columns + (weights if self.taps > 1 else ()))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        work = prod(self.output) // self.units * self.taps**2
        return grain(chosen, self.units, work, self.target)

    def workload(self, config: Config) -> Workload:
        slow = 4.0 if not self.last and self.columns is None else 1.0
        return streaming_workload(
            self.stage, self.target, ceil(self.units / config["rows"]), 2.0 * self.taps**2, slow
        )

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = ResizeLoops(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)


class ResizeLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: Resize, rows: int) -> None:
        self.sketch, self.rows = sketch, rows

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        sketch = self.sketch
        self.em, self.args = em, args
        self.reader = Reader(sketch.stage, em, args.inputs)
        images, height, _, channels = sketch.output
        self.tables = sketch.scratch.arrays(args)
        if sketch.columns is not None:
            sketch.columns.fill(em, self.tables)
        else:
            self.fill()
        with tasks_of_rows(em, args, sketch.units, self.rows) as unit:
            if sketch.last:
                n, y = unflatten(em, unit, (images, height))
                self.row(n, y, self.found(y, 0))
            else:
                n, c, y = unflatten(em, unit, (images, channels, height))
                self.channel_row(n, c, y, self.found(y, 0))

    def fill(self) -> None:
        """Fills the tables: source columns and weights of every output column."""
        em, sketch = self.em, self.sketch
        with em.loop(sketch.output[2], "x") as x:
            for t, (at, weight) in enumerate(self.found(x, 1)):
                number = isinstance(at, int)
                place = tirx.const(at, "float32") if number else tirx.Cast("float32", at)
                em.store(self.tables[f"at{t}"], [x], place)
                if weight is not None:
                    em.store(self.tables[f"weight{t}"], [x], weight)

    def found(self, i: Expr, axis: int) -> list[Tap]:
        """The taps of output row (axis 0) or column (axis 1) ``i``."""
        along = self.sketch.axis(axis)
        if self.sketch.op["method"] == "nearest":
            return [(along.nearest(self.em, i), None)]
        return list(along.taps(self.em, i))

    def kept(self, x: Expr) -> list[Tap]:
        """The taps of output column ``x`` from the tables."""
        em, sketch = self.em, self.sketch
        result: list[Tap] = []
        for t in range(sketch.taps):
            at = em.let(tirx.Cast(em.index_dtype, em.load(self.tables[f"at{t}"], [x])), "at")
            em.bind(at, sketch.source[2])
            weights = self.tables.get(f"weight{t}")
            result.append((at, weights and em.let(em.load(weights, [x]), "w")))
        return result

    def row(self, n: Expr, y: Expr, ys: list[Tap]) -> None:
        em, sketch = self.em, self.sketch
        with em.loop(sketch.output[2], "x") as x:
            pairs = [
                (at_y, at_x, None if wy is None or wx is None else em.let(wy * wx, "w"))
                for at_y, wy in ys
                for at_x, wx in self.kept(x)
            ]
            for begin, count, lanes in vector_runs(sketch.output[3], em.lanes):
                with em.loop(count, "c") as block, em.vector(lanes) as lane:
                    c = begin + block * lanes + lane
                    total: Expr = None
                    for at_y, at_x, weight in pairs:
                        value = self.reader.value(
                            sketch.op.inputs[0], sketch.place(n, at_y, at_x, c)
                        )
                        term = value if weight is None else value * weight
                        total = term if total is None else total + term
                    self.finish(n, y, x, c, total)

    def channel_row(self, n: Expr, c: Expr, y: Expr, ys: list[Tap]) -> None:
        em, sketch = self.em, self.sketch
        if sketch.columns is not None:
            image, columns = sketch.op.inputs[0], sketch.columns

            def source(at_y: Expr, x: Expr) -> Expr:
                at = sketch.place(n, at_y, x, c)
                if columns.direct:
                    return em.load_vector(self.args.inputs[image], at)
                return self.reader.value(image, at)

            def finish(x: Expr, value: Expr) -> None:
                self.finish(n, y, x, c, value)

            row = columns.row_in_place if columns.direct else columns.row
            row(em, self.tables, ys, source, finish)
            return
        for begin, count, lanes in vector_runs(sketch.output[2], em.lanes):
            with em.loop(count, "block") as block, em.vector(lanes) as lane:
                x = begin + block * lanes + lane
                total: Expr = None
                for at_x, wx in self.kept(x):
                    column: Expr = None
                    for at_y, wy in ys:
                        value = self.reader.value(
                            sketch.op.inputs[0], sketch.place(n, at_y, at_x, c)
                        )
                        term = value if wy is None else value * wy
                        column = term if column is None else column + term
                    term = column if wx is None else column * wx
                    total = term if total is None else total + term
                self.finish(n, y, x, c, total)

    def finish(self, n: Expr, y: Expr, x: Expr, c: Expr, total: Expr) -> None:
        value = self.em.let(total, "value")
        at = self.sketch.place(n, y, x, c)
        self.reader.finish(self.sketch.tail, at, value, self.args.output)
