"""Worker processes: jobs come back as kernels; crashes, exceptions and overruns come back as
failures.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gtco.codegen import processes
from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.processes import early
from gtco.codegen.workers import Ahead, Workers
from gtco.machine.gpu import gpu_target
from gtco.machine.target import target
from gtco.support.errors import BuildError
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
    """The command of a worker that runs ``body`` with ``connection`` and ``job``, without end."""
    script = folder / "worker.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "from gtco.codegen.jobs import Failure, Kernel\n"
        "connection = Connection(int(sys.argv[1]))\n"
        "while True:\n"
        "    job = connection.recv()\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    return (sys.executable, str(script))


ANSWER = "connection.send(Kernel(job.symbol, b'', 1, 0, {}))"


def test_a_kernel_and_a_refusal() -> None:
    """Real workers: an object file for one job, and the reason for the other."""
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
    """The clock stops until the slow job has begun, and then an hour has passed. However slow the
    machine is, only this job overruns.
    """
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


@pytest.mark.parametrize("sent", [2, 100])
def test_an_answer_that_was_begun_and_never_ended(tmp_path: Path, sent: int) -> None:
    """The process stops in the middle of a message. It overruns its time as if it had sent nothing,
    and the others continue.
    """
    begun = tmp_path / "begun"
    stuck = (
        "import pickle, struct\n"
        "text = pickle.dumps(Kernel(job.symbol, bytes(1000), 1, 0, {}))\n"
        "if job.symbol == 'b':\n"
        f"    os.write(connection.fileno(), (struct.pack('!i', len(text)) + text)[:{sent}])\n"
        f"    open({str(begun)!r}, 'w').close(); time.sleep(600)\n" + ANSWER
    )
    command = worker(tmp_path, stuck)
    with Workers(1, command=command, timeout=3.0, clock=lambda: 3600.0 * begun.exists()) as workers:
        answers = {a.symbol: a for a in workers.build([job(s) for s in "abc"])}
    late = answers["b"]
    assert isinstance(late, Failure) and "took over 3 s" in late.reason
    assert isinstance(answers["a"], Kernel) and isinstance(answers["c"], Kernel)


def test_an_answer_that_comes_in_pieces(tmp_path: Path) -> None:
    """The answer takes several reads, with pauses, and has the form of length for huge messages."""
    slow = (
        "import pickle, struct\n"
        "text = pickle.dumps(Kernel(job.symbol, os.urandom(3 << 20), 1, 0, {}))\n"
        "text = struct.pack('!iQ', -1, len(text)) + text\n"
        "for piece in (text[:2], text[2:7], text[7:300], text[300:]):\n"
        "    while piece:\n"
        "        piece = piece[os.write(connection.fileno(), piece):]\n"
        "    time.sleep(0.05)"
    )
    with Workers(2, command=worker(tmp_path, slow)) as workers:
        answers = list(workers.build([job(s) for s in "abc"]))
    assert sorted(a.symbol for a in answers) == list("abc")
    assert all(isinstance(a, Kernel) and len(a.code) == 3 << 20 for a in answers)


def test_the_kernel_of_a_whole_model_may_take_longer(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    slow = f"open({str(begun)!r}, 'w').close(); time.sleep(1.5)\n" + ANSWER
    command = worker(tmp_path, slow)
    program = CudaProgram("", (1, 1, 1), 32)
    jobs = [ProgramJob("whole", program, gpu_target("cuda:sm_80"))]
    with Workers(1, command=command, timeout=3.0, clock=lambda: 10.0 * begun.exists()) as workers:
        (answer,) = workers.build(jobs)
    assert isinstance(answer, Kernel)


def test_jobs_that_are_built_ahead(tmp_path: Path) -> None:
    """Their answers come in the order of the jobs, whichever is built first. More may be added, and
    a process that dies takes only its own job with it.
    """
    body = (
        "if job.symbol == 'a': time.sleep(0.2)\n"
        "if job.symbol == 'c': sys.exit(3)\n" + ANSWER
    )
    with Workers(2, command=worker(tmp_path, body)) as workers:
        for rest in ("", "def"):
            with Ahead(workers) as ahead:
                ahead.add([job(s) for s in "abc"])
                ahead.add([job(s) for s in rest])
                answers = ahead.answers()
            assert [a.symbol for a in answers] == [*"abc", *rest]
            assert [a.symbol for a in answers if isinstance(a, Failure)] == ["c"]
        (after,) = workers.build([job("after")])
        assert isinstance(after, Kernel)


def test_nothing_is_ahead(tmp_path: Path) -> None:
    with Workers(1, command=worker(tmp_path, ANSWER)) as workers, Ahead(workers) as ahead:
        assert ahead.answers() == []


def test_guesses_are_built_by_workers_that_nothing_else_waits_for(tmp_path: Path) -> None:
    """Later guesses replace earlier ones that no worker has begun. A worker does not begin the same
    guess twice, but it begins a guess that stands for another kernel of the same name.
    """
    gate = tmp_path / "gate"
    body = (
        f"while job.symbol == 'first' and not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        f"open({str(tmp_path)!r} + '/built', 'a').write(job.symbol + '\\n')\n" + ANSWER
    )
    other = replace(job("c"), text=True)
    with Workers(1, command=worker(tmp_path, body)) as workers, Ahead(workers) as ahead:
        ahead.add([job("first")])
        ahead.guess([job("gone")])
        ahead.guess([job("a"), job("c")])
        ahead.add([job("second")])
        gate.touch()
        until = time.monotonic() + 60
        while "c" not in ahead.guessed() and time.monotonic() < until:
            time.sleep(0.01)
        assert [a.symbol for a in ahead.so_far()] == ["first", "second"]
        ahead.guess([job("a"), other])
        while ahead.guessed()["c"][0] != other and time.monotonic() < until:
            time.sleep(0.01)
        assert [a.symbol for a in ahead.answers()] == ["first", "second"]
        assert {s: one for s, (one, _) in ahead.guessed().items()} == {"a": job("a"), "c": other}
    built = (tmp_path / "built").read_text().split()
    assert built == ["first", "second", "a", "c", "c"]


def test_leaving_what_is_built_ahead(tmp_path: Path) -> None:
    """The thread ends, with jobs that are waiting and one that hangs, and so do the processes."""
    with pytest.raises(KeyboardInterrupt):
        with Workers(2, command=worker(tmp_path, "time.sleep(600)")) as workers:
            pids = [w.process.pid for w in workers.workers]
            with Ahead(workers) as ahead:
                ahead.add([job(s) for s in "abcde"])
                raise KeyboardInterrupt
    assert not [t for t in threading.enumerate() if t.name == "gtco-workers"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def test_a_stage_may_change_while_its_job_waits(tmp_path: Path) -> None:
    """A stage remembers answers about itself, and its job is a message by then."""
    with Workers(1, command=worker(tmp_path, ANSWER)) as workers, Ahead(workers) as ahead:
        jobs = [job(f"k{n}") for n in range(20)]
        ahead.add(jobs)
        for one in jobs:
            one.stage.found["answer"] = lambda: None  # no pickle has this
        assert all(isinstance(a, Kernel) for a in ahead.answers())


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

    monkeypatch.setattr("gtco.codegen.workers.allowed_cores", lambda: 2)
    monkeypatch.setattr(Workers, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(2, command=worker(tmp_path, "time.sleep(600)"))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def processes_of(workers: Workers) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process from which real workers are forked, and the workers, once they have answered."""
    assert workers.forks is not None
    list(workers.build([job(f"s{n}") for n in range(4 * workers.count)]))
    server = psutil.Process(workers.forks.process.pid)
    return server, server.children()


def ended(*those: psutil.Process) -> bool:
    """True if they end, even if nobody has asked for their exit codes yet."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in those):
            return True
        time.sleep(0.02)
    return False


def test_real_workers_are_forks_of_one_process() -> None:
    """Only this process imports TVM. A worker that dies is reported and replaced."""
    with Workers(3) as workers:
        server, forked = processes_of(workers)
        assert len(forked) == 3 and all(p.cmdline() == server.cmdline() for p in forked)
        assert all(p.num_threads() == 1 for p in (server, *forked))
        forked[1].send_signal(signal.SIGSEGV)
        answers = list(workers.build([job(s) for s in "abcdef"]))
        dead = [a for a in answers if isinstance(a, Failure)]
        assert len(answers) == 6 and len(dead) <= 1
        assert all("SIGSEGV" in a.reason for a in dead)
        _, now = processes_of(workers)
        assert len([p for p in now if p.status() != psutil.STATUS_ZOMBIE]) == 3
    assert not any(p.is_running() for p in (server, *forked, *now))


def test_a_real_worker_that_hangs_is_ended() -> None:
    """It stops before it answers; an hour has passed when it is checked."""
    ticks = itertools.count(0, 3600)
    with Workers(2) as workers:
        _, forked = processes_of(workers)
        for process in forked:
            process.suspend()
        workers.clock = lambda: float(next(ticks))
        late = list(workers.build([job("a"), job("b")]))
        assert [isinstance(a, Failure) and "took over" in a.reason for a in late] == [True, True]
        assert not any(p.is_running() for p in forked)
        workers.clock = time.monotonic
        assert all(isinstance(a, Kernel) for a in workers.build([job("c"), job("d")]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_process_they_are_forked_from(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is killed, or stopped for good. Its workers end with it, and new ones are
    started.
    """
    monkeypatch.setattr(processes, "ENDING", 0.5)
    with Workers(2) as workers:
        server, forked = processes_of(workers)
        server.send_signal(number)
        for process in forked:
            process.kill()
        answers = list(workers.build([job(s) for s in "abcdef"]))
        assert len(answers) == 6 and any(isinstance(a, Kernel) for a in answers)
        assert all("process died" in a.reason for a in answers if isinstance(a, Failure))
        assert workers.forks is not None and server.pid != workers.forks.process.pid
    assert ended(server, *forked)


def test_forks_end_with_the_process_that_uses_them(tmp_path: Path, root: Path) -> None:
    """This holds even if that process is killed and they hang."""
    script = (
        "import sys, time\n"
        "from tests.codegen.test_workers import Workers, processes_of\n"
        "server, forked = processes_of(workers := Workers(2))\n"
        "for p in forked: p.suspend()\n"
        "print(server.pid, *[p.pid for p in forked], flush=True)\n"
        "time.sleep(600)\n"
    )
    user = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE)
    assert user.stdout is not None
    started = [psutil.Process(int(pid)) for pid in user.stdout.readline().split()]
    assert len(started) == 3
    user.kill()
    user.communicate()
    assert ended(*started)


def test_workers_take_the_process_that_was_started_early() -> None:
    with early():
        (first,) = processes._early
        with Workers(1) as workers:
            assert workers.forks is first and not processes._early
            assert isinstance(next(workers.build([job("a")])), Kernel)
        with Workers(1) as workers:
            assert workers.forks is not first
    assert not first.alive
    with early():
        (unused,) = processes._early
    assert not unused.alive and not processes._early


def test_where_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A container's limit of processes is not a fault of gtco's."""
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "def fork():\n"
        "    raise OSError(errno.EAGAIN, 'there are enough')\n"
        "if 'gtco.codegen.fork_server' in sys.orig_argv:\n"
        "    os.fork = fork\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Workers(1) as workers, pytest.raises(BuildError, match="can be started: allow more"):
        list(workers.build([job("a")]))
    assert "there are enough" in capfd.readouterr().err


def test_where_there_are_threads_workers_import_by_themselves(tmp_path: Path) -> None:
    """A fork would copy only one of the threads."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'gtco.codegen.fork_server' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with Workers(1) as workers:
            (answer,) = workers.build([job("a")])
            assert isinstance(answer, Kernel)
            _, (spawned,) = processes_of(workers)
            assert "gtco.codegen.serve" in spawned.cmdline()
    finally:
        sys.path.remove(str(tmp_path))


def test_no_more_start_than_there_are_jobs_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Workers._start, []

    def counted(workers: Workers) -> Any:
        started.append(1)
        return start(workers)

    monkeypatch.setattr(Workers, "_start", counted)
    monkeypatch.setattr("gtco.codegen.workers.allowed_cores", lambda: 2)
    with Workers(1000, command=worker(tmp_path, ANSWER)) as workers:
        assert len(started) == 2
        assert len(list(workers.build([job(f"k{n}") for n in range(5)]))) == 5
        assert len(list(workers.build([job("last")]))) == 1
    assert len(started) == 5
