"""Sketch rule for depthwise convolution (one filter a channel, or several) and for convolution in
groups narrower than a vector, with a readable prologue and a one-to-one epilogue.

The loops are those of :mod:`gtco.tensor.sketch.shared.window`. Constant weights [C, G, KH, KW] are
packed as [KH, KW, G, C]. If the outputs of a group fill vectors, the convolution is a batched
product, and the ``gemm`` sketch takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
    anchor,
    float32,
    is_static,
    shape_of,
)
from gtco.tensor.analysis.window import MOST_MIXED, Geometry, geometry
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.shared import window
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import in_vectors
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload


def match(stage: Stage, target: Target) -> Depthwise | None:
    """The stage as one float32 convolution, depthwise or in groups of which several fill a vector
    (groups only for NHWC); else None.
    """
    op = anchor(stage, "conv2d")
    if op is None or not is_static(stage):
        return None
    channels, inputs = (int(d) for d in stage.types[op.inputs[1]].shape[:2])
    if op["groups"] == 1 or 0 in (op.type.size, *(stage.types[x].size for x in op.inputs)):
        return None
    outputs = channels // int(op["groups"])
    mixes = (inputs, outputs) != (1, 1)
    if mixes and (op["layout"] != "NHWC" or target.lanes % outputs or inputs > MOST_MIXED):
        return None
    tail = in_vectors(stage, op) if float32(stage, (*op.inputs, op.output)) else None
    return Depthwise(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution on a CPU."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "depthwise"
    structure = "SSRS"

    @cached_property
    def geometry(self) -> Geometry:
        kh, kw = self.stage.types[self.op.inputs[1]].shape[2:]
        return geometry(self.op, shape_of(self.stage, self.op.inputs[0]), (int(kh), int(kw)))

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return window.next_decision(self.geometry, self.target, chosen)

    def workload(self, config: Config) -> Workload:
        return window.workload(self.stage, self.op, self.tail, self.geometry, self.target, config)

    @cached_property
    def packing(self) -> dict[str, Packing]:
        name = self.op.inputs[1]
        if name not in self.stage.constants:
            return {}
        g = self.geometry
        taps, channels, inputs = g.kernel[0] * g.kernel[1], g.output[3], g.group[0]
        shape = (channels, inputs, taps)
        return {name: Packing(shape, (2, 1, 0), (0, 0, 0), shape[::-1], (0, 1, 2))}

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        def body(em: Emitter, args: KernelArguments) -> None:
            reader = Reader(self.stage, em, args.inputs)
            loops.emit(em, args, reader, Products(self, args, reader))

        loops = window.WindowLoops(self.geometry, self.op.inputs[0], self.tail, config)
        return program(symbol, self.stage, self.target, loops.tasks, body, packings=self.packing)


@dataclass(frozen=True)
class Products:
    """A window's taps: the sum of products with the channel's filter."""

    sketch: Depthwise
    args: KernelArguments
    reader: Reader
    start: float = 0.0

    def weight(self, em: Emitter, kh: Expr, kw: int, c: Expr, j: int = 0) -> Expr:
        name = self.sketch.op.inputs[1]
        if name in self.sketch.packing:
            tap = kh * self.sketch.geometry.kernel[1] + kw
            return em.load(self.args.inputs[name], [tap, j, c])
        return self.reader.value(name, [c, j, kh, kw])

    def combine(self, em: Emitter, total: Expr, x: Expr, weight: Expr | None) -> Expr:
        return total + x * weight

    def scale(self, em: Emitter, y: Expr, x: Expr) -> None:
        return None
