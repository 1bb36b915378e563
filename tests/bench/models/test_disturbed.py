"""``python -m bench disturbed``: which readings count, and what a row says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench.harness.process import Worker, WorkerError
from bench.harness.workload import Workload
from bench.models import disturbed
from bench.models.disturbed import Disturbed, cpu_seconds, line, spinning
from gtco.support.errors import OptionError


def test_a_reading_counts_where_its_quiet_neighbours_agree() -> None:
    assert Disturbed(1.0, 1.4, 1.04, 0.5).steady
    assert not Disturbed(1.0, 1.4, 1.3, 0.5).steady
    assert Disturbed(1.0, 1.5, 1.0, 0.5).multiple == pytest.approx(1.5)


def test_a_row_leaves_out_what_does_not_count() -> None:
    good, bad = Disturbed(1.0, 1.4, 1.0, 0.5), Disturbed(1.0, 9.0, 1.5, 0.5)
    row = line("gtco", {"held": [bad, good, bad], "free": [bad]}, cores=2)
    assert "1.40 (1.33)" in row and "3 of 4" in row
    assert "9.0" not in row and row.count(" - ") == 1


def test_a_core_that_is_taken_whole_leaves_nothing_to_one_thread() -> None:
    taken = Disturbed(1.0, 3.0, 1.0, 1.0)
    assert "3.00 (inf)" in line("gtco", {"held": [taken], "free": [taken]}, cores=1)


class Stub:
    """A worker whose system takes 1 ms. ``lazy`` does not open, ``mortal`` dies in a round."""

    made: ClassVar[list[Stub]] = []

    def __init__(self, _: Any) -> None:
        self.asked: list[str] = []
        self.job: dict[str, Any] = {}
        self.ended = False
        self.made.append(self)

    def ask(self, *_: Any, do: str, job: Any = None, **__: Any) -> dict[str, Any]:
        self.job = job or self.job
        self.asked.append(do)
        if self.job["system"] == "lazy":
            raise WorkerError("no answer in 900 s")
        if self.job["system"] == "mortal" and self.asked.count("time") == 8:
            raise WorkerError("the process ended")
        return {"seconds": [1e-3] if do == "time" else 1e-3}

    def stop(self) -> None:
        assert not self.ended

    def kill(self) -> None:
        self.ended = True


def test_a_system_that_fails_is_ended_and_costs_its_own_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stub, "made", [])
    monkeypatch.setattr(disturbed, "Worker", Stub)
    jobs = {name: {"system": name} for name in ("lazy", "mortal", "gtco")}
    seen, errors = disturbed.time_all(jobs, 2, os.sched_getaffinity(0))
    assert errors == {"lazy": "no answer in 900 s", "mortal": "the process ended"}
    assert list(seen) == ["gtco"] and [len(r) for r in seen["gtco"].values()] == [2, 2]
    lazy, mortal, _ = Stub.made
    assert lazy.asked == ["open"] and mortal.asked.count("time") == 8
    assert all(stub.ended for stub in Stub.made)


def test_libraries_of_one_name_are_timed_both(
    workload: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(OptionError, match="unknown peer opnevino"):
        disturbed.main(["m.onnx", "--peers", "opnevino"])
    asked: dict[str, dict[str, Any]] = {}

    def time_all(jobs: dict[str, dict[str, Any]], *_: Any) -> tuple[Any, Any]:
        asked.update(jobs)
        return {}, {"openvino": "crashed"} if "openvino" in jobs else {}

    monkeypatch.setattr(disturbed, "prepare", lambda *_: workload)
    monkeypatch.setattr(disturbed, "time_all", time_all)
    libraries = [str(tmp_path / name) for name in ("old/vit.so", "new/vit.so", "gtco.so")]
    assert disturbed.main(["m.onnx", "--peers", "openvino", "--library", *libraries]) == 1
    assert {name: job["library"] for name, job in asked.items() if name != "openvino"} == {
        **{"gtco": "m.so", "vit": libraries[0]},
        **{library: library for library in libraries[1:]},
    }
    assert "openvino" in asked and "failed: crashed" in capsys.readouterr().out
    assert disturbed.main(["m.onnx", "--peers"]) == 0


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
