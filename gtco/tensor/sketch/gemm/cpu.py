"""Sketch rule for contractions, structure SSRSRS: tasks (S S), blocks of k (R), panels and row
blocks (S), k (R), tile (S).

::

    for task in batch x row chunks x column chunks:          # parallel
      for kb in blocks of k, of as many rows as L2 holds:    # the block of B stays in L1 or L2
        pack rows of A (prologue, im2col), columns of B      # when the config says so
        for panel of nr columns in the task's columns:
          widen the panel of narrower weights                # when the config says so
          for block of mr (or mr - 1) of these rows:
            tile[mr, nr] (+)= A[mr, kc] x B[kc, nr]          # micro-kernel, in registers
            on the last kb: epilogue(tile) -> output

With ``order=rows`` the block of rows is the outermost loop of a task. The packed rows of A stay in
L1 for all panels, and B comes from L2 for each block. With ``order=k`` the blocks of k are the loop
inside that over panels: a block of B stays in L1, and no more than a panel's sums are kept.

M = 197 needs no padding: rows are cut into blocks of two neighbouring heights, each with its own
micro-kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    ancestors,
    anchor,
    epilogue,
    prologue_readable,
)
from gtco.tensor.analysis.contraction import (
    CONTRACTIONS,
    ConvView,
    MatmulView,
    TransposedView,
    contraction,
)
from gtco.tensor.analysis.placement import (
    along_memory,
    gathers,
    run_breaks,
    scatters,
)
from gtco.tensor.analysis.remembered import remembered
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.intrinsics.table import WEIGHTS, MicroKernel, kinds, micro_kernels, packable
from gtco.tensor.intrinsics.tiles import CONFIGURING
from gtco.tensor.loops import Line
from gtco.tensor.nest.emission import NestLoops
from gtco.tensor.nest.lines import nest_lines
from gtco.tensor.nest.nest import Nest
from gtco.tensor.nest.shape import task_shape
from gtco.tensor.nest.tile_store import LINE
from gtco.tensor.nest.traffic import layers
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.gemm import norm_prologue
from gtco.tensor.sketch.gemm.facts import GemmFacts, operand_dtype, rows_for
from gtco.tensor.sketch.gemm.loops import GemmLoops
from gtco.tensor.sketch.shared.pack import row_vectors
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.tiling import (
    chunk_options,
    tile_decision,
    tile_options,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection, Role
from gtco.tensor.stage import INT4, Stage
from gtco.tensor.workload import Extra, Workload

SUMS = {  # the product's dtype in the graph, by the operand of its rows
    **dict.fromkeys(("float32", "bfloat16", "float16", WEIGHTS, INT4), "float32"),
    "int8": "int32",
}
# What storing one element to a cache line of its own takes, in vectors that are stored.
# Convolutions of 16 channels that become the outermost axis took some 90 (2 cores of a Zen 5):
# their lines, powers of two apart, share few sets of the cache. Other distances take less. Nor do
# rows help that lie only a few elements apart (pixels of one phase of a transposed convolution):
# their lines are gone before the next row comes.
SCATTERED = 16.0
STORED = ("float32", "bfloat16", "float16", "uint8", "int8", "int32")  # dtypes of the output
# Vector instructions that widen a vector of weights into scratch, multiply it by the scales of its
# block, and subtract the zero points before. Eight vectors of int4 read theirs once.
WIDENING, SCALING, SHIFTING = 3.0, 2.0, 2.0
WIDENING_INT4, SCALING_INT4, SHIFTING_INT4 = 4.2, 1.2, 1.3
NORM_VECTORS = 10.0  # instructions of a layer_norm's three passes, on one vector


@remembered
def match(stage: Stage, target: Target) -> Gemm | None:
    """The stage as one contraction with a readable prologue and a one-to-one epilogue, else
    None.
    """
    op = anchor(stage, *CONTRACTIONS)
    operand = operand_dtype(stage, op) if op else ""
    if op is None or not operand:
        return None
    a = stage.types[op.inputs[0]].dtype
    rows = kinds(target, rows_for(a, operand))
    if op.type.dtype != SUMS.get(rows_for(a, operand)) or not rows:
        return None
    if operand == "int8" and rows[0].a.dtype != a:
        return None  # the rows of a target multiply either uint8 or int8 by int8
    view = contraction(stage, op)
    if view is None:
        return None
    if len(op.inputs) > 2:  # scales of blocks of constant weights, and zero points
        matrix = len(stage.types[op.inputs[1]].shape) == 2
        if rows_for(a, operand) not in (WEIGHTS, INT4) or not matrix:
            return None
        if not stage.constants.issuperset(op.inputs[2:]):
            return None
        scales = stage.types[op.inputs[2]].dtype
        if scales != "float32" and not kinds(target, scales):
            return None  # no instruction widens them
    norm = norm_prologue.find(stage, op)
    if norm is not None and not (isinstance(view, MatmulView) and view.folded):
        return None
    known = frozenset([norm.output] if norm else [])
    if not prologue_readable(stage, op.inputs, known):
        return None
    tail = epilogue(stage, op.output)
    if tail is None or stage.output.type.dtype not in STORED:
        return None
    if isinstance(view, TransposedView) and op.inputs[1] not in stage.constants:
        return None
    if isinstance(view, ConvView):
        view = along_memory(stage, view)
    elif gathers(stage, view, norm.inputs[0] if norm else op.inputs[0]):
        view = replace(view, gathered=True)
    return Gemm(stage, target, view, tail, norm)


@dataclass(frozen=True)
class Gemm(GemmFacts):
    """A contraction on a CPU; see the module's text for the loops."""

    name = "gemm"
    structure = "SSRSRS"

    # the space ------------------------------------------------------------------------------------

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        v = self.view
        if "tile" not in chosen:
            return self.tile_decision
        tile = self.row(chosen)
        if "chunks_m" not in chosen:
            return Decision(
                "chunks_m", "parallel", chunk_options(ceil(v.m / tile.rows), self.target.cores)
            )
        if "chunks_n" not in chosen:
            return Decision(
                "chunks_n", "parallel", chunk_options(ceil(v.n / tile.columns), self.target.cores)
            )
        if "a" not in chosen:
            where = ("direct", "packed") if self.reads_rows(tile) else ("packed",)
            return Decision("a", "operand", where)
        if "b" not in chosen and self.reads_columns(tile):
            return Decision("b", "operand", ("direct", "packed"))
        if "kc" not in chosen:
            return Decision("kc", "block", self.depth_options)
        if "order" not in chosen and self.reorders(chosen):
            role: Role = "loops" if tile.kind.in_tiles else "order"
            orders = ("panels", "rows", "k") if self.keeps_panels(chosen) else ("panels", "rows")
            return Decision("order", role, orders, unsaid="panels")
        if "mc" not in chosen and (options := self.height_options(chosen)):
            return Decision("mc", "block", options)
        if "prefetch" not in chosen:
            ahead = ("next", "none", "both") if self.constant_b else ("none",)
            return Decision("prefetch", "overlap", ahead[:2] if self.widens(tile) else ahead)
        return None

    @cached_property
    def tile_decision(self) -> Decision:
        return tile_decision(self.tiles(), self.view.n, self.view.m)

    def tiles(self) -> list[MicroKernel]:
        operand = rows_for(self.operand_a, self.operand)
        rows = micro_kernels(self.target, operand) if self.scales is None else ()
        if operand in ("float16", WEIGHTS, INT4) and self.constant_b:
            rows += micro_kernels(self.target)  # on panels of weights that are widened
        return tile_options(rows if self.constant_b else packable(rows), self.view.m, self.view.n)

    @cached_property
    def depth_options(self) -> tuple[int, ...]:
        """Block sizes of k: multiples of the run that packing copies at once, and all of k."""
        k, unit = self.view.k, self.depth_unit
        options = {k}
        if not isinstance(self.view, ConvView) and run_breaks(self.stage, self.view):
            return (k,)
        for wanted in (128, 256, 384, 512, 768, 1024):
            if wanted < k:
                blocks = ceil(k / wanted)
                options.add(min(k, ceil(k / blocks / unit) * unit))
        return tuple(sorted(options))

    def reorders(self, chosen: Mapping[str, Option]) -> bool:
        """True if row blocks may be the outer loop, and panels the inner one. There must be several
        of both, and a block of B that is packed or widened must be so once.
        """
        tile = self.row(chosen)
        if self.widens(tile):
            return False
        shape = task_shape(self.view, tile, int(chosen["chunks_m"]), int(chosen["chunks_n"]))
        kept = self.constant_b or chosen.get("b") == "direct" or chosen["kc"] == self.view.k
        return shape.task_blocks > 1 and shape.task_panels > 1 and kept

    def keeps_panels(self, chosen: Mapping[str, Option]) -> bool:
        """True if the loop over blocks of k may be inside that over panels (``order=k``). Nothing
        may be packed there.
        """
        tiles, reads = self.row(chosen).kind.in_tiles, chosen["a"] == "direct" and self.constant_b
        return tiles and reads and int(chosen["kc"]) < self.view.k

    def height_options(self, chosen: Mapping[str, Option]) -> tuple[int, ...]:
        """The numbers of row blocks that are packed, or read panel after panel, at once: those that
        fit a quarter and an eighth of L2, which the panels and the results share. There is no
        option if a task's rows fit half of L2, are read only once, or are taken block after block.
        """
        if chosen.get("order", "panels") != "panels":
            return ()
        tile = self.row(chosen)
        shape = task_shape(self.view, tile, int(chosen["chunks_m"]), int(chosen["chunks_n"]))
        capacity = self.target.level("L2").capacity
        row = tile.kind.a.nbytes * int(chosen["kc"])
        read_once = chosen["a"] == "direct" and shape.task_panels == 1
        if read_once or shape.task_rows * row <= capacity // 2:
            return ()
        block = row * shape.heights[0]
        fitting = {max(1, capacity // share // block) for share in (4, 8)}
        return tuple(sorted(n for n in fitting if n < shape.task_blocks))

    @property
    def depth_unit(self) -> int:
        v = self.view
        unit = self.target.lanes
        if isinstance(v, ConvView):
            unit = v.kernel[0] * v.kernel[1] if v.channels_first else v.channels
        return lcm(unit, *(kind.step for kind in self.kinds))

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Workload:
        nest = self.nest(config)
        kernel, work = nest.level0
        loops = layers(nest, self.target)
        extra = self.extra(config, nest)
        return Workload(kernel, work, loops, self.view.flops, extra, self.behind)

    def extra(self, config: Config, nest: Nest) -> tuple[Extra, ...]:
        """The work beside the products: vectors between registers, tile and output, and packing
        with the prologue.
        """
        v, shape, lanes = self.view, nest.shape, self.target.lanes
        stored = v.batch * v.m * v.n / lanes
        packed, copied = config["a"] == "packed", self.packs_columns(config)
        columns = shape.task_panels * nest.row.columns
        widened = nest.passes if nest.b.how == "widened" else 0
        # A pass packs B again where the blocks of k share their scratch.
        packings = nest.passes if nest.kblocks > 1 else 1
        return (
            Extra("store", stored * (2.0 * nest.kblocks + 2)),
            Extra("pack", shape.tasks * shape.task_rows if packed else 0, self.packing_vectors),
            Extra("vector", shape.tasks * shape.task_rows if packed else 0, self.prologue_vectors),
            Extra("reduce", shape.tasks * shape.task_rows if packed else 0, self.norm_vectors),
            Extra("pack", 2.0 * packings * shape.tasks * v.k * columns / lanes if copied else 0),
            Extra("fma", self.widening * widened * shape.tasks * v.k * columns / lanes),
            Extra("fma", CONFIGURING * nest.configurations),
        )

    @cached_property
    def widening(self) -> float:
        """Vector instructions that widen a vector of weights into scratch."""
        narrow = self.operand == INT4
        whole = WIDENING_INT4 if narrow else WIDENING
        if self.scales is not None:
            whole += SCALING_INT4 if narrow else SCALING
        if self.zeros is not None:
            whole += SHIFTING_INT4 if narrow else SHIFTING
        return whole

    @cached_property
    def packing_vectors(self) -> float:
        """Vector instructions that copying one row of A takes."""
        return row_vectors(self.view, 2, self.target.lanes)

    @cached_property
    def prologue_vectors(self) -> float:
        """Vector instructions that the prologue spends on one row of A while it is packed."""
        lanes = self.target.lanes
        return row_vectors(self.view, 2 + self.head_vectors, lanes) - self.packing_vectors

    @cached_property
    def norm_vectors(self) -> float:
        """Vector instructions that normalise one row of A; most are reductions."""
        return NORM_VECTORS * self.view.k / self.target.lanes if self.norm else 0.0

    @cached_property
    def head_vectors(self) -> float:
        """Vector instructions of the prologue for one vector of A."""
        before = [o for o in ancestors(self.stage, self.view.op.inputs[0]) if o != self.norm]
        return vectors(self.stage, before, self.target.lanes).total

    @cached_property
    def behind(self) -> tuple[Extra, ...]:
        """The work of the epilogue, which is the same for every config."""
        each = epilogue_vectors(self.tail, self.target.lanes)
        stored = self.view.batch * self.view.m * self.view.n / self.target.lanes
        scattered = SCATTERED if scatters(self.view, self.tail, LINE) else 0.0
        return (
            Extra("vector", stored, each.vector),
            Extra("exp", stored, each.exp),
            Extra("store", stored * self.target.lanes, scattered),
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the loops' price depend on. Prologue and epilogue are units
        of extra work.
        """
        v = self.view
        return (
            self.name,
            self.operand_a,
            self.operand,
            self.stage.output.type.dtype,
            v.batch,
            v.m,
            v.n,
            v.k,
            self.direct_rows,
            self.direct_columns,
            self.constant_b,
            self.widening,
            self.depth_options,
        )

    # the program ----------------------------------------------------------------------------------
    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name."""
        nest = self.nest(config)
        packings, columns, stored = {}, nest.row.columns, nest.stored
        if self.constant_b:
            packings[self.view.op.inputs[1]] = self.view.packing(
                columns, stored.step, nest.whole, stored.dtype == INT4
            )
        for name in (self.scales, self.zeros):
            if name is not None:
                packings[name] = self.scales_packing(columns)
        return packings

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        return self.program_of(GemmLoops(self, config), self.layouts(config), symbol)

    def program_of(
        self, loops: NestLoops, packings: Mapping[str, Packing], symbol: str
    ) -> Program:
        """The kernel of any loops of this product."""
        tasks, scratch, lines = loops.shape.tasks, loops.scratch, self.lines(loops.nest)
        return program(symbol, self.stage, self.target, tasks, loops.emit, scratch, packings, lines)

    def scales_packing(self, columns: int) -> Packing:
        """The scales, or zero points, in panels of columns: [panels, blocks, columns]."""
        n, panels = self.view.n, ceil(self.view.n / columns)
        shape = (self.blocks, n)
        pad, split = (0, panels * columns - n), (self.blocks, panels, columns)
        return Packing(shape, (0, 1), pad, split, (1, 0, 2))

    def lines(self, nest: Nest) -> tuple[Line, ...]:
        """The loops in words."""
        before = ancestors(self.stage, self.view.op.inputs[0])
        after = [op.kind for op in self.tail.operators]
        normalising = "mean and scale of each row of A -> scratch" if self.norm else ""
        return nest_lines(nest, normalising, [op.kind for op in before], after)
