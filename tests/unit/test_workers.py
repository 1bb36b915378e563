"""Worker processes: jobs come back as kernels; crashes, exceptions and overruns as failures."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gtco.codegen.build import Failure, Job, Kernel, ProgramJob
from gtco.codegen.workers import Workers
from gtco.gpu import gpu_target
from gtco.target import target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch import sketches
from gtco.tensor.space import Config, configs
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType

MACHINE = target("x86-64-v3")


def relu(size: int = 32) -> Stage:
    shape = TensorType((size,))
    return Stage((StageInput("x", shape),), (Operator("relu", ("x",), "y", shape),))


def job(symbol: str, sketch: str = "elementwise") -> Job:
    stage = relu()
    found = next(s for s in sketches(stage, MACHINE) if s.name == "elementwise")
    config = next(iter(configs(found)))
    return Job(symbol, stage, Config(sketch, config.choices), MACHINE)


def worker(folder: Path, body: str) -> tuple[str, str]:
    """The command of a worker that runs ``body`` with ``connection`` and ``job``, for ever."""
    script = folder / "worker.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "from gtco.codegen.build import Failure, Kernel\n"
        "connection = Connection(int(sys.argv[1]))\n"
        "while True:\n"
        "    job = connection.recv()\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    return (sys.executable, str(script))


ANSWER = "connection.send(Kernel(job.symbol, b'', 1, 0, {}))"


def test_a_kernel_and_a_refusal() -> None:
    """Real workers: an object file for one job, the reason for the other."""
    with Workers(1) as workers:
        answers = {a.symbol: a for a in workers.build([job("good"), job("bad", "no such sketch")])}
    good, bad = answers["good"], answers["bad"]
    assert isinstance(good, Kernel) and good.code[:4] == b"\x7fELF" and good.tasks >= 1
    assert isinstance(bad, Failure) and "no sketch 'no such sketch' for relu" in bad.reason


def test_an_exception_in_the_compiler_is_a_failure() -> None:
    stage = relu()
    broken = Stage(stage.inputs, (Operator("relu", ("absent",), "y", TensorType((32,))),))
    given = job("broken")
    with Workers(1) as workers:
        first, second = workers.build([Job("broken", broken, given.config, MACHINE), job("after")])
    assert isinstance(first, Failure) and "Error" in first.reason and ".py:" in first.reason
    assert isinstance(second, Kernel), "the process that met the exception goes on"


@pytest.mark.parametrize("count", [1, 3])
def test_a_crash_names_the_signal_and_the_others_go_on(tmp_path: Path, count: int) -> None:
    crash = "if job.symbol == 'b': os.kill(os.getpid(), signal.SIGSEGV)\n" + ANSWER
    with Workers(count, command=worker(tmp_path, crash)) as workers:
        answers = {a.symbol: a for a in workers.build([job(s) for s in "abcd"])}
    assert answers.keys() == set("abcd")
    dead = answers["b"]
    assert isinstance(dead, Failure) and "SIGSEGV" in dead.reason
    assert all(isinstance(answers[s], Kernel) for s in "acd")


def test_every_process_may_die(tmp_path: Path) -> None:
    with Workers(2, command=worker(tmp_path, "sys.exit(3)")) as workers:
        answers = list(workers.build([job(s) for s in "abcde"]))
    assert sorted(a.symbol for a in answers) == list("abcde")
    assert all(isinstance(a, Failure) and "exit code 3" in a.reason for a in answers)


def test_an_overrun_ends_and_the_others_go_on(tmp_path: Path) -> None:
    """The clock stands still until the slow job has begun, and then an hour has passed: however
    slow the machine is, that job alone overruns."""
    begun = tmp_path / "begun"
    slow = f"if job.symbol == 'b': open({str(begun)!r}, 'w').close(); time.sleep(600)\n" + ANSWER
    command = worker(tmp_path, slow)
    with Workers(1, command=command, timeout=3.0, clock=lambda: 3600.0 * begun.exists()) as workers:
        pids = [w.process.pid for w in workers.workers]
        answers = {a.symbol: a for a in workers.build([job(s) for s in "abc"])}
    late = answers["b"]
    assert isinstance(late, Failure) and "took over 3 s" in late.reason
    assert isinstance(answers["a"], Kernel) and isinstance(answers["c"], Kernel)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_kernel_of_a_whole_model_may_take_longer(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    slow = f"open({str(begun)!r}, 'w').close(); time.sleep(1.5)\n" + ANSWER
    command = worker(tmp_path, slow)
    program = CudaProgram("", (1, 1, 1), 32)
    jobs = [ProgramJob("whole", program, gpu_target("cuda:sm_80"))]
    with Workers(1, command=command, timeout=3.0, clock=lambda: 10.0 * begun.exists()) as workers:
        (answer,) = workers.build(jobs)
    assert isinstance(answer, Kernel)


def test_leaving_ends_the_processes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with Workers(2, command=worker(tmp_path, "time.sleep(600)")) as workers:
            pids = [w.process.pid for w in workers.workers]
            raise KeyboardInterrupt
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def test_an_interruption_while_they_start_ends_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, pids = Workers._start, []

    def interrupted(workers: Workers) -> Any:
        if pids:
            raise KeyboardInterrupt
        pids.append((found := start(workers)).process.pid)
        return found

    monkeypatch.setattr(Workers, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(2, command=worker(tmp_path, "time.sleep(600)"))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
