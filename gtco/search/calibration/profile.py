"""Measuring this machine once: level 0, memory bandwidths, the barrier between two stages and what
passes it; and the arithmetic peak.

Takes a few seconds; the result is cached in the user's cache folder (``GTCO_CACHE``) under all that
it depends on. Everything runs on all cores at once, as a stage does: what cores share, clocks for
wide vectors too, is shared then as well. Level 0 goes by each thread's own time, which does not run
while other processes have the core; the rest by the clock. Always the best of several rounds, since
other tenants of a machine can only slow a round down. A shared machine can be at half its speed for
seconds: a round goes over everything before the next begins.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import median
from typing import Any

import tvm

from gtco.codegen.load import load
from gtco.machine.target import Target, cpu_identity, detect
from gtco.search.calibration.barrier import MOST_STEPS, barrier_seconds, handover_seconds
from gtco.search.calibration.level0 import (
    DEPTH,
    REPEATS,
    STAGE_REPEATS,
    TimedKernel,
    copy_kernel,
    operand_types,
    peak_kernel,
    probes,
    read_kernel,
    symbol,
    tile_kernel,
)
from gtco.search.calibration.rates import WORK, RateTable
from gtco.search.calibration.timing import Call, aligned, call, of_each, operands, together
from gtco.support.options import cache_folder
from gtco.support.version import __version__
from gtco.tensor.intrinsics.table import MicroKernel, every_micro_kernel, micro_kernels

ROUNDS = 8
ROUND_SECONDS = 1e-3  # of a round of level 0; the best of many short ones finds an idle moment
DRAM_SECONDS = 30e-3
WARM_SECONDS = 0.1  # until a core has raised its clock, or lowered it for wide vectors
PEAK_SECONDS, PEAK_ROUNDS = 0.25, 5  # turbo and other tenants hide in shorter samples
HANDOVER_BYTES, HANDOVER_RUNS = 64 << 20, 6  # of a run of steps; runs of a round
TASKS_A_CORE = 8  # of such a step: which core takes one is left to chance, as in a model
VERSION = 9  # of the cached file
# Vector operations and bytes a second of one core, and seconds of a barrier, that no machine
# reaches, or falls short of.
RATE_BOUNDS, BANDWIDTH_BOUNDS = (1e6, 1e11), (1e6, 1e14)
LAUNCH_BOUNDS = (0.0, 1e-2)


def machine_table(target: Target) -> RateTable:
    """This machine's table: the cached one, or a new measurement that is then cached."""
    table = cached(target)
    if table is None:
        table = measure(target)
        with suppress(OSError):  # nowhere to keep it: measured again next time
            _save(_path(target), table, _key(target))
    return table


def cached(target: Target) -> RateTable | None:
    """The cached table of this machine; None where there is none, or one that is damaged, was
    measured under other circumstances, or holds values that cannot be.
    """
    try:
        data = json.loads(_path(target).read_text())
        if data["key"] != _key(target):
            return None
        names = {*(tile.kernel for tile in every_micro_kernel(target)), *WORK}
        rates = _checked(data["rates"], names, RATE_BOUNDS)
        bandwidths = _checked(data["bandwidths"], {m.name for m in target.memory}, BANDWIDTH_BOUNDS)
        between = _checked({"launch": data["launch"]}, {"launch"}, LAUNCH_BOUNDS)
        handed = _checked(data["handed"], _handed_levels(target), BANDWIDTH_BOUNDS)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return _table(target, rates, bandwidths, between["launch"], handed)


def _checked(
    values: Mapping[str, Any], names: set[str], bounds: tuple[float, float]
) -> dict[str, float]:
    """The values, where they are a number within the bounds for each of the names; else
    ``ValueError``.
    """
    if values.keys() != names:
        raise ValueError("other names than this version measures")
    for value in values.values():
        if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:
            raise ValueError(f"{value!r} cannot be")
    return {name: float(value) for name, value in values.items()}


def _key(target: Target) -> dict[str, Any]:
    """All that a table depends on; the target holds features, cores and caches."""
    return {
        "version": VERSION,
        "gtco": __version__,
        "tvm": tvm.__version__,
        "cpu": cpu_identity(),
        "target": target.to_json(),
    }


def _table(
    target: Target,
    rates: Mapping[str, float],
    bandwidths: Mapping[str, float],
    launch: float,
    handed: Mapping[str, float],
) -> RateTable:
    memory = tuple(replace(m, bandwidth=bandwidths[m.name]) for m in target.memory)
    products = [rate for name, rate in rates.items() if name.startswith("fma:")]
    frequency = max(products) / target.fma_ports
    measured = replace(target, memory=memory, frequency=frequency)
    return RateTable(measured, tuple(sorted(rates.items())), launch, tuple(sorted(handed.items())))


def measure(target: Target | None = None) -> RateTable:
    """Everything in the table, by running it (a few seconds)."""
    target = target or detect()
    tiles = every_micro_kernel(target)
    sizes = {m.name: _probe_bytes(target, i) for i, m in enumerate(target.memory)}
    functions = [tile_kernel(t) for t in tiles] + [
        read_kernel(name, size, target) for name, size in sizes.items()
    ]
    library = load(functions, target)
    together(_tile_calls(library, tiles[0], target.cores), WARM_SECONDS)
    products = {t.kernel: _tile_rate(library, t, target.cores) for t in tiles}
    first = {name: measure() for name, measure in products.items()}
    small = tuple(probes(target, max(micro_kernels(target), key=lambda t: first[t.kernel])))
    rounds: dict[str, Callable[[], float]] = {
        **products,
        **_work_seconds(target, small),
        **{
            name: _bandwidth(library, name, size, target.cores if name == "DRAM" else 1)
            for name, size in sizes.items()
        },
    }
    found = {name: max(each) for name, each in _rounds(rounds).items()}
    rates = {t.kernel: found[t.kernel] for t in tiles}
    for probe in small:
        rates[probe.work] = _rate_of(probe, 1 / found[probe.work], rates)
    bandwidths = {name: found[name] for name in sizes}
    del rounds, products  # and the memory that they read
    launch = barrier_seconds(target.cores)
    return _table(target, rates, bandwidths, launch, _handed(target, sizes, launch))


def _rounds(measured: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each of these gives, in ROUNDS rounds over all of them."""
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(ROUNDS):
        for name, measure in measured.items():
            found[name].append(measure())
    return found


def measure_peak(
    threads: int, target: Target | None = None, operand: str = "float32"
) -> float:
    """The peak in FLOP/s of products of this dtype: what ``threads`` threads sustain together for
    PEAK_SECONDS, the best of PEAK_ROUNDS. In float32, independent FMA chains in registers; else
    the micro-kernel of the most sums, on operands in L1.
    """
    target = target or detect()
    if operand != "float32":
        tile = max(micro_kernels(target, operand), key=lambda t: (t.kind.products, t.registers))
        library = load([tile_kernel(tile)], target)
        flops = 2.0 * tile.rows * tile.columns * DEPTH * REPEATS
        calls = _tile_calls(library, tile, threads)
    else:
        chains = 24 if target.registers >= 32 else 12
        steps = 500_000  # some milliseconds a call
        flops = 2.0 * steps * chains * target.lanes
        library = load([peak_kernel(chains, steps, target.lanes)], target)
        calls = [call(library.peak, x, x) for x in operands(threads, chains * target.lanes)]
    together(calls, WARM_SECONDS)
    return flops * max(together(calls, PEAK_SECONDS) for _ in range(PEAK_ROUNDS))


# level 0 ------------------------------------------------------------------------------------------
def _tile_calls(library: Any, tile: MicroKernel, threads: int) -> list[Call]:
    """Calls of a micro-kernel, each on operands of its own."""
    function = getattr(library, symbol(tile))
    sizes = [-(-t.nbytes // 4) for t in operand_types(tile)]
    return [call(function, *map(aligned, sizes)) for _ in range(threads)]


def _tile_rate(library: Any, tile: MicroKernel, threads: int) -> Callable[[], float]:
    """Vector operations a second of one core while all run the micro-kernel, in one round."""
    calls = _tile_calls(library, tile, threads)
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


def _rate_of(probe: TimedKernel, seconds: float, rates: Mapping[str, float]) -> float:
    """The rate of a probe's own work: its units over the time that other work in it does not
    explain. That is half of the time at least, since what stands side by side also overlaps.
    """
    others = sum(n / rates[name] for name, n in probe.units.items() if name != probe.work)
    return probe.units[probe.work] / max(seconds - others, seconds / 2)


# memory -------------------------------------------------------------------------------------------
def _probe_bytes(target: Target, level: int) -> int:
    if target.memory[level].name == "DRAM":
        return 4 * target.memory[level - 1].capacity
    capacity = target.memory[level].capacity
    lower = target.memory[level - 1].capacity if level else 0
    # what overflows a core's own caches is mostly little beside what all share, and other tenants
    # may hold the rest of that
    middle = isqrt(lower * capacity) if target.memory[level].shared else (lower + capacity) // 2
    return middle // 4096 * 4096


def _bandwidth(
    library: Any, name: str, nbytes: int, threads: int
) -> Callable[[], float]:
    """Bytes a second that ``threads`` threads read together, each from memory of its own, in one
    round.
    """
    repeats = max(1, (32 << 20) // nbytes)
    function = getattr(library, f"read_{name}")
    calls = [
        call(function, x, aligned(1024), tasks=repeats) for x in operands(threads, nbytes // 4)
    ]
    rate = of_each if threads == 1 else together
    seconds = ROUND_SECONDS if threads == 1 else DRAM_SECONDS
    return lambda: nbytes * repeats * rate(calls, seconds)


def _handed_levels(target: Target) -> set[str]:
    """Levels whose ``handed`` is measured: none where there is one core, and not L1, which is too
    small to tell it from the barrier.
    """
    return {m.name for m in target.memory[1:]} if target.cores > 1 else set()


def _handed(target: Target, sizes: Mapping[str, int], launch: float) -> dict[str, float]:
    """Bytes a second that a core reads and writes, of DRAM all cores together, in a stage between
    others: what it reads and what it overwrites was last in the hands of whichever core.
    """
    if target.cores == 1:
        return {}
    cores, tasks = target.cores, target.cores * TASKS_A_CORE
    parts = {  # bytes that a step reads, and writes as many
        m.name: sizes[m.name] * (1 if m.shared else cores) // 2 // (4096 * tasks) * 4096 * tasks
        for m in target.memory[1:]
    }
    library = load([copy_kernel(name, n, tasks, target) for name, n in parts.items()], target)
    buffers = {name: operands(2, nbytes // 4) for name, nbytes in parts.items()}

    def rate(name: str) -> float:
        nbytes, function = parts[name], getattr(library, f"copy_{name}")
        steps = min(MOST_STEPS, 2 * max(1, HANDOVER_BYTES // (4 * nbytes)))
        x, y = buffers[name]
        seconds = handover_seconds(cores, function, tasks, x, y, HANDOVER_RUNS, steps)
        share = 1 if name == "DRAM" else cores
        return 2 * nbytes / share / max(seconds - launch, seconds / 2)

    # not the best: threads that happen to take the same tasks again hand nothing over
    rounds = _rounds({name: partial(rate, name) for name in parts})
    return {name: median(each) for name, each in rounds.items()}


# the cached file ----------------------------------------------------------------------------------
def _path(target: Target) -> Path:
    """One file for every key, so that machines, or settings of one, may share the folder."""
    key = json.dumps(_key(target), sort_keys=True).encode()
    return cache_folder() / f"rates-{target.mcpu}-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _save(path: Path, table: RateTable, key: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bandwidths = {m.name: m.bandwidth for m in table.target.memory}
    data = {
        "key": key,
        "rates": dict(table.measured),
        "bandwidths": bandwidths,
        "launch": table.launch,
        "handed": dict(table.handed),
    }
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)
