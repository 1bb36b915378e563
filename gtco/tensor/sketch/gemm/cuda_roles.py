"""Warp roles of a product by warp groups (warp specialisation). The consumers multiply, and one
further warp group, the producer, brings all slices of k. The producer's threads give the registers
that they do not need to the consumers; see ``device/gtco/roles.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gtco.machine.gpu import GpuTarget
from gtco.tensor.sketch.gemm.cuda_tiles import PRODUCERS, Tiles, shared_limit
from gtco.tensor.stage import ITEM_BYTES

ROLES, NONE, PRODUCER = "warp_roles", "none", "producer"  # the decision and its options
LEAST_SLICES = 2  # slices of a block: with one there is nothing to bring ahead
MOST_CONSUMERS = 256  # threads: beside three groups a producer left some kernels too few registers
GRANULE = 8  # registers of a thread are handed over eight at a time
MOST = 240  # registers of a thread that took some: instructions address at most 255
KEPT_SHARED = 1024  # bytes of shared memory that a block costs beside those it asks for
# Registers of a producer's thread, fitted to the fewest with which ptxas spills nothing, 24 to 136
# in 65 kernels. The first is for counters, slots and addresses. The others are for the place of
# each piece of 16 bytes that it copies: of a packed operand, of one in place beside a packed one,
# of either if both are in place, and of one whose rows lie unevenly apart or outside a padded
# image.
OWN = 24
PACKED, IN_PLACE, BOTH_IN_PLACE, UNEVEN = 1.0, 2.0, 4.5, 7.0
# ptxas refuses a product of warp groups in a kernel that begins with fewer registers than this plus
# half a register a column.
BEGIN = 26


@dataclass(frozen=True)
class Registers:
    """The registers of a thread: at the start of the kernel, then of a producer's and of a
    consumer's (zeros if none are handed over). The launch bounds name ``side_by_side`` blocks of a
    multiprocessor, which leave so many registers at the start.
    """

    begin: int
    producer: int = 0
    consumer: int = 0
    side_by_side: int = 0


def role_options(tiles: Tiles, target: GpuTarget) -> tuple[str, ...]:
    """The roles of a kernel whose tiles, with a producer, are ``tiles``. The first option lets
    every warp copy and multiply, because on an H200 roles win only for small tiles.
    """
    few = tiles.slices // tiles.split < LEAST_SLICES or tiles.stages < 2
    if few or tiles.workers > MOST_CONSUMERS:
        return (NONE,)
    return (NONE, PRODUCER) if registers(tiles, target) else (NONE,)


def registers(tiles: Tiles, target: GpuTarget) -> Registers | None:
    """The registers that let most blocks run side by side, up to the number that shared memory has
    room for. None if consumers or the producer had too few.
    """
    shared = tiles.shared + KEPT_SHARED
    room = min(target.shared_sm // shared, target.threads_sm // tiles.threads)
    if tiles.shared > shared_limit(target):
        return None
    for blocks in range(room, 0, -1):
        begin = down(target.registers_sm / (tiles.threads * blocks))
        if begin >= MOST:
            return Registers(max(producing(tiles), tiles.registers))
        if begin < tiles.block[1] // 2 + BEGIN:
            continue
        left = begin * tiles.threads - producing(tiles) * PRODUCERS
        taken = min(down(left / tiles.workers), MOST)
        if taken > begin and taken >= tiles.registers:
            return Registers(begin, producing(tiles), taken, blocks)
    return None


def producing(tiles: Tiles) -> int:
    """Registers of a producer's thread."""
    found = float(OWN)
    for rows, each in zip(tiles.block, tiles.pieces, strict=False):
        size = rows * tiles.block[2] * ITEM_BYTES[tiles.operand]
        found += each * ceil(size / 16 / PRODUCERS)
    return ceil(found / GRANULE) * GRANULE


def piece_registers(packed: Sequence[bool], even: Sequence[bool]) -> tuple[float, ...]:
    """Registers of a piece of A and of B, by the way they are read: packed, or from places that lie
    evenly apart or not.
    """
    in_place = IN_PLACE if any(packed) else BOTH_IN_PLACE
    return tuple(
        PACKED if laid else in_place if apart else UNEVEN
        for laid, apart in zip(packed, even, strict=True)
    )


def down(count: float) -> int:
    return int(count) // GRANULE * GRANULE
