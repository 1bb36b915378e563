"""Trials until MetaSchedule's latency is matched, on subgraphs of DETR and ViT: GTCO's Table V on
CPUs.

``python -m bench trials [--models vit-mha,detr-encoder] [--trials 32] [--stages 3] [--json FILE]``

A row is a subgraph: attention, an encoder layer, a decoder layer, a whole model. Its heaviest
different stages, as gtco fuses it, are tuned by gtco and by TVM's MetaSchedule with as many trials
each, on the same target, threads and timer. MetaSchedule's trials are those until it is within 1 %
of the least latency that it finds; gtco's those until it is at or below that least latency. The
untuned pick counts as a trial of each stage. In the end what both found is timed once more, side by
side.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from gtco.cli.arguments import positive
from gtco.codegen.generate import Generated, generate
from gtco.codegen.workers import Workers
from gtco.compiler import stages_of
from gtco.machine.target import Target, cpu_target
from gtco.search.records.records import Record, Records
from gtco.search.records.standing import relative
from gtco.support.errors import OptionError, UnsupportedError
from gtco.support.options import Tune
from gtco.tuning.result import StageResult
from gtco.tuning.tune import heaviest, tune

from ..harness.by_model import ended, every_model, parser
from ..harness.suite import console
from .metaschedule import Found, Search, Task, beside
from .tvm_kernels import Program
from .tvm_stage import program

NEAR = 1.01  # times the least latency: MetaSchedule is as good as done
PATIENCE = 1000  # slots without a gain: gtco spends all its trials
SECONDS = 600.0  # of gtco's tuning, at most
END_SECONDS = (2.0, 6.0)  # for timing the results: at least, and at most
SEED = 1
TABLE_V = 0.75  # GTCO's trials over Ansor's, on average
VIT_TOKENS, VIT_WIDTH, VIT_HEADS = 197, 768, 12
DETR_TOKENS, DETR_QUERIES, DETR_WIDTH, DETR_HEADS, DETR_HIDDEN = 1050, 100, 256, 8, 2048

# A trial: the number of its stage and its seconds, infinite where it failed.
Trial = tuple[int, float]


@dataclass(frozen=True)
class Row:
    """One subgraph.

    - how many of its different stages were tuned, and their share of its predicted time
    - the trials of each search, how many of MetaSchedule's failed, and both numbers of trials
      (None: gtco did not get there)
    - milliseconds of these stages in a run: MetaSchedule's least, by the searches' own readings; by
      the last timing, side by side, gtco's untuned picks, its tuned ones, and MetaSchedule's
    - ``wrong``: stages for which MetaSchedule has no right program
    - seconds of both searches
    """

    model: str
    stages: int
    share: float
    trials: int
    failed: int
    metaschedule_trials: int
    gtco_trials: int | None
    least: float
    untuned: float
    gtco: float
    metaschedule: float
    wrong: tuple[str, ...]
    seconds: float
    metaschedule_seconds: float

    @property
    def ratio(self) -> float:
        """gtco's trials over MetaSchedule's."""
        return math.inf if not self.gtco_trials else self.gtco_trials / self.metaschedule_trials


# what is tuned ------------------------------------------------------------------------------------
def _vit_attention() -> tuple[Any, Any]:
    import torch

    from gtco.models.layers import SelfAttention

    return SelfAttention(VIT_WIDTH, VIT_HEADS), torch.zeros(1, VIT_TOKENS, VIT_WIDTH)


def _vit_encoder() -> tuple[Any, Any]:
    import torch

    from gtco.models.layers import Block

    tokens = torch.zeros(1, VIT_TOKENS, VIT_WIDTH)
    return Block(VIT_WIDTH, VIT_HEADS, 4 * VIT_WIDTH), tokens


def _detr_attention() -> tuple[Any, Any]:
    import torch

    from gtco.models.detr import MultiheadAttention

    placed, tokens = (torch.zeros(1, DETR_TOKENS, DETR_WIDTH) for _ in range(2))
    return MultiheadAttention(DETR_WIDTH, DETR_HEADS), (placed, placed.clone(), tokens)


def _detr_encoder() -> tuple[Any, Any]:
    import torch

    from gtco.models.detr import EncoderLayer

    tokens = torch.zeros(1, DETR_TOKENS, DETR_WIDTH)
    positions = torch.zeros(DETR_TOKENS, DETR_WIDTH)
    return EncoderLayer(DETR_WIDTH, DETR_HEADS, DETR_HIDDEN), (tokens, positions)


def _detr_decoder() -> tuple[Any, Any]:
    import torch

    from gtco.models.detr import DecoderLayer

    x = torch.zeros(1, DETR_QUERIES, DETR_WIDTH)
    memory, placed = (torch.zeros(1, DETR_TOKENS, DETR_WIDTH) for _ in range(2))
    queries = torch.zeros(DETR_QUERIES, DETR_WIDTH)
    return DecoderLayer(DETR_WIDTH, DETR_HEADS, DETR_HIDDEN), (x, memory, placed, queries)


def _whole(name: str) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        from gtco.models import create, example_inputs

        return create(name), example_inputs(name)

    return make


SUBGRAPHS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "vit-mha": _vit_attention,
    "vit-encoder": _vit_encoder,
    "vit": _whole("vit-base-16"),
    "detr-mha": _detr_attention,
    "detr-encoder": _detr_encoder,
    "detr-decoder": _detr_decoder,
    "detr": _whole("detr-resnet50-e6"),
}


def subgraph(name: str) -> tuple[Any, Any]:
    """A module in eval mode with weights drawn from a seed, and example inputs."""
    from gtco.models.weights import initialise

    module, inputs = SUBGRAPHS[name]()
    initialise(module, 0)
    return module.eval(), inputs


# arithmetic ---------------------------------------------------------------------------------------
def curve(trials: Iterable[Trial], weights: Sequence[int]) -> list[float]:
    """Seconds of all stages in a run after each trial, each with the best that it has had; infinite
    until every stage has one.
    """
    best = [math.inf] * len(weights)
    found = []
    for number, seconds in trials:
        best[number] = min(best[number], seconds)
        found.append(sum(w * s for w, s in zip(weights, best, strict=True)))
    return found


def reached(seconds: Sequence[float], wanted: float) -> int | None:
    """The number of trials until ``wanted`` or less is reached."""
    return next((n for n, s in enumerate(seconds, 1) if s <= wanted), None)


def compare(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int | None, float]:
    """MetaSchedule's number of trials, gtco's, and the least latency that both are about. Raises
    :class:`UnsupportedError` if MetaSchedule has no program for some stage.
    """
    least = min(theirs, default=math.inf)
    own = reached(theirs, NEAR * least)
    if math.isinf(least) or own is None:
        raise UnsupportedError("MetaSchedule found no right program of some stage")
    return own, reached(ours, least), least


def tried(records: Iterable[Record], results: Sequence[StageResult]) -> list[Trial]:
    """gtco's trials in order: the first pick of every stage, then each candidate; infinite if it
    failed or was lost in noise.
    """
    numbers = {result.stage.key: n for n, result in enumerate(results)}
    of_stage: dict[str, list[Record]] = {key: [] for key in numbers}
    known = {(r.stage.key, r.first.config) for r in results}
    order = []
    for record in records:
        of_stage[record.stage].append(record)
        which = record.stage, record.parsed
        if which not in known:  # else it is the pick that the others of its trial are timed beside
            known.add(which)
            order.append(which)
    times = {key: relative(found) for key, found in of_stage.items()}
    firsts = [(n, result.first_seconds) for n, result in enumerate(results)]
    return [
        *firsts,
        *(
            (numbers[key], times[key].get(config, math.inf) * firsts[numbers[key]][1])
            for key, config in order
        ),
    ]


# measuring ----------------------------------------------------------------------------------------
def main(argv: Sequence[str]) -> int:
    rows, failed = every_model(_parser().parse_args(argv), shown, check=check)
    if len(rows) > 1:
        show(rows)
    return ended(failed, not any(row.wrong for row in rows))


def check(names: Sequence[str], _: Path) -> None:
    if unknown := [name for name in names if name not in SUBGRAPHS]:
        known = ", ".join(SUBGRAPHS)
        raise OptionError(f"unknown subgraph {', '.join(unknown)}: choose from {known}")


def shown(name: str, options: argparse.Namespace) -> list[Row]:
    """The row of one subgraph. It is shown as soon as it is measured."""
    rows = [measure(name, options)]
    show(rows)
    return rows


def measure(name: str, options: argparse.Namespace) -> Row:
    module, inputs = subgraph(name)
    policy, stages = stages_of(module, inputs, threads=options.threads)
    target = cpu_target(policy.target)
    with Workers(options.threads) as workers:
        generated = generate(stages, policy.choose, target, workers)
        chosen, share = heavy(generated, options.stages, target.lanes)
        made = restricted(generated, {r.stage.key for r in chosen})
        firsts = {key: Program.of(made.kernels[key], s.canonical) for key, s in keyed(made)}
        wanted = options.trials * len(chosen)
        effort = Tune(wanted, SECONDS, PATIENCE)
        begin = time.monotonic()
        with Records(":memory:") as records:
            results = tune(
                [made], policy, workers, threads=options.threads, effort=effort, records=records
            )
            kept = records.all()
        seconds = time.monotonic() - begin
    for note in made.notes:
        console().print(f"{name}: {note}", highlight=False, markup=False)
    if len(results) < len(chosen):
        raise OptionError(f"{name}: {options.trials} trials are too few to measure every stage")
    ours = tried(kept, results)
    tasks = [
        Task(r.stage, r.occurrences, firsts[r.stage.key], r.first_seconds) for r in results
    ]
    begin = time.monotonic()
    search = Search(tasks, target, options.threads)
    found = search.run(wanted, SEED)
    theirs_seconds = time.monotonic() - begin
    for why, count in _counted(found.failures):
        console().print(f"{name}: {count} of TVM's: {why}", highlight=False, markup=False)
    picked = [Program.of(made.kernels[task.stage.key], task.stage) for task in tasks]
    own, matched, least = outcome(tasks, ours, found)
    (untuned, tuned, theirs), wrong = side_by_side(tasks, picked, found, target, options.threads)
    return Row(
        name,
        len(tasks),
        share,
        wanted,
        sum(math.isinf(s) for _, s in found.trials),
        own,
        matched,
        least,
        untuned,
        tuned,
        theirs,
        wrong,
        seconds,
        theirs_seconds,
    )


def outcome(
    tasks: Sequence[Task], ours: Sequence[Trial], found: Found
) -> tuple[int, int | None, float]:
    """Both numbers of trials, and milliseconds of the least latency that MetaSchedule finds. All
    are zero if it has no right program for some stage.
    """
    weights = [task.weight for task in tasks]
    try:
        own, matched, least = compare(curve(ours, weights), curve(found.trials, weights))
    except UnsupportedError:
        return 0, None, 0.0
    return own, matched, 1e3 * least


def side_by_side(
    tasks: Sequence[Task], picked: Sequence[Program], found: Found, target: Target, threads: int
) -> tuple[tuple[float, float, float], tuple[str, ...]]:
    """Milliseconds in a run of gtco's untuned picks, of its final picks and of MetaSchedule's best,
    and the stages for which MetaSchedule has no right program. These stages are in none of the
    three times.
    """
    sums = [0.0, 0.0, 0.0]
    wrong = []
    for number, task in enumerate(tasks):
        read: Sequence[float | None] | str = "no program"
        if number in found.best:
            rivals = [picked[number], found.best[number][1]]
            read = beside(task, rivals, target, threads, END_SECONDS)
        if isinstance(read, str) or None in read:
            wrong.append(task.stage.label)
            continue
        for n, ratio in enumerate((1.0, *read)):
            sums[n] += 1e3 * task.weight * task.seconds * (ratio or 0.0)
    return (sums[0], sums[1], sums[2]), tuple(wrong)


def heavy(generated: Generated, most: int, lanes: int) -> tuple[list[StageResult], float]:
    """The heaviest different stages that TVM can tune too, and their share of the predicted time of
    all stages.
    """
    total = sum(generated.choices[stage.key].seconds for stage in generated.stages)
    found = []
    for result in heaviest([generated]):
        try:
            program(result.stage, lanes)
        except UnsupportedError as error:
            console().print(f"left out: {result.stage.label}: {error}", markup=False)
            continue
        found.append(result)
    taken = found[:most]
    return taken, sum(r.occurrences * r.first.seconds for r in taken) / total


def restricted(generated: Generated, keys: set[str]) -> Generated:
    """Only the stages with these keys."""
    return replace(
        generated,
        stages=[stage for stage in generated.stages if stage.key in keys],
        kernels={key: kernel for key, kernel in generated.kernels.items() if key in keys},
        choices={key: pick for key, pick in generated.choices.items() if key in keys},
        notes=[],
    )


def keyed(generated: Generated) -> list[tuple[str, Any]]:
    return list({stage.key: stage for stage in generated.stages}.items())


def _counted(failures: Sequence[str]) -> list[tuple[str, int]]:
    lines = [why.strip().splitlines()[0] for why in failures]
    return [(why, lines.count(why)) for why in dict.fromkeys(lines)]


def show(rows: Sequence[Row]) -> None:
    table = Table(title="trials until MetaSchedule's latency is matched", title_justify="left")
    table.add_column("subgraph")
    for heading in (
        *("stages", "share of time", "MetaSchedule's trials", "gtco's", "gtco's share"),
        *("untuned ms", "gtco ms", "MetaSchedule ms", "seconds, gtco + MetaSchedule"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.model + (" (failed)" if row.wrong else ""),
            str(row.stages),
            f"{row.share:.0%}",
            f"{row.metaschedule_trials or '-'} of {row.trials}, {row.failed} failed",
            "never" if row.gtco_trials is None else str(row.gtco_trials),
            f"{row.ratio:.0%}" if row.gtco_trials else "-",
            *(f"{ms:.3f}" for ms in (row.untuned, row.gtco, row.metaschedule)),
            f"{row.seconds:.0f} + {row.metaschedule_seconds:.0f}",
        )
    out = console()
    out.print(table)
    for row in rows:
        for label in row.wrong:
            out.print(f"{row.model}: MetaSchedule has no right program of {label}", markup=False)
    if all(row.gtco_trials for row in rows):
        mean = statistics.fmean(row.ratio for row in rows)
        out.print(f"mean {mean:.0%} of MetaSchedule's trials (Table V: {TABLE_V:.0%} of Ansor's)")


def _parser() -> argparse.ArgumentParser:
    found = parser("trials", __doc__, SUBGRAPHS)
    found.add_argument("--trials", type=positive, default=32, help="of each stage, in the mean")
    found.add_argument("--stages", type=positive, default=3, help="heaviest different ones, a row")
    return found
