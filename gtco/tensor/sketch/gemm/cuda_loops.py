"""The loops of a product on a GPU (``device/gtco/gemm.cuh``) as lines to read."""

from __future__ import annotations

from math import ceil

from gtco.tensor.cuda.loops import Loops, before, written
from gtco.tensor.loops import BLOCKS, REGISTERS, WARPS, Line
from gtco.tensor.sketch.gemm.cuda_mapping import Mapped
from gtco.tensor.sketch.gemm.cuda_operands import Reading, Source
from gtco.tensor.sketch.gemm.cuda_tiles import Tiles

# Steps of k that a warp multiplies at once: STEP of mma.cuh
STEPS = {"mma": 16, "wgmma": 16, "fma": 8}


def product_lines(mapped: Mapped, tiles: Tiles, group: int) -> tuple[Line, ...]:
    """The loops of C = A x B. ``group``: the rows of tiles that are walked together."""
    batch, m, n, outer, depth = tiles.extents
    (bm, bn, bk), (wm, wn) = tiles.block, tiles.warp
    (down, across), step, row = tiles.counts, STEPS[tiles.row.unit], tiles.row
    loops = Loops()
    cut = f"{bm} x {bn} of C[{m}, {n}] each" + (f", {batch} products" if batch > 1 else "")
    if 1 < group < down:
        cut += f"; {group} rows of tiles are walked together"
    along_k = f"k is {outer} times {depth}" if outer > 1 else f"k is {depth}"
    slices = f"{along_k}; {tiles.stages} slices in shared memory, {tiles.ahead} copied ahead"
    with loops.over("tile", batch * down * across, BLOCKS, cut):
        with loops.over("part", tiles.split, BLOCKS, "of k's slices"):
            each = ceil(tiles.slices / tiles.split)
            with loops.over("slice", each, step=bk, text=slices):
                own = "by warps that do nothing else" if tiles.producer else "by all threads"
                loops.says(
                    f"A[{bm}, {bk}], B[{bk}, {bn}] {tiles.operand} -> shared memory, {own}: "
                    f"A {_way(mapped.a_source, mapped.a(row))}, "
                    f"B {_way(mapped.b_source, mapped.b(row))}"
                )
                shares = f"{wm} x {wn} of the tile each"
                if tiles.parts > 1:
                    shares += f"; {tiles.parts} share it, each with a part of the slice"
                with loops.over("warp", tiles.workers // 32, WARPS, shares):
                    steps = bk // tiles.parts // step
                    with loops.over("k", steps, REGISTERS, "C in registers", step):
                        what = f"A[{wm}, {step}] x B[{step}, {wn}]"
                        loops.says(f"C += {what}: {row.name}")
            if tiles.parts > 1:
                loops.says(f"C of the {tiles.parts} warps is added up in shared memory")
            if tiles.split > 1:
                loops.says("C -> global memory; the block that comes last adds up all parts")
        order = "by columns" if tiles.transposed else "by rows"
        end = written(mapped.stage, mapped.product.view.op.output, "C")
        loops.says(f"C -> shared memory; {order}: {end}")
    return loops.lines


def _way(source: Source, reading: Reading) -> str:
    """How an operand comes to shared memory."""
    match reading.way:
        case "packed":
            return "packed when it was compiled"
        case "in_place":
            return "in pieces of 16 bytes"
    made = before(source.stage, source.tensor)
    at_once = f"{reading.run} at once" if reading.run > 1 else "one by one"
    return f"computed ({made}), {at_once}" if made else f"read {at_once}"
