"""What the tuner's learned cost model is good for: how well it ranks programs that it was not
shown, and what a search with it finds at equal trials.

``python -m bench cost_model [--models vit-ti-16,swin-t] [--trials 200] [--json FILE]``

Each model's heavy stages are tuned twice from the same picks with so many trials in all: with the
analytic policy's proposals and mutations, and with the learned model's. What both picked in the end
is timed again, side by side: ``gain`` is the time of the analytic search's pick over that of the
learned one's, ``first`` that of the untuned pick over the learned one's. The rankings are of all
programs that the two searches measured, each scored by a model that was trained without it (one
fold in four): the share of pairs in the right order, and Spearman's correlation. ``unseen`` is of
models that were shown no program of that stage.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from gtco.cli.arguments import positive
from gtco.codegen.generate import Generated, generate
from gtco.codegen.workers import Workers
from gtco.compiler import stages_of
from gtco.search.learning.cost_model import Quality, held_out
from gtco.search.policy import Policy
from gtco.support.options import Tune
from gtco.tuning.learned import LearnedProposals
from gtco.tuning.measure import Measurer
from gtco.tuning.result import StageResult
from gtco.tuning.trial import Trial
from gtco.tuning.tune import tune

from ..harness.by_model import ended, every_model, parser
from ..harness.suite import console
from ..harness.workload import export

SECONDS = 5.0  # for timing the final picks
PATIENCE = 1000  # slots without a gain: both searches spend all their trials


@dataclass(frozen=True)
class Row:
    """A stage.

    - how often it runs, and the programs that were measured
    - how these are ranked by the analytic price, by a model that knows other programs of the stage,
      and by one that knows only other stages
    - microseconds of its picks: untuned, by the analytic search and by the learned one
    """

    model: str
    stage: str
    runs: int
    analytic: Quality
    learned: Quality
    unseen: Quality
    first: float
    searched: float
    found: float


def main(argv: Sequence[str]) -> int:
    rows, failed = every_model(_parser().parse_args(argv), measure)
    show(rows)
    return ended(failed)


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one model, the heaviest stage first."""
    options.folder.mkdir(parents=True, exist_ok=True)
    policy, stages = stages_of(export(name, options.folder), threads=options.threads)
    with Workers(options.threads) as workers:
        untuned = generate(stages, policy.choose, policy.target, workers)
        searches: list[tuple[Generated, list[StageResult]]] = []
        for learned in (False, True):
            made = replace(
                untuned, kernels=dict(untuned.kernels), choices=dict(untuned.choices), notes=[]
            )
            effort = Tune(options.trials, options.seconds, PATIENCE, learned=learned)
            found = tune([made], policy, workers, threads=options.threads, effort=effort)
            searches.append((made, found))
            done, what = sum(r.measured for r in found), "learned" if learned else "analytic"
            console().print(f"{name}: {done} candidates timed, {what} search", highlight=False)
            for note in made.notes:
                console().print(f"{name}: {note}", highlight=False, markup=False)
        rankings = ranked(policy, [found for _, found in searches])
        measurer = Measurer(workers, policy.target, options.threads)
        trials = []
        for result in searches[1][1]:
            key = result.stage.key
            models = (untuned, *(made for made, _ in searches))
            picks = tuple(made.choices[key] for made in models)
            trials.append(Trial(result.stage, picks, tuple(m.kernels[key] for m in models)))
        times = {
            timed.trial.stage.key: np.median(timed.readings[:, :3], axis=0) * 1e6
            for timed in measurer.time(trials, SECONDS)
            if not timed.failed
        }
    return [
        Row(name, r.stage.label, r.occurrences, *rankings[r.stage.key], *times[r.stage.key])
        for r in searches[1][1]
        if r.stage.key in times and r.stage.key in rankings
    ]


def ranked(
    policy: Policy, searches: Iterable[Sequence[StageResult]]
) -> dict[str, tuple[Quality, Quality, Quality]]:
    """By stage key, how the measured programs are ranked by the analytic price, by a model that was
    shown other programs of the stage, and by one that was shown only other stages.
    """
    merged: dict[str, StageResult] = {}  # a program that both searches measured is one
    for result in itertools.chain.from_iterable(searches):
        known = merged.setdefault(result.stage.key, replace(result, readings={}))
        for config, seconds in result.readings.items():
            known.readings.setdefault(config, seconds / result.first_seconds)
    examples = LearnedProposals(policy, merged).examples()
    programs = held_out(examples)
    stages = held_out(examples, whole_stages=True)
    return {key: (*programs[key], stages[key][1]) for key in programs}


def show(rows: Sequence[Row]) -> None:
    table = Table(title="pairs in the right order, and what is found", title_justify="left")
    table.add_column("model")
    table.add_column("stage", max_width=36)
    for heading in (
        *("runs", "programs", "analytic", "learned", "unseen"),
        *("untuned us", "analytic us", "learned us", "gain"),
    ):
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            *(r.model, r.stage, str(r.runs), str(r.learned.programs)),
            *(f"{q.pairs:.2f}" for q in (r.analytic, r.learned, r.unseen)),
            *(f"{us:.1f}" for us in (r.first, r.searched, r.found)),
            f"{r.searched / r.found:.3f}",
        )
    out = console()
    out.print(table)
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        first = sum(r.runs * r.first for r in mine)
        searched = sum(r.runs * r.searched for r in mine)
        found = sum(r.runs * r.found for r in mine)
        rank = [_mean(q.rank for q in each) for each in _rankings(mine)]
        pairs = [_mean(q.pairs for q in each) for each in _rankings(mine)]
        out.print(
            f"{name}: pairs {pairs[0]:.3f} analytic, {pairs[1]:.3f} learned, {pairs[2]:.3f} on "
            f"unseen stages; Spearman {rank[0]:.2f}, {rank[1]:.2f}, {rank[2]:.2f}; gain of the "
            f"learned search {searched / found:.3f} over the analytic one, "
            f"{first / found:.3f} over no tuning",
            highlight=False,
        )


def _rankings(rows: Sequence[Row]) -> tuple[list[Quality], list[Quality], list[Quality]]:
    return [r.analytic for r in rows], [r.learned for r in rows], [r.unseen for r in rows]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _parser() -> argparse.ArgumentParser:
    found = parser("cost_model", __doc__, ("vit-ti-16", "swin-t"))
    found.add_argument("--trials", type=positive, default=200, help="of each search")
    found.add_argument("--seconds", type=positive, default=600, help="of each search, at most")
    return found
