"""Tiles of a product on a GPU: three levels (block, warp, instruction), and the resources of a
block. It mirrors ``Plan`` of ``device/gtco/gemm.cuh``; each kernel asserts that both agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from gtco.machine.gpu import GPUS, MOST_BLOCK_THREADS, MOST_REGISTERS, WARP, GpuTarget
from gtco.tensor.cuda.tensor_core import TensorCoreRow, oldest
from gtco.tensor.stage import ITEM_BYTES

# Registers of a thread beside sums and fragments, fitted to what ptxas takes for 143 random
# configs:
OVERHEAD = 20  # places, counters and addresses
# registers for each piece of 16 bytes of a slice of A and of B that it copies; its place is
# computed once
PIECES = (3.0, 1.2)
# registers for each sum, if blocks share a tile: on its way to the other sums and back
SHARED_SUM = 0.25
EXTENTS = (16, 32, 64, 128, 256)  # extents of a block's tile
LARGEST = 128 * 256
DEPTHS = (16, 32, 64, 128)  # depths of a slice of k
SLICE = (4 << 10, 32 << 10)  # bytes of a slice: less is mostly barriers, more delays the start
WARP_EXTENTS = (16, 32, 64)  # extents of a warp's tile
ENOUGH: tuple[int, ...] = (4, 8)  # warps of a block
PARTS = (1, 2, 4)  # warps that share a warp's tile, each with its part of k
SPLITS = (1, 2, 3, 4, 6, 8)  # blocks that share a tile, each with a part of k
LEAST_SLICES = 3  # slices of such a part: with fewer, a block does little but fill its stages
CROWD = 2  # tiles are split up to so many blocks a multiprocessor
L2_SHARE = 0.25  # the share that split sums may take: they are read back from L2
# Multiply-adds for each element that a block loads (DyGen, eq. 5): at least this. If a tile of
# TYPICAL leaves no multiprocessor idle, at least half of that tile's.
LEAST_INTENSITY, TYPICAL = 10.0, (64, 64)
STAGES = (8, 6, 4, 3, 2)  # slices in shared memory at once
# Warp groups: rows of one, rows of a block, steps of a slice (a swizzled row of 128 bytes), and
# bytes that align swizzled tiles.
GROUP_ROWS, GROUP_BLOCKS, GROUP_DEPTH, ALIGNED = 64, (64, 128, 192, 256), 64, 1024 - 128
# The producer (cuda_roles.py): its threads, and bytes of a slot's barriers.
PRODUCERS, SLOT_BARRIERS = 128, 2 * 8


@dataclass(frozen=True)
class Tiles:
    """The sizes of one kernel: ``row`` multiplies elements of ``operand``.

    - ``block``: the tile (B_m, B_n, B_k) of a block;
    - ``warp``: the tile (W_m, W_n) of a warp;
    - ``parts``: warps that share a warp's tile; W_k is B_k / parts;
    - ``stages``: slices in shared memory;
    - ``split``: blocks that share a tile, each with a part of k's slices;
    - ``transposed``: True if sums are stored along columns;
    - ``producer``: True if a warp group that multiplies nothing brings the slices;
    - ``pieces``: registers in which a producer keeps the place of a piece of A, and of B.
    """

    row: TensorCoreRow
    operand: str
    extents: tuple[int, int, int, int, int]  # batch, m, n, outer, depth
    block: tuple[int, int, int]
    warp: tuple[int, int]
    parts: int
    stages: int
    transposed: bool = False
    held: float = 0.0  # registers of the block in which one step of k of the next slice waits
    placed: float = 0.0  # further ones, which the compiler can do without
    split: int = 1
    copied: tuple[bool, bool] = (True, True)  # True if A and B are copied, False if computed
    pieces: tuple[float, ...] = ()
    producer: bool = False

    @property
    def warps(self) -> int:
        """Warps that have a tile of their own."""
        return self.block[0] // self.warp[0] * (self.block[1] // self.warp[1])

    @cached_property
    def workers(self) -> int:
        """Threads that multiply."""
        return self.warps * self.parts * WARP

    @cached_property
    def threads(self) -> int:
        return self.workers + (PRODUCERS if self.producer else 0)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The numbers of tiles along m and n."""
        return ceil(self.extents[1] / self.block[0]), ceil(self.extents[2] / self.block[1])

    @cached_property
    def tiles(self) -> int:
        down, across = self.counts
        return self.extents[0] * down * across

    @property
    def blocks(self) -> int:
        return self.tiles * self.split

    @property
    def ahead(self) -> int:
        """Slices under way while one is multiplied. A warp group's products still read the slice
        before; if a producer brings the slices, it waits for that itself.
        """
        kept = 2 if self.row.unit == "wgmma" and not self.producer else 1
        return max(1, self.stages - kept)

    @property
    def scratch(self) -> int:
        """Bytes of global memory in which the sums of split tiles meet."""
        return self.scratch_with(self.split)

    def scratch_with(self, split: int) -> int:
        """The ``scratch`` with ``split`` blocks a tile."""
        return self.tiles * split * self.block[0] * self.block[1] * 4 if split > 1 else 0

    @cached_property
    def slices(self) -> int:
        """Slices of k, over all its runs and all blocks that share a tile."""
        return self.extents[3] * ceil(self.extents[4] / self.block[2])

    @property
    def stage(self) -> int:
        """Bytes of one slice of both operands."""
        m, n, k = self.block
        return (m + n) * k * ITEM_BYTES[self.operand]

    @property
    def shared(self) -> int:
        """Bytes of a block's shared memory: DyGen, eq. 3, and the room through which sums pass at
        the end.
        """
        return self.shared_with(self.stages)

    def shared_with(self, stages: int) -> int:
        """The ``shared`` bytes with ``stages`` slices at once."""
        (m, n, _), (wm, wn) = self.block, self.warp
        slab = 32 if self.transposed and wm % 32 == 0 else 16
        if self.transposed:
            size = wn * (slab + 4)
        else:
            size = slab * (wn if wn % 16 == 8 else wn + 8)
        parts = m * n * 4 if self.parts > 1 else 0
        aligned = ALIGNED if self.row.unit == "wgmma" else 0
        barriers = SLOT_BARRIERS * stages if self.producer else 0
        return aligned + max(stages * self.stage, self.warps * size * 4, parts) + barriers

    @property
    def registers(self) -> int:
        """An estimate of the registers of a thread that multiplies (DyGen, eq. 4): sums, fragments
        held twice, its share of the next slice (if there is one and it comes through registers),
        and the rest.
        """
        return min(self._settled + self._waiting + self._of_slice(self.placed), MOST_REGISTERS)

    @property
    def crowded(self) -> bool:
        """True if a thread would spill. The compiler can do without some of the registers, but not
        without those of waiting elements.
        """
        return min(self._settled, MOST_REGISTERS) + self._waiting > MOST_REGISTERS

    @cached_property
    def _settled(self) -> int:
        wm, wn = self.warp
        if self.row.unit == "wgmma":
            # descriptors, and places of copies under way; beside 128 sums ptxas computes them again
            held = 28 if wn < 256 else 0
        elif self.row.unit == "mma":
            held = 2 * (wm // 16 * 4 + wn // 8 * 2)
        else:  # also a fragment of the next step, or addresses
            held = 16 // ITEM_BYTES[self.operand] * (wm // 4 + wn // 8) + 32
        sums = wm * wn // WARP
        beside = OVERHEAD + (SHARED_SUM * sums if self.split > 1 else 0)
        for rows, each, copied in zip(self.block, PIECES, self.copied, strict=False):
            size = rows * self.block[2] * ITEM_BYTES[self.operand]
            beside += each * ceil(size / 16 / self.threads) * (copied and not self.producer)
        return sums + held + ceil(beside)

    @property
    def _waiting(self) -> int:
        return self._of_slice(self.held)

    def _of_slice(self, of_step: float) -> int:
        """A thread's registers for the next slice, if there is one, from the block's registers for
        one step.
        """
        return 0 if self.slices == 1 else ceil(of_step * self.block[2] / self.threads)

    def fits(self, target: GpuTarget) -> bool:
        """True if a block's threads and registers fit (DyGen, eq. 2 and 4)."""
        registers = self.registers
        return (
            self.threads <= MOST_BLOCK_THREADS
            and registers <= MOST_REGISTERS
            and registers * self.threads <= target.registers_sm
        )


@lru_cache
def shared_limit(target: GpuTarget) -> int:
    """Bytes of shared memory that a block may have, on the target and on every architecture for
    which an image is built.
    """
    images = (gpu.shared for gpu in GPUS.values() if gpu.arch in target.images)
    return min((target.shared, *images))


def _upto(size: int, options: tuple[int, ...]) -> tuple[int, ...]:
    """The options below ``size``, and the first that covers it."""
    covering = next((o for o in options if o >= size), options[-1])
    return tuple(o for o in options if o <= covering)


def block_options(
    target: GpuTarget, operand: str, extents: tuple[int, int, int, int, int], row: TensorCoreRow
) -> Iterator[tuple[int, int, int]]:
    """(B_m, B_n, B_k). No block is much larger than the product or has too little intensity for it,
    and slices are neither tiny nor huge.
    """
    batch, m, n, _, depth = extents
    if row.unit == "wgmma":
        for bm in _upto(m, GROUP_BLOCKS):
            yield bm, row.extents[1], GROUP_DEPTH
        return
    ms, ns = _upto(m, EXTENTS), _upto(n, EXTENTS)
    ks = _upto(depth, DEPTHS)[-3:]
    whole = batch * ceil(m / TYPICAL[0]) * ceil(n / TYPICAL[1])
    least = 2 * LEAST_INTENSITY if whole >= target.sms else LEAST_INTENSITY
    least = min(least, intensity(ms[-1], ns[-1]))
    for bm in ms:
        for bn in ns:
            if bm * bn > LARGEST or intensity(bm, bn) < least:
                continue
            sizes = {k: (bm + bn) * k * ITEM_BYTES[operand] for k in ks}
            fitting = [k for k in ks if SLICE[0] <= sizes[k] <= SLICE[1]]
            for bk in fitting[-2:] or ks[-1:]:
                yield bm, bn, bk


def intensity(m: int, n: int) -> float:
    return m * n / (m + n)


@lru_cache(maxsize=1024)
def warp_options(
    block: tuple[int, int, int], unit: str, least: tuple[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """(W_m, W_n, parts). Four or eight warps keep a multiprocessor's four partitions busy; there
    are fewer if the block's tile and slice are too small for four. For each number of parts the
    squarest tile is taken, because it reads least from shared memory. Tiles are multiples of
    ``least``.
    """
    bm, bn, bk = block
    if unit == "wgmma":  # four for each group, each with 16 of its 64 rows
        return ((GROUP_ROWS // 4, bn, 1),)
    step = 16 if unit == "mma" else 8
    found: dict[int, dict[int, tuple[int, int, int]]] = {}  # shapes, by warps and by parts
    shapes = [(wm, wn) for wm in WARP_EXTENTS for wn in WARP_EXTENTS if wm * wn <= 64 * 64]
    for wm, wn in sorted(shapes, key=lambda w: (abs(w[0] - w[1]), -w[1])):
        if bm % wm or bn % wn or wm % least[0] or wn % least[1]:
            continue
        for parts in PARTS:
            if bk % (parts * step) == 0:
                warps = bm // wm * (bn // wn) * parts
                found.setdefault(warps, {}).setdefault(parts, (wm, wn, parts))
    fewer = max((count for count in found if count < ENOUGH[0]), default=0)
    counts = [count for count in ENOUGH if count in found] or [fewer]
    return tuple(each for warps in counts for each in list(found.get(warps, {}).values())[:2])


def stage_options(tiles: Tiles, target: GpuTarget) -> tuple[int, ...]:
    """The numbers of slices in shared memory at once, up to those that k has and that fit there
    (DyGen, eq. 3). Asynchronous copies begin with sm_80. Before that, the next slice waits in
    registers while the current one is multiplied.
    """
    least = 3 if tiles.row.unit == "wgmma" else 2  # the slice that is read keeps its slot
    most = max(tiles.slices, least) if oldest(target) >= 80 else 2
    room = shared_limit(target)
    return tuple([s for s in STAGES if least <= s <= most and tiles.shared_with(s) <= room][:3])


def split_options(tiles: Tiles, target: GpuTarget) -> tuple[int, ...]:
    """The numbers of blocks that share a tile, fewest first. There are more than one if one block a
    tile would leave multiprocessors idle.
    """
    if tiles.tiles >= target.sms:
        return (1,)
    fitting = (
        split
        for split in SPLITS
        if split > 1
        and tiles.tiles * split <= CROWD * target.sms
        and tiles.slices >= LEAST_SLICES * split
        and tiles.scratch_with(split) <= L2_SHARE * target.l2
    )
    return (1, *fitting)
