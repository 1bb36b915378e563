"""Sketch rule for large products of float32 by Strassen's algorithm (Gaussian Elimination is not
Optimal, 1969), one level, structure SSSRS: seven products of halves where a plain one has eight.

::

    for task in chunks of row pairs x chunks of column pairs:       # parallel
      for held pairs of neighbouring rows:                          # what L2 holds
        for pair, k < K/2: rows[p, pair, k] = sum of A's quarters   # p: the seven products
        for panel of nr columns in the task's columns of a half:
          for block of mr (or mr - 1) of these pairs:
            for p:
              products[p, mr, nr] = rows[p, mr, k] x sums[p, k, nr]  # micro-kernel, in registers
            for pair, column: epilogue(sums of the products) -> output, in four places

The library has the sums of B's quarters, which take 7/4 of the room: made in each task, they would
take what the eighth product gives (8 % of 576x768x3072, 2 cores of a Zen 4). A task makes those of
A, which are mostly stores; they pay where a half of k and of n are some hundreds.

Accuracy was compared with float64 on uniform random data: the largest error is 0.8 to 1.6 times
that of the plain product for k from 192 to 3072. It is relative to the largest of the two rows and
the two columns that are added: a token that is small beside its neighbour has fewer digits. A NaN
or an infinity in a row makes its neighbour NaN too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from gtco.machine.target import Target
from gtco.tensor.analysis.contraction import MatmulView
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels
from gtco.tensor.nest.traffic import layers
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.shared.pack import MOVE_COST
from gtco.tensor.sketch.shared.tiling import (
    chunk_options,
    held_options,
    tile_decision,
    tile_options,
)
from gtco.tensor.sketch.strassen.facts import OF_B, PRODUCTS, QUARTERS, StrassenFacts
from gtco.tensor.sketch.strassen.loops import StrassenLoops
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Extra, Workload

# Smaller products (m, n, k) are not looked at. Where k or n is less, the sums take what the eighth
# product gives. Where m is less, a product waits for its weights, which are then 7/4 as large:
# ViT-B/16 with its 197 rows was 1 % faster for 70 % more memory (2 cores of a Zen 4).
LEAST = 256, 192, 256
ADDS_A, ADDS_C = 5, 8  # vector additions for one vector of each quarter
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # shares of L2 for the held pairs' sums


def match(stage: Stage, target: Target) -> Strassen | None:
    """The stage as a large product of float32 by constant weights with even extents, that ``gemm``
    takes and reads and stores row by row; else None. Rows of a matrix may be samples, which are not
    to be added; of more axes the first one is that of samples.
    """
    product = gemm.match(stage, target) if target.fast_algorithms else None
    if product is None or type(product.view) is not MatmulView or not product.view.folded:
        return None
    view = product.view
    if (product.operand_a, product.operand) != ("float32", "float32") or view.op.get("exact"):
        return None
    if not product.constant_b or product.scales is not None or product.norm is not None:
        return None
    if len(view.a_shape) < 3 or view.gathered or product.stores_columns or run_breaks(stage, view):
        return None
    if any(x < least for x, least in zip((view.m, view.n, view.k), LEAST, strict=True)):
        return None
    found = Strassen(product)
    return found if view.k % (2 * target.lanes) == 0 and found.micro_kernels else None


@dataclass(frozen=True)
class Strassen(StrassenFacts):
    """A large product on a CPU; see the module's text for the loops."""

    name = "strassen"
    structure = "SSSRS"

    @cached_property
    def micro_kernels(self) -> list[MicroKernel]:
        """Those whose panels end where a half of the columns does."""
        every = [t for t in micro_kernels(self.target) if not t.kind.in_tiles]
        whole = [t for t in every if t.kind.b.step == 1 and self.view.n % (2 * t.columns) == 0]
        return tile_options(whole, self.rows, self.columns) if whole else []

    # the space ------------------------------------------------------------------------------------

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        cores = self.target.cores
        if "tile" not in chosen:
            return tile_decision(self.micro_kernels, self.columns, self.rows)
        tile = self.row(chosen)
        if "chunks_m" not in chosen:
            return Decision(
                "chunks_m", "parallel", chunk_options(ceil(self.rows / tile.rows), cores)
            )
        if "chunks_n" not in chosen:
            return Decision(
                "chunks_n", "parallel", chunk_options(self.columns // tile.columns, cores)
            )
        if "mc" not in chosen:
            return Decision("mc", "block", self.held_options(chosen))
        if "prefetch" not in chosen:
            return Decision("prefetch", "overlap", ("next", "none"))
        return None

    def held_options(self, chosen: Mapping[str, Option]) -> tuple[int, ...]:
        """Numbers of row blocks whose sums of A take a share of L2."""
        tile = self.row(chosen)
        shape = self.shape(tile, int(chosen["chunks_m"]), int(chosen["chunks_n"]))
        block = tile.kind.a.nbytes * PRODUCTS * self.depth * shape.heights[0]
        capacity = self.target.level("L2").capacity
        return held_options(capacity, SHARES, block, shape.task_blocks)

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Workload:
        nest, lanes = self.nest(config), self.target.lanes
        (kernel, work), shape = nest.level0, nest.shape
        vectors_a = shape.chunks_n * self.rows * ceil(self.depth / lanes)
        vectors_c = self.rows * shape.panels * nest.row.vectors
        moved = MOVE_COST * PRODUCTS
        extra = (
            Extra("vector", vectors_a * QUARTERS, self.product.head_vectors),
            Extra("fma", vectors_a * (ADDS_A + moved)),
            Extra("fma", vectors_c * (ADDS_C + moved)),
        )
        # A panel of B is 7/4 as large, and products wait for it where another task read it before:
        # SETR's took 1.3 times what they should on a Granite Rapids, whose L3 is slow.
        micro, panel, *others = layers(nest, self.target)
        first, *again = panel.loads
        loops = (micro, panel._replace(loads=(first,), stores=(*again,)), *others)
        return Workload(kernel, work, loops, self.view.flops, extra, self.product.behind)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the price without prologue and epilogue depend on."""
        v = self.view
        return (self.name, self.stage.output.type.dtype, v.m, v.n, v.k, self.rows)

    # the program ----------------------------------------------------------------------------------
    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant input, by name: [panels, products, k / 2, nr]."""
        columns, depth = self.row(config).columns, self.depth
        packing = Packing(
            (PRODUCTS, depth, self.columns),
            (0, 1, 2),
            (0, 0, 0),
            (PRODUCTS, depth, self.columns // columns, columns),
            (2, 0, 1, 3),
            quarters=OF_B,
        )
        return {self.view.op.inputs[1]: packing}

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops, packings = StrassenLoops(self, config), self.layouts(config)
        return self.product.program_of(loops, packings, symbol)
