"""Sketch rule for sampling images at points (GridSample), channels last, structure SS.

::

    for task in images x blocks of points:                     # parallel
      for vector of points in the block:
        scratch = rows, columns and weights of their corners   # the grid's prologue is in here
      for point in the block:
        for vector of channels:
          output = sum over corners of weight * image[row, column]   # whole pixels are read

An NCHW image would cost a load for each channel. Multi-scale deformable attention samples a few
points a query from a value whose channels lie side by side (last).
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
    shape_of,
)
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.sampling import CORNERS, corners, index_of
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    GATHER,
    divisor_below,
    grain,
    in_vectors,
    tasks_of_rows,
    unflatten,
    vector_runs,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Layer, Stream, Workload

BLOCK = 128  # points whose corners are kept in the tables: 4 KB
LOCATING = 60.0  # vector instructions that find the corners of a vector of points
POINT = 16.0  # and those that fetch the corners of one point from the tables


def match(stage: Stage, target: Target) -> GridSample | None:
    """The stage as one float32 ``grid_sample`` in NHWC, else None."""
    op = anchor(stage, "grid_sample")
    if op is None or not is_static(stage):
        return None
    if op["layout"] != "NHWC" or op.type.size == 0:
        return None
    tail = in_vectors(stage, op) if float32(stage, (*op.inputs, op.output)) else None
    return GridSample(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class GridSample:
    """Nearest or linear sampling on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "grid_sample"
    structure = "SS"

    @cached_property
    def output(self) -> tuple[int, int, int, int]:
        """Images, height, width, channels."""
        n, h, w, c = shape_of(self.stage, self.op.output)
        return n, h, w, c

    @cached_property
    def source(self) -> tuple[int, int, int, int]:
        n, h, w, c = shape_of(self.stage, self.op.inputs[0])
        return n, h, w, c

    @property
    def points(self) -> int:
        """The points of one image."""
        return self.output[1] * self.output[2]

    @cached_property
    def size(self) -> int:
        """The points of a block; the last one may have fewer."""
        return min(divisor_below(self.points, BLOCK), BLOCK)

    @property
    def units(self) -> int:
        return self.output[0] * ceil(self.points / self.size)

    @property
    def corners(self) -> int:
        """Positions along an axis that a point reads."""
        return CORNERS[self.op["method"]]

    @property
    def tables(self) -> int:
        """The number of tables: rows, columns, and the products' weights if there are several
        corners.
        """
        return 2 * self.corners + (self.corners**2 if self.corners > 1 else 0)

    @property
    def scratch(self) -> Scratch:
        return Scratch((Piece("corners", (self.tables, BLOCK)),))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        work = self.size * max(self.output[3] * self.corners**2, self.target.lanes)
        return grain(chosen, self.units, work, self.target)

    def workload(self, config: Config) -> Workload:
        lanes, (_, _, _, channels) = self.target.lanes, self.output
        points = self.output[0] * self.points
        tasks = ceil(self.units / config["rows"])
        taps = self.corners**2
        loaded, beside = self.gathers
        image, grid = (
            vectors(self.stage, ancestors(self.stage, x), lanes).total for x in self.op.inputs
        )
        a_vector = taps * (2.5 + image + loaded * GATHER * lanes)
        a_vector += 1 + epilogue_vectors(self.tail, lanes).total + beside * GATHER * lanes
        a_point = (LOCATING + 2 * grid + 2 * GATHER * lanes) / lanes + POINT
        work = a_point + ceil(channels / lanes) * a_vector
        whole = float(self.stage.types[self.op.inputs[0]].nbytes)
        others = self.stage.input_bytes - whole
        written = float(self.stage.output.type.nbytes)
        point = Layer(
            points / tasks,
            (
                Stream(4.0 * channels * taps, whole, chains=self.corners),
                Stream(max(others, 0.0) / points, max(others, 1.0)),
            ),
            (Stream(written / points, written, handed=self.target.elsewhere),),
        )
        flops = 2.0 * taps * prod(self.output)
        return Workload("fma", work, (point, Layer(1, (), (), tasks)), flops)

    @cached_property
    def gathers(self) -> tuple[int, int]:
        """Loads of the image, and loads and stores of the epilogue, whose channels lie apart."""
        image, result = Probe(self.stage), Probe(self.stage)
        at = image.scope.variables(self.source)
        image.follow(self.op.inputs[0], at)
        put = result.scope.variables(self.output)
        result.through(self.tail, put)
        return image.apart(at[3]), result.apart(put[3])

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = GridSampleLoops(self, config["rows"])
        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, loops.emit, self.scratch)


class GridSampleLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: GridSample, rows: int) -> None:
        self.sketch, self.rows = sketch, rows

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        sketch = self.sketch
        self.em, self.args = em, args
        self.reader = Reader(sketch.stage, em, args.inputs)
        self.table = sketch.scratch.arrays(args)["corners"]
        size, blocks = sketch.size, ceil(sketch.points / sketch.size)
        with tasks_of_rows(em, args, sketch.units, self.rows) as unit:
            n, block = unflatten(em, unit, (sketch.output[0], blocks))
            first = em.let_index(block * size, "first")
            if sketch.points % size == 0:
                self.points(n, first, size)
                return
            last = sketch.points - (blocks - 1) * size
            em.branch(
                block < blocks - 1,
                lambda: self.points(n, first, size),
                lambda: self.points(n, (blocks - 1) * size, last),
            )

    def points(self, n: Expr, first: Expr, count: int) -> None:
        """Emits ``count`` points of image ``n``: first their places, then their values."""
        em = self.em
        for begin, times, lanes in vector_runs(count, em.lanes):
            with em.loop(times, "v") as v, em.vector(lanes) as lane:
                self.locate(n, first, em.index(begin + v * lanes + lane))
        with em.loop(count, "point") as j:
            self.point(n, first, j)

    def locate(self, n: Expr, first: Expr, j: Expr) -> None:
        """Puts rows, columns and weights of the block's point ``j`` into the tables."""
        em, sketch = self.em, self.sketch
        op, (_, height, width, _) = sketch.op, sketch.source
        place = split_flat(em.index(first + j), sketch.output[1:3])
        x, y = (self.reader.value(op.inputs[1], [n, *place, axis]) for axis in (0, 1))
        rows, columns = corners(em, op, y, height), corners(em, op, x, width)
        kept = [corner.at for corner in (*rows, *columns)]
        weights = [(row.weight, column.weight) for row in rows for column in columns]
        kept += [a * b for a, b in weights if a is not None and b is not None]
        for k, value in enumerate(kept):
            em.store(self.table, [k, j], value)

    def point(self, n: Expr, first: Expr, j: Expr) -> None:
        em, sketch = self.em, self.sketch
        y, x = split_flat(em.index(first + j), sketch.output[1:3])
        corners = self.kept(j)
        for begin, count, lanes in vector_runs(sketch.output[3], em.lanes):
            with em.loop(count, "c") as block, em.vector(lanes) as lane:
                c = begin + block * lanes + lane
                total: Expr = None
                for at_y, at_x, there, weight in corners:
                    value = self.reader.value(sketch.op.inputs[0], [n, at_y, at_x, c])
                    if there is not None:
                        value = tirx.Select(there, value, tirx.const(0, "float32"))
                    term = value if weight is None else value * weight
                    total = term if total is None else total + term
                value = em.let(total, "value")
                self.reader.finish(sketch.tail, [n, y, x, c], value, self.args.output)

    def kept(self, j: Expr) -> list[tuple[Expr, Expr, Expr | None, Expr | None]]:
        """The corners of the block's point ``j``: row, column, whether they lie in the image (None
        if they always do), weight.
        """
        em, sketch = self.em, self.sketch
        taps, zeros = sketch.corners, sketch.op["padding"] == "zeros"
        found = [index_of(em, em.load(self.table, [k, j])) for k in range(2 * taps)]
        cut = [em.let(tirx.max(at, 0), "at") if zeros else at for at in found]
        for k, at in enumerate(cut):
            em.bind(at, sketch.source[1 + k // taps])
        result = []
        for a in range(taps):
            for b in range(taps):
                k = 2 * taps + a * taps + b
                there = tirx.And(found[a] >= 0, found[taps + b] >= 0) if zeros else None
                weight = em.let(em.load(self.table, [k, j]), "weight") if taps > 1 else None
                result.append((cut[a], cut[taps + b], there, weight))
        return result
