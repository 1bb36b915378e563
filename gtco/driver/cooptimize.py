"""Fusion and tuning alternate until neither gains: the co-optimization of GTCO's title.

::

    partitions = the best one by prediction, and its rivals
    repeat:
      tune the stages of all partitions; time all stages side by side, into the records
      search again with what was measured; a new partition joins the others
    tune the partition that is best by measurement to the end

Measured times and predictions have different scales; :mod:`gtco.search.recorded` has the rule by
which they are added up. The loop ends when the search finds no partition that promises more than
the best measured one, and after ``TURNS`` repetitions at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Protocol

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.driver.phases import CutModel, key_of
from gtco.graph.fusion.stages import CLOSE, Partition, fuse, rivals
from gtco.graph.graph import Graph
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import BuildError
from gtco.support.options import Tune
from gtco.tensor.stage import Stage
from gtco.tuning.race import RaceReadings, race, saved
from gtco.tuning.runner import Runner

SHARE = 0.5  # share of the budget for choosing a partition; the one that stands gets the rest
TURNS = 3
RACE_SECONDS = 3.0  # seconds of readings side by side


class Steps(Protocol):
    """What happens between two searches."""

    def search(self) -> tuple[Graph, Partition]:
        """The best partition by all that is known."""
        ...

    def rivals(self, graph: Graph, best: Partition) -> list[tuple[Graph, Partition]]:
        """Other partitions that are worth measuring."""
        ...

    def seconds(self, partition: Partition) -> float:
        """The sum of the known or predicted times of its stages."""
        ...

    def generate(self, partition: Partition) -> Generated: ...

    def tune(self, models: Sequence[Generated], effort: Tune) -> None: ...

    def race(self, models: Sequence[Generated]) -> RaceReadings:
        """Times all stages side by side and records the times."""
        ...


@dataclass(frozen=True)
class Measured:
    """The steps for a compile of ``graph``; ``runner`` measures, None is this machine."""

    graph: Graph
    policy: RecordedPolicy
    workers: Workers
    threads: int
    generated: Callable[[list[Stage]], Generated]
    tuned: Callable[[Sequence[Generated], Tune], object]
    runner: Runner | None = None

    def search(self) -> tuple[Graph, Partition]:
        policy = self.policy
        return fuse(self.graph, policy.predict, policy.floor, policy.possible, promising=CLOSE)

    def rivals(self, graph: Graph, best: Partition) -> list[tuple[Graph, Partition]]:
        policy = self.policy
        return rivals(self.graph, best, policy.predict, policy.floor, policy.possible)

    def seconds(self, partition: Partition) -> float:
        return sum(self.policy.predict(stage) for stage in partition.stages)

    def generate(self, partition: Partition) -> Generated:
        return self.generated(list(partition.stages))

    def tune(self, models: Sequence[Generated], effort: Tune) -> None:
        self.tuned(models, effort)

    def race(self, models: Sequence[Generated]) -> RaceReadings:
        assert self.policy.records is not None, "what is measured is kept"
        found = race(
            models, self.policy.target, self.workers, self.threads, RACE_SECONDS, self.runner
        )
        self.policy.records.add(found.records)
        self.policy.observe()
        return found


def cooptimize(first: CutModel, steps: Steps, effort: Tune) -> tuple[CutModel, str]:
    """The partition that is kept, and a sentence on how it was found."""
    end = time.monotonic() + effort.seconds
    seen = {first.key: first}
    chosen, before, gain = first, nan, 0.0

    def join(graph: Graph, partition: Partition) -> bool:
        key = key_of(partition)
        if key in seen:
            return False
        try:
            seen[key] = CutModel(graph, partition, steps.generate(partition))
        except BuildError:  # the partition is left out; the first one is there in any case
            return False
        return True

    for graph, partition in steps.rivals(first.graph, first.partition):
        join(graph, partition)
    for turn in range(TURNS):
        left = end - time.monotonic()
        if left <= 0:
            break
        measured = list(seen.values())
        models = [candidate.generated for candidate in measured]
        trials = max(effort.trials // TURNS, 1)
        steps.tune(models, replace(effort, trials=trials, seconds=left / (TURNS - turn)))
        readings = steps.race(models)
        gains = [saved(first.weights, c.weights, readings) for c in measured]
        gain = max(gains)
        chosen = measured[gains.index(gain)]  # the first one, where none gains
        before = steps.seconds(first.partition)
        graph, partition = steps.search()
        promised = steps.seconds(partition) < steps.seconds(chosen.partition)
        if turn == TURNS - 1 or not promised or not join(graph, partition):
            break
    if isnan(before):
        return first, (
            f"building the kernels of {len(seen)} partitions left no time to measure them, the "
            "predicted one stands"
        )
    times = first.generated.times  # parts of a batch
    what = (
        f"{len(seen)} partitions measured, the predicted one "
        + ("stands" if chosen is first else f"gave way: {_differences(first, chosen)}")
        + f", {1e3 * times * before:.2f} -> {1e3 * times * (before - gain):.2f} ms"
    )
    return chosen, what


def part(effort: Tune, share: float) -> Tune:
    """A share of an effort, in which every stage is tried about once."""
    trials = max(int(share * effort.trials), 1)
    return replace(
        effort, trials=trials, seconds=share * effort.seconds, patience=1, fusion=False
    )


def rest(effort: Tune, seconds: float, trials: int) -> Tune:
    """The effort that is left, at least enough to report that it was spent."""
    left = max(effort.seconds - seconds, 1.0)
    return replace(effort, trials=max(effort.trials - trials, 1), seconds=left)


def _differences(first: CutModel, chosen: CutModel) -> str:
    """The stages that only the first partition has, and those that only the chosen one has."""
    labels = {s.key: s.label for c in (first, chosen) for s in c.partition.stages}

    def named(key: frozenset[tuple[str, int]]) -> str:
        return ", ".join(sorted(f"{n} x {labels[stage]}" for stage, n in key)) or "nothing"

    return f"{named(first.key - chosen.key)} became {named(chosen.key - first.key)}"
