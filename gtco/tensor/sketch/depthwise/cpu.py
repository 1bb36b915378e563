"""Sketch rule for depthwise convolution (one filter a channel, or several) and for convolution in
groups narrower than a vector, with a readable prologue and a one-to-one epilogue.

The loops are those of :mod:`gtco.tensor.sketch.shared.window`. Constant weights [C, G, KH, KW] are
packed as [KH, KW, G, C]. Those of 8 bits are widened into scratch, with their scales, where a task
begins with a chunk of channels. If the outputs of a group fill vectors, the convolution is a
batched product, and the ``gemm`` sketch takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor import cost
from gtco.tensor.analysis.chains import (
    Epilogue,
    anchor,
    float32,
    is_static,
    shape_of,
)
from gtco.tensor.analysis.window import MOST_MIXED, Geometry, geometry
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.shared import window
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import in_vectors, vector_runs
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Extra, Workload

# Vector instructions that widen a vector of weights, multiply it by its scales and store it, and
# those that subtract the zero points before.
WIDENING, SHIFTING = 4.0, 2.0


def match(stage: Stage, target: Target) -> Depthwise | None:
    """The stage as one float32 convolution, depthwise or in groups of which several fill a vector
    (groups only for NHWC); else None. Weights may be constants of 8 bits with scales.
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
    scaled = len(op.inputs) > 2
    if scaled and not in_bytes(stage, op):
        return None
    floats = (op.inputs[0], op.output) if scaled else (*op.inputs, op.output)
    tail = in_vectors(stage, op) if float32(stage, floats) else None
    return Depthwise(stage, target, op, tail) if tail else None


def in_bytes(stage: Stage, op: Operator) -> bool:
    """True if the weights are constants of 8 bits, as are their scales and zero points."""
    if not stage.constants.issuperset(op.inputs[1:]):
        return False
    dtypes = ("int8", "float32", "int8")
    return all(stage.types[x].dtype == d for x, d in zip(op.inputs[1:], dtypes, strict=False))


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

    @cached_property
    def around(self) -> window.Around:
        return window.around(self.stage, self.op, self.tail, self.target.lanes)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return window.next_decision(self.geometry, self.target, chosen)

    def workload(self, config: Config) -> Workload:
        work = window.workload(self.around, self.geometry, self.target, config)
        if not self.widens:
            return work
        chunk, each = config["channels"], WIDENING + SHIFTING * (len(self.op.inputs) > 3)
        # the chunks that the tasks begin, and those that begin within a task
        rows = window.rows_count(self.geometry, chunk)
        count = ceil(rows / config["rows"]) - 1
        count += rows // window.band_height(self.geometry, chunk, self.target.cores)
        vectors = self.taps * ceil(chunk / self.target.lanes)
        return work._replace(extra=(*work.extra, Extra("vector", count, each * vectors)))

    @property
    def widens(self) -> bool:
        """True if the weights are stored in 8 bits."""
        return len(self.op.inputs) > 2

    @property
    def taps(self) -> int:
        """The weights of an output channel."""
        return prod(self.geometry.kernel) * self.geometry.group[0]

    def scratch(self, config: Config) -> Scratch:
        """The widened weights of a chunk of channels."""
        pieces = [Piece("weights", (self.taps, config["channels"]))] if self.widens else []
        return Scratch(tuple(pieces))

    @cached_property
    def packing(self) -> dict[str, Packing]:
        name = self.op.inputs[1]
        if name not in self.stage.constants:
            return {}
        g = self.geometry
        taps, channels, inputs = g.kernel[0] * g.kernel[1], g.output[3], g.group[0]
        shape = (channels, inputs, taps)
        return {name: Packing(shape, (2, 1, 0), (0, 0, 0), shape[::-1], (0, 1, 2))}

    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name."""
        return self.packing

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        behind = cost.epilogue_vectors(self.tail, self.target.lanes)
        rolled = behind.total > window.LONG_EPILOGUE
        of = self.geometry, self.op.inputs[0], self.tail
        loops = window.WindowLoops(*of, config, self.target.cores, rolled)
        scratch = self.scratch(config)

        def body(em: Emitter, args: KernelArguments) -> None:
            reader = Reader(self.stage, em, args.inputs)
            widened = scratch.arrays(args).get("weights")
            taps = Products(self, args, reader)
            if widened is not None:
                taps = Widened(self, args, reader, scratch=widened)
            loops.emit(em, args, reader, taps)

        packings = self.packing
        return program(symbol, self.stage, self.target, loops.tasks, body, scratch, packings)


@dataclass
class Products:
    """A window's taps: the sum of products with the channel's filter."""

    sketch: Depthwise
    args: KernelArguments
    reader: Reader
    start: float = 0.0

    def prepare(self, em: Emitter, first: Expr, c0: Expr, width: int) -> None:
        return None

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


@dataclass
class Widened(Products):
    """Products with weights of 8 bits. ``scratch`` [taps, chunk] has those of a chunk of channels,
    which begins with ``c0``, as float32.
    """

    scratch: Array = field(kw_only=True)
    c0: Expr = field(default=0, kw_only=True)

    def prepare(self, em: Emitter, first: Expr, c0: Expr, width: int) -> None:
        self.c0 = c0
        name, *beside = self.sketch.op.inputs[1:]
        steps, (scales, *zeros) = self.args.inputs[name], (self.args.inputs[x] for x in beside)
        flat = replace(steps, shape=(self.sketch.taps, steps.shape[-1]))
        with em.when(first):
            for begin, count, lanes in vector_runs(width, em.lanes):
                with (
                    em.loop(count, "c", rolled=True) as cv,
                    em.loop(self.sketch.taps, "tap", rolled=True) as tap,
                ):
                    at = begin + cv * lanes
                    with em.vector(lanes) as lane:
                        c = c0 + at + lane
                        value = tirx.Cast("float32", em.load(flat, [tap, c]))
                        for zero in zeros:
                            value = value - tirx.Cast("float32", em.load(zero, [c]))
                        value = value * em.load(scales, [c])
                        em.store(self.scratch, [tap, at + lane], value)

    def weight(self, em: Emitter, kh: Expr, kw: int, c: Expr, j: int = 0) -> Expr:
        g = self.sketch.geometry
        tap = (kh * g.kernel[1] + kw) * g.group[0] + j
        return em.load(self.scratch, [tap, c - self.c0])
