"""The share of the CPUs that other processes have."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from gtco.machine.load import Others, share_of_others

TICK = os.sysconf("SC_CLK_TCK")


def stat(root: Path, busy: dict[int, float], steal: float = 0.0) -> None:
    """Writes /proc/stat: seconds that each CPU was busy, half of them in system calls; ``steal``
    more on each CPU. All were idle, or waited, for long.
    """
    (root / "proc").mkdir(exist_ok=True)
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0"]
    for cpu, seconds in busy.items():
        half, stolen = int(seconds * TICK / 2), int(steal * TICK)
        lines.append(f"cpu{cpu} {half} 0 {half} 123456 7890 0 0 {stolen} {half} 0")
    (root / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that passed, and that this process used; it may use the CPUs 2 and 3."""
    now = {"passed": 100.0, "own": 7.0}
    monkeypatch.setattr("gtco.machine.load.os.sched_getaffinity", lambda pid: {2, 3})
    monkeypatch.setattr("gtco.machine.load.time.monotonic", lambda: now["passed"])
    monkeypatch.setattr("gtco.machine.load._own", lambda: now["own"])
    return now


def test_share_of_the_cpus_of_this_process(tmp_path: Path, clock: dict[str, float]) -> None:
    stat(tmp_path, {0: 50, 2: 60, 3: 70, 22: 80})
    others = Others(tmp_path)
    assert others.share() == 0.0
    clock.update(passed=110.0, own=12.0)
    stat(tmp_path, {0: 60, 2: 66, 3: 74, 22: 90})
    assert others.share() == pytest.approx((6 + 4 - 5) / 20)
    stat(tmp_path, {0: 60, 2: 66, 3: 74, 22: 90}, steal=2.0)
    assert others.share() == pytest.approx((6 + 4 + 2 * 2 - 5) / 20)


def test_a_share_has_bounds(tmp_path: Path, clock: dict[str, float]) -> None:
    """The counters are coarse: a process may seem to use more than all processes together."""
    stat(tmp_path, {2: 60, 3: 70})
    others = Others(tmp_path)
    clock.update(passed=101.0, own=9.0)
    assert others.share() == 0.0
    stat(tmp_path, {2: 90, 3: 90})
    assert others.share() == 1.0


@pytest.mark.parametrize("text", [None, "", "cpu", "cpu2 a b c", "cpu2\ncpu3"])
def test_a_system_that_does_not_say(
    tmp_path: Path, clock: dict[str, float], text: str | None
) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_text(text)
    others = Others(tmp_path)
    clock.update(passed=101.0)
    assert others.share() == 0.0


def spin(until: float) -> None:
    while time.monotonic() < until:
        pass


def test_a_process_that_spins_is_seen() -> None:
    """By those that are not its parent; own work is not."""
    before = time.monotonic()
    other = multiprocessing.get_context("spawn").Process(target=spin, args=(before + 3600,))
    other.start()
    try:
        while share_of_others(0.3) < 0.3 / len(os.sched_getaffinity(0)):
            assert time.monotonic() < before + 120, "a process that spins is not seen"
    finally:
        other.kill()
        other.join()
