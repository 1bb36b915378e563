"""Times all stages of several partitions side by side, so that their times can be added up and
compared.

Tuning reads different stages minutes apart. In that time the speed of a shared machine changes by
more than partitions differ. Here the kernel of each stage is one step of one library, and a round
runs all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine
from gtco.search.records.records import Record, circumstances
from gtco.tensor.stage import Stage
from gtco.tuning.measure import Measurer, Timed
from gtco.tuning.runner import Runner
from gtco.tuning.trial import Trial
from gtco.tuning.verdict import judge


@dataclass(frozen=True)
class RaceReadings:
    """``seconds`` [rounds, 2] of each stage, by key, and a record ``kept`` for each."""

    seconds: Mapping[str, np.ndarray]
    records: tuple[Record, ...]


def race(
    models: Sequence[Generated],
    target: Machine,
    workers: Workers,
    threads: int,
    seconds: float,
    runner: Runner | None = None,
) -> RaceReadings:
    """Times every different stage of the models with its current kernel, on one machine. Stages
    whose timing fails are left out.
    """
    stages: dict[str, tuple[Stage, Generated]] = {}
    for model in models:
        for stage in model.stages:
            stages.setdefault(stage.key, (stage.canonical, model))
    trials = [
        Trial(stage, (model.choices[key],), (model.kernels[key],))
        for key, (stage, model) in stages.items()
    ]
    measurer = Measurer(workers, target, threads, runner=runner)
    found = [t for t in measurer.time(trials, seconds, machines=1) if not t.failed]
    return RaceReadings(
        {timed.trial.stage.key: timed.readings for timed in found},
        tuple(_record(timed, circumstances(target)) for timed in found),
    )


def _record(timed: Timed, known: str) -> Record:
    stage, pick = timed.trial.stage, timed.trial.picks[0]
    first, again = (float(x) for x in np.median(timed.readings, axis=0))
    seconds = (first + again) / 2
    measured = seconds, 1.0, abs(first - again) / seconds
    return Record.of(stage, pick, known, "kept", measured, machine=timed.machine)


def saved(first: Mapping[str, int], rival: Mapping[str, int], readings: RaceReadings) -> float:
    """Seconds that a rival partition clearly saves, or 0. ``first`` and ``rival`` say how often
    each partition has a stage, by key. Only the stages that they do not share are compared, round
    by round.
    """
    differ = {key: rival.get(key, 0) - first.get(key, 0) for key in {*first, *rival}}
    differ = {key: n for key, n in differ.items() if n}
    if not differ or not set(differ) <= set(readings.seconds):
        return 0.0
    rounds = min(len(readings.seconds[key]) for key in differ)

    def total(sign: int) -> np.ndarray:
        parts = [
            abs(n) * readings.seconds[key][:rounds] for key, n in differ.items() if n * sign > 0
        ]
        return np.sum(parts, axis=0) if parts else np.zeros((rounds, 2))

    went, came = total(-1), total(1)
    if not went.any():
        return 0.0
    verdict = judge(np.stack([went[:, 0], came.mean(axis=1), went[:, 1]], axis=1))
    return verdict.first_seconds - verdict.seconds if verdict.best else 0.0
