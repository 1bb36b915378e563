"""The number of threads that share a row or a column of a reduction, and the number of such teams
in a block.
"""

from __future__ import annotations

from math import ceil

from gtco.machine.gpu import MOST_BLOCK_THREADS, WARP, GpuTarget

ENOUGH = 128  # threads of a block that are enough if all multiprocessors have work
HELD = 32  # most elements of a row that a thread keeps in registers: more would spill
BESIDE = 28  # further registers
SECTOR = 8  # float32s that memory delivers at once


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def teams(length: int, vector: int) -> tuple[int, ...]:
    """The numbers of threads that may share a row of ``length`` elements, read ``vector`` at once.
    There are enough to keep the row in registers, and so few that each has work. A team that
    together reads less than a sector of memory would ask for each sector several times.
    """
    pieces = length // vector
    most = min(power_of_two(pieces), MOST_BLOCK_THREADS)
    least = min(most, max(1, SECTOR // vector))
    fitting = [1 << n for n in range(11) if least <= 1 << n <= most]
    held = [t for t in fitting if ceil(pieces / t) * vector <= HELD]
    return tuple(held[:5] if held else fitting[-1:])


def side(rows: int, team: int, registers: int, target: GpuTarget) -> tuple[int, ...]:
    """The numbers of rows that a block of such teams may have: whole warps, up to 512 threads if
    one team has no more, and at most the rows that there are. Small blocks are options only if
    larger ones would leave multiprocessors idle, because each block has a start-up cost and a
    multiprocessor has room for few blocks.
    """
    most = max(power_of_two(rows), WARP // team)
    room = min(512, target.registers_sm // registers)
    options = [1 << n for n in range(10) if 1 << n <= most]
    fitting = [n for n in options if WARP <= n * team <= room]
    large = [n for n in fitting if n * team >= ENOUGH or ceil(rows / (2 * n)) < target.sms]
    return tuple(large or fitting[-1:]) or (max(1, WARP // team),)


def splits(length: int) -> tuple[int, ...]:
    """The numbers of threads that may share the ``length`` positions of a column."""
    return tuple(n for n in (1, 2, 4, 8, 16, 32) if n <= power_of_two(length))


def columns(vectors: int, split: int) -> tuple[int, ...]:
    """The numbers of threads side by side that a block may have, for rows of ``vectors`` vectors of
    columns.
    """
    most = max(power_of_two(vectors), SECTOR)
    options = (8, 16, 32, 64, 128)
    fitting = tuple(n for n in options if n <= most and WARP <= n * split <= 512)
    return fitting or (ceil(WARP / split),)
