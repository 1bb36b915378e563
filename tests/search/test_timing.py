"""Timing of calls on threads: what counts as time, and by which clock."""

from __future__ import annotations

import threading
import time

import pytest

from gtco.search.calibration import timing
from gtco.search.calibration.timing import of_each, together


def test_calls_together_are_counted_from_the_first_start_to_each_end() -> None:
    """Calls of known length, which sleep. The rate follows from their length, however busy the
    machine is, and is never higher. Every thread is at work at once.
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
    """The test has its own clock: one of two threads starts half-way through the window of the
    other.
    """
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
    # One thread makes 10 calls in 10 seconds. The other runs from 5 to 15: 10 calls in 15 seconds.
    assert together([call, call], 10.0) == pytest.approx(10 / 10 + 10 / 15)


def test_a_micro_kernel_is_timed_by_what_its_thread_computes() -> None:
    """Other processes that have the core for a while do not lower the rate. A call that sleeps
    stands for a call that waits for the core.
    """
    rate = of_each([lambda: time.sleep(0.01)], 1e-4)
    assert rate > 2 / 0.01


def test_of_each_all_threads_are_at_work() -> None:
    """The calls of all threads run at once; the rate is that of one thread."""
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


def test_threads_that_cannot_be_started_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that allows few processes. Those that did start do not wait for ever."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(OSError, match="can't start new thread, of 3 threads"):
        together([lambda: None] * 3, 0.01)
    (one,) = started
    assert not one.is_alive()


def test_a_call_that_fails_ends_the_threads_that_wait_for_it() -> None:
    """Ctrl-C is such a failure."""
    before = threading.active_count()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together([interrupted, lambda: None, lambda: None], 0.01)
    assert threading.active_count() == before
