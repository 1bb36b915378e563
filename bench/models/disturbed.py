"""Latency beside another process that spins on one core, as a multiple of the latency without it.

    python -m bench disturbed SOURCE [--threads 2] [--rounds 7] [--peers onnxruntime openvino]
                              [--library OTHER.so ...] [--json FILE]

``SOURCE``: an .onnx file, or a model's name. Every system runs in a process of its own and is timed
with the spinning process stopped, beside it held on one of the cores, and beside it where the
scheduler puts it; rounds interleave the systems. Where C cores are used and one is shared equally,
C - 1/2 are left: on 2 cores the best possible multiple is 1.33. ``--library``: other compiled forms
of the model, as of another version of gtco, to be timed in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import machine
from bench.harness.process import Worker, WorkerError
from bench.harness.rounds import OPEN_TIMEOUT, WORKER, calls_per_round
from bench.harness.workload import candidates, prepare
from gtco.cli.arguments import new_file

SPINNING = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1]))\nwhile True: pass"
PLACES = ("quiet", "held", "free")
BUDGET = 0.5  # seconds of calls per system, place and round


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


def time_all(
    jobs: dict[str, dict[str, Any]], rounds: int, allowed: set[int]
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds of each system at each place (the mean call of every round), and the reasons why
    others failed.
    """
    workers: dict[str, Worker] = {}
    calls: dict[str, int] = {}
    seen: dict[str, dict[str, list[float]]] = {}
    errors: dict[str, str] = {}
    try:
        for name, job in jobs.items():
            workers[name] = Worker(WORKER)
            try:
                workers[name].ask(OPEN_TIMEOUT, do="open", job=job)
                once = float(workers[name].ask(OPEN_TIMEOUT, do="warm", seconds=1.0)["seconds"])
                calls[name], seen[name] = calls_per_round(once, BUDGET), {p: [] for p in PLACES}
                workers[name].stop()
            except WorkerError as error:
                errors[name] = str(error)
        with spinning({max(allowed)}) as held, spinning(allowed) as free:
            for _ in range(rounds):
                for name in seen:
                    for place, other in zip(PLACES, (None, held, free), strict=True):
                        if other:
                            other.send_signal(signal.SIGCONT)
                        times = workers[name].ask(do="time", calls=calls[name])["seconds"]
                        if other:
                            other.send_signal(signal.SIGSTOP)
                        seen[name][place].append(statistics.mean(times))
                    workers[name].stop()
    finally:
        for worker in workers.values():
            worker.kill()
    return seen, errors


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
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare(options.source, Path(folder), options.threads)
        chosen, skipped = candidates(workload, options.peers, options.threads)
        jobs = {candidate.name: dict(candidate.job) for candidate in chosen}
        for path in options.library:
            jobs[path.stem] = {**jobs["gtco"], "library": str(path.resolve())}
        seen, errors = time_all(jobs, options.rounds, os.sched_getaffinity(0))
    print(f"{machine.cpu_model()}, {options.threads} threads, {options.source}")
    print(f"{'':24} quiet [ms]   spinning held   spinning free")
    for name, by_place in seen.items():
        quiet, held, free = (statistics.median(by_place[place]) for place in PLACES)
        print(f"{name:24} {quiet * 1e3:10.2f}   {held / quiet:13.2f}   {free / quiet:13.2f}")
    failed = {**skipped, **errors}
    for name, reason in failed.items():
        print(f"{name:24} failed: {reason}")
    if options.json:
        report = {
            "machine": machine.describe(options.threads),
            "seconds": seen,
            "errors": {**skipped, **errors},
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
