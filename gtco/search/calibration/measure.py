"""Measures this machine: level 0, memory bandwidths, the barrier between two stages, and the data
that is handed over at it.

Everything runs on all cores at once, as a stage does, so the cores share what they share then, also
the lower clocks of wide vectors. Level 0 counts each thread's own time, which does not run while
other processes have the core. The rest counts the time of the clock. The best of several rounds
counts, because other tenants of a machine can only slow a round down. A shared machine can be at
half its speed for seconds, so each round measures everything before the next round begins.

Measuring takes at most MOST_SECONDS and MOST_BYTES, and at most a share of the memory that is left.
This holds for any number of cores and any cache sizes that the machine reports. All levels of
memory are read in the same two arrays. The caches are flushed before a measurement of DRAM, so the
arrays need not be larger than the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from statistics import median
from typing import Any

import numpy as np

from gtco.codegen.load import load
from gtco.machine.cores import cpu_quota
from gtco.machine.load import Others
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
from gtco.search.calibration.rates import default_rate
from gtco.search.calibration.timing import Call, aligned, call, of_each, operands, together
from gtco.tensor.intrinsics.table import (
    KINDS,
    WEIGHTS,
    MicroKernel,
    in_registers,
    kinds,
    micro_kernels,
    tallest,
    timed_micro_kernels,
)
from gtco.tensor.stage import INT4

MOST_SECONDS = 5.0  # seconds of the whole measurement, on a core of its own
LEAST_QUOTA = 0.25  # share of a core: with less, measuring takes no longer than with this
# Bytes of all arrays together. They also take at most 1 / SHARE_LEFT of the memory that is left.
MOST_BYTES, SHARE_LEFT = 256 << 20, 4
ARRAYS = 8  # each of the two arrays takes 1 / ARRAYS; kernels and threads take the rest
LEAST_BYTES = 1 << 20  # bytes of an array: smaller ones show no differences
ROUNDS = 8
ROUND_SECONDS = 1e-3  # a round of level 0; the best of many short ones finds an idle moment
WARM_SECONDS = 0.1  # until a core has raised its clock, or lowered it for wide vectors
# When each part ends, as a share of MOST_SECONDS. The first round may end later.
LEVEL0_SHARE, MEMORY_SHARE, HANDOVER_SHARE = 0.6, 0.85, 1.0
LATEST_SHARE = 1.5  # when the first round has ended, or the machine is not measured
# Runs of the barrier in a round. Another process on one of the cores makes a barrier ten times as
# long, so the best of several moments counts here too.
BARRIER, BARRIER_RUNS = "barrier", 40
LEAST_BARRIER = 1e-8  # seconds; threads that arrive at once seem to take none
MEMORY_BYTES, MEMORY_RUNS = 16 << 20, 4  # bytes of an array that is flushed before each run
HANDOVER_BYTES, HANDOVER_RUNS = 64 << 20, 6  # bytes of a run of steps; runs of a round
TASKS_A_CORE = 8  # tasks of a step for each core: any core may take one, as in a model


class NotMeasured(Exception):
    """The machine could not be measured. The message says why: too little memory or time."""


@dataclass(frozen=True)
class MachineRates:
    """The measured values from which :func:`gtco.search.calibration.profile.table_of` makes a
    table. ``others`` is the share of the CPUs that other processes had meanwhile, and ``times``
    counts how often the machine was measured for it.
    """

    rates: Mapping[str, float]
    bandwidths: Mapping[str, float]
    launch: float
    handed: Mapping[str, float]
    kept: Mapping[str, float]
    others: float = 0.0
    times: int = 1


class Clock:
    """The time that measuring may take. ``say`` receives the progress."""

    def __init__(self, say: Callable[[str], None] = lambda what: None) -> None:
        self.begin, self.say = time.monotonic(), say
        # A container with a part of a core stands still for the rest of each period.
        self.seconds = MOST_SECONDS / min(max(cpu_quota() or 1.0, LEAST_QUOTA), 1.0)

    def left(self, share: float) -> float:
        """Seconds until this share of the time has passed; zero or less if it has."""
        return self.begin + share * self.seconds - time.monotonic()

    def need(self) -> None:
        """Raises :class:`NotMeasured` if it is too late for a first round."""
        if self.left(LATEST_SHARE) <= 0:
            latest = self.seconds * LATEST_SHARE
            raise NotMeasured(
                f"its time of {latest:g} s passed before everything was measured once; "
                "other processes may have held the cores"
            )


def measure(target: Target, say: Callable[[str], None] = lambda what: None) -> MachineRates:
    """Measures everything in the table. Raises :class:`NotMeasured` if there is too little memory
    or time.
    """
    clock, (x, y) = Clock(say), _arrays()
    tiles = timed_micro_kernels(target)
    sizes = {m.name: probe_bytes(target, i, x.nbytes) for i, m in enumerate(target.memory[:-1])}
    say("building kernels")
    functions = [tile_kernel(t) for t in tiles] + [
        read_kernel(name, size, target) for name, size in sizes.items()
    ]
    library = load(functions, target)
    operands_of = Operands(tiles, target.cores)
    clock.need()
    busy = Others()
    together(operands_of.calls(library, tiles[0]), WARM_SECONDS)
    products = {t.kernel: tile_rate(library, t, operands_of) for t in tiles}
    say("kernels")
    first = _round(products, clock)
    small = tuple(probes(target, max(micro_kernels(target), key=lambda t: first[t.kernel])))
    others: dict[str, Callable[[], float]] = {
        **_work_seconds(target, small),
        **{name: _bandwidth(library, name, x[: size // 4]) for name, size in sizes.items()},
        BARRIER: partial(_barriers, target.cores),
    }
    found = {**first, **_round(others, clock)}
    for number in range(1, ROUNDS):
        if clock.left(LEVEL0_SHARE) <= 0:
            break
        say(f"kernels, round {number + 1} of {ROUNDS}")
        more = _round({**products, **others}, clock, LEVEL0_SHARE)
        found = {name: max(rate, more.get(name, 0.0)) for name, rate in found.items()}
    rates = {t.kernel: found[t.kernel] for t in tiles}
    rates |= derived(target, rates)
    for probe in small:
        rates[probe.work] = rate_of(probe, 1 / found[probe.work], rates)
    bandwidths = {name: found[name] for name in sizes}
    launch = 1 / found[BARRIER]
    say("memory")
    bandwidths["DRAM"], copied = _memory(target.cores, x, y, clock)
    handed, kept = _between_stages(target, sizes, launch, x, y, clock)
    if handed:
        handed["DRAM"] = kept["DRAM"] = copied
    return MachineRates(rates, bandwidths, launch, handed, kept, busy.share())


def derived(target: Target, rates: Mapping[str, float]) -> dict[str, float]:
    """The rates of the rows that are not timed. That of a row for bytes is the one of the fma row
    of the same size, times the ratio of the two rates of the timed row with as many vectors. That
    of a row for int8 weights is the one of the row for float16, which widens by as many
    instructions. That of a row for int4 weights differs from it as their formulas do.
    """
    rows = in_registers(micro_kernels(target, "int8"))
    half = next(iter(kinds(target, "float16")), KINDS["fma"])  # a hypervisor may hide F16C

    def rate(tile: MicroKernel) -> float:
        # NEON's fma rows hold elements of A in registers, so there are none of the tallest sizes
        same = replace(tile, kind=KINDS["fma"]).kernel
        return rates[same] if same in rates else rates[replace(tile, kind=half).kernel]

    ratios = {n: rates[tile.kernel] / rate(tile) for n, tile in tallest(rows).items()}
    found = {tile.kernel: ratios[tile.vectors] * rate(tile) for tile in rows}
    for tile in (*micro_kernels(target, WEIGHTS), *micro_kernels(target, INT4)):
        same = replace(tile, kind=half).kernel
        slower = 1.0
        if tile.kind.operand == INT4:
            slower = default_rate(target, tile.kernel) / default_rate(target, same)
        found[tile.kernel] = rates[same] * slower
    return found


def _arrays() -> list[np.ndarray]:
    """The two arrays in which all levels of memory are read. They are written first, because memory
    that was never written is one page of zeros.
    """
    left = memory_left()
    most = MOST_BYTES if left is None else min(MOST_BYTES, left // SHARE_LEFT)
    size = most // ARRAYS // 4096 * 4096
    if size < LEAST_BYTES:
        raise NotMeasured(
            f"it takes {ARRAYS * LEAST_BYTES >> 20} MB, and may use only 1/{SHARE_LEFT} of the "
            f"{(left or 0) / 1e6:.0f} MB that are left to this process"
        )
    return operands(2, size // 4)


def _round(
    measured: Mapping[str, Callable[[], float]], clock: Clock, share: float = 1.0
) -> dict[str, float]:
    """Runs each of these once. It stops when the ``share`` of the time is over, and then gives only
    some results. If the share is all of the time, it raises :class:`NotMeasured` instead.
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
    """The operands of the micro-kernels. Each thread has memory of its own, which all micro-kernels
    use.
    """

    def __init__(self, tiles: Sequence[MicroKernel], threads: int) -> None:
        sizes = [[-(-t.nbytes // 4) for t in operand_types(tile)] for tile in tiles]
        largest = [max(each) for each in zip(*sizes, strict=True)]
        self.of_thread = [[aligned(size) for size in largest] for _ in range(threads)]

    def calls(self, library: Any, tile: MicroKernel) -> list[Call]:
        """A call of the micro-kernel for each thread."""
        return [call(getattr(library, symbol(tile)), *buffers) for buffers in self.of_thread]


def tile_calls(library: Any, tile: MicroKernel, threads: int) -> list[Call]:
    """Calls of a micro-kernel for ``threads`` threads, each on its own operands."""
    return Operands([tile], threads).calls(library, tile)


def tile_rate(library: Any, tile: MicroKernel, operands_of: Operands) -> Callable[[], float]:
    """Vector operations per second of a core while all cores run the micro-kernel, in one round."""
    calls = operands_of.calls(library, tile)
    work = tile.work(tile.rows, DEPTH) * REPEATS
    return lambda: work * of_each(calls, ROUND_SECONDS)


def _work_seconds(target: Target, small: Sequence[TimedKernel]) -> dict[str, Callable[[], float]]:
    """For each small stage, how often per second one core runs it while all do, in one round."""
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


def _barriers(threads: int) -> float:
    """Barriers per second in one round."""
    return 1 / max(barrier_seconds(threads, BARRIER_RUNS), LEAST_BARRIER)


def rate_of(probe: TimedKernel, seconds: float, rates: Mapping[str, float]) -> float:
    """The rate of a probe's own work: its units over the time that the other work in it does not
    explain. This time is at least half of the total, because neighbouring work also overlaps.
    """
    others = sum(n / rates[name] for name, n in probe.units.items() if name != probe.work)
    return probe.units[probe.work] / max(seconds - others, seconds / 2)


# memory -------------------------------------------------------------------------------------------
def probe_bytes(target: Target, level: int, most: int) -> int:
    """The number of bytes that are read again and again to measure this cache: more than the caches
    below it hold, and at most ``most``.
    """
    capacity = target.memory[level].capacity
    lower = target.memory[level - 1].capacity if level else 0
    # A core's own caches are mostly much smaller than the shared cache, and other tenants may hold
    # a part of that.
    middle = isqrt(lower * capacity) if target.memory[level].shared else (lower + capacity) // 2
    return max(min(middle, most) // 4096, 1) * 4096


def _bandwidth(library: Any, name: str, x: np.ndarray) -> Callable[[], float]:
    """Bytes per second at which one thread reads this array again and again, in one round."""
    repeats = max(1, (32 << 20) // x.nbytes)
    calls = [call(getattr(library, f"read_{name}"), x, aligned(1024), tasks=repeats)]
    return lambda: x.nbytes * repeats * of_each(calls, ROUND_SECONDS)


def _memory(threads: int, x: np.ndarray, y: np.ndarray, clock: Clock) -> tuple[float, float]:
    """Bytes per second of DRAM for all cores together: reading alone, and reading with writing."""
    x, y = x[: MEMORY_BYTES // 4], y[: MEMORY_BYTES // 4]
    tasks = threads * TASKS_A_CORE

    def seconds(to: np.ndarray | None, share: float) -> float:
        return memory_seconds(threads, tasks, x, to, MEMORY_RUNS, max(clock.left(share), 0.0))

    middle = (LEVEL0_SHARE + MEMORY_SHARE) / 2
    read, copied = seconds(None, middle), seconds(y, MEMORY_SHARE)
    # The last writes are still in the caches at the end; their way to memory is that of a read.
    return x.nbytes / read, 2 * x.nbytes / (copied + read)


def handed_levels(target: Target) -> set[str]:
    """The levels whose ``handed`` and ``kept`` are measured. With one core there are none. L1 is
    never one: it is too small to tell its time from that of the barrier.
    """
    return {m.name for m in target.memory[1:]} if target.cores > 1 else set()


def _between_stages(
    target: Target,
    sizes: Mapping[str, int],
    launch: float,
    x: np.ndarray,
    y: np.ndarray,
    clock: Clock,
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes per second of each cache that a core reads and writes in a stage between others:
    ``handed`` and ``kept``. The data that it reads, and the data that it overwrites, was last with
    another core, or with itself.
    """
    if target.cores == 1:
        return {}, {}
    cores, tasks = target.cores, target.cores * TASKS_A_CORE
    parts = {}  # bytes that a step reads; it writes as many
    for level in target.memory[1:-1]:
        wanted = sizes[level.name] * (1 if level.shared else cores) // 2
        parts[level.name] = max(min(wanted, x.nbytes) // (4096 * tasks), 1) * 4096 * tasks
    if max(parts.values(), default=0) > x.nbytes:
        raise NotMeasured(f"its memory is too small for steps of {cores} cores")
    library = load([copy_kernel(name, n, tasks, target) for name, n in parts.items()], target)

    def rate(name: str, across: bool, most: float) -> float:
        nbytes, function = parts[name], getattr(library, f"copy_{name}")
        steps = min(MOST_STEPS, 2 * max(1, HANDOVER_BYTES // (4 * nbytes)))
        given = x[: nbytes // 4], y[: nbytes // 4]
        seconds = handover_seconds(
            cores, function, tasks, across, *given, rounds=HANDOVER_RUNS, steps=steps, most=most
        )
        return 2 * nbytes / cores / max(seconds - launch, seconds / 2)

    found: dict[tuple[str, bool], list[float]] = {
        (name, across): [] for name in parts for across in (True, False)
    }
    for number in range(ROUNDS):
        for which, each in found.items():
            if number and clock.left(HANDOVER_SHARE) <= 0:
                break
            clock.need()
            each.append(rate(*which, max(clock.left(HANDOVER_SHARE) / len(found), 0.0)))
    # Not the best round: where a thread is late, others keep what it should have handed over.
    of = {which: median(each) for which, each in found.items()}
    return {name: of[name, True] for name in parts}, {name: of[name, False] for name in parts}
