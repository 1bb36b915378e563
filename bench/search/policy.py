"""How good the analytic policy is on this machine: its picks beside the best that measuring finds.

``python -m bench policy [--models vit-ti-16,swin-t] [--seconds 120] [--json FILE]``
``python -m bench policy --records build/records``
``python -m bench policy --readings bench/readings/*.gz``

Each model's heaviest stages are tuned for the time given, or nothing is measured and they are those
that ``end_to_end --records`` tuned; every candidate is timed beside the pick.
``of the best`` is the best candidate's time over the pick's: 1 where nothing that was tried is
faster. The best of many readings is partly luck, so the share is a lower bound. ``error`` is the
median of how far predicted and measured times are apart, ``rank`` Spearman's correlation between
them.

With ``--readings`` nothing is measured: the configs that ``bench readings`` timed, on any machine,
are priced with that machine's table (:mod:`bench.search.carried`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gtco.cli.arguments import positive
from gtco.cli.console import Phases
from gtco.compiler import compile_to_file, stages_of
from gtco.search.learning.cost_model import spearman
from gtco.search.recorded import by_stage
from gtco.search.records.records import Record, Records, circumstances
from gtco.search.records.standing import relative
from gtco.support.options import Tune

from ..harness.by_model import ended, every_model, parser
from ..harness.readings import load
from ..harness.suite import console
from ..harness.workload import export
from ..models.names import MODELS
from . import carried

PATIENCE = 6


@dataclass(frozen=True)
class Row:
    """One stage of a model: how often it runs, how many candidates were timed, the pick's
    microseconds (predicted and measured), and the best candidate's time over the pick's.
    """

    model: str
    stage: str
    runs: int
    candidates: int
    predicted: float
    measured: float
    of_best: float
    error: float
    rank: float


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.readings:
        for file in options.readings:
            carried.show(file, carried.priced_stages(load(file)))
        return 0
    rows, failed = every_model(options, measure)
    show(rows)
    return ended(failed)


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one model, the heaviest stage first."""
    options.folder.mkdir(parents=True, exist_ok=True)
    model = export(name, options.folder)
    if options.records:
        return kept(name, model, options.records, options.threads)
    effort = Tune(seconds=options.seconds, patience=PATIENCE)
    with tempfile.TemporaryDirectory(prefix="gtco-policy-") as folder:
        file = Path(folder, "records")
        with Phases() as progress:
            report = compile_to_file(
                model,
                Path(folder, "model.so"),
                threads=options.threads,
                tune=effort,
                records=file,
                progress=progress,
            )
        with Records(file) as records:
            known = records.all()
    rows = []
    for result in report.tuning:
        if timed := ranked(r for r in known if r.stage == result["key"]):
            rows.append(row(name, result["stage"], result["occurrences"], timed))
    return rows


def ranked(records: Iterable[Record]) -> list[Record]:
    """The records that were timed while the machine was quiet enough to compare rivals."""
    useless = ("noisy", "wrong")
    return [r for r in records if r.seconds and r.predicted and r.outcome not in useless]


def kept(name: str, model: Path, folder: Path, threads: int) -> list[Row]:
    """The rows for the stages of the untuned model, by the records of an earlier tuning."""
    policy, stages = stages_of(model, threads=threads)
    with Records(folder / f"{name}.fp32.records", create=False) as records:
        known = by_stage(records.under(circumstances(policy.target)))
    runs = Counter(stage.key for stage in stages)
    rows = []
    for key, count in runs.items():
        timed = ranked(known.get(key, ()))
        if len({r.config for r in timed}) > 1:
            rows.append(row(name, timed[0].label, count, timed))
    return sorted(rows, key=lambda r: -r.runs * r.measured)


def row(model: str, stage: str, runs: int, timed: Sequence[Record]) -> Row:
    """The row for the readings of a stage. The first reading is the pick's."""
    times = relative(timed)
    first = timed[0]
    assert first.seconds is not None and first.predicted is not None
    predicted = {r.parsed: r.predicted or math.nan for r in timed}
    pairs = [(predicted[c], t * first.seconds) for c, t in times.items()]
    errors = [abs(p / m - 1) for p, m in pairs]
    return Row(
        model,
        stage,
        runs,
        len(times),
        first.predicted * 1e6,
        first.seconds * 1e6,
        min(times.values()),
        statistics.median(errors),
        spearman([p for p, _ in pairs], [m for _, m in pairs]),
    )


def show(rows: Sequence[Row]) -> None:
    table = Table(title="the analytic policy's picks", title_justify="left")
    table.add_column("model")
    table.add_column("stage", max_width=40)
    for heading in ("runs", "tried", "predicted us", "us", "of the best", "error", "rank"):
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            r.model,
            r.stage,
            str(r.runs),
            str(r.candidates),
            f"{r.predicted:.1f}",
            f"{r.measured:.1f}",
            f"{r.of_best:.3f}",
            f"{r.error:.0%}",
            f"{r.rank:.2f}",
        )
    out = console()
    out.print(table)
    if rows:
        mean = statistics.geometric_mean(r.of_best for r in rows)
        weights = [r.runs * r.measured for r in rows]
        weighted = sum(w * r.of_best for w, r in zip(weights, rows, strict=True)) / sum(weights)
        worst = min(rows, key=lambda r: r.of_best)
        out.print(
            f"of the best: {mean:.3f} in the geometric mean, {weighted:.3f} by time; worst "
            f"{worst.of_best:.3f} ({worst.model}, {worst.stage}); error "
            f"{statistics.median(r.error for r in rows):.0%} in the median",
            highlight=False,
            markup=False,
        )


def _parser() -> argparse.ArgumentParser:
    found = parser("policy", __doc__, MODELS)
    found.add_argument("--seconds", type=positive, default=120, help="of measuring, each model")
    found.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="measure nothing: what end_to_end kept there when it tuned these models",
    )
    found.add_argument(
        "--readings",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: price what bench readings timed on some machine",
    )
    return found
