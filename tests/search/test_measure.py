"""Real measurements of the machine: the table has all rows, and measuring keeps to its memory and
its time, whatever the machine says of itself.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.codegen.processes import environment
from gtco.machine.target import TARGETS, Target, cpu_target, detect, target
from gtco.search.calibration import level0, measure, profile
from gtco.search.calibration.level0 import TimedKernel
from gtco.search.calibration.measure import NotMeasured
from gtco.search.calibration.rates import WORK
from gtco.search.calibration.timing import operands
from gtco.tensor.intrinsics.table import (
    WEIGHTS,
    every_micro_kernel,
    micro_kernels,
    timed_micro_kernels,
)

MACHINE = target("x86-64-v3")


def with_caches(machine: Target, nbytes: int) -> Target:
    """The machine, with this many bytes in each of its caches."""
    memory = (*(replace(m, capacity=nbytes) for m in machine.memory[:-1]), machine.memory[-1])
    return replace(machine, memory=memory)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures less than a compile does, and allows all the time that this takes beside other
    tests.
    """
    monkeypatch.setattr(measure, "MOST_SECONDS", 600.0)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(level0, "REPEATS", 100)
    monkeypatch.setattr(measure, "REPEATS", 100)
    monkeypatch.setattr(level0, "STAGE_REPEATS", 100)
    monkeypatch.setattr(measure, "STAGE_REPEATS", 100)
    monkeypatch.setattr(measure, "MEMORY_RUNS", 1)
    monkeypatch.setattr(measure, "HANDOVER_RUNS", 2)


def test_a_real_measurement(quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every micro-kernel, every kind of work and every level; all rates are within the bounds."""
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    machine, said = detect(), list[str]()
    found = profile.machine_table(machine, said.append)
    table = found.rates
    assert table is not None and profile.cached(machine) == table and not found.note
    assert any("kernels" in what for what in said) and any("memory" in what for what in said)
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


@pytest.mark.parametrize("capacity", [0, 1 << 30])
@pytest.mark.parametrize("cores", [1, 3, 24])
def test_whatever_a_machine_says_of_itself(quick: None, cores: int, capacity: int) -> None:
    """No caches or huge ones, few cores or more than there are: everything is measured."""
    machine = with_caches(replace(detect(), cores=cores), capacity)
    tiles = every_micro_kernel(machine)[:2]
    with pytest.MonkeyPatch.context() as few:
        few.setattr(measure, "timed_micro_kernels", lambda target: tiles)
        few.setattr(
            measure,
            "micro_kernels",
            lambda target, operand="": () if operand in (WEIGHTS, "int4") else tiles,
        )
        found = measure.measure(machine)
    assert all(math.isfinite(x) and x > 0 for x in found.rates.values())
    assert found.bandwidths.keys() == {m.name for m in machine.memory}
    assert all(1e6 < x < 1e14 for x in found.bandwidths.values())
    for between in (found.handed, found.kept):
        assert between.keys() == measure.handed_levels(machine)
        assert all(1e6 < x < 1e14 for x in between.values())


def test_rates_for_bytes_that_follow_from_others() -> None:
    """A row for bytes is as much faster than the fma row of its size as the timed one with as many
    vectors. A row for int8 weights is as fast as the one for float16, and one for int4 weights
    slower by what its shifts take.
    """
    machine = TARGETS["icelake-server"]
    timed = [tile.kernel for tile in timed_micro_kernels(machine)]
    assert [n for n in timed if n.startswith("vnni")] == [
        f"vnni:{size}" for size in ("14x1", "14x2", "9x3", "6x4", "4x6")
    ]
    rates = {name: float(number + 1) for number, name in enumerate(timed)}
    found = measure.derived(machine, rates)
    assert {*rates, *found} == {tile.kernel for tile in every_micro_kernel(machine)}
    assert all(found[name] == pytest.approx(rates[name]) for name in {*rates} & {*found})
    ratio = rates["vnni:6x4"] / rates["fma:6x4"]
    assert found["vnni:3x4"] == pytest.approx(ratio * rates["fma:3x4"])
    assert found["byte:3x4"] == rates["half:3x4"]
    assert 0.7 * rates["half:3x4"] < found["nibble:3x4"] < rates["half:3x4"]
    others = measure.derived(TARGETS["x86-64-v4"], rates)
    assert {name.partition(":")[0] for name in others} == {"byte", "nibble"}
    arm = cpu_target("neoverse-n1")
    rates = {tile.kernel: 1.0 for tile in timed_micro_kernels(arm)}
    weights = {t.kernel for dtype in (WEIGHTS, "int4") for t in micro_kernels(arm, dtype)}
    assert weights and measure.derived(arm, rates).keys() > weights


MEMORY = """
import resource
from gtco.support.torchless import import_tvm
import_tvm()
from dataclasses import replace
from gtco.machine.target import detect
from gtco.search.calibration import level0, measure
from tests.search.test_measure import with_caches

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

measure.MOST_SECONDS = 600.0
measure.WARM_SECONDS = measure.ROUND_SECONDS = 1e-6
measure.ROUNDS = measure.MEMORY_RUNS = measure.HANDOVER_RUNS = 1
level0.REPEATS = measure.REPEATS = level0.STAGE_REPEATS = measure.STAGE_REPEATS = 10
before = used()
measure.measure(with_caches(replace(detect(), cores={cores}), 1 << 30))
print(used() - before)
"""


def test_memory_does_not_grow_with_the_machine() -> None:
    """The process measures a machine of many cores with caches of a gigabyte. It takes no more
    memory than promised; this includes the building of kernels and the threads.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(cores=32)],
        env=environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= measure.MOST_BYTES


def test_no_more_than_a_share_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for left, most in ((None, 256 << 20), (1 << 40, 256 << 20), (512 << 20, 128 << 20)):
        monkeypatch.setattr(measure, "memory_left", lambda left=left: left)
        assert sum(array.nbytes for array in measure._arrays()) <= most // 4
    monkeypatch.setattr(measure, "memory_left", lambda: 20 << 20)
    with pytest.raises(NotMeasured, match="of the 21 MB that are left"):
        measure._arrays()


def test_threads_that_arrive_at_once_make_no_endless_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "barrier_seconds", lambda threads, rounds: 0.0)
    assert measure._barriers(2) == 1 / measure.LEAST_BARRIER


def test_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rounds are left out if the time is over. If not even one round was done, there is no
    table.
    """
    now = [0.0]
    monkeypatch.setattr(measure, "MOST_SECONDS", 5.0)
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    clock = measure.Clock()

    def second() -> float:
        now[0] += 1.0
        return now[0]

    work = dict.fromkeys("abc", second)
    assert measure._round(work, clock) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert measure._round(work, clock, measure.LEVEL0_SHARE) == {}
    measure._round(work, clock)  # a first round may end later
    with pytest.raises(NotMeasured, match=r"its time of 7\.5 s"):
        measure._round(work, clock)
    assert now == [8.0]


def test_a_last_part_that_ends_late_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything was measured once then."""
    between = measure._between_stages

    def late(*given: Any) -> tuple[dict[str, float], dict[str, float]]:
        found = between(*given)
        given[-1].begin -= 2 * given[-1].seconds
        return found

    monkeypatch.setattr(measure, "MOST_SECONDS", 60.0)  # however busy this machine is
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "_between_stages", late)
    assert measure.measure(detect()).launch > 0


@pytest.mark.parametrize(("quota", "seconds"), [(None, 5), (4.0, 5), (0.5, 10), (0.01, 20)])
def test_with_a_part_of_a_core_it_takes_longer(
    quota: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of half a core are common: each compile in one would measure, and give up."""
    monkeypatch.setattr(measure, "MOST_SECONDS", 5.0)
    monkeypatch.setattr(measure.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(measure, "cpu_quota", lambda: quota)
    assert measure.Clock().left(1.0) == seconds


def test_what_is_read_of_a_cache() -> None:
    machine = target("x86-64-v4")
    l1, l2, l3 = (measure.probe_bytes(machine, n, 1 << 25) for n in range(3))
    assert l1 < machine.memory[0].capacity < l2 < machine.memory[1].capacity < l3
    assert measure.probe_bytes(with_caches(machine, 1 << 30), 2, 1 << 25) == 1 << 25
    assert measure.probe_bytes(with_caches(machine, 0), 1, 1 << 25) == 4096


def test_what_passes_between_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a step reads and writes, divided by its time without the barrier."""
    seen: list[tuple[int, bool]] = []

    def timed(
        threads: int, _: Any, tasks: int, across: bool, x: np.ndarray, y: np.ndarray, **most: float
    ) -> float:
        assert threads == 2 and x.nbytes == y.nbytes and x.nbytes % tasks == 0
        seen.append((x.nbytes, across))
        return 3.0 if across else 2.0

    monkeypatch.setattr(measure, "handover_seconds", timed)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    machine = target("x86-64-v3")
    small = {"L1": 1 << 14, "L2": 1 << 20, "L3": 1 << 22}
    x, y = operands(2, 1 << 20)

    def between(machine: Target, launch: float) -> tuple[dict[str, float], dict[str, float]]:
        return measure._between_stages(machine, small, launch, x, y, measure.Clock())

    handed, kept = between(machine, 1.0)
    assert handed == {"L2": 1 << 19, "L3": 1 << 20} and kept == {"L2": 1 << 20, "L3": 1 << 21}
    assert seen == [(n, a) for n in (1 << 20, 1 << 21) for a in (True, False)], "of each, or all"
    assert between(machine, 2.9)[0]["L2"] == (1 << 20) / 1.5, "half is not a barrier"
    assert between(replace(machine, cores=1), 1.0) == ({}, {})


def test_memory_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy reads memory. It also writes bytes that go back to memory after the last task has
    ended.
    """
    monkeypatch.setattr(measure, "memory_seconds", lambda *a: 3.0 if a[3] is not None else 2.0)
    x, y = operands(2, measure.MEMORY_BYTES // 2)
    n = measure.MEMORY_BYTES
    assert measure._memory(2, x, y, measure.Clock()) == (n / 2.0, 2 * n / 5.0)


def test_a_machine_of_one_core_hands_nothing_over() -> None:
    assert measure.handed_levels(replace(MACHINE, cores=1)) == set()
    assert measure.handed_levels(MACHINE) == {"L2", "L3", "DRAM"}


def test_a_rate_is_of_the_time_that_other_work_leaves() -> None:
    def rate(seconds: float) -> float:
        units = {"exp": 30.0, "vector": 4.0}
        return measure.rate_of(TimedKernel("exp", None, units, ()), seconds, {"vector": 2.0})

    assert rate(8.0) == pytest.approx(30.0 / (8.0 - 2.0))
    assert rate(3.0) == pytest.approx(30.0 / 1.5), "half of the time is its own"
