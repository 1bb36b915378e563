"""Seconds from a model's file to its first output, by system, and gtco's by phase: GTCO's Table VI.

``python -m bench compile_time [--models vit-ti-16,swin-t] [--efforts off,quick]
[--peers onnxruntime,openvino,torch-compile] [--json FILE]``

Each system starts in a process of its own, with nothing in its caches but what a user's would have
(torch's compiled kernels are made anew), and counts from the start of the process to the end of the
first call. gtco's compile is a process too; what a later start of its library takes is beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gtco.support.options import EFFORTS

from ..harness.build import Tuning, build
from ..harness.by_model import ended, every_model, parser
from ..harness.process import Worker, WorkerError
from ..harness.rounds import OPEN_TIMEOUT, WORKER
from ..harness.suite import console, write_report
from ..harness.workload import candidates, check_peers, prepare

PHASES = ("read", "simplify", "fuse", "generate", "tune", "link")


@dataclass(frozen=True)
class Row:
    """A system's seconds to the first output; ``start``: the seconds with a library that exists
    already; ``phases`` of a compile; or the reason why there are none.
    """

    model: str
    system: str
    seconds: float = 0.0
    start: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    error: str = ""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)

    def report(file: Path, rows: Sequence[Row]) -> None:
        found = {"rows": [asdict(row) for row in rows]}
        write_report(file, options.threads, 1, found)

    rows, failed = every_model(options, measure, report)
    output = console()
    output.print(table(rows))
    for row in rows:
        if row.error:
            output.print(f"  {row.model}, {row.system} failed: {row.error}", markup=False)
    return ended(failed, not any(row.error for row in rows))


def measure(source: str, options: argparse.Namespace) -> list[Row]:
    """Measures one model, by name or as a file, with every system, one after the other."""
    work = prepare(source, options.folder, options.threads, library=options.folder / "none.so")
    check_peers(options.peers)
    # as named: of torch-compile's settings, the one that tunes for minutes is asked for by its name
    found, _ = candidates(work, options.peers.split(","), options.threads)
    jobs = {candidate.name: candidate.job for candidate in found}
    assert work.onnx is not None
    rows = []
    for effort in options.efforts.split(","):
        library = options.folder / f"{work.name}-{effort}.so"
        made = build(work.onnx, library, options.threads, tuning=Tuning(effort))
        system = "gtco" if effort == "off" else f"gtco --tune {effort}"
        if made.error:
            rows.append(Row(work.name, system, error=made.error))
            continue
        start = first_output({**jobs["gtco"], "library": str(library)})
        whole = made.seconds + (start.seconds if not start.error else 0.0)
        rows.append(Row(work.name, system, whole, start.seconds, made.phases, start.error))
    for system in list(jobs)[1:]:
        seen = first_output(jobs[system])
        rows.append(Row(work.name, system, seen.seconds, error=seen.error))
    return rows


@dataclass(frozen=True)
class Start:
    seconds: float
    error: str = ""


def first_output(job: Mapping[str, Any]) -> Start:
    """The time from the start of a process to the end of its first call. torch's cache is an empty
    folder, because a second compile would only read it.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        begin = time.perf_counter()
        worker = Worker(WORKER)
        try:
            worker.ask(OPEN_TIMEOUT, do="open", job=dict(job))
            worker.ask(OPEN_TIMEOUT, do="save", file=str(Path(folder, "outputs.npz")))
            return Start(time.perf_counter() - begin)
        except WorkerError as error:
            return Start(0.0, str(error))
        finally:
            worker.kill()
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="seconds to the first output", title_justify="left")
    shown.add_column("model")
    shown.add_column("system")
    for heading in ("seconds", *PHASES, "starts again in"):
        shown.add_column(heading, justify="right")
    for row in rows:
        phases = dict(row.phases)
        shown.add_row(
            row.model,
            row.system,
            "failed" if row.error else f"{row.seconds:.1f}",
            *(f"{phases[name]:.1f}" if name in phases else "" for name in PHASES),
            "" if row.start is None else f"{row.start:.2f}",
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    found = parser("compile_time", __doc__, ("vit-ti-16", "swin-t"))
    found.add_argument("--efforts", default="off,quick", help=f"off, {', '.join(EFFORTS)}")
    found.add_argument("--peers", default="onnxruntime,openvino,torch-compile")
    return found
