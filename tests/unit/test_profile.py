"""Measuring the machine: once, kept by CPU, and again where what was kept is damaged."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gtco.search import profile
from gtco.search.level0 import Level0
from gtco.target import Target, detect, target
from gtco.tensor.intrinsics.table import micro_kernels

MACHINE = target("x86-64-v3")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Target]:
    """The measurements made, each of them quick and made up; the cache is an empty folder."""
    calls: list[Target] = []

    def measure(machine: Target) -> Level0:
        calls.append(machine)
        return Level0(replace(machine, frequency=1e9 + len(calls)), (("fma:1x1", 7.0),))

    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "measure", measure)
    return calls


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def test_measured_once(measured: list[Target], tmp_path: Path) -> None:
    assert profile.cached(MACHINE) is None and not measured
    first = profile.level0(MACHINE)
    assert profile.level0(MACHINE) == first == profile.cached(MACHINE)
    assert measured == [MACHINE] and first.rate("fma:1x1") == 7.0
    (path,) = files(tmp_path)
    assert MACHINE.mcpu in path.name and path.suffix == ".json"


def test_another_target_is_measured_for_itself(measured: list[Target], tmp_path: Path) -> None:
    other = target("x86-64-v4")
    assert profile.level0(MACHINE) != profile.level0(other)
    assert measured == [MACHINE, other] and len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"rates": {}}', '{"target": {}, "rates": {}}', "cut", "rates"],
)
def test_a_damaged_file_is_measured_again(
    measured: list[Target], tmp_path: Path, damage: str
) -> None:
    profile.level0(MACHINE)
    (path,) = files(tmp_path)
    whole = path.read_text()
    spoilt = {
        "cut": whole[: len(whole) // 2],
        "rates": json.dumps({**json.loads(whole), "rates": None}),
    }
    path.write_text(spoilt.get(damage, damage))
    again = profile.level0(MACHINE)
    assert len(measured) == 2 and again.target.frequency == 1e9 + 2
    assert profile.level0(MACHINE) == again and len(measured) == 2, "and kept anew"
    assert files(tmp_path) == [path]


def test_a_cache_that_cannot_be_written(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured at each compile, but no error: the table is what matters."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file" / "cache"))
    assert profile.level0(MACHINE).rate("fma:1x1") == 7.0
    assert profile.level0(MACHINE) and len(measured) == 2


def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds of the real thing: every micro-kernel, every level, all plausible."""
    monkeypatch.setattr(profile, "ROUNDS", 1)
    machine = detect()
    table = profile.measure(machine)
    assert {f"fma:{t.name}" for t in micro_kernels(machine)} == table.table.keys()
    assert all(1e7 < rate < 1e11 for rate in table.table.values())
    assert max(table.table.values()) == pytest.approx(table.target.frequency * machine.fma_ports)
    assert all(1e7 < level.bandwidth < 1e13 for level in table.target.memory)
    assert [m.capacity for m in table.target.memory] == [m.capacity for m in machine.memory]


@pytest.mark.parametrize("chains", [12, 24])
def test_the_peak_kernel_does_all_the_work_it_is_credited_with(chains: int) -> None:
    """``steps`` multiply-adds in every lane of every chain: x -> x * f + f, f = x[0] + 0.999."""
    machine, steps = detect(), 5
    x = np.linspace(-0.5, 0.5, chains * machine.lanes, dtype=np.float32)
    wanted, factor = x.astype(np.float64), float(x[0]) + 0.999
    for _ in range(steps):
        wanted = wanted * factor + factor
    kernel = profile._peak_kernel(chains, steps, machine.lanes)
    with profile._library([kernel], machine) as library:
        given, out = profile._aligned(x.size), profile._aligned(x.size)
        given[:] = x
        pointers = profile._pointer(given), profile._pointer(out)
        library.peak(*pointers, None, ctypes.c_int64(0), ctypes.c_int64(1))
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_the_peak_is_of_all_threads_together_and_beside_the_micro_kernels() -> None:
    """A tenth to ten times the best micro-kernel's rate: units are right, on any machine."""
    machine = detect()
    with profile._library(
        [profile._tile_kernel(t) for t in micro_kernels(machine)], machine
    ) as lib:
        rates = [profile._tile_rate(lib, t) for t in micro_kernels(machine)]
    best = 2 * machine.lanes * max(rates)
    assert 0.1 < profile.measure_peak(1) / best < 10
    assert 0.1 < profile.measure_peak(2) / best < 20
