"""How many threads share a row or a column of a reduction, and how many of these a block has."""

from __future__ import annotations

from math import ceil

from gtco.machine.gpu import GpuTarget

WARP = 32
LARGEST = 1024  # threads of a block
ENOUGH = 128  # of them, where there is work for all multiprocessors
HELD = 32  # elements of a row that a thread keeps in registers, at most: more would spill
BESIDE = 28  # registers beside those
SECTOR = 8  # float32s that memory gives at once


def power_of_two(n: int) -> int:
    """The least that is not under ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def teams(length: int, vector: int) -> tuple[int, ...]:
    """Threads that may share a row of ``length`` elements, read ``vector`` at once: enough to keep
    it in registers, and few enough that each has something to do. Fewer than read a sector of
    memory together would ask for each sector several times.
    """
    pieces = length // vector
    most = min(power_of_two(pieces), LARGEST)
    least = min(most, max(1, SECTOR // vector))
    fitting = [1 << n for n in range(11) if least <= 1 << n <= most]
    held = [t for t in fitting if ceil(pieces / t) * vector <= HELD]
    return tuple(held[:5] if held else fitting[-1:])


def side(rows: int, team: int, registers: int, target: GpuTarget) -> tuple[int, ...]:
    """Rows that a block of such teams may have: whole warps, up to 512 threads where one team has
    not more, and no more than there are rows. Small blocks only where larger ones would leave
    multiprocessors without one: each block has its start, and there is room for few.
    """
    most = max(power_of_two(rows), WARP // team)
    room = min(512, target.registers_sm // registers)
    options = [1 << n for n in range(10) if 1 << n <= most]
    fitting = [n for n in options if WARP <= n * team <= room]
    large = [n for n in fitting if n * team >= ENOUGH or ceil(rows / (2 * n)) < target.sms]
    return tuple(large or fitting[-1:]) or (max(1, WARP // team),)


def splits(length: int) -> tuple[int, ...]:
    """Threads that may share the ``length`` positions of a column."""
    return tuple(n for n in (1, 2, 4, 8, 16, 32) if n <= power_of_two(length))


def columns(vectors: int, split: int) -> tuple[int, ...]:
    """Threads side by side that a block may have for rows of so many vectors of columns."""
    most = max(power_of_two(vectors), SECTOR)
    options = (8, 16, 32, 64, 128)
    fitting = tuple(n for n in options if n <= most and WARP <= n * split <= 512)
    return fitting or (ceil(WARP / split),)
