"""Whole models with the language model's kernels (TLM, Section 6.4.1, Fig. 11).

A model is compiled without measuring, by the analytic price and by the language model (the column
``1 x g`` of the paper, "no necessity for measurement"); with so many sentences for each of its
``g`` heavy stages; and with the search, which goes on until nothing gains or its time is over. All
libraries are timed in turn, each in a process of its own. Records that come with gtco are left out,
so nobody knows a measurement before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from gtco.compiler import compile_to_file
from gtco.search.records import shipped
from gtco.support.options import Tune

from ...harness.lines import append, read
from ...harness.rounds import Contender, compare
from ...harness.workload import Workload, candidates, prepare

UNTUNED, SEARCH = "untuned", "search"
PATIENCE = 100_000  # slots without a gain: the language model has all its trials
ROUNDS = 9


@dataclass(frozen=True)
class Row:
    """One model: how many stages were tuned, and by the name of a library its milliseconds and the
    seconds of its compile. ``wrong`` are the libraries whose outputs differ from ONNX Runtime's.
    """

    model: str
    stages: int
    milliseconds: dict[str, float]
    seconds: dict[str, float]
    wrong: tuple[str, ...] = ()


def named(sentences: int) -> str:
    return f"{sentences} x g"


def measure(
    name: str,
    folder: Path,
    threads: int,
    sentences: Sequence[int],
    seconds: float,
    say: Callable[[str], None],
) -> Row:
    """One model's row; the search may take so many ``seconds``."""
    work = prepare(name, folder, threads)
    (analytic, judge), _ = candidates(work, ("onnxruntime",), threads)
    took, libraries = {UNTUNED: work.build.seconds}, {UNTUNED: Path(str(work.build.library))}
    with no_shipped_records():
        made = _compile(work, folder, SEARCH, threads, tune=Tune(seconds=seconds))
        libraries[SEARCH], took[SEARCH], stages = made
        say(f"{name}: {stages} stages; the search took {took[SEARCH]:.0f} s")
        for count in sentences:
            how: dict[str, Any] = {"policy": "language-model"}
            if count > 1:
                how["tune"] = Tune(
                    policy="language-model",
                    trials=(count - 1) * stages,  # the first sentence is the pick
                    seconds=seconds,
                    patience=PATIENCE,
                    learned=False,
                )
            made = _compile(work, folder, named(count), threads, **how)
            libraries[named(count)], took[named(count)], _ = made
    rivals = [Contender(s, {**analytic.job, "library": str(p)}) for s, p in libraries.items()]
    seen = compare([*rivals, judge], ROUNDS, budget=1.0)
    if failed := [m for m in seen.measurements if m.error]:
        raise RuntimeError(f"{name}, {failed[0].system}: {failed[0].error}")
    times = {m.system: 1e3 * m.median for m in seen.measurements if m.system in libraries}
    wrong = tuple(m.system for m in seen.measurements if m.disagrees)
    return Row(name, stages, times, took, wrong)


def _compile(
    work: Workload, folder: Path, system: str, threads: int, **how: Any
) -> tuple[Path, float, int]:
    """A library, the seconds of its compile, and how many stages were tuned."""
    library = folder / f"{work.name}.{system.replace(' ', '')}.so"
    assert work.onnx is not None
    report = compile_to_file(work.onnx, library, threads=threads, cache=False, **how)
    return library, report.seconds, len(report.tuning)


@contextmanager
def no_shipped_records() -> Iterator[None]:
    """A compile that measures begins with nothing that was measured before."""
    with TemporaryDirectory(prefix="gtco-records-") as empty:
        with mock.patch.object(shipped, "FOLDER", Path(empty)):
            yield


# figures ------------------------------------------------------------------------------------------
def read_rows(path: Path) -> list[Row]:
    """The rows of a file, which need not exist."""
    return [Row(**{**row, "wrong": tuple(row["wrong"])}) for row in read(path)]


def lines(rows: Sequence[Row]) -> list[str]:
    """A table for people: speed over the search's library, and seconds of the compiles."""
    systems = [s for s in dict.fromkeys(s for row in rows for s in row.milliseconds) if s != SEARCH]
    said = [f"{'model':20}{'g':>4}{'search ms':>11}" + "".join(f"{s:>9}" for s in systems)]
    for row in rows:
        found = {s: row.milliseconds[SEARCH] / t for s, t in row.milliseconds.items()}
        cells = "".join(f"{found[s]:9.3f}" if s in found else f"{'':9}" for s in systems)
        said.append(f"{row.model:20}{row.stages:4}{row.milliseconds[SEARCH]:11.2f}{cells}")
        cells = "".join(f"{row.seconds[s]:9.0f}" if s in found else f"{'':9}" for s in systems)
        said.append(f"{'seconds':>20}{'':4}{row.seconds[SEARCH]:11.0f}{cells}")
        if row.wrong:
            said.append(f"  wrong outputs: {', '.join(row.wrong)}")
    means = [
        statistics.geometric_mean(
            row.milliseconds[SEARCH] / row.milliseconds[s] for row in rows if s in row.milliseconds
        )
        for s in systems
    ]
    said.append(f"{'geometric mean':35}" + "".join(f"{mean:9.3f}" for mean in means))
    return said


def run(
    models: Sequence[str],
    folder: Path,
    threads: int,
    sentences: Sequence[int],
    seconds: float,
    path: Path,
    say: Callable[[str], None],
) -> list[Row]:
    """All rows of ``path`` after measuring those models that it has not."""
    done = {row.model for row in read_rows(path)}
    for name in models:
        if name not in done:
            row = measure(name, folder, threads, sentences, seconds, say)
            append(path, row)
            say("\n".join(lines([row])))
    return read_rows(path)
