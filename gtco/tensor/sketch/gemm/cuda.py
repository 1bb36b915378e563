"""Sketch rule for contractions on a GPU, structure SSSRRSRS: blocks, warps and a thread's sums
(S S S), slices of k and a slice's steps (R R), tile (S), step (R), tile (S).

::

    for tile[B_m, B_n] of C in batches x tiles:           # a block each (GTCO, Fig. 9), or several
      for slice[B_k] of its part of k:                    # copied stages - 1 ahead of their use
        for step of W_k:                                  # its fragments one step ahead (Fig. 10)
          tile[W_m, W_n] += A[W_m, step] x B[step, W_n]   # the row's instruction, in registers
      epilogue(tile) -> output                            # lanes store neighbours

The kernel is ``device/gtco/gemm.cuh``; the stage's reads and stores are printed as lambdas. k is
split in two ways. Both add up in a fixed order, so that every run gives the same bits. In a block,
``parts`` warps share a warp's tile, each with its part W_k of every slice. If there are fewer tiles
than multiprocessors, ``split`` blocks share a tile, each with a part of the slices. Their sums meet
in L2. An atomic counter finds the block that comes last, which adds them up and does the epilogue.
With warp groups, a further group may bring the slices that the others multiply (``warp_roles``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import (
    Epilogue,
    ancestors,
    anchor,
    epilogue,
    is_static,
    prologue_readable,
)
from gtco.tensor.analysis.contraction import (
    CONTRACTIONS,
    Contraction,
    ConvView,
    TransposedView,
    contraction,
)
from gtco.tensor.analysis.mapped import mapped_products
from gtco.tensor.analysis.placement import along_memory
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import PRODUCER_GROUP, source
from gtco.tensor.cuda.spelling import CTYPES
from gtco.tensor.cuda.tensor_core import TensorCoreRow, emitted_rows, group_rows
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.gemm.cuda_gathers import distinct, one_by_one
from gtco.tensor.sketch.gemm.cuda_loops import product_lines
from gtco.tensor.sketch.gemm.cuda_mapping import Mapped
from gtco.tensor.sketch.gemm.cuda_roles import (
    NONE,
    PRODUCER,
    ROLES,
    Registers,
    registers,
    role_options,
)
from gtco.tensor.sketch.gemm.cuda_tiles import (
    GROUP_DEPTH,
    GROUP_ROWS,
    PRODUCERS,
    Tiles,
    split_options,
)
from gtco.tensor.space import Config, Decision, Option, Rejection, Role
from gtco.tensor.stage import ITEM_BYTES, Stage

OPERANDS = ("float16", "bfloat16", "float32")
WASTE = 1.5  # times the products of the least wasteful mapping: one with more is not an option
MAPPINGS = 3  # options: of two equally wasteful ones the narrower has less reuse and as many blocks
SMALL = 2.0  # times the products that are needed
GROUP = 8  # rows of tiles that are walked together
LANES = 8  # operations are counted for so many lanes at once; each lane counts as one
# Registers of a thread that no launch has. They stand for a config that this space lacks, and that
# an earlier stage of the same signature has.
LACKING = 1 << 16
UNITS = {"mma": "TensorCores", "wgmma": "WarpGroups", "fma": "CudaCores"}  # the names in mma.cuh
TILINGS: tuple[tuple[str, Role], ...] = (
    ("block", "block"),
    ("warps", "parallel"),
    ("stages", "overlap"),
)


def match(stage: Stage, target: GpuTarget) -> CudaGemm | None:
    """The stage as one contraction with a readable prologue and a one-to-one epilogue, else
    None.
    """
    op = anchor(stage, *CONTRACTIONS)
    if op is None or not is_static(stage):
        return None
    operands = {stage.types[x].dtype for x in op.inputs[:2]}
    if len(operands) > 1 or not {*operands, op.type.dtype} <= set(OPERANDS):
        return None
    view = contraction(stage, op)
    if view is None or not prologue_readable(stage, op.inputs):
        return None
    tail = epilogue(stage, op.output)
    if tail is None:
        return None
    if isinstance(view, TransposedView) and op.inputs[1] not in stage.constants:
        return None
    if isinstance(view, ConvView):
        view = along_memory(stage, view)
    return CudaGemm(stage, target, view, tail)


@dataclass(frozen=True)
class CudaGemm:
    """A contraction on a GPU; see the module's text for the loops."""

    stage: Stage
    target: GpuTarget
    view: Contraction
    tail: Epilogue

    name = "gemm"
    structure = "SSSRRSRS"

    # the space ------------------------------------------------------------------------------------
    @cached_property
    def operand(self) -> str:
        """The dtype of A and B."""
        return self.stage.types[self.view.op.inputs[0]].dtype

    @cached_property
    def rows(self) -> Mapping[str, TensorCoreRow]:
        """The register level, which multiplies, by name. CUDA cores are options beside Tensor Cores
        only if these would multiply ``SMALL`` times the needed products or more (Helix, Fig. 12).
        Warp groups are options if their tiles waste little more than a warp's.
        """
        best, *others = emitted_rows(self.target, self.operand)
        waste = min(x.product.waste(best.extents) for x in self.mappings.values())
        groups = [
            row
            for row in group_rows(self.target, self.operand)
            if any(
                x.product.waste((*row.extents[:2], GROUP_DEPTH)) <= WASTE * waste and x.tilings(row)
                for x in self.mappings.values()
            )
        ]
        return {row.name: row for row in (best, *(others if waste >= SMALL else ()), *groups)}

    @cached_property
    def mappings(self) -> Mapping[str, Mapped]:
        """Every legal mapping, by a name that says which loops are m, n and k."""
        found = (
            Mapped(self.stage, self.target, product, self.tail, self.operand)
            for product in mapped_products(self.view)
        )
        return {mapped.name: mapped for mapped in found}

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "row" not in chosen:
            return Decision("row", "micro-kernel", tuple(self.rows))
        row = self.rows[str(chosen["row"])]
        if "mapping" not in chosen:
            return Decision("mapping", "micro-kernel", self.mapping_options(row))
        left: object = self.mappings[str(chosen["mapping"])].tilings(row)
        for name, role in TILINGS:
            if name not in chosen:
                assert isinstance(left, Mapping | tuple)
                return Decision(name, role, tuple(left))
            left = left[chosen[name]] if isinstance(left, Mapping) else None
        if "split" not in chosen:
            options = split_options(self.tiles(chosen), self.target)
            return Decision("split", "parallel", options, unsaid=1)
        if row.unit == "wgmma" and ROLES not in chosen:
            roles = role_options(self.tiles({**chosen, ROLES: PRODUCER}), self.target)
            return Decision(ROLES, "overlap", roles, unsaid=NONE)
        if "group" not in chosen:
            return Decision("group", "grain", self.group_options(self.tiles(chosen)))
        return None

    def mapping_options(self, row: TensorCoreRow) -> tuple[str, ...]:
        """Step two of the mapping: the mappings that fit the row's size and whose tiles fit the
        GPU. The least wasteful come first, and the widest of equally wasteful ones; ``MAPPINGS`` at
        most.
        """
        waste = {
            name: x.product.waste(row.extents)
            for name, x in self.mappings.items()
            if row.unit != "wgmma" or x.swizzled(row)
        }
        least = min(waste.values())
        fitting = [
            name
            for name, value in waste.items()
            if value <= WASTE * least and self.mappings[name].tilings(row)
        ]
        return tuple(sorted(fitting, key=lambda name: waste[name])[:MAPPINGS])

    def group_options(self, tiles: Tiles) -> tuple[int, ...]:
        """The numbers of rows of tiles that are walked together. The number matters if not all
        blocks run at once.
        """
        down, across = tiles.counts
        if down == 1 or across == 1 or tiles.blocks <= self.target.sms:
            return (down,)
        return tuple(dict.fromkeys((min(down, GROUP), 1)))

    def mapped(self, chosen: Mapping[str, Option]) -> Mapped:
        return self.mappings[str(chosen["mapping"])]

    def tiles(self, chosen: Mapping[str, Option]) -> Tiles:
        """The sizes of the kernel's tiles."""
        return self.mapped(chosen).chosen(self.rows[str(chosen["row"])], chosen)

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Launch:
        tiles = self.tiles(config.by_name)
        batch, m, n, outer, depth = tiles.extents
        (bm, bn, bk), (wm, wn) = tiles.block, tiles.warp
        mapped, roles = self.mapped(config.by_name), self.roles(tiles)
        lacks = tiles.producer and roles is None
        lacks |= tiles.row.unit == "wgmma" and not mapped.swizzled(tiles.row)
        steps = float(tiles.tiles * tiles.slices)
        item = ITEM_BYTES[self.operand]
        epilogue = self.tail_vectors * batch * m * n * self.lonely(tiles)
        prologue = sum(
            each * tiles.tiles * size * tiles.slices * bk
            for each, size, copied in zip(self.head_vectors, (bm, bn), tiles.copied, strict=True)
            if not copied
        )
        gathers, alone = mapped.gathers(tiles.row), mapped.placing * self.lonely(tiles)
        indexing, lines, scattered = one_by_one(
            tiles, gathers, alone, mapped.stores, mapped.stored[1]
        )
        read, written = self.moved
        # bytes that blocks ask L2 for: rows and columns outside the matrix are not read
        rows, columns = min(bm, m), min(bn, n)
        asked = item * (rows + columns) * outer * depth * tiles.tiles
        asked += 2 * tiles.scratch
        if tiles.row.unit == "wgmma":  # a whole group reads rows together
            read_rows = tiles.warps // 4 * (GROUP_ROWS + bn)
        else:
            read_rows = tiles.warps * (wm + wn)
        return Launch(
            blocks=tiles.blocks,
            threads=tiles.threads,
            shared=tiles.shared,
            registers=LACKING if lacks else roles.begin if roles else tiles.registers,
            unit=tiles.row.rate(self.operand),
            work=2.0 * steps * bm * bn * bk,
            vector=epilogue + prologue,
            read=read,
            written=written,
            traffic=asked + written + scattered,
            flops=self.view.flops,
            overlapped=not any(x and x.loads for x in gathers),
            staged=steps * read_rows * bk * item + 8.0 * tiles.tiles * bm * bn,
            steps=ceil(tiles.slices / tiles.split) + tiles.parts - 1,
            joined=tiles.scratch / tiles.tiles,
            copying=tiles.threads - tiles.workers,
            ahead=tiles.ahead,
            indexing=indexing,
            lines=lines,
        )

    def roles(self, tiles: Tiles) -> Registers | None:
        """Registers by role, if warps have roles. None also where a role had too few of them;
        :func:`role_options` offers no such roles.
        """
        return registers(tiles, self.target) if tiles.producer else None

    def lonely(self, tiles: Tiles) -> float:
        """How much longer the epilogue takes than if all blocks did a part of it. If blocks share
        tiles, the last block of a tile does the whole epilogue, one block on a multiprocessor.
        """
        return tiles.split / ceil(tiles.blocks / self.target.sms) if tiles.split > 1 else 1.0

    @cached_property
    def moved(self) -> tuple[float, float]:
        """Bytes of all inputs, and of the output."""
        return float(self.stage.input_bytes), float(self.stage.output.type.nbytes)

    @cached_property
    def tail_vectors(self) -> float:
        """Operations of the epilogue on one element, those that find its place in the output
        included.
        """
        return 4 + epilogue_vectors(self.tail, LANES).total

    @cached_property
    def head_vectors(self) -> tuple[float, float]:
        """Operations for a computed element of A and of B, those that find its place included."""
        operands = (ancestors(self.stage, x) for x in self.view.op.inputs[:2])
        a, b = (6 + vectors(self.stage, before, LANES).total for before in operands)
        return a, b

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the loops' price depend on. Prologue and epilogue are
        operations beside them.
        """
        v = self.view
        best = next(iter(self.mappings.values()))
        extents = tuple(x.product.extents for x in self.mappings.values())
        kinds = v.op.kind, self.operand, self.stage.output.type.dtype
        row = next(iter(self.rows.values()))
        ways = best.a(row), best.b(row), best.transposed
        alone = distinct(best.gathers(row), best.placing, best.stores, best.stored[1])
        names = tuple(self.mappings)  # the names that a config uses
        names += tuple(self.rows)
        return (self.name, self.target.name, *kinds, names, extents, *ways, *alone, prod(v.a_shape))

    # the program ----------------------------------------------------------------------------------
    def layouts(self, config: Config) -> dict[str, Packing]:
        """Of the constant inputs, by name."""
        chosen = config.by_name
        mapped, tiles = self.mapped(chosen), self.tiles(chosen)
        if mapped.b(tiles.row).way != "packed":
            return {}
        packing = mapped.product.packing(tiles.block[1], tiles.block[2])
        return {mapped.b_source.tensor: packing}

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        chosen = config.by_name
        mapped, tiles = self.mapped(chosen), self.tiles(chosen)
        roles = self.roles(tiles)
        a, b = mapped.a(tiles.row), mapped.b(tiles.row)
        packings = self.layouts(config)
        args = arguments(self.stage, packings)
        store, stored = mapped.store(args)
        text = source(
            symbol,
            self.stage,
            ("gemm.cuh",),
            (
                *mapped.a_source.lambdas(args, a),
                *mapped.b_source.lambdas(args, b),
                store,
            ),
            self.call(tiles, int(chosen["group"]), stored, roles),
            tiles.threads,
            self.about(mapped, tiles),
            side_by_side=roles.side_by_side if roles else 0,
            shares=tiles.split > 1,
            waits=True,
        )
        return CudaProgram(
            text,
            (tiles.blocks, 1, 1),
            tiles.threads,
            tiles.shared,
            packings,
            tiles.scratch,
            tiles.tiles if tiles.split > 1 else 0,
            lines=product_lines(mapped, tiles, int(chosen["group"])),
        )

    def about(self, mapped: Mapped, tiles: Tiles) -> str:
        """The text of the comment above the kernel."""
        (m, n, k), warps = tiles.block, tiles.warps
        split = f", {tiles.split} blocks share a tile" if tiles.split > 1 else ""
        shared = f", {tiles.parts} of which share a tile" if tiles.parts > 1 else ""
        producer = f" and {PRODUCERS // 32} that bring the slices" if tiles.producer else ""
        return (
            f"{tiles.row.name} on {mapped.name}, blocks of {m}x{n}, slices of {k}, "
            f"{tiles.stages} at once, {warps * tiles.parts} warps{shared}{producer}{split}"
        )

    def call(self, tiles: Tiles, group: int, stored: str, roles: Registers | None) -> str:
        """The statements that follow the lambdas."""
        types = (
            ("Shape", tiles.extents, "batch, m, n, runs of k, steps of one"),
            ("Block", tiles.block, "tile of C, steps of a slice"),
            ("Warps", (*tiles.warp, tiles.parts), "tile of a warp, warps that share it"),
        )
        element, rows_first = CTYPES[self.operand], str(tiles.transposed).lower()
        unit = f"gtco::{UNITS[tiles.row.unit]}"
        lines = [
            f"using {name} = gtco::{name}<{', '.join(map(str, values))}>;  // {what}"
            for name, values, what in types
        ]
        split = f", gtco::Split<{tiles.split}>{{scratch, counters}}" if tiles.split > 1 else ""
        if roles:
            names = f"{roles.producer}, {roles.consumer}"
            what = "registers of a thread: copying, multiplying"
            lines.append(f"using Roles = {PRODUCER_GROUP}<{names}>;  // {what}")
            rows_first += ", Roles"
        plan = f"gtco::Plan<{element}, {unit}, Shape, Block, Warps, {tiles.stages}, {rows_first}>"
        return "\n".join(
            [
                *lines,
                f"static_assert({plan}::SHARED == {tiles.shared});",
                f"gtco::gemm<{element}, {unit}, Shape, Block, Warps, {tiles.stages}, {group}, "
                f"{rows_first}>(block, a, b, {stored}{split});",
            ]
        )
