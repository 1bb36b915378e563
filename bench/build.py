"""Compile one model with gtco in a process of its own, and watch the wall time and the peak memory
from outside.

``python -m bench.build JOB.json`` is that process: it writes the compile report's numbers, or why
there are none, to the file the job names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.process import child_environment

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Build:
    """A finished compile: wall seconds of the whole process, peak bytes of it and its workers, and
    the report's numbers.
    """

    library: str
    seconds: float
    peak_memory_bytes: int
    weights_bytes: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    stages: int = 0
    notes: tuple[str, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    model: str | Path,
    library: str | Path,
    threads: int,
    shapes: Mapping[str, int] | None = None,
    precision: str = "fp32",
    timeout: float = 1800.0,
    tune: str = "off",
    target: str = "native",
) -> Build:
    """Compile ``model`` (.onnx) to ``library``. Never raises for a failed compile: ``error`` says
    why.
    """
    with tempfile.TemporaryDirectory(prefix="gtco-build-") as folder:
        job, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        job.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "library": str(library),
                    "threads": threads,
                    "shapes": dict(shapes or {}),
                    "precision": precision,
                    "tune": tune,
                    "target": target,
                    "answer": str(answer),
                }
            )
        )
        start = time.perf_counter()
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.build", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
            )
            watch = MemoryWatch(process.pid)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                peak = watch.stop()
            seconds = time.perf_counter() - start
            if code is not None and answer.exists():
                return Build(str(library), seconds, peak, **_tuples(json.loads(answer.read_text())))
            log.seek(0)
            tail = log.read().decode(errors="replace").strip().splitlines()
        reason = (
            f"no result in {timeout:.0f} s"
            if code is None
            else (tail[-1] if tail else f"exit code {code}")
        )
        return Build(str(library), seconds, peak, error=reason)


class MemoryWatch:
    """Samples the proportional set size of a process and all its descendants (shared pages count
    once), from a thread.
    """

    def __init__(self, pid: int):
        self._pid, self._peak, self._done = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the sampling; the largest sum seen, in bytes."""
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, sum(map(memory_bytes, family(self._pid))))
            if self._done.wait(SAMPLE_SECONDS):
                return


def family(pid: int) -> list[int]:
    """The process and its descendants that live now."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        for task in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                queue += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # the thread ended meanwhile
    return found


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _tuples(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        return answer
    answer["phases"] = tuple((name, seconds) for name, seconds in answer["phases"])
    answer["notes"] = tuple(answer["notes"])
    return answer


def main(argv: list[str]) -> int:
    from gtco.torchless import import_tvm

    import_tvm()  # as the command line does
    from gtco.compiler import compile_to_file
    from gtco.errors import GtcoError

    job = json.loads(Path(argv[0]).read_text())
    try:
        report = compile_to_file(
            job["model"],
            job["library"],
            threads=job["threads"],
            shapes=job["shapes"] or None,
            precision=job["precision"],
            tune=job["tune"],
            target=job["target"],
        )
    except GtcoError as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        # In the answer: the log's last lines are often warnings that TVM and torch leave at exit.
        Path(job["answer"]).write_text(json.dumps({"error": reason}))
        return 1
    Path(job["answer"]).write_text(
        json.dumps(
            {
                "weights_bytes": int(report.weights_bytes),
                "phases": [[name, float(s)] for name, s in report.phases],
                "stages": len(report.stages),
                "notes": list(report.notes),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
