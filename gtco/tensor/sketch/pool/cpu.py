"""Sketch rule for pooling, with a readable prologue and a one-to-one epilogue. The loops are those
of :mod:`gtco.tensor.sketch.shared.window`, or of :mod:`gtco.tensor.sketch.pool.rows` for channels
first and for images of one channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, nan

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
    anchor,
    float32,
    is_static,
    shape_of,
)
from gtco.tensor.analysis.window import Geometry, geometry
from gtco.tensor.emit.arithmetic import is_nan
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments, lanes_of
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.pool import rows as pool_rows
from gtco.tensor.sketch.shared import window
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import grain, in_vectors, streaming_workload
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

KINDS = ("max_pool2d", "avg_pool2d")


def match(stage: Stage, target: Target) -> Pool | None:
    """The stage as one float32 pooling operator, else None."""
    op = anchor(stage, *KINDS)
    if op is None or not is_static(stage):
        return None
    if not float32(stage, op.inputs) or stage.types[op.inputs[0]].size == 0:
        return None
    tail = in_vectors(stage, op)
    return Pool(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class Pool:
    """Maximum or mean over windows on a CPU."""

    stage: Stage
    target: Target
    op: Operator
    tail: Epilogue

    name = "pool"
    structure = "SSRS"

    @cached_property
    def geometry(self) -> Geometry:
        return geometry(self.op, shape_of(self.stage, self.op.inputs[0]), self.op["kernel"])

    @cached_property
    def around(self) -> window.Around:
        return window.around(self.stage, self.op, self.tail, self.target.lanes)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if self.in_rows:
            work = max(self.geometry.source[2] * self.geometry.kernel[0], self.geometry.output[2])
            return grain(chosen, pool_rows.units(self.geometry), work, self.target)
        return window.next_decision(self.geometry, self.target, chosen)

    @property
    def in_rows(self) -> bool:
        """True if the elements of an image's row lie side by side: the channels come first, or
        there is one channel, whose vectors would have one element.
        """
        _, _, columns, channels = self.geometry.output
        return self.geometry.layout == "NCHW" or (channels == 1 and columns > 1)

    def workload(self, config: Config) -> Workload:
        if self.in_rows:
            tasks = ceil(pool_rows.units(self.geometry) / config["rows"])
            passes = pool_rows.passes(self.geometry, self.around.before)
            return streaming_workload(self.stage, self.target, tasks, passes)
        return window.workload(self.around, self.geometry, self.target, config)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        include = bool(self.op.get("count_include_pad", False))
        what = Maximum() if self.op.kind == "max_pool2d" else Mean(self.geometry, include)
        of = self.geometry, self.op.inputs[0], self.tail
        loops: pool_rows.PoolRows | window.WindowLoops
        if self.in_rows:
            loops = pool_rows.PoolRows(*of, config["rows"])
        else:
            loops = window.WindowLoops(*of, config, self.target.cores)

        def body(em: Emitter, args: KernelArguments) -> None:
            loops.emit(em, args, Reader(self.stage, em, args.inputs), what)

        return program(symbol, self.stage, self.target, loops.tasks, body, loops.scratch)


@dataclass(frozen=True)
class Maximum:
    """The greatest element. Padding never wins, NaN does."""

    start: float = -inf

    def prepare(self, em: Emitter, first: Expr, c0: Expr, width: int) -> None:
        return None

    def weight(self, em: Emitter, kh: Expr, kw: int, c: Expr, j: int = 0) -> None:
        return None

    def combine(self, em: Emitter, total: Expr, x: Expr, weight: Expr | None) -> Expr:
        total = em.let(total, "top")
        return tirx.Select(is_nan(total), total, tirx.max(total, x))

    def all(self, em: Emitter, values: Sequence[Expr]) -> Expr:
        """The maximum of the values, or NaN if one is NaN.

        A machine's maximum gives its second operand if either is NaN. So a NaN in the last value is
        kept, and the others are compared; LLVM makes one comparison for two of them.
        """
        first, *others = values
        if not others:
            return first
        top, lost = first, is_nan(first)
        for x in others[:-1]:
            top = em.let(tirx.max(top, x), "top")
            lost = tirx.Or(lost, is_nan(x))
        top = em.let(tirx.max(top, others[-1]), "top")
        return tirx.Select(lost, em.splat(nan, lanes_of(top)), top)

    def scale(self, em: Emitter, y: Expr, x: Expr) -> None:
        return None


@dataclass(frozen=True)
class Mean:
    """The mean. Its divisor counts the padding if ``include``, but never the positions that ceil
    mode adds beyond the padding.
    """

    geometry: Geometry
    include: bool
    start: float = 0.0

    def prepare(self, em: Emitter, first: Expr, c0: Expr, width: int) -> None:
        return None

    def weight(self, em: Emitter, kh: Expr, kw: int, c: Expr, j: int = 0) -> None:
        return None

    def combine(self, em: Emitter, total: Expr, x: Expr, weight: Expr | None) -> Expr:
        return total + x

    def all(self, em: Emitter, values: Sequence[Expr]) -> Expr:
        return sum(values[1:], values[0])

    def scale(self, em: Emitter, y: Expr, x: Expr) -> Expr:
        g = self.geometry
        high, wide = (
            g.counted(em, em.index(i * g.strides[a] - g.padding[a]), a, self.include)
            for a, i in enumerate((y, x))
        )
        count = em.index(high * wide)
        if isinstance(count, int):
            return tirx.const(1.0 / count, "float32")
        return em.let(tirx.const(1.0, "float32") / tirx.Cast("float32", count), "share")
