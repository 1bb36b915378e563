"""The harness with fake systems: small processes that sleep, tick and fail as they are told."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.harness import worker
from bench.harness.agreement import Agreement, agree
from bench.harness.peers import load_inputs
from bench.harness.process import Worker, WorkerError
from bench.harness.rounds import Contender, Measurement, calls_per_round, compare
from gtco.verification.outputs import Verdict

FAKE = """
import json, os, sys, threading, time
import numpy as np
from bench.harness import worker
from bench.harness.worker import System

def open_fake(job):
    print("a library that talks on standard output")
    if job.get("fails_at_open"):
        raise ValueError(job["fails_at_open"])
    log, name, calls = job["log"], job["name"], [0]
    def note(what):
        with open(log, "a") as file:
            file.write(f"{time.monotonic()} {name} {what}\\n")
    def tick():  # what a spinning thread pool would do between calls
        while True:
            note("tick")
            time.sleep(0.01)
    if job.get("ticks"):
        threading.Thread(target=tick, daemon=True).start()
    def call():
        calls[0] += 1
        note("call")
        if calls[0] == job.get("dies_at_call"):
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(job["seconds"])
    def outputs():
        if job.get("fails_at_outputs"):
            raise ValueError(job["fails_at_outputs"])
        return [np.array(job.get("output", [1.0, -2.0]))]
    return System("1.0", call, outputs)

worker.WAKING = 0.0  # one call is thrown away
worker.serve({"fake": open_fake, "gtco": open_fake})
"""


@pytest.fixture
def fake(tmp_path):
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE)

    def make(name: str, seconds: float = 0.004, **job) -> Contender:
        job = {"system": "fake", "name": name, "log": str(log), "seconds": seconds, **job}
        return Contender(name, job, (sys.executable, str(script)))

    make.log = log
    return make


def events(log: Path) -> list[tuple[float, str, str]]:
    lines = [line.split() for line in log.read_text().splitlines()]
    return sorted((float(at), name, what) for at, name, what in lines)


def compare_quickly(candidates, rounds=4, **options):
    return compare(candidates, rounds, warm=0.02, budget=0.0, **options)  # 3 timed calls a round


def test_inputs_keep_their_shapes(tmp_path):
    """Also that of a number, and of what is not stored row by row."""
    given = {"sr": np.array(16000), "x": np.ones((3, 4), np.float32, order="F")}
    np.savez(tmp_path / "inputs.npz", **given)
    found = load_inputs({"inputs": str(tmp_path / "inputs.npz")})
    assert {name: x.shape for name, x in found.items()} == {"sr": (), "x": (3, 4)}
    assert all(x.flags.c_contiguous for x in found.values())


def test_rounds_are_interleaved_and_the_first_call_is_thrown_away(fake):
    result = compare_quickly([fake("a"), fake("b")])
    assert [len(m.rounds) for m in result.measurements] == [4, 4]
    assert all(len(r) == 3 for m in result.measurements for r in m.rounds)
    calls = [name for _, name, what in events(fake.log) if what == "call"]
    # Four rounds of (1 thrown away + 3 timed) calls each, in an order that rotates.
    assert calls[-32:] == [n for order in ("ab", "ba", "ab", "ba") for n in order for _ in range(4)]


def test_a_waiting_system_is_stopped_while_another_is_timed(fake):
    compare_quickly([fake("spinner", ticks=True), fake("b", 0.05)], rounds=2)
    seen = events(fake.log)
    # In one round of b (4 calls of 50 ms) the spinner would tick every 10 ms if it were awake.
    calls = [at for at, name, what in seen if name == "b" and what == "call"]
    ticks = [at for at, name, what in seen if name == "spinner" and what == "tick"]
    assert ticks, "the spinner never ticked: this test would prove nothing"
    last_round = calls[-4:]
    assert not [at for at in ticks if last_round[0] <= at <= last_round[-1]]


def test_timings_are_at_least_what_the_system_takes(fake):
    """How much longer they are depends on the machine."""
    result = compare_quickly([fake("fast", 0.002), fake("slow", 0.03)])
    for name, least in (("fast", 0.002), ("slow", 0.03)):
        calls = [seconds for r in result[name].rounds for seconds in r]
        assert min(calls) >= least and min(calls) <= result[name].median <= max(calls)


def test_median_is_over_rounds_and_p90_over_calls():
    m = Measurement("x", rounds=((1.0, 1.0, 9.0), (2.0, 2.0, 2.0), (3.0, 4.0, 3.0)))
    assert m.median == statistics.median([1.0, 2.0, 3.0])
    assert m.p90 == pytest.approx(5.0)  # between the two largest of nine, numpy's linear rule
    assert m.to_json()["rounds_s"][0] == [1.0, 1.0, 9.0]


def test_a_system_that_fails_to_open_is_reported_and_hides_nobody(fake):
    result = compare_quickly([fake("bad", fails_at_open="no such model"), fake("good")])
    assert result["bad"].error == "ValueError: no such model"
    assert result["bad"].rounds == () and "median_s" not in result["bad"].to_json()
    assert result["good"].error is None and len(result["good"].rounds) == 4


def test_a_process_that_dies_in_a_round_is_reported_with_its_last_words(fake):
    # Far more calls than the warm-up's 20 ms can hold at 10 ms each, so it dies while being timed.
    result = compare_quickly([fake("mortal", 0.01, dies_at_call=9), fake("good")])
    assert "in round" in result["mortal"].error
    assert "exit code 3" in result["mortal"].error and "out of luck" in result["mortal"].error
    assert result["mortal"].rounds == ()
    assert len(result["good"].rounds) == 4


def test_a_missing_command_of_a_worker_is_its_error(fake):
    worker = Worker((sys.executable, "-c", "import sys; sys.exit('nothing here')"))
    with pytest.raises(WorkerError, match=r"exit code 1.*nothing here"):
        worker.ask(do="open", job={})
    worker.kill()


def test_a_hanging_worker_times_out():
    worker = Worker((sys.executable, "-c", "import sys; sys.stdin.read()"))  # it never ends
    with pytest.raises(WorkerError, match="no answer in"):
        worker.ask(0.3, do="open", job={})
    worker.kill()


def test_outputs_are_held_against_the_reference(fake):
    result = compare_quickly(
        [
            fake("gtco", output=[1.0, -2.0002]),
            fake("off", output=[1.0, -2.2]),
            fake("shape", output=[1.0]),
            fake("nan", output=[float("nan"), -2.0]),
            fake("onnxruntime"),
        ],
        rounds=1,
    )
    assert result["gtco"].difference == pytest.approx(1e-4) and result["gtco"].disagrees is None
    assert "off by 1.0e-01" in result["off"].disagrees
    assert "shape" in result["shape"].disagrees
    assert "finite" in result["nan"].disagrees
    assert result["onnxruntime"].difference is None and result["onnxruntime"].disagrees is None


def test_gtco_is_never_held_against_itself():
    ours, theirs = [np.array([1.0, 2.0])], [np.array([1.0, 3.0])]
    alone = agree({"gtco": ours}, "onnxruntime", 1e-3)
    assert alone == {"gtco": Agreement(None)}
    beside = agree({"gtco": ours, "torch": theirs, "openvino": theirs}, "onnxruntime", 1e-3)
    assert "off by 3.3e-01" in beside["gtco"].reason
    assert beside["torch"] == Agreement(None) and beside["openvino"].difference == 0.0
    assert agree({}, "onnxruntime", 1e-3) == {}


def test_none_of_gtcos_own_systems_is_the_reference(fake):
    """A fault that all of them share is seen, whatever they are called."""
    wrong, right = [np.array([1.0, 2.0])], [np.array([1.0, 3.0])]
    ours = {"gtco": wrong, "gtco:quick": wrong, "open": wrong}
    seen = agree({**ours, "openvino": right}, "onnxruntime", 1e-3, own=["open"])
    assert all(seen[name].reason for name in ours) and seen["openvino"] == Agreement(None)
    assert agree(ours, "onnxruntime", 1e-3, own=["open"]) == dict.fromkeys(ours, Agreement(None))
    named = [fake(name, system="gtco", output=[1.0, 5.0]) for name in ("open", "static")]
    result = compare_quickly([*named, fake("openvino")], rounds=1)
    assert result["open"].disagrees and result["static"].disagrees
    assert result["openvino"].disagrees is None and result["openvino"].difference is None


def test_a_judge_is_asked_where_outputs_of_one_shape_differ():
    asked = []

    def judge(actual, expected, reference):
        asked.append((actual, expected, reference))
        right = bool(actual[0][0] == 1.0)
        return Verdict(right, "float64 says so")

    outputs = {
        "gtco": [np.array([1.0, 2.0])],
        "near": [np.array([1.0, 3.0001])],
        "off": [np.array([0.0, 3.0])],
        "shape": [np.array([1.0])],
        "onnxruntime": [np.array([1.0, 3.0])],
    }
    seen = agree(outputs, "onnxruntime", 1e-3, judge)
    ours = seen["gtco"]
    assert ours.reason is None and ours.judged == "float64 says so"
    assert ours.difference == pytest.approx(1 / 3)
    assert seen["near"].judged is None and seen["near"].reason is None
    assert seen["off"].judged is None and seen["off"].reason.endswith("; float64 says so")
    assert "shape" in seen["shape"].reason and len(asked) == 2
    assert all(each[1:] == (outputs["onnxruntime"], "onnxruntime") for each in asked)


def test_nan_beside_nan_is_no_agreement():
    nan = [np.full(3, np.nan)]
    seen = agree({"onnxruntime": nan, "gtco": nan}, "onnxruntime", 1.0)
    assert "nothing to compare" in seen["gtco"].reason


def test_the_peak_is_read_between_rounds(fake):
    result = compare_quickly([fake("a")], rounds=5, peak=fake("peak", output=[2.5e11]))
    assert result.peaks == (2.5e11,) * 3 and result.peak == 2.5e11
    failing = compare_quickly([fake("a")], rounds=1, peak=fake("peak", fails_at_open="no kernel"))
    assert failing.peak is None and "no kernel" in failing.peak_error
    assert len(failing["a"].rounds) == 1


def test_a_worker_without_a_peak_disturbs_no_round(fake):
    """One that did not answer in time would go on measuring beside the systems."""
    peak = fake("peak", ticks=True, fails_at_outputs="no kernel")
    result = compare_quickly([fake("a", 0.05)], rounds=2, peak=peak)
    assert result.peak is None and "no kernel" in result.peak_error
    seen = events(fake.log)
    calls = [at for at, name, what in seen if name == "a" and what == "call"]
    ticks = [at for at, name, what in seen if name == "peak" and what == "tick"]
    assert ticks and ticks[-1] < calls[-8]


def test_calls_fill_the_budget_within_bounds():
    assert calls_per_round(1.0, 0.3) == 3
    assert calls_per_round(0.01, 0.3) == 30
    assert calls_per_round(1e-6, 0.3) == 50


def test_what_was_stopped_is_awake_before_it_is_timed(monkeypatch):
    """It is called as often as fills that time, because a GPU's clocks take some milliseconds to
    rise.
    """
    now, calls = [0.0], []

    def call():
        calls.append(now[0])
        now[0] += 0.004

    monkeypatch.setattr(worker, "CLOCK", lambda: now[0])
    system = worker.System("1.0", call, list)
    seconds = worker._time(system, {"calls": 3})["seconds"]
    assert seconds == pytest.approx([0.004] * 3)
    assert calls[-3] >= worker.WAKING and calls[-4] < worker.WAKING
