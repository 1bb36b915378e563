"""Sketch rule for pooling on a GPU, structure SSRS, with the strips of windows of
:mod:`gtco.tensor.sketch.shared.cuda_window`.

A maximum begins at minus infinity, so padding never wins, and NaN does. A mean's divisor is counted
from the strip's position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue, anchor, is_static, shape_of
from gtco.tensor.analysis.window import geometry
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.neighbours import HEADER
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.sketch.shared.cuda_streaming import around, floats
from gtco.tensor.sketch.shared.cuda_window import Windows
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage

# Instructions of a tap: two comparisons, for NaN too, and a choice, or a sum. And of an output: a
# mean counts its window's rows and columns, and divides.
WORK = {"max_pool2d": (3.0, 0.0), "avg_pool2d": (1.0, 24.0)}


def match(stage: Stage, target: GpuTarget) -> CudaPool | None:
    """The stage as one pooling operator of floats, else None."""
    op = anchor(stage, "max_pool2d", "avg_pool2d")
    if op is None or not is_static(stage) or not floats(stage, (*op.inputs, op.output)):
        return None
    if 0 in (stage.types[op.inputs[0]].size, op.type.size):
        return None
    tail = around(stage, op)
    return CudaPool(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class CudaPool:
    """Maximum or mean over windows on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator
    tail: Epilogue

    name = "pool"
    structure = "SSRS"

    @cached_property
    def windows(self) -> Windows:
        image = self.op.inputs[0]
        g = geometry(self.op, shape_of(self.stage, image), self.op["kernel"])
        tap, output = WORK[self.op.kind]
        return Windows(self.stage, g, image, self.tail, tap, output)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return self.windows.next_decision(chosen)

    def workload(self, config: Config) -> Launch:
        return self.windows.workload(config)

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        windows, threads = self.windows, config["threads"]
        text = windows.lambdas(arguments(self.stage), config["vector"])
        kind = windows.kind(config)
        if self.op.kind == "max_pool2d":
            call = f"gtco::max_pool<{kind}>({windows.thread(config)}, value, store);"
        else:
            padding = "true" if self.op.get("count_include_pad", False) else "false"
            call = f"gtco::mean_pool<{kind}, {padding}>({windows.thread(config)}, value, store);"
        headers = ("window.cuh", HEADER)
        return CudaProgram(
            source(symbol, self.stage, headers, text, call, threads, windows.about()),
            (windows.blocks(config), 1, 1),
            threads,
            lines=windows.lines(config, self.op),
        )
