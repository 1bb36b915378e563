"""Latency beside another process that spins on one core, as a multiple of the latency without it.

    python -m bench disturbed SOURCE [--threads 2] [--rounds 7] [--peers onnxruntime openvino]
                              [--library OTHER.so ...] [--json FILE]

``SOURCE``: an .onnx file, or a model's name. Every system runs in a process of its own and is timed
beside the spinning process held on one of the cores, and beside it where the scheduler puts it;
rounds interleave the systems. Of C cores, the spinning process takes the share s that the scheduler
gives it, so that the best possible multiple is C / (C - s): 1.33 where one of 2 cores is shared
equally. It is printed beside the multiple.

Each disturbed reading stands between two quiet ones and is held against their mean. Virtual
machines change their speed by a fifth from one second to the next, for instance after a pause. A
reading whose two quiet neighbours differ by more than 5 % does not count and is repeated, at most
twice a round.

``--library``: other compiled forms of the model, as of another version of gtco, to be timed in the
same rounds.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gtco.cli.arguments import new_file
from gtco.support.errors import BuildError

from ..harness import machine
from ..harness.process import Worker, WorkerError
from ..harness.rounds import OPEN_TIMEOUT, WORKER, calls_per_round
from ..harness.suite import write_report
from ..harness.workload import candidates, check_peers, prepare

SPINNING = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1]))\nwhile True: pass"
PLACES = ("held", "free")
BUDGET = 0.7  # seconds of calls per reading
STEADY = 0.05  # the difference of the quiet readings around one that counts, as a share
REPEATS = 3  # of a reading in one round until it counts


@dataclass(frozen=True)
class Disturbed:
    """The mean call beside the spinning process, and before and after it without; seconds.
    ``taken``: the cores that the spinning process had.
    """

    before: float
    during: float
    after: float
    taken: float

    @property
    def quiet(self) -> float:
        return (self.before + self.after) / 2

    @property
    def steady(self) -> bool:
        return abs(self.before - self.after) <= STEADY * self.quiet

    @property
    def multiple(self) -> float:
        return self.during / self.quiet


@contextmanager
def spinning(cpus: set[int]) -> Iterator[subprocess.Popen[bytes]]:
    """A stopped process that spins on these CPUs when it continues."""
    process = subprocess.Popen([sys.executable, "-c", SPINNING, repr(cpus)])
    try:
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has had."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def time_all(
    jobs: dict[str, dict[str, Any]], rounds: int, allowed: set[int]
) -> tuple[dict[str, dict[str, list[Disturbed]]], dict[str, str]]:
    """The readings of each system at each place, those that do not count included, and the reasons
    why other systems failed.
    """
    workers: dict[str, Worker] = {}
    calls: dict[str, int] = {}
    seen: dict[str, dict[str, list[Disturbed]]] = {}
    errors: dict[str, str] = {}

    def mean_call(name: str) -> float:
        return statistics.mean(workers[name].ask(do="time", calls=calls[name])["seconds"])

    def disturbed(name: str, other: subprocess.Popen[bytes]) -> Disturbed:
        before = mean_call(name)
        began, had = time.perf_counter(), cpu_seconds(other.pid)
        other.send_signal(signal.SIGCONT)
        try:
            during = mean_call(name)
        finally:
            other.send_signal(signal.SIGSTOP)
        taken = (cpu_seconds(other.pid) - had) / (time.perf_counter() - began)
        return Disturbed(before, during, mean_call(name), taken)

    def turn(name: str, others: dict[str, subprocess.Popen[bytes]]) -> None:
        workers[name].ask(do="warm", seconds=1.0)
        for place, other in others.items():
            for _ in range(REPEATS):
                seen[name][place].append(disturbed(name, other))
                if seen[name][place][-1].steady:
                    break
        workers[name].stop()

    def fail(name: str, error: WorkerError) -> None:
        """Ends the worker, whose threads may still run beside the others."""
        errors[name] = str(error)
        seen.pop(name, None)
        workers.pop(name).kill()

    try:
        for name, job in jobs.items():
            workers[name] = Worker(WORKER)
            try:
                workers[name].ask(OPEN_TIMEOUT, do="open", job=job)
                once = float(workers[name].ask(OPEN_TIMEOUT, do="warm", seconds=1.0)["seconds"])
                calls[name] = calls_per_round(once, BUDGET)
                seen[name] = {place: [] for place in PLACES}
                workers[name].stop()
            except WorkerError as error:
                fail(name, error)
        with spinning({max(allowed)}) as held, spinning(allowed) as free:
            for _ in range(rounds):
                for name in list(seen):
                    try:
                        turn(name, {"held": held, "free": free})
                    except WorkerError as error:
                        fail(name, error)
    finally:
        for worker in workers.values():
            worker.kill()
    return seen, errors


def line(name: str, by_place: dict[str, list[Disturbed]], cores: int) -> str:
    """A system's row: the median quiet call, at each place the median multiple and the best
    possible one, and how many readings do not count. A place without a steady reading has a dash.
    """
    readings = [r for place in PLACES for r in by_place[place]]
    quiet = statistics.median(r.quiet for r in readings)
    cells = []
    for place in PLACES:
        steady = [r for r in by_place[place] if r.steady]
        if not steady:
            cells.append(f"{'-':>13}")
            continue
        multiple = statistics.median(r.multiple for r in steady)
        left = cores - statistics.median(r.taken for r in steady)
        possible = cores / left if left > 0 else math.inf
        cells.append(f"{f'{multiple:.2f} ({possible:.2f})':>13}")
    unsteady = sum(not r.steady for r in readings)
    return f"{name:24} {quiet * 1e3:10.2f}   {'   '.join(cells)}   {unsteady} of {len(readings)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench disturbed", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", nargs="*", default=["onnxruntime", "openvino"])
    parser.add_argument("--library", type=Path, nargs="+", default=[])
    parser.add_argument("--json", type=new_file)
    options = parser.parse_args(arguments)
    check_peers(",".join(options.peers))  # before anything is compiled
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare(options.source, Path(folder), options.threads)
        chosen, skipped = candidates(workload, options.peers, options.threads)
        jobs = {candidate.name: dict(candidate.job) for candidate in chosen}
        for path in options.library:
            if "gtco" in skipped:
                raise BuildError(f"{options.source} cannot be compiled: {skipped['gtco']}")
            name = str(path) if path.stem in jobs else path.stem
            jobs[name] = {**jobs["gtco"], "library": str(path.resolve())}
        seen, errors = time_all(jobs, options.rounds, os.sched_getaffinity(0))
    print(f"{machine.cpu_model()}, {options.threads} threads, {options.source}")
    print(f"{'':24} quiet [ms]   spinning held   spinning free   unsteady")
    for name, by_place in seen.items():
        print(line(name, by_place, options.threads))
    failed = {**skipped, **errors}
    for name, reason in failed.items():
        print(f"{name:24} failed: {reason}")
    if options.json:
        report = {
            "seconds": {
                name: {place: [asdict(r) for r in readings] for place, readings in by_place.items()}
                for name, by_place in seen.items()
            },
            "errors": failed,
        }
        write_report(options.json, options.threads, options.rounds, report)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
