"""What tuning knows of one stage: its first pick, its current pick, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gtco.codegen.generate import Generated
from gtco.search.learning.cost_model import Quality, quality
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage
from gtco.tuning.measure import Timed
from gtco.tuning.verdict import Verdict, first_seconds


class Prediction(NamedTuple):
    """Scores of a config before it was measured (higher is faster), by the learned model and by the
    analytic price.
    """

    learned: float
    analytic: float


@dataclass
class StageResult:
    """A stage that a run of model j calls ``weights[j]`` times, with its first and current pick.

    - ``history``: seconds of the best pick before any slot (predicted until it is measured) and
      after each slot;
    - ``readings``: seconds of every config that was timed. The pick, which is timed in every round,
      makes them comparable over rounds;
    - ``tested``: all configs that were tried or are in records, whatever the outcome;
    - ``predicted``: the scores of the configs that a learned model proposed;
    - ``noise`` of the last round, as a share.
    """

    stage: Stage
    weights: tuple[int, ...]
    first: Pick
    last: Pick
    history: list[float] = field(default_factory=list)
    readings: dict[Config, float] = field(default_factory=dict)
    tested: set[Config] = field(default_factory=set)
    predicted: dict[Config, Prediction] = field(default_factory=dict)
    noise: float = 0.0
    ranked: bool = True  # could the last round tell rivals apart?
    rounds: int = 0
    measured: int = 0
    unbuilt: int = 0  # slots in a row of which no candidate could be built
    exhausted: bool = False  # nothing is left to try, or trying it crashes

    def __post_init__(self) -> None:
        self.history = self.history or [self.last.seconds]
        self.tested.add(self.first.config)

    @property
    def occurrences(self) -> int:
        """How often a run of each model calls the stage, all together."""
        return sum(self.weights)

    @property
    def first_seconds(self) -> float:
        """Seconds of the first pick; predicted until it is measured."""
        return self.history[0]

    @property
    def seconds(self) -> float:
        return self.history[-1]

    @property
    def flops(self) -> float:
        """Floating-point operations of one run."""
        return self.first.sketch.workload(self.first.config).flops

    @property
    def slots(self) -> int:
        return len(self.history) - 1

    def add(self, timed: Timed, verdict: Verdict) -> None:
        """Adds the readings of one slot. The gains of rounds are multiplied, because their seconds
        were read at different times.
        """
        if not self.measured:
            self.history[0] = verdict.first_seconds
        picks, readings = timed.trial.picks, timed.readings
        ratios = np.median(readings / first_seconds(readings)[:, None], axis=0)
        for n, pick in enumerate(picks):
            if verdict.ranked and n not in timed.wrong:
                self.readings[pick.config] = self.seconds * float(ratios[n])
        self.measured += len(picks) - 1
        self.noise, self.ranked = verdict.noise, verdict.ranked
        self.history.append(self.seconds * verdict.seconds / verdict.first_seconds)

    @property
    def rankings(self) -> tuple[Quality, Quality] | None:
        """How well the learned model and the analytic price ranked the programs that were measured
        after they had scored them. None for fewer than two programs.
        """
        both = [(p, self.readings[c]) for c, p in self.predicted.items() if c in self.readings]
        if len(both) < 2:
            return None
        seconds = [s for _, s in both]
        return (
            quality([p.learned for p, _ in both], seconds),
            quality([p.analytic for p, _ in both], seconds),
        )

    def to_json(self, model: int = 0) -> dict[str, Any]:
        """The stage in the report of a model."""
        return {
            "stage": self.stage.label,
            "key": self.stage.key,
            "occurrences": self.weights[model],
            "candidates": self.measured,
            "first": self.first.config.to_json(),
            "last": self.last.config.to_json(),
            "first_seconds": self.first_seconds,
            "seconds": self.seconds,
            "noise": self.noise,
            "ranking": [asdict(ranking) for ranking in self.rankings or ()],
        }


def together(results: Sequence[StageResult], model: Generated) -> list[dict[str, Any]]:
    """The result of several tunings of a model's stages, one after the other, heaviest first: the
    first pick of the first tuning, and the pick now.
    """
    counts = Counter(stage.key for stage in model.stages)
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        key, report = result.stage.key, result.to_json()
        if not counts[key]:
            continue
        if before := found.get(key):
            report |= {name: before[name] for name in ("first", "first_seconds")}
            report["candidates"] += before["candidates"]
        stands = model.choices[key].config.to_json()
        if stands == report["first"]:
            report["seconds"] = report["first_seconds"]
        found[key] = report | {"occurrences": model.times * counts[key], "last": stands}
    return sorted(found.values(), key=lambda r: -r["occurrences"] * r["first_seconds"])
