"""Timing calls on threads: what counts as time, by whose clock."""

from __future__ import annotations

import threading
import time

import pytest

from gtco.search.calibration import timing
from gtco.search.calibration.timing import of_each, together


def test_calls_together_are_counted_from_the_first_start_to_each_end() -> None:
    """Calls of known length, which sleep: as many a second as they take, however busy the machine;
    never more, and with every thread at work at once.
    """
    present = threading.Barrier(3, timeout=60)  # breaks unless all three are inside at once
    calls = [0, 0, 0]

    def one(i: int) -> None:
        if calls[i] < 2:
            present.wait()
        calls[i] += 1
        time.sleep(0.01)

    rate = together([lambda i=i: one(i) for i in range(3)], 0.1)  # type: ignore[misc]
    assert 0 < rate <= 3 / 0.01
    assert min(calls) >= 2


def test_a_late_thread_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: one of two threads starts half-way through the window of the other."""
    local, turns = threading.local(), iter([0.0, 5.0])
    turn = threading.Lock()

    def clock() -> float:
        if not hasattr(local, "now"):
            with turn:
                local.now = next(turns)
        return float(local.now)

    def call() -> None:
        if hasattr(local, "now"):
            local.now += 1.0

    monkeypatch.setattr(timing.time, "perf_counter", clock)
    # One makes 10 calls in 10 seconds; the other, from 5 to 15, has made 10 in 15.
    assert together([call, call], 10.0) == pytest.approx(10 / 10 + 10 / 15)


def test_a_micro_kernel_is_timed_by_what_its_thread_computes() -> None:
    """Other processes that have the core for a while slow no rate down: a call that sleeps stands
    for one that is kept waiting.
    """
    rate = of_each([lambda: time.sleep(0.01)], 1e-4)
    assert rate > 2 / 0.01


def test_of_each_all_threads_are_at_work() -> None:
    """Calls of all threads run at once, and the rate is one thread's."""
    present = threading.Barrier(3, timeout=60)  # breaks unless all three are inside at once
    calls = [0, 0, 0]

    def one(i: int) -> None:
        if calls[i] < 2:
            present.wait()
        calls[i] += 1
        until = time.thread_time() + 2e-3
        while time.thread_time() < until:
            pass

    rate = of_each([lambda i=i: one(i) for i in range(3)], 0.01)  # type: ignore[misc]
    assert 0 < rate <= 1 / 2e-3
    assert min(calls) >= 2
