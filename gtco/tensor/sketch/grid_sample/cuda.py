"""Sketch rule for sampling images at points (GridSample) on a GPU, structure SS, with the positions
and taps of :mod:`gtco.tensor.sketch.shared.cuda_points`.

A thread computes the grid's prologue and the corners (those of :mod:`gtco.tensor.emit.sampling`) of
a point once for all vectors of channels that it makes there. In multi-scale deformable attention a
head's channels lie side by side, so a few threads share a point and read whole pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue, anchor, is_static
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.lambdas import Body
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.sampling import CORNERS, corners, index_of
from gtco.tensor.sketch.shared.cuda_points import Points, Tap
from gtco.tensor.sketch.shared.cuda_streaming import around, floats
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage

LOCATING = 60.0  # instructions of a point


def match(stage: Stage, target: GpuTarget) -> CudaGridSample | None:
    """The stage as one ``grid_sample`` of floats, else None."""
    op = anchor(stage, "grid_sample")
    if op is None or not is_static(stage) or not floats(stage, (*op.inputs, op.output)):
        return None
    if 0 in (op.type.size, stage.types[op.inputs[0]].size) or op["method"] not in CORNERS:
        return None
    tail = around(stage, op)
    return CudaGridSample(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class CudaGridSample:
    """Nearest or linear sampling on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator
    tail: Epilogue

    name = "grid_sample"
    structure = "SS"

    @cached_property
    def points(self) -> Points:
        taps = CORNERS[self.op["method"]] ** 2
        return Points(self.stage, self.op, self.tail, taps, LOCATING)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return self.points.next_decision(chosen)

    def workload(self, config: Config) -> Launch:
        return self.points.workload(config)

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        return self.points.build(config, symbol, self._taps)

    def _taps(self, b: Body, n: Expr, y: Expr, x: Expr) -> list[Tap]:
        em, op, (_, high, wide, _) = b.em, self.op, self.points.source
        grid, zeros = op.inputs[1], op["padding"] == "zeros"
        reader, own = Reader(self.stage, em, b.inputs), self.stage.types[grid].dtype

        def along(axis: int, size: int) -> list[tuple[Expr, Expr, Expr | None]]:
            """Positions along an axis, whether they lie in the image, and their weights."""
            given = convert(em, reader.value(grid, [n, y, x, axis]), own, "float32")
            found = []
            for corner in corners(em, op, given, size):
                at = index_of(em, corner.at)
                cut = em.let(tirx.max(at, 0), "at") if zeros else at
                em.bind(cut, size)
                found.append((cut, at >= 0, corner.weight))
            return found

        taps = []
        columns = along(0, wide)
        for row, high_there, wy in along(1, high):
            for column, wide_there, wx in columns:
                there = tirx.And(high_there, wide_there) if zeros else None
                weight = em.let(wy * wx, "weight") if wx is not None else None
                taps.append(Tap(row, column, weight, there))
        return taps
