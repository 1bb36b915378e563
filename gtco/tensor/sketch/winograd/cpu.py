"""Sketch rule for 3x3 convolutions of stride 1 by Winograd's minimal filtering (Lavin and Gray
2016), structure SSSRS. F(2x2, 3x3) takes 2.25 times and F(4x4, 3x3) 4 times fewer products than a
sum over the taps.

::

    for task in chunks of output tiles x column chunks:             # parallel
      for held tiles of m x m outputs:                              # what L2 holds
        for tile, channel: inputs[p, tile, channel] = (B^T x B)[p]  # p: the (m + 2)^2 positions
        for panel of nr columns in the task's columns:
          U[p, k, nr] = G w G^T                                     # of weights of 8 bits
          for p, for block of mr (or mr - 1) of these tiles:
            products[p, mr, nr] = inputs[p, mr, k] x U[p, k, nr]    # micro-kernel, in registers
          for tile, column: epilogue(A^T products A) -> output

U = G w G^T is made when weights are packed, in float64 and rounded once. A tile at the border is
copied with zeros around it first. Weights of 8 bits stay so in the library, and U is made of a
panel where it is used: sums of them are exact, and are multiplied once.

Accuracy was compared with float64 on random data of 16 to 512 channels. The root mean square error
is 0.6 to 0.8 times that of a direct convolution for F(2x2), and 1.7 to 2.5 times for F(4x4). The
latter grows with the square root of the channels, as a direct one's does (8e-7 of the outputs' at
64 channels, 2.2e-6 at 512). Errors are relative to the largest inputs of a tile's window: an output
that is small beside its neighbours has fewer digits. A NaN or an infinity reaches all m x m outputs
of a tile as NaN, and inputs whose products come within 10^4 of the largest float32 may overflow.

bfloat16 operands are transformed in float32 and rounded once more. The error of F(2x2) is twice
that of a direct convolution with rounded operands (4.5e-3 of the outputs for 2.3e-3). That of
F(4x4) would be ten times as large, so it is not an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from gtco.machine.target import Target
from gtco.tensor import cost
from gtco.tensor.analysis.chains import anchor
from gtco.tensor.analysis.contraction import ConvView, TransposedView
from gtco.tensor.analysis.filtering import TAPS, applicable
from gtco.tensor.emit.filtering import TRANSFORMS
from gtco.tensor.intrinsics.table import Kind, kinds
from gtco.tensor.nest.traffic import layers
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.shared.pack import MOVE_COST, RUN_COST
from gtco.tensor.sketch.shared.tiling import chunk_options, held_options, tile_decision
from gtco.tensor.sketch.winograd.facts import WinogradFacts
from gtco.tensor.sketch.winograd.loops import WinogradLoops
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Extra, Workload

SHARES = (0.25, 0.5, 1.0, 2.0)  # shares of L2 for the held tiles' transformed inputs


def match(stage: Stage, target: Target) -> Winograd | None:
    """The stage as a 3x3 convolution of stride 1 with constant weights, channels last, that
    ``gemm`` takes; else None.
    """
    op = anchor(stage, "conv2d")
    if op is None or op.inputs[1] not in stage.constants or not target.fast_algorithms:
        return None
    if not applicable(op, stage.types[op.inputs[1]].shape):
        return None
    product = gemm.match(stage, target)
    if product is None or not isinstance(product.view, ConvView) or product.view.channels_first:
        return None
    assert not isinstance(product.view, TransposedView)
    # the transformed values would be rounded once more
    if product.operand in ("float16", "int4") or product.operand_a == "uint8":
        return None
    if product.operand == "int8" and (product.operand_a != "float32" or product.scales):
        return None
    found = Winograd(product)
    return found if found.kinds else None


@dataclass(frozen=True)
class Winograd(WinogradFacts):
    """A 3x3 convolution on a CPU; see the module's text for the loops."""

    name = "winograd"
    # the best micro-kernel depends on how many tiles a task has, and says little of other sizes
    by_size = True
    structure = "SSSRS"

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of micro-kernels whose steps of k are whole."""
        rows = kinds(self.target, self.operand)
        whole = (kind for kind in rows if self.view.channels % kind.step == 0)
        return tuple(kind for kind in whole if not kind.in_tiles)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of tiles. In bfloat16, tiles of 4x4 would have too large an error."""
        return tuple(TRANSFORMS) if self.operand == "float32" else (min(TRANSFORMS),)

    # the space ------------------------------------------------------------------------------------

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        cores, n = self.target.cores, self.view.n
        if "m" not in chosen:
            return Decision("m", "grain", self.sizes)
        size = int(chosen["m"])
        if "tile" not in chosen:
            tiles = (t for t in self.line(size).tiles() if t.kind in self.kinds)
            return tile_decision(tuple(tiles), n)
        tile = self.row(chosen)
        if "chunks_m" not in chosen:
            options = chunk_options(ceil(self.tiles(size) / tile.rows), cores)
            return Decision("chunks_m", "parallel", options)
        if "chunks_n" not in chosen:
            options = chunk_options(ceil(n / tile.columns), cores)[:2]
            return Decision("chunks_n", "parallel", options)
        if "mc" not in chosen:
            return Decision("mc", "block", self.held_options(chosen))
        if "prefetch" not in chosen:
            return Decision("prefetch", "overlap", ("next", "none"))
        return None

    def held_options(self, chosen: Mapping[str, Option]) -> tuple[int, ...]:
        """Numbers of row blocks whose transformed inputs take a share of L2."""
        size, tile = int(chosen["m"]), self.row(chosen)
        shape = self.shape(size, tile, int(chosen["chunks_m"]), int(chosen["chunks_n"]))
        capacity = self.target.level("L2").capacity
        row = tile.kind.a.nbytes * TRANSFORMS[size].positions * self.view.channels
        block = row * shape.heights[0]
        return held_options(capacity, SHARES, block, shape.task_blocks)

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Workload:
        v, nest, size, lanes = self.view, self.nest(config), config["m"], self.target.lanes
        kernel, work = nest.level0
        shape, (_, tiles, _, depth), positions = nest.shape, nest.extents, nest.positions
        vectors_in = shape.chunks_n * tiles * ceil(depth / lanes)
        vectors_out = tiles * shape.panels * nest.row.vectors
        forth, back = self.instructions(size)
        border = self.borders[size]
        made = nest.passes * shape.tasks * shape.task_panels * nest.row.vectors * depth
        extra = (
            Extra("fma", made * self.filtering(size) if self.widens else 0),
            Extra("vector", vectors_in * positions, self.product.head_vectors),
            Extra("vector", vectors_in * positions, self.conversions(nest.row.kind)),
            Extra("fma", vectors_in * (forth + MOVE_COST * positions * (1 + border))),
            Extra("fma", shape.chunks_n * tiles * border * positions * RUN_COST),
            Extra("fma", vectors_out * (back + positions + MOVE_COST * size * size)),
            Extra("fma", tiles * shape.panels * size * RUN_COST),
            Extra("store", v.m * v.n / size, self.scattered),
        )
        loops = layers(nest, self.target)
        return Workload(kernel, work, loops, v.flops, extra, self.product.behind)

    @property
    def scattered(self) -> float:
        """Vectors whose store takes as long as that of a tile's pixels of a channel, where these
        lie side by side in the output.
        """
        return gemm.SCATTERED if self.product.stores_columns else 0.0

    def conversions(self, kind: Kind) -> float:
        """Vector instructions that convert a vector of the input to float32, and then to the dtype
        that is multiplied.
        """
        return cost.conversion(self.operand, "float32", self.target.lanes) + (
            cost.conversion("float32", kind.a.dtype, self.target.lanes)
        )

    def instructions(self, size: int) -> tuple[int, int]:
        """Vector instructions of the two transforms of one tile."""
        width = TRANSFORMS[size].width
        forth = 2 * width * (4 + 2 * (width - 2))
        back = (width + size) * (width - 2 + 2 * size)
        return forth, back

    def filtering(self, size: int) -> float:
        """Vector instructions that read a vector of taps and transform it."""
        width, positions = TRANSFORMS[size].width, TRANSFORMS[size].positions
        sums = (TAPS + width) * 3 * ((width - 2) // 2)  # three for a pair of points
        return 2 * TAPS**2 + sums + positions + MOVE_COST / 2 * positions

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the price without prologue and epilogue depend on."""
        v = self.view
        operand, out = self.product.operand, self.stage.output.type.dtype
        return (self.name, operand, out, v.a_shape, v.b_shape, v.result, v.op["padding"])

    # the program ----------------------------------------------------------------------------------
    def packing(self, config: Config) -> Packing:
        """[panels, positions, k / step, nr, step]; the last axis only if it is not 1. Weights of 8
        bits are [panels, k, taps, nr].
        """
        v, tile = self.view, self.row(config)
        transform, step = TRANSFORMS[config["m"]], tile.kind.b.step
        panels = ceil(v.n / tile.columns)
        if self.widens:
            taps = TAPS**2
            return Packing(
                (v.n, v.channels, taps),
                (2, 1, 0),
                (0, 0, panels * tile.columns - v.n),
                (taps, v.channels, panels, tile.columns),
                (2, 1, 0, 3),
            )
        steps = (v.channels,) if step == 1 else (v.channels // step, step)
        return Packing(
            (v.n, v.channels, transform.positions),
            (2, 1, 0),
            (0, 0, panels * tile.columns - v.n),
            (transform.positions, *steps, panels, tile.columns),
            (2, 0, 1, 3) if step == 1 else (3, 0, 1, 4, 2),
            both=transform.weight_matrix,
        )

    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name."""
        return {self.view.op.inputs[1]: self.packing(config)}

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops, packings = WinogradLoops(self, config), self.layouts(config)
        return self.product.program_of(loops, packings, symbol)
