"""The machine's arithmetic peak: every command reads it in the same way, once an hour, with its
spread.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gtco.codegen.llvm import object_code
from gtco.codegen.load import load
from gtco.machine.target import detect, target
from gtco.search.calibration import level0, measure, peak
from gtco.search.calibration.timing import aligned, call
from gtco.tensor.intrinsics.table import micro_kernels
from tests.instructions import instructions

MACHINE = target("x86-64-v3")
held = [1.0]  # the share of the cores that the next reading had


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """The readings so far. Each has three windows and differs from the others. The cache is an
    empty folder, and the clock stays at 10^9 seconds.
    """
    made: list[tuple[int, str]] = []
    held[0] = 1.0

    def read(threads: int, machine: object, operand: str) -> tuple[list[float], float]:
        made.append((threads, operand))
        return [1e11, 3e11 + len(made), 2e11], held[0]

    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    monkeypatch.setattr(peak, "measure_peak", read)
    monkeypatch.setattr(peak.time, "time", lambda: 1e9)
    return made


def test_a_quota_of_half_a_core_is_all_that_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARM_SECONDS", 0.01), ("PEAK_SECONDS", 0.05), ("PEAK_ROUNDS", 2)):
        monkeypatch.setattr(peak, name, value)
    monkeypatch.setattr(peak, "cpu_quota", lambda: 1e-3)
    _, share = peak.measure_peak(1, MACHINE)
    assert share > 10  # the process has no such quota, so it holds a thousand times as much


def test_a_peak_is_read_once_an_hour(
    readings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = peak.machine_peak(2, "float32", MACHINE)
    assert first.flops == 3e11 + 1 and first.readings == (1e11, 3e11 + 1, 2e11)
    assert "300 GFLOP/s (3 windows of 0.25 s on 2 threads" in str(first)
    assert "100 to 300" in str(first)
    for later in (0.0, 1.0, 3599.0):
        monkeypatch.setattr(peak.time, "time", lambda later=later: 1e9 + later)
        assert peak.machine_peak(2, "float32", MACHINE) == first
    assert readings == [(2, "float32")]
    for wrong in (3600.0, -1.0):  # an hour later, or a clock that was set back
        monkeypatch.setattr(peak.time, "time", lambda wrong=wrong: 1e9 + wrong)
        assert peak.known_peak(2, "float32", MACHINE) is None
    assert peak.machine_peak(2, "float32", MACHINE).flops == 3e11 + 2


def test_a_peak_that_others_disturbed_is_not_kept(readings: list[tuple[int, str]]) -> None:
    held[0] = 0.4
    disturbed = peak.machine_peak(2, "float32", MACHINE)
    assert "not kept, other processes held the cores" in str(disturbed)
    held[0] = 0.9
    quiet = peak.machine_peak(2, "float32", MACHINE)
    assert "not kept" not in str(quiet) and len(readings) == 2
    assert peak.machine_peak(2, "float32", MACHINE).readings == quiet.readings
    assert len(readings) == 2


def test_other_threads_and_dtypes_have_a_peak_of_their_own(
    readings: list[tuple[int, str]],
) -> None:
    for _ in range(2):
        for asked in ((2, "float32"), (1, "float32"), (2, "bfloat16")):
            peak.machine_peak(*asked, MACHINE)
    assert readings == [(2, "float32"), (1, "float32"), (2, "bfloat16")]


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{}",
        '{"threads": 2, "readings": [], "time": 1e9}',
        '{"threads": 2, "readings": [0], "time": 1e9}',
        '{"threads": 2, "readings": ["fast"], "time": 1e9}',
        '{"threads": 2, "readings": [1e11], "time": null}',
        '{"threads": 3, "readings": [1e11], "time": 1e9}',
        '{"threads": 2, "readings": [NaN], "time": 1e9}',
    ],
)
def test_a_damaged_file_is_read_again(
    readings: list[tuple[int, str]], tmp_path: Path, data: str
) -> None:
    peak.machine_peak(2, "float32", MACHINE)
    (path,) = tmp_path.iterdir()
    path.write_text(data)
    assert peak.machine_peak(2, "float32", MACHINE).flops == 3e11 + 2
    assert json.loads(path.read_text())["threads"] == 2


def test_a_cache_that_cannot_be_written(
    readings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file" / "x"))
    assert peak.machine_peak(2, "float32", MACHINE).flops == 3e11 + 1


@pytest.mark.parametrize("chains", [12, 24])
def test_the_peak_kernel_does_all_the_work_it_is_credited_with(chains: int) -> None:
    """``steps`` multiply-adds in every lane of every chain: x -> x * f + f, f = x[0] + 0.999."""
    machine, steps = detect(), 5
    x = np.linspace(-0.5, 0.5, chains * machine.lanes, dtype=np.float32)
    wanted, factor = x.astype(np.float64), float(x[0]) + 0.999
    for _ in range(steps):
        wanted = wanted * factor + factor
    library = load([level0.peak_kernel(chains, steps, machine.lanes)], machine)
    given, out = aligned(x.size), aligned(x.size)
    given[:] = x
    call(library.peak, given, out)()
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is the flops of the kernel's instructions times the sustained calls a second."""
    seen: list[tuple[int, float]] = []

    def sustained(calls: list, seconds: float) -> float:
        seen.append((len(calls), seconds))
        return [1.0, 30.0, 20.0, 5.0, 29.0, 10.0][len(seen) - 1]

    real = peak.together
    monkeypatch.setattr(peak, "together", sustained)
    machine = target("x86-64-v3")
    assert max(peak.measure_peak(3, machine)[0]) == 30.0 * 2 * 500_000 * 12 * 8
    assert all(threads == 3 for threads, _ in seen)
    windows = [seconds for _, seconds in seen[1:]]  # the first is to warm up
    assert len(windows) >= 3 and min(windows) >= 0.25
    monkeypatch.setattr(peak, "together", real)
    monkeypatch.setattr(peak, "PEAK_SECONDS", 0.02)
    # A tenth to ten times a micro-kernel's rate on each thread: units are right, on any machine.
    machine = detect()
    tile = micro_kernels(machine)[-1]
    library = load([level0.tile_kernel(tile)], machine)
    rate = 2 * machine.lanes * measure.tile_rate(library, tile, measure.Operands([tile], 2))()
    assert 0.1 < max(peak.measure_peak(1, machine)[0]) / rate < 10
    assert 0.1 < max(peak.measure_peak(2, machine)[0]) / rate < 20
    wider = 16 if "amx-bf16" in machine.features else 2  # work of a bf16 instruction over float32
    assert 0.1 < max(peak.measure_peak(2, machine, "bfloat16")[0]) / rate < 20 * wider


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_the_peak_is_of_fused_multiply_adds(name: str) -> None:
    """A separate product and sum would halve it, and a call would be even slower."""
    machine = target(name)
    code = object_code([level0.peak_kernel(12, 1000, machine.lanes)], machine)
    lines = instructions(code)
    wide = "%zmm" if machine.lanes == 16 else "%ymm"
    assert any(line.startswith("vfmadd") and wide in line for line in lines)
    assert not any(line.startswith(("vmulps", "vaddps", "call")) for line in lines)
