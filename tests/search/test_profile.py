"""Measuring the machine: once, kept by CPU, and again where what was kept is damaged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gtco.codegen.llvm import object_code
from gtco.codegen.load import load
from gtco.machine.target import Target, detect, target
from gtco.search.calibration import barrier as barrier_module
from gtco.search.calibration import level0, profile
from gtco.search.calibration.level0 import TimedKernel
from gtco.search.calibration.rates import WORK, RateTable
from gtco.search.calibration.timing import aligned, call
from gtco.tensor.intrinsics.table import every_micro_kernel, micro_kernels
from tests.instructions import instructions

MACHINE = target("x86-64-v3")


def made_up(machine: Target, number: int) -> RateTable:
    """A plausible table, another one for every number."""
    names = [*(tile.kernel for tile in every_micro_kernel(machine)), *WORK]
    rates = {name: 1e9 + number for name in names}
    bandwidths = {m.name: 1e10 for m in machine.memory}
    handed = {name: 2e9 + number for name in ("L2", "L3", "DRAM")}
    return profile._table(machine, rates, bandwidths, 1e-6 * number, handed)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Target]:
    """The measurements made, each of them quick and made up; the cache is an empty folder."""
    calls: list[Target] = []

    def measure(machine: Target) -> RateTable:
        calls.append(machine)
        return made_up(machine, len(calls))

    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "measure", measure)
    return calls


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def test_measured_once(measured: list[Target], tmp_path: Path) -> None:
    assert profile.cached(MACHINE) is None and not measured
    first = profile.machine_table(MACHINE)
    assert profile.machine_table(MACHINE) == first == profile.cached(MACHINE)
    assert measured == [MACHINE] and first == made_up(MACHINE, 1)
    (path,) = files(tmp_path)
    assert MACHINE.mcpu in path.name and path.suffix == ".json"


def test_another_target_is_measured_for_itself(measured: list[Target], tmp_path: Path) -> None:
    other = target("x86-64-v4")
    assert profile.machine_table(MACHINE) != profile.machine_table(other)
    assert measured == [MACHINE, other] and len(files(tmp_path)) == 2


CHANGES = {
    "features": replace(MACHINE, features=MACHINE.features[:-1]),
    "cores": replace(MACHINE, cores=MACHINE.cores + 1),
    "caches": replace(
        MACHINE, memory=(replace(MACHINE.memory[0], capacity=1), *MACHINE.memory[1:])
    ),
    "tuning": replace(MACHINE, mcpu="haswell"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_setting_is_measured_for_itself(
    measured: list[Target], tmp_path: Path, change: str
) -> None:
    assert profile.machine_table(MACHINE) != profile.machine_table(CHANGES[change])
    assert len(measured) == 2 and len(files(tmp_path)) == 2
    profile.machine_table(MACHINE)
    profile.machine_table(CHANGES[change])
    assert len(measured) == 2, "both are kept"


@pytest.mark.parametrize("what", ["stepping", "model", "cpu family", "vendor_id", "model name"])
def test_another_cpu_is_measured_for_itself(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    profile.machine_table(MACHINE)
    other = {**profile.cpu_identity(), what: "another"}
    monkeypatch.setattr(profile, "cpu_identity", lambda: other)
    profile.machine_table(MACHINE)
    assert len(measured) == 2


def test_other_versions_measure_for_themselves(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("VERSION", -1), ("__version__", "0.0"), ("tvm", MACHINE)):
        with monkeypatch.context() as patched:
            before = len(measured)
            profile.machine_table(MACHINE)
            assert len(measured) == max(before, 1)
            if name == "tvm":
                patched.setattr(profile.tvm, "__version__", "0.0")
            else:
                patched.setattr(profile, name, value)
            profile.machine_table(MACHINE)
            assert len(measured) == max(before, 1) + 1


NONSENSE = [math.nan, math.inf, -math.inf, 0, -1.0, 1e-3, 1e20, "fast", None, True, [1e9]]


@pytest.mark.parametrize("table", ["rates", "bandwidths", "handed"])
@pytest.mark.parametrize("value", NONSENSE)
def test_a_value_that_cannot_be_is_measured_again(
    measured: list[Target], tmp_path: Path, table: str, value: object
) -> None:
    profile.machine_table(MACHINE)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data[table][min(data[table])] = value
    path.write_text(json.dumps(data))
    assert profile.cached(MACHINE) is None
    assert profile.machine_table(MACHINE) == made_up(MACHINE, 2) == profile.cached(MACHINE)


@pytest.mark.parametrize("value", [*(v for v in NONSENSE if v not in (0, 1e-3)), 1.5, "missing"])
def test_a_barrier_that_cannot_be_is_measured_again(
    measured: list[Target], tmp_path: Path, value: object
) -> None:
    profile.machine_table(MACHINE)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["launch"] = value
    if value == "missing":
        del data["launch"]
    path.write_text(json.dumps(data))
    assert profile.cached(MACHINE) is None
    assert profile.machine_table(MACHINE) == made_up(MACHINE, 2) == profile.cached(MACHINE)


@pytest.mark.parametrize("table", ["rates", "bandwidths", "handed"])
def test_a_value_too_many_or_too_few(measured: list[Target], tmp_path: Path, table: str) -> None:
    for change in ("more", "less"):
        profile.machine_table(MACHINE)
        (path,) = files(tmp_path)
        data = json.loads(path.read_text())
        if change == "more":
            data[table]["fma:99x9"] = 1e9
        else:
            del data[table][max(data[table])]
        path.write_text(json.dumps(data))
        assert profile.cached(MACHINE) is None, change


def test_a_file_under_the_name_of_another(measured: list[Target], tmp_path: Path) -> None:
    """What counts is what the file says that it was measured under."""
    profile.machine_table(MACHINE)
    (path,) = files(tmp_path)
    other = CHANGES["cores"]
    profile._path(other).write_bytes(path.read_bytes())
    assert profile.cached(other) is None
    profile.machine_table(other)
    assert measured == [MACHINE, other] and profile.cached(other) == made_up(other, 2)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", "7", '{"rates": {}}', "[" * 100_000, "\0", "cut", "rates", "key"],
)
def test_a_damaged_file_is_measured_again(
    measured: list[Target], tmp_path: Path, damage: str
) -> None:
    profile.machine_table(MACHINE)
    (path,) = files(tmp_path)
    whole = path.read_text()
    spoilt = {
        "cut": whole[: len(whole) // 2],
        "rates": json.dumps({**json.loads(whole), "rates": None}),
        "key": json.dumps({**json.loads(whole), "key": None}),
    }
    path.write_text(spoilt.get(damage, damage))
    again = profile.machine_table(MACHINE)
    assert len(measured) == 2 and again == made_up(MACHINE, 2)
    assert profile.machine_table(MACHINE) == again and len(measured) == 2, "and kept anew"
    assert files(tmp_path) == [path]


def test_a_cache_that_cannot_be_written(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured at each compile, but no error: the table is what matters."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file" / "cache"))
    assert profile.machine_table(MACHINE) == made_up(MACHINE, 1)
    assert profile.machine_table(MACHINE) and len(measured) == 2


def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few rounds of the real thing: every micro-kernel, work of every kind, every level, all within
    the bounds.
    """
    monkeypatch.setattr(profile, "ROUNDS", 1)
    monkeypatch.setattr(level0, "REPEATS", 100)
    monkeypatch.setattr(profile, "REPEATS", 100)
    monkeypatch.setattr(level0, "STAGE_REPEATS", 100)
    monkeypatch.setattr(profile, "STAGE_REPEATS", 100)
    monkeypatch.setattr(barrier_module, "ROUNDS", 3)
    monkeypatch.setattr(profile, "HANDOVER_RUNS", 2)
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    machine = detect()
    table = profile.machine_table(machine)
    assert profile.cached(machine) == table
    rates = dict(table.measured)
    assert {*(tile.kernel for tile in every_micro_kernel(machine)), *WORK} == rates.keys()
    assert all(1e7 < rate < 1e11 for rate in rates.values())
    products = max(rate for name, rate in rates.items() if name.startswith("fma:"))
    assert products == pytest.approx(table.target.frequency * machine.fma_ports)
    assert table.rate("fma") == pytest.approx(products)
    assert all(1e7 < level.bandwidth < 1e13 for level in table.target.memory)
    assert [m.capacity for m in table.target.memory] == [m.capacity for m in machine.memory]
    assert table.launch >= 0
    assert table.handed or machine.cores == 1
    assert all(1e7 < rate < 1e13 for _, rate in table.handed)


def test_what_passes_between_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a step reads and writes, by its time without the barrier: of one core, of DRAM all
    of them together.
    """
    seen: list[tuple[int, int]] = []

    def timed(
        threads: int, kernel: object, tasks: int, x: np.ndarray, y: np.ndarray, *_: int
    ) -> float:
        assert threads == 2 and x.nbytes == y.nbytes and x.nbytes % tasks == 0
        seen.append((x.nbytes, tasks))
        return 3.0

    monkeypatch.setattr(profile, "handover_seconds", timed)
    monkeypatch.setattr(profile, "ROUNDS", 1)
    machine = target("x86-64-v3")
    small = {"L1": 1 << 14, "L2": 1 << 20, "L3": 1 << 22, "DRAM": 1 << 24}
    found = profile._handed(machine, small, 1.0)
    assert [n for n, _ in seen] == [1 << 20, 1 << 21, 1 << 23], "of each, or all"
    assert found == {"L2": 1 << 19, "L3": 1 << 20, "DRAM": 1 << 23}
    assert profile._handed(machine, small, 2.9)["L2"] == (1 << 20) / 1.5, "half is no barrier"
    assert profile._handed(replace(machine, cores=1), small, 1.0) == {}


def test_a_machine_of_one_core_hands_nothing_over() -> None:
    assert profile._handed_levels(replace(MACHINE, cores=1)) == set()
    assert profile._handed_levels(MACHINE) == {"L2", "L3", "DRAM"}


def test_a_rate_is_of_the_time_that_other_work_leaves() -> None:
    def rate(seconds: float) -> float:
        units = {"exp": 30.0, "vector": 4.0}
        return profile._rate_of(TimedKernel("exp", None, units, ()), seconds, {"vector": 2.0})

    assert rate(8.0) == pytest.approx(30.0 / (8.0 - 2.0))
    assert rate(3.0) == pytest.approx(30.0 / 1.5), "half of the time is its own"


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
    """The flops that the kernel's instructions do, times the calls a second that are sustained."""
    seen: list[tuple[int, float]] = []

    def sustained(calls: list, seconds: float) -> float:
        seen.append((len(calls), seconds))
        return [1.0, 30.0, 20.0, 5.0, 29.0, 10.0][len(seen) - 1]

    real = profile.together
    monkeypatch.setattr(profile, "together", sustained)
    machine = target("x86-64-v3")
    assert profile.measure_peak(3, machine) == 30.0 * 2 * 500_000 * 12 * 8
    assert all(threads == 3 for threads, _ in seen)
    windows = [seconds for _, seconds in seen[1:]]  # the first is to warm up
    assert len(windows) >= 3 and min(windows) >= 0.25
    monkeypatch.setattr(profile, "together", real)
    monkeypatch.setattr(profile, "PEAK_SECONDS", 0.02)
    # A tenth to ten times a micro-kernel's rate on each thread: units are right, on any machine.
    machine = detect()
    tile = micro_kernels(machine)[-1]
    library = load([level0.tile_kernel(tile)], machine)
    rate = 2 * machine.lanes * profile._tile_rate(library, tile, 2)()
    assert 0.1 < profile.measure_peak(1) / rate < 10
    assert 0.1 < profile.measure_peak(2) / rate < 20
    assert 0.1 < profile.measure_peak(2, operand="bfloat16") / rate < 40


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_the_peak_is_of_fused_multiply_adds(name: str) -> None:
    """A product and a sum apart would halve it; a call to anything would do worse."""
    machine = target(name)
    code = object_code([level0.peak_kernel(12, 1000, machine.lanes)], machine)
    lines = instructions(code)
    wide = "%zmm" if machine.lanes == 16 else "%ymm"
    assert any(line.startswith("vfmadd") and wide in line for line in lines)
    assert not any(line.startswith(("vmulps", "vaddps", "call")) for line in lines)
