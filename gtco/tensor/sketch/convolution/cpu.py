"""Sketch rule for convolutions whose windows overlap, structure SSRSRS: a task copies the input
rows that it needs once, zeros around them, and the micro-kernel reads every window there.

::

    for task in groups x images x groups of output rows x column chunks:   # parallel
      copy input rows with their borders to scratch (prologue)             # once, not kh * kw times
      for panel of nr columns in the task's columns:
        for block of taps, whose B stays in L1 or L2:
          for output row, block of mr (or mr - 1) neighbouring pixels of it:
            for run of taps:                                               # its A is one stretch
              tile[mr, nr] (+)= scratch[pixels, run] x B[run, nr]          # micro-kernel
            on the last block of taps: epilogue(tile) -> output

The ``gemm`` sketch copies an input element once for every tap over it. Here packing is cheaper by
the size of the kernel, and the rows stay in L2. Tiles end at the end of an output row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import anchor
from gtco.tensor.analysis.contraction import ConvView, TransposedView
from gtco.tensor.intrinsics.table import Kind, MicroKernel
from gtco.tensor.intrinsics.tiles import CONFIGURING
from gtco.tensor.nest.traffic import layers
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.convolution.facts import ConvolutionFacts, Halo
from gtco.tensor.sketch.convolution.loops import ConvolutionLoops
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.shared.pack import RUN_COST
from gtco.tensor.sketch.shared.tiling import chunk_options, tile_decision
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import INT4, Stage
from gtco.tensor.workload import Extra, Workload

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # output rows of a task
DEPTHS = (128, 1024)  # least and most depth of a block of taps
CALL_COST = 32.0  # vector instructions in the time of a mispredicted branch (at the end of a loop)
LEAST_STEPS = 2  # least steps of a run: shorter runs would be mostly overhead


def match(stage: Stage, target: Target) -> Convolution | None:
    """A convolution that ``gemm`` takes, with constant weights and windows that overlap."""
    op = anchor(stage, "conv2d")
    if op is None or not stage.types[op.inputs[1]].static:
        return None
    kernel_shape = [int(d) for d in stage.types[op.inputs[1]].shape[2:]]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel_shape, op["dilation"], strict=True)]
    if op.inputs[1] not in stage.constants or prod(kernel_shape) == 1:
        return None
    if all(span <= stride for span, stride in zip(spans, op["strides"], strict=True)):
        return None
    product = gemm.match(stage, target)
    if product is None or not isinstance(product.view, ConvView):
        return None
    assert not isinstance(product.view, TransposedView)
    found = Convolution(product)
    return found if found.tiles else None


@dataclass(frozen=True)
class Convolution(ConvolutionFacts):
    """A convolution on a CPU; see the module's text for the loops."""

    name = "convolution"
    structure = "SSRSRS"

    # the space ------------------------------------------------------------------------------------

    @cached_property
    def tiles(self) -> tuple[MicroKernel, ...]:
        """The micro-kernels whose kind can read windows in place; see :meth:`row_options`."""
        return tuple(tile for tile in self.line.tiles() if self.row_options.get(tile.kind.name))

    @cached_property
    def row_options(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of output rows of a task, by the kind of micro-kernel.

        The input rows of a task fit half of L2 (panels and results share the other half), or three
        quarters if the task has one row. There is no option if one row does not fit either, or if a
        run of taps ends within a step of k.
        """
        return {kind.name: self._row_options(kind) for kind in self.kinds}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.product.kinds

    def _row_options(self, kind: Kind) -> tuple[int, ...]:
        capacity, one = self.target.level("L2").capacity, self.halo(1, kind)
        height = self.view.result[1]
        sizes = [(r, kind.a.nbytes * self.halo(r, kind).elements) for r in ROWS if r <= height]
        if one.depth < LEAST_STEPS * kind.step or sizes[0][1] > capacity * 3 // 4:
            return ()
        if one.depth % kind.step or (one.step > 1 and kind.a.step > 1):
            return ()
        return tuple(r for r, size in sizes if r == 1 or size <= capacity // 2)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        v, cores = self.view, self.target.cores
        if "tile" not in chosen:
            return tile_decision(self.tiles, v.n, v.result[2])
        tile = self.product.row(chosen)
        if "rows" not in chosen:
            return Decision("rows", "grain", self.row_options[tile.kind.name])
        if "chunks_n" not in chosen:
            options = chunk_options(ceil(v.n / tile.columns), cores)[:3]
            return Decision("chunks_n", "parallel", options)
        if "kc" not in chosen:
            return Decision("kc", "block", self.depth_options[tile.kind.name])
        if "prefetch" not in chosen:
            panels = ceil(ceil(v.n / tile.columns) / int(chosen["chunks_n"]))
            follows = panels * v.k > int(chosen["kc"])  # is there a second block?
            ahead = ("next", "none") if follows else ("none",)
            return Decision("prefetch", "overlap", ahead)
        return None

    @cached_property
    def depth_options(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of steps of k in a block of taps, by the kind of micro-kernel: whole runs,
        and all of k.
        """
        return {kind.name: self._depth_options(kind) for kind in self.kinds}

    def _depth_options(self, kind: Kind) -> tuple[int, ...]:
        halo = self.halo(1, kind)
        least, most = DEPTHS
        sizes = [halo.depth * r for r in range(1, halo.runs) if halo.runs % r == 0]
        fitting = [size for size in sizes if least <= size <= most] or sizes[:1]
        return tuple(sorted({*fitting[:1], *fitting[-1:], self.view.k}))

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Workload:
        v, nest, product = self.view, self.nest(config), self.product
        kernel, work = nest.level0
        halo, tasks = self.halo(config["rows"], nest.row.kind), nest.shape.tasks
        stored = v.batch * v.m * v.n / self.target.lanes
        # Calls of the micro-kernel, for all of k
        calls = tasks * nest.held * nest.shape.task_panels
        copies = RUN_COST * (calls * halo.runs + tasks * self.lines(halo))
        extra = (
            Extra("store", stored * (2.0 * nest.kblocks + 2)),  # between registers, tile and output
            Extra("pack", 2.0 * tasks * self.copied(halo)),
            Extra("vector", tasks * self.copied(halo), product.head_vectors),
            Extra("fma", copies + CALL_COST * calls * nest.kblocks),
            Extra("fma", CONFIGURING * nest.configurations),
        )
        loops = layers(nest, self.target)
        return Workload(kernel, work, loops, v.flops, extra, product.behind)

    def lines(self, halo: Halo) -> int:
        """Runs of neighbours that are copied to fill the scratch."""
        return halo.rows * (halo.channels if self.view.channels_first else halo.width)

    def copied(self, halo: Halo) -> int:
        """Vectors that are copied to fill the scratch."""
        length = halo.width if self.view.channels_first else halo.channels
        return self.lines(halo) * ceil(length / self.target.lanes)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the price without the epilogue depend on."""
        v, op = self.view, self.view.op
        return (
            self.name,
            self.product.operand_a,
            self.product.operand,
            self.stage.output.type.dtype,
            v.a_shape,
            v.b_shape,
            v.result,
            v.channels_first,
            op["strides"],
            op["dilation"],
            self.product.head_vectors,
        )

    # the program ----------------------------------------------------------------------------------
    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name."""
        nest = self.nest(config)
        step, pairs = nest.stored.step, nest.stored.dtype == INT4
        return {self.view.op.inputs[1]: self.view.packing(nest.row.columns, step, pairs=pairs)}

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops, packings = ConvolutionLoops(self, config), self.layouts(config)
        return self.product.program_of(loops, packings, symbol)
