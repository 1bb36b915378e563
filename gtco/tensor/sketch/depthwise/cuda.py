"""Sketch rule for depthwise convolution on a GPU (one filter a channel, or several) and for
convolution in narrow groups, structure SSRS.

It computes the strips of windows of :mod:`gtco.tensor.sketch.shared.cuda_window`. Weights of a
column of taps wait in registers for the strip's inputs. Constant weights [C, G, KH, KW] are packed
as [KH, KW, G, C], so that neighbouring threads read them side by side. It runs on CUDA cores:
channels share nothing that an mma could multiply, and memory is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue, anchor, is_static, shape_of
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.analysis.window import geometry
from gtco.tensor.cuda.arguments import Arguments, arguments
from gtco.tensor.cuda.lambdas import Body
from gtco.tensor.cuda.neighbours import HEADER, NearReader, each_lane, function, reading
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.shared.cuda_streaming import around, floats
from gtco.tensor.sketch.shared.cuda_window import Windows
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import Operator, Stage, TensorType

MOST_INPUTS = 8  # inputs of a group: wider groups are products


def match(stage: Stage, target: GpuTarget) -> CudaDepthwise | None:
    """The stage as one depthwise convolution of floats, or one in narrow groups; else None."""
    op = anchor(stage, "conv2d")
    if op is None or not is_static(stage) or op["groups"] == 1:
        return None
    if 0 in (op.type.size, *(stage.types[x].size for x in op.inputs)):
        return None
    if stage.types[op.inputs[1]].sizes[1] > MOST_INPUTS:
        return None
    tail = around(stage, op) if floats(stage, (*op.inputs, op.output)) else None
    return CudaDepthwise(stage, target, op, tail) if tail else None


@dataclass(frozen=True)
class CudaDepthwise:
    """A depthwise convolution on a GPU."""

    stage: Stage
    target: GpuTarget
    op: Operator
    tail: Epilogue

    name = "depthwise"
    structure = "SSRS"

    @cached_property
    def windows(self) -> Windows:
        image, weight = self.op.inputs
        high, wide = shape_of(self.stage, weight)[2:]
        g = geometry(self.op, shape_of(self.stage, image), (high, wide))
        return Windows(self.stage, g, image, self.tail, weighted=True)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return self.windows.next_decision(chosen)

    def workload(self, config: Config) -> Launch:
        return self.windows.workload(config)

    @cached_property
    def packings(self) -> dict[str, Packing]:
        name = self.op.inputs[1]
        if name not in self.stage.constants:
            return {}
        channels, inputs, high, wide = shape_of(self.stage, name)
        shape = (channels, inputs, high * wide)
        return {name: Packing(shape, (2, 1, 0), (0, 0, 0), shape[::-1], (0, 1, 2))}

    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name: the same for all configs."""
        return self.packings

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        windows, threads, vector = self.windows, config["threads"], config["vector"]
        args = arguments(self.stage, self.packings)
        value, store = windows.lambdas(args, vector)
        text = (value, self._weight(args, vector), store)
        inputs = windows.geometry.group[0]
        given = f"{windows.thread(config)}, value, weight, store"
        call = f"gtco::convolve<{windows.kind(config)}, {inputs}>({given});"
        headers = ("window.cuh", HEADER)
        return CudaProgram(
            source(symbol, self.stage, headers, text, call, threads, windows.about()),
            (windows.blocks(config), 1, 1),
            threads,
            packings=self.packings,
            lines=windows.lines(config, self.op),
        )

    def _weight(self, args: Arguments, vector: int) -> str:
        """``weight(kh, kw, c, i, x)``"""
        g, name = self.windows.geometry, self.op.inputs[1]
        high, wide = g.kernel
        channels, own = g.output[3], self.stage.types[name].dtype
        params = [("kh", high), ("kw", wide), ("c", channels // vector), ("i", g.group[0])]
        if name not in self.packings:
            return reading(
                args, self.stage, name, "weight", params,
                lambda kh, kw, c, i, v: [c * vector + v, i, kh, kw], vector,
            )  # fmt: skip

        def at(b: Body, v: Expr) -> list[Expr]:
            kh, kw, c, i = b.index
            return [kh * wide + kw, i, c * vector + v]

        def body(b: Body) -> None:
            def follow(probe: Probe, v: Expr) -> None:
                probe.loads.append((name, probe.scope.index(b.inputs[name].flat(at(b, v)))))

            def element(reader: NearReader, v: Expr) -> None:
                found = convert(b.em, reader.load(name, at(b, v)), own, "float32")
                b.em.store(b.arrays["x"], [v], found)

            each_lane(b, self.stage, vector, follow, element)

        return function(args, "weight", params, body, {"float (&x)": TensorType((vector,))})
