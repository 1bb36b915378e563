"""The machine's arithmetic peak: the rate that all threads sustain together. Every command that
shows a share of the peak reads it here.

A sample of milliseconds, or a new reading for each command, differs by half from one reading to the
next, because of turbo clocks and other tenants. So the peak is read in windows of PEAK_SECONDS, of
which the best counts. It is kept for VALID_SECONDS with the spread of its windows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gtco.codegen.load import load
from gtco.machine.cores import allowed_cores, cpu_quota
from gtco.machine.target import Target, detect
from gtco.search.calibration.level0 import DEPTH, REPEATS, peak_kernel, tile_kernel
from gtco.search.calibration.measure import WARM_SECONDS, tile_calls
from gtco.search.calibration.profile import cache_file, machine_key, save
from gtco.search.calibration.timing import call, operands, together
from gtco.tensor.intrinsics.table import micro_kernels

PEAK_SECONDS, PEAK_ROUNDS = 0.25, 5
VALID_SECONDS = 3600.0
LEAST_HELD = 0.7  # share of the cores' time: a reading with less depends on the other processes


@dataclass(frozen=True)
class Peak:
    """A reading of the peak.

    - ``readings``: FLOP/s of ``threads`` threads together, in windows one after the other;
    - ``time``: that of the last window, in seconds since 1970;
    - ``held``: the share of the time in which each thread had a core; other processes had the rest.
    """

    threads: int
    readings: tuple[float, ...]
    time: float
    held: float = 1.0

    @property
    def flops(self) -> float:
        """The peak: the best window."""
        return max(self.readings)

    def __str__(self) -> str:
        """``310 GFLOP/s (5 windows of 0.25 s: 295 to 310)``"""
        least, most = min(self.readings) / 1e9, max(self.readings) / 1e9
        return (
            f"{most:.0f} GFLOP/s ({len(self.readings)} windows of {PEAK_SECONDS:g} s on "
            f"{self.threads} threads at {time.strftime('%H:%M', time.localtime(self.time))}: "
            f"{least:.0f} to {most:.0f})"
            + ("" if self.held >= LEAST_HELD else "; not kept, other processes held the cores")
        )


def machine_peak(threads: int, operand: str = "float32", target: Target | None = None) -> Peak:
    """The peak of products of this dtype on ``threads`` threads of this machine. It is a reading of
    the last hour, or a new one, which takes 1.4 s.
    """
    target = target or detect()
    peak = known_peak(threads, operand, target)
    if peak is None:
        readings, held = measure_peak(threads, target, operand)
        peak = Peak(threads, tuple(readings), time.time(), held)
        if held >= LEAST_HELD:
            # If it cannot be kept, each command reads it again; a compile says so, and what to do.
            save(
                _path(threads, operand, target),
                {"threads": threads, "readings": peak.readings, "time": peak.time},
            )
    return peak


def known_peak(threads: int, operand: str, target: Target) -> Peak | None:
    """The reading of the last hour; None if there is none."""
    try:
        data = json.loads(_path(threads, operand, target).read_text())
        readings = tuple(map(float, data["readings"]))
        peak = Peak(int(data["threads"]), readings, float(data["time"]))
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    sound = peak.threads == threads and readings and all(1e6 < r < 1e16 for r in readings)
    return peak if sound and 0 <= time.time() - peak.time < VALID_SECONDS else None


def measure_peak(
    threads: int, target: Target, operand: str = "float32"
) -> tuple[Sequence[float], float]:
    """Reads FLOP/s that ``threads`` threads sustain together, in PEAK_ROUNDS windows of
    PEAK_SECONDS each, and the share of that time in which each thread had a core.

    In float32 they run independent FMA chains in registers. For other dtypes they run the
    micro-kernel with the most sums, on operands in L1.
    """
    if operand != "float32":
        tile = max(micro_kernels(target, operand), key=lambda t: (t.kind.products, t.registers))
        library = load([tile_kernel(tile)], target)
        flops = 2.0 * tile.rows * tile.columns * DEPTH * REPEATS
        calls = tile_calls(library, tile, threads)
    else:
        chains = 24 if target.registers >= 32 else 12
        steps = 500_000  # some milliseconds per call
        flops = 2.0 * steps * chains * target.lanes
        library = load([peak_kernel(chains, steps, target.lanes)], target)
        calls = [call(library.peak, x, x) for x in operands(threads, chains * target.lanes)]
    together(calls, WARM_SECONDS)
    begin, worked = time.perf_counter(), time.process_time()
    readings = [flops * together(calls, PEAK_SECONDS) for _ in range(PEAK_ROUNDS)]
    passed = max(time.perf_counter() - begin, 1e-9)
    most = min(threads, allowed_cores(), cpu_quota() or inf)
    return readings, (time.process_time() - worked) / passed / most


def _path(threads: int, operand: str, target: Target) -> Path:
    key = {**machine_key(target), "threads": threads, "operand": operand}
    return cache_file(f"peak-{target.mcpu}", key)
