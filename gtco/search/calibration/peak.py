"""The machine's arithmetic peak: what all threads sustain together, read one way for whoever shows
a share of it.

A peak that is sampled for milliseconds, or anew for each command, differs by half from one reading
to the next: turbo and other tenants hide in short samples. So it is read in windows of
PEAK_SECONDS, the best of which counts, and kept for VALID_SECONDS with the spread of its windows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtco.codegen.load import load
from gtco.machine.cores import allowed_cores
from gtco.machine.target import Target, detect
from gtco.search.calibration.level0 import DEPTH, REPEATS, peak_kernel, tile_kernel
from gtco.search.calibration.measure import WARM_SECONDS, tile_calls
from gtco.search.calibration.profile import cache_file, machine_key, save
from gtco.search.calibration.timing import call, operands, together
from gtco.tensor.intrinsics.table import micro_kernels

PEAK_SECONDS, PEAK_ROUNDS = 0.25, 5
VALID_SECONDS = 3600.0
LEAST_HELD = 0.7  # of the cores' time: with less the reading is of the other processes


@dataclass(frozen=True)
class Peak:
    """FLOP/s of ``threads`` threads together, in ``readings`` windows one after the other; ``time``
    of the last one, in seconds since 1970; ``held``, the share of that time that the threads had a
    core each: other processes had the rest.
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
    """The peak of products of this dtype on so many threads of this machine: the one that was read
    within the last hour, or a new reading, which takes 1.4 s.
    """
    target = target or detect()
    peak = known_peak(threads, operand, target)
    if peak is None:
        readings, held = measure_peak(threads, target, operand)
        peak = Peak(threads, tuple(readings), time.time(), held)
        if held >= LEAST_HELD:
            # where it cannot be kept each command reads it: a compile says so, with what to do
            save(
                _path(threads, operand, target),
                {"threads": threads, "readings": peak.readings, "time": peak.time},
            )
    return peak


def known_peak(threads: int, operand: str, target: Target) -> Peak | None:
    """The peak that was read within the last hour."""
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
    """FLOP/s that ``threads`` threads sustain together, for PEAK_SECONDS each of PEAK_ROUNDS times;
    and the share of that time that each of them had a core.
    In float32, independent FMA chains in registers; else the micro-kernel of the most sums, on
    operands in L1.
    """
    if operand != "float32":
        tile = max(micro_kernels(target, operand), key=lambda t: (t.kind.products, t.registers))
        library = load([tile_kernel(tile)], target)
        flops = 2.0 * tile.rows * tile.columns * DEPTH * REPEATS
        calls = tile_calls(library, tile, threads)
    else:
        chains = 24 if target.registers >= 32 else 12
        steps = 500_000  # some milliseconds a call
        flops = 2.0 * steps * chains * target.lanes
        library = load([peak_kernel(chains, steps, target.lanes)], target)
        calls = [call(library.peak, x, x) for x in operands(threads, chains * target.lanes)]
    together(calls, WARM_SECONDS)
    begin, worked = time.perf_counter(), time.process_time()
    readings = [flops * together(calls, PEAK_SECONDS) for _ in range(PEAK_ROUNDS)]
    passed = max(time.perf_counter() - begin, 1e-9)
    most = min(threads, allowed_cores())
    return readings, (time.process_time() - worked) / passed / most


def _path(threads: int, operand: str, target: Target) -> Path:
    key = {**machine_key(target), "threads": threads, "operand": operand}
    return cache_file(f"peak-{target.mcpu}", key)
