"""``python -m bench disturbed``: which readings count, and what a row says."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from bench.harness.process import Worker
from bench.models.disturbed import Disturbed, cpu_seconds, line, spinning


def test_a_reading_counts_where_its_quiet_neighbours_agree() -> None:
    assert Disturbed(1.0, 1.4, 1.04, 0.5).steady
    assert not Disturbed(1.0, 1.4, 1.3, 0.5).steady
    assert Disturbed(1.0, 1.5, 1.0, 0.5).multiple == pytest.approx(1.5)


def test_a_row_leaves_out_what_does_not_count() -> None:
    good, bad = Disturbed(1.0, 1.4, 1.0, 0.5), Disturbed(1.0, 9.0, 1.5, 0.5)
    row = line("gtco", {"held": [bad, good, bad], "free": [bad]}, cores=2)
    assert "1.40 (1.33)" in row and "3 of 4" in row
    assert "9.0" not in row and row.count(" - ") == 1


def test_the_spinning_process_and_a_worker_share_a_core_equally() -> None:
    """They are in one session: Linux shares a CPU between sessions first."""
    worker = Worker([sys.executable, "-c", "pass"])
    try:
        assert os.getsid(worker._process.pid) == os.getsid(0)
        assert os.getpgid(worker._process.pid) == worker._process.pid
    finally:
        worker.kill()


def test_a_spinning_process_takes_cpu_time_only_while_it_continues() -> None:
    with spinning(os.sched_getaffinity(0)) as process:
        time.sleep(0.2)
        before = cpu_seconds(process.pid)
        time.sleep(0.2)
        assert cpu_seconds(process.pid) == before
        process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while cpu_seconds(process.pid) == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
