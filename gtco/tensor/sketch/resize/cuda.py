"""Sketch rule for resizing images on a GPU, structure SS, with the positions and taps of
:mod:`gtco.tensor.sketch.shared.cuda_points`.

A thread finds rows, columns and weights in float64 (as :mod:`gtco.tensor.emit.spatial` does), once
for all vectors of channels that it makes of a position. Neighbouring outputs share most taps, and
the caches serve these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue, anchor, is_static
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.lambdas import Body
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.emit.spatial import TAPS, ResizedAxis
from gtco.tensor.sketch.shared.cuda_points import Points, Tap
from gtco.tensor.sketch.shared.cuda_streaming import around, floats
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage

LOCATING = {"nearest": 16.0, "linear": 120.0, "cubic": 240.0}  # float64 is slow on most GPUs


def match(stage: Stage, target: GpuTarget) -> CudaResize | None:
    """The stage as one ``resize2d`` of floats, else None."""
    op = anchor(stage, "resize2d")
    if op is None or not is_static(stage) or not floats(stage, (*op.inputs, op.output)):
        return None
    tail = around(stage, op) if op.type.size else None
    return CudaResize(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class CudaResize:
    """Nearest, linear or cubic resizing on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator
    tail: Epilogue

    name = "resize"
    structure = "SS"

    @cached_property
    def points(self) -> Points:
        method = self.op["method"]
        taps = len(TAPS[method]) ** 2
        return Points(self.stage, self.op, self.tail, taps, LOCATING[method])

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return self.points.next_decision(chosen)

    def workload(self, config: Config) -> Launch:
        return self.points.workload(config)

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        return self.points.build(config, symbol, self._taps)

    def _taps(self, b: Body, n: Expr, y: Expr, x: Expr) -> list[Tap]:
        points = self.points
        rows, columns = (
            ResizedAxis(self.op, points.source[1 + a], points.output[1 + a]) for a in (0, 1)
        )
        if self.op["method"] == "nearest":
            return [Tap(rows.nearest(b.em, y), columns.nearest(b.em, x))]
        ys, xs = rows.taps(b.em, y), columns.taps(b.em, x)
        return [
            Tap(row, column, b.em.let(wy * wx, "weight")) for row, wy in ys for column, wx in xs
        ]
