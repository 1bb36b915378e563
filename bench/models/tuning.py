"""What measuring gains: each model compiled untuned and tuned, run side by side with the peers.

``python -m bench tuning [--models vit-ti-16,swin-t] [--effort quick|full] [--rounds 7]
[--peers onnxruntime,openvino] [--json FILE]``

``expected`` is what the tuner's own readings of single stages promise for the whole model; beside
it stands what the model gained.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gtco.cli.arguments import positive
from gtco.compiler import compile_to_file
from gtco.support.errors import BuildError
from gtco.support.options import EFFORTS

from ..harness.by_model import ended, every_model, parser
from ..harness.rounds import Contender, compare
from ..harness.suite import console, judge, tolerance
from ..harness.workload import candidates, check_peers, prepare
from .names import MODELS

TUNED = "gtco-tuned"


@dataclass(frozen=True)
class Row:
    """One model.

    - milliseconds of the library without and with tuning, and seconds of both compiles
    - the best peer and its milliseconds
    - of the tuner: candidates, changed stages, and the milliseconds of its stages before and after
    """

    model: str
    untuned: float
    tuned: float
    seconds: float
    tuned_seconds: float
    candidates: int
    changed: int
    stages_before: float
    stages_after: float
    peer: str
    peer_milliseconds: float
    agrees: bool

    @property
    def gain(self) -> float:
        return self.untuned / self.tuned

    @property
    def expected(self) -> float:
        """The gain of the whole model if the stages' readings were those of the model."""
        return self.untuned / (self.untuned - self.stages_before + self.stages_after)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    check_peers(options.peers)  # before anything is compiled
    rows, failed = every_model(options, shown)
    if len(rows) > 1:
        show(rows)
    console().print(f"gain, geometric mean: {statistics.geometric_mean(r.gain for r in rows):.3f}")
    return ended(failed, all(row.agrees for row in rows))


def shown(name: str, options: argparse.Namespace) -> list[Row]:
    """One model's row, which is shown as soon as it is there."""
    rows = [measure(name, options)]
    show(rows)
    return rows


def measure(name: str, options: argparse.Namespace) -> Row:
    folder: Path = options.folder
    work = prepare(name, folder, options.threads)
    if work.build.error:
        raise BuildError(f"{name} cannot be compiled: {work.build.error}")
    library = folder / f"{name}-{options.effort}.so"
    report = compile_to_file(
        work.onnx, library, threads=options.threads, tune=options.effort, cache=False
    )
    found, _ = candidates(work, check_peers(options.peers), options.threads)
    tuned = Contender(TUNED, {**found[0].job, "library": str(library)})
    seen = compare(
        [found[0], tuned, *found[1:]], options.rounds, tolerance=tolerance(work), judge=judge(work)
    )
    for own in (seen["gtco"], seen[TUNED]):
        if own.error:
            raise BuildError(f"{own.system} could not run {name}: {own.error}")
    timed = [m for m in seen.measurements if m.rounds and m.system not in ("gtco", TUNED)]
    best = min(timed, key=lambda m: m.median, default=None)
    results = report.tuning
    return Row(
        name,
        1e3 * seen["gtco"].median,
        1e3 * seen[TUNED].median,
        work.build.seconds,
        report.seconds,
        sum(r["candidates"] for r in results),
        sum(r["first"] != r["last"] for r in results),
        1e3 * sum(r["occurrences"] * r["first_seconds"] for r in results),
        1e3 * sum(r["occurrences"] * r["seconds"] for r in results),
        best.system if best else "",
        1e3 * best.median if best else 0.0,
        not any(m.disagrees for m in seen.measurements[:2]),
    )


def show(rows: Sequence[Row]) -> None:
    table = Table(title="untuned and tuned", title_justify="left")
    table.add_column("model")
    for heading in (
        *("untuned ms", "tuned ms", "gain", "expected", "candidates", "changed"),
        *("compile s", "with tuning s", "best peer / tuned"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.untuned:.2f}",
            f"{row.tuned:.2f}",
            f"{row.gain:.3f}",
            f"{row.expected:.3f}",
            str(row.candidates),
            str(row.changed),
            f"{row.seconds:.1f}",
            f"{row.tuned_seconds:.1f}",
            f"{row.peer_milliseconds / row.tuned:.2f} {row.peer}" if row.peer else "-",
        )
    console().print(table)


def _parser() -> argparse.ArgumentParser:
    found = parser("tuning", __doc__, MODELS)
    found.add_argument("--effort", choices=tuple(EFFORTS), default="quick")
    found.add_argument("--peers", default="onnxruntime,openvino", help="by comma; may be empty")
    found.add_argument("--rounds", type=positive, default=7)
    return found
