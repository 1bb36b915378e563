"""Compiles one model with gtco in a process of its own, and watches its wall time and peak memory
from outside.

``python -m bench.harness.build JOB.json`` is that process. It writes the compile report's numbers,
or the reason why there are none, to the file that the job names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gtco.codegen.processes import die_with_parent, python
from gtco.frontend.dimensions import Shapes
from gtco.support.errors import GtcoError, RecordError
from gtco.support.options import EFFORTS, Tune

from .process import child_environment

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Tuning:
    """What a build measures.

    - ``effort``: a value of ``--tune``
    - ``seconds``: the time for tuning, if it is not the effort's own. 0 measures nothing and
      compiles the configs that stand in the records
    - ``records``: the file that keeps measurements and from which tuning continues
    """

    effort: str = "off"
    seconds: float | None = None
    records: Path | None = None

    @property
    def ledger(self) -> Path | None:
        """The file beside the records with the seconds that builds have measured for them."""
        return self.records and self.records.with_suffix(".seconds")

    def earlier(self) -> float | None:
        """The seconds of earlier builds; None if others made the records, because nobody knows
        then.
        """
        if self.records is None or self.ledger is None or not self.records.exists():
            return 0.0
        try:
            return float(self.ledger.read_text())
        except (OSError, ValueError):
            return None

    def add(
        self, earlier: float | None, seconds: float, phases: Sequence[Any] | None
    ) -> float | None:
        """Adds the seconds that a build measured to ``earlier``, writes the sum to the ledger, and
        gives it. If a build failed and has no ``phases``, all of its time counts: that is more than
        it measured, never less.
        """
        if earlier is None or self.effort == "off" or self.seconds == 0:
            return earlier
        total = earlier + (seconds if phases is None else dict(phases).get("tune", 0.0))
        if self.ledger is not None:
            self.ledger.write_text(f"{total}\n")
        return total


@dataclass(frozen=True)
class Build:
    """A finished compile.

    - wall seconds of the whole process, and peak bytes of it and its workers
    - the report's numbers
    - ``fusion``, ``settled``: in words, how measuring changed the partition, and the result of the
      last check in the whole model
    - ``measured_seconds``: the time spent on measuring, including earlier builds that left their
      records; None if it is unknown
    """

    library: str
    seconds: float
    peak_memory_bytes: int
    weights_bytes: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    stages: int = 0
    notes: tuple[str, ...] = ()
    fusion: str = ""
    settled: str = ""
    error: str | None = None
    measured_seconds: float | None = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    model: str | Path,
    library: str | Path,
    threads: int,
    shapes: Shapes | None = None,
    precision: str = "fp32",
    timeout: float = 1800.0,
    tuning: Tuning = Tuning(),
    target: str = "native",
    dims: Mapping[str, str | list[int]] | None = None,
) -> Build:
    """Compiles ``model`` (.onnx) to ``library``, with ranges and lists of sizes in ``dims``, within
    ``timeout`` seconds in addition to those of ``tuning``. Never raises for a failed compile:
    ``error`` says why it failed.
    """
    timeout += tuning.seconds or 0.0
    earlier = tuning.earlier()
    with tempfile.TemporaryDirectory(prefix="gtco-build-") as folder:
        job, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        job.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "library": str(library),
                    "threads": threads,
                    "shapes": dict(shapes or {}),
                    "dims": dict(dims or {}),
                    "precision": precision,
                    "tune": tuning.effort,
                    "seconds": tuning.seconds,
                    "records": str(tuning.records) if tuning.records else None,
                    "target": target,
                    "answer": str(answer),
                }
            )
        )
        start = time.perf_counter()
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                [*python("gtco.bench.harness.build"), str(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
            )
            watch = MemoryWatch(process.pid)
            found: dict[str, Any] | None = None
            try:
                code = process.wait(timeout)
                found = json.loads(answer.read_text()) if answer.exists() else None
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                peak = watch.stop()
                seconds = time.perf_counter() - start
                measured = tuning.add(earlier, seconds, (found or {}).get("phases"))
            if found is not None:
                made = Build(str(library), seconds, peak, measured_seconds=measured)
                return replace(made, **_tuples(found))
            log.seek(0)
            tail = log.read().decode(errors="replace").strip().splitlines()
        reason = (
            f"no result in {timeout:.0f} s"
            if code is None
            else (tail[-1] if tail else f"exit code {code}")
        )
        return Build(str(library), seconds, peak, error=reason, measured_seconds=measured)


class MemoryWatch:
    """Samples, from a thread, the proportional set size of a process and all its descendants
    (shared pages count once).
    """

    def __init__(self, pid: int):
        self._pid, self._peak, self._done = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Ends the sampling; gives the largest sum seen, in bytes."""
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, sum(map(memory_bytes, family(self._pid))))
            if self._done.wait(SAMPLE_SECONDS):
                return


def family(pid: int) -> list[int]:
    """The process and its descendants that are alive now."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        with suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"/proc/{current}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{current}/task/{thread}/children").read_text()
                    queue += [int(child) for child in children.split()]
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


def effort(job: Mapping[str, Any]) -> str | Tune:
    """How much the job's compile measures. Raises :class:`RecordError` if it measures nothing and
    the job's records have nothing of this machine: the library would be untuned.
    """
    from gtco.machine.target import target
    from gtco.search.records.records import Records, circumstances

    if job["seconds"] is None:
        return str(job["tune"])
    if job["seconds"]:
        return replace(EFFORTS[job["tune"]], seconds=job["seconds"])
    here = circumstances(replace(target(job["target"]), cores=job["threads"]))
    with Records(job["records"], create=False) as records:
        if not records.under(here):
            raise RecordError(
                f"{records.path} has nothing that was measured on this machine with these versions "
                f"and {job['threads']} threads: give some minutes"
            )
    return "off"


def main(argv: list[str]) -> int:
    die_with_parent()  # else a killed harness would leave a compile that nobody waits for
    from gtco.support.torchless import import_tvm

    import_tvm()  # as the command line does
    from gtco.compiler import compile_to_file

    job = json.loads(Path(argv[0]).read_text())
    try:
        report = compile_to_file(
            job["model"],
            job["library"],
            threads=job["threads"],
            shapes=job["shapes"] or None,
            dims=job["dims"] or None,
            precision=job["precision"],
            tune=effort(job),
            records=job["records"],
            target=job["target"],
            cache=False,  # its time is reported
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
                "fusion": report.fusion,
                "settled": str(report.settled or ""),
                "stages": len(report.stages),
                "notes": list(report.notes),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
