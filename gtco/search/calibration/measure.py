"""Measuring this machine: level 0, memory bandwidths, the barrier between two stages and what
passes it.

Everything runs on all cores at once, as a stage does: what cores share, clocks for wide vectors
too, is shared then as well. Level 0 goes by each thread's own time, which does not run while other
processes have the core; the rest goes by the clock. The best of several rounds counts, since other
tenants of a machine can only slow a round down. A shared machine can be at half its speed for
seconds: a round goes over everything before the next begins.

Measuring takes MOST_SECONDS and MOST_BYTES at most, and no more than a share of the memory that is
left, whatever the number of cores and whatever caches the machine reports. All levels of memory are
read in the same two arrays; what is to come from DRAM is flushed from the caches first, so that the
arrays need not be larger than these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from statistics import median
from typing import Any

import numpy as np

from gtco.codegen.load import load
from gtco.machine.memory import memory_left
from gtco.machine.target import Target
from gtco.search.calibration.barrier import (
    MOST_STEPS,
    barrier_seconds,
    handover_seconds,
    memory_seconds,
)
from gtco.search.calibration.level0 import (
    DEPTH,
    REPEATS,
    STAGE_REPEATS,
    TimedKernel,
    copy_kernel,
    operand_types,
    probes,
    read_kernel,
    symbol,
    tile_kernel,
)
from gtco.search.calibration.timing import Call, aligned, call, of_each, operands, together
from gtco.tensor.intrinsics.table import MicroKernel, every_micro_kernel, micro_kernels

MOST_SECONDS = 5.0  # of it all
# Of it all; and no more than one of so many parts of what is left.
MOST_BYTES, SHARE_LEFT = 256 << 20, 4
ARRAYS = 8  # each of the two arrays is one of so many parts; kernels and threads take the rest
LEAST_BYTES = 1 << 20  # of an array: below that nothing can be told apart
ROUNDS = 8
ROUND_SECONDS = 1e-3  # of a round of level 0; the best of many short ones finds an idle moment
WARM_SECONDS = 0.1  # until a core has raised its clock, or lowered it for wide vectors
# When each part ends, as a share of MOST_SECONDS; what has to be measured once may end later.
LEVEL0_SHARE, BARRIER_SHARE, MEMORY_SHARE, HANDOVER_SHARE = 0.6, 0.65, 0.85, 1.0
MEMORY_BYTES, MEMORY_RUNS = 16 << 20, 4  # of an array that is flushed before each run
HANDOVER_BYTES, HANDOVER_RUNS = 64 << 20, 6  # of a run of steps; runs of a round
TASKS_A_CORE = 8  # of such a step: which core takes one is left to chance, as in a model


class NotMeasured(Exception):
    """Why the machine could not be measured, in words: too little memory or time."""


@dataclass(frozen=True)
class MachineRates:
    """What :func:`gtco.search.calibration.profile.table_of` makes a table of."""

    rates: Mapping[str, float]
    bandwidths: Mapping[str, float]
    launch: float
    handed: Mapping[str, float]


class Clock:
    """The time that measuring may take. ``say`` is told how far it is."""

    def __init__(self, say: Callable[[str], None] = lambda what: None) -> None:
        self.begin, self.say = time.monotonic(), say

    def left(self, share: float) -> float:
        """Seconds until so much of MOST_SECONDS has passed; none or less where it has."""
        return self.begin + share * MOST_SECONDS - time.monotonic()

    def need(self) -> None:
        """Raises :class:`NotMeasured` where all of it has passed."""
        if self.left(1.0) <= 0:
            raise NotMeasured(
                f"its time of {MOST_SECONDS:g} s was over before everything was measured once; "
                "other processes may have held the cores"
            )


def measure(target: Target, say: Callable[[str], None] = lambda what: None) -> MachineRates:
    """Everything in the table, by running it. Raises :class:`NotMeasured` where memory or time do
    not suffice.
    """
    clock, (x, y) = Clock(say), _arrays()
    tiles = every_micro_kernel(target)
    sizes = {m.name: probe_bytes(target, i, x.nbytes) for i, m in enumerate(target.memory[:-1])}
    say("building kernels")
    functions = [tile_kernel(t) for t in tiles] + [
        read_kernel(name, size, target) for name, size in sizes.items()
    ]
    library = load(functions, target)
    operands_of = Operands(tiles, target.cores)
    clock.need()
    together(operands_of.calls(library, tiles[0]), WARM_SECONDS)
    products = {t.kernel: tile_rate(library, t, operands_of) for t in tiles}
    say("kernels")
    first = _round(products, clock)
    small = tuple(probes(target, max(micro_kernels(target), key=lambda t: first[t.kernel])))
    others: dict[str, Callable[[], float]] = {
        **_work_seconds(target, small),
        **{name: _bandwidth(library, name, x[: size // 4]) for name, size in sizes.items()},
    }
    found = {**first, **_round(others, clock)}
    for number in range(1, ROUNDS):
        if clock.left(LEVEL0_SHARE) <= 0:
            break
        say(f"kernels, round {number + 1} of {ROUNDS}")
        more = _round({**products, **others}, clock, LEVEL0_SHARE)
        found = {name: max(rate, more.get(name, 0.0)) for name, rate in found.items()}
    rates = {t.kernel: found[t.kernel] for t in tiles}
    for probe in small:
        rates[probe.work] = rate_of(probe, 1 / found[probe.work], rates)
    bandwidths = {name: found[name] for name in sizes}
    say("the barrier between two stages")
    launch = barrier_seconds(target.cores, most=max(clock.left(BARRIER_SHARE), 0.0))
    say("memory")
    bandwidths["DRAM"], copied = _memory(target.cores, x, y, clock)
    handed = _handed(target, sizes, launch, x, y, clock)
    if handed:
        handed["DRAM"] = copied
    clock.need()
    return MachineRates(rates, bandwidths, launch, handed)


def _arrays() -> list[np.ndarray]:
    """The two arrays that all levels of memory are read in. They are written, since memory that
    never was is one page of zeros.
    """
    left = memory_left()
    most = MOST_BYTES if left is None else min(MOST_BYTES, left // SHARE_LEFT)
    size = most // ARRAYS // 4096 * 4096
    if size < LEAST_BYTES:
        raise NotMeasured(
            f"it takes {ARRAYS * LEAST_BYTES >> 20} MB, and may take one in {SHARE_LEFT} of the "
            f"{(left or 0) / 1e6:.0f} MB that are left to this process"
        )
    return operands(2, size // 4)


def _round(
    measured: Mapping[str, Callable[[], float]], clock: Clock, share: float = 1.0
) -> dict[str, float]:
    """What each of these gives once; some of them where the ``share`` of the time is over. Where it
    is all of the time, raises :class:`NotMeasured`.
    """
    found: dict[str, float] = {}
    for name, measure in measured.items():
        if share == 1.0:
            clock.need()
        elif clock.left(share) <= 0:
            break
        found[name] = measure()
    return found


# level 0 ------------------------------------------------------------------------------------------
class Operands:
    """What the micro-kernels read and write: for each thread memory of its own, the same for all of
    them.
    """

    def __init__(self, tiles: Sequence[MicroKernel], threads: int) -> None:
        sizes = [[-(-t.nbytes // 4) for t in operand_types(tile)] for tile in tiles]
        largest = [max(each) for each in zip(*sizes, strict=True)]
        self.of_thread = [[aligned(size) for size in largest] for _ in range(threads)]

    def calls(self, library: Any, tile: MicroKernel) -> list[Call]:
        """A call of the micro-kernel for each thread."""
        return [call(getattr(library, symbol(tile)), *buffers) for buffers in self.of_thread]


def tile_calls(library: Any, tile: MicroKernel, threads: int) -> list[Call]:
    """Calls of a micro-kernel, each on operands of its own."""
    return Operands([tile], threads).calls(library, tile)


def tile_rate(library: Any, tile: MicroKernel, operands_of: Operands) -> Callable[[], float]:
    """Vector operations a second of one core while all run the micro-kernel, in one round."""
    calls = operands_of.calls(library, tile)
    work = tile.work(tile.rows, DEPTH) * REPEATS
    return lambda: work * of_each(calls, ROUND_SECONDS)


def _work_seconds(target: Target, small: Sequence[TimedKernel]) -> dict[str, Callable[[], float]]:
    """How often a second one core of all does each of the small stages, in one round."""
    found: dict[str, Callable[[], float]] = {}
    library = load([probe.function for probe in small], target)
    for probe in small:
        function = getattr(library, f"probe_{probe.work}")
        calls = []
        for _ in range(target.cores):
            buffers = [aligned(-(-t.nbytes // 4)) for t in probe.types]
            workspace = aligned(-(-probe.workspace // 4)) if probe.workspace else None
            calls.append(call(function, *buffers, workspace=workspace))
        found[probe.work] = partial(_times, calls)
    return found


def _times(calls: Sequence[Call]) -> float:
    return STAGE_REPEATS * of_each(calls, ROUND_SECONDS)


def rate_of(probe: TimedKernel, seconds: float, rates: Mapping[str, float]) -> float:
    """The rate of a probe's own work: its units over the time that other work in it does not
    explain. That is half of the time at least, since what stands side by side also overlaps.
    """
    others = sum(n / rates[name] for name, n in probe.units.items() if name != probe.work)
    return probe.units[probe.work] / max(seconds - others, seconds / 2)


# memory -------------------------------------------------------------------------------------------
def probe_bytes(target: Target, level: int, most: int) -> int:
    """Bytes that are read again and again from this cache: more than the caches below it hold, no
    more than ``most``.
    """
    capacity = target.memory[level].capacity
    lower = target.memory[level - 1].capacity if level else 0
    # what overflows a core's own caches is mostly little beside what all share, and other tenants
    # may hold the rest of that
    middle = isqrt(lower * capacity) if target.memory[level].shared else (lower + capacity) // 2
    return max(min(middle, most) // 4096, 1) * 4096


def _bandwidth(library: Any, name: str, x: np.ndarray) -> Callable[[], float]:
    """Bytes a second that one thread reads of this array again and again, in one round."""
    repeats = max(1, (32 << 20) // x.nbytes)
    calls = [call(getattr(library, f"read_{name}"), x, aligned(1024), tasks=repeats)]
    return lambda: x.nbytes * repeats * of_each(calls, ROUND_SECONDS)


def _memory(threads: int, x: np.ndarray, y: np.ndarray, clock: Clock) -> tuple[float, float]:
    """Bytes a second of DRAM that all cores together read, and that they read and write."""
    x, y = x[: MEMORY_BYTES // 4], y[: MEMORY_BYTES // 4]
    tasks = threads * TASKS_A_CORE

    def seconds(to: np.ndarray | None, share: float) -> float:
        return memory_seconds(threads, tasks, x, to, MEMORY_RUNS, max(clock.left(share), 0.0))

    middle = (BARRIER_SHARE + MEMORY_SHARE) / 2
    read, copied = seconds(None, middle), seconds(y, MEMORY_SHARE)
    # what was written is still in the caches at the end: the way back is as long as that of a read
    return x.nbytes / read, 2 * x.nbytes / (copied + read)


def handed_levels(target: Target) -> set[str]:
    """Levels whose ``handed`` is measured: none where there is one core, and not L1, which is too
    small to tell it from the barrier.
    """
    return {m.name for m in target.memory[1:]} if target.cores > 1 else set()


def _handed(
    target: Target,
    sizes: Mapping[str, int],
    launch: float,
    x: np.ndarray,
    y: np.ndarray,
    clock: Clock,
) -> dict[str, float]:
    """Bytes a second of each cache that a core reads and writes in a stage between others: what it
    reads and what it overwrites was last in the hands of whichever core.
    """
    if target.cores == 1:
        return {}
    cores, tasks = target.cores, target.cores * TASKS_A_CORE
    parts = {}  # bytes that a step reads, and writes as many
    for level in target.memory[1:-1]:
        wanted = sizes[level.name] * (1 if level.shared else cores) // 2
        parts[level.name] = max(min(wanted, x.nbytes) // (4096 * tasks), 1) * 4096 * tasks
    if max(parts.values(), default=0) > x.nbytes:
        raise NotMeasured(f"its memory is too small for steps of {cores} cores")
    library = load([copy_kernel(name, n, tasks, target) for name, n in parts.items()], target)

    def rate(name: str, most: float) -> float:
        nbytes, function = parts[name], getattr(library, f"copy_{name}")
        steps = min(MOST_STEPS, 2 * max(1, HANDOVER_BYTES // (4 * nbytes)))
        given = x[: nbytes // 4], y[: nbytes // 4]
        seconds = handover_seconds(cores, function, tasks, *given, HANDOVER_RUNS, steps, most)
        return 2 * nbytes / cores / max(seconds - launch, seconds / 2)

    found: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(ROUNDS):
        for name in parts:
            if number and clock.left(HANDOVER_SHARE) <= 0:
                break
            clock.need()
            found[name].append(rate(name, max(clock.left(HANDOVER_SHARE) / len(parts), 0.0)))
    # not the best: threads that happen to take the same tasks again hand nothing over
    return {name: median(each) for name, each in found.items()}
