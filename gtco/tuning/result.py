"""What tuning knows of one stage: its first pick, its last one, and what was measured."""

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
    """Scores of a config before it was measured, higher is faster: the learned model's, and the
    analytic price's.
    """

    learned: float
    analytic: float


@dataclass
class StageResult:
    """A stage that occurs ``weights[j]`` times in model j, its first pick and the last one.

    ``history``: seconds of the best before any slot (predicted, until it is measured) and after
    each; ``readings``: seconds of every config that was timed, made comparable over rounds by the
    pick that all rivals of a round are timed against; ``tested``: all that were tried or are known
    from records, whatever came of them; ``predicted``: what a learned model said of those that it
    proposed; ``noise``: of the last round, as a share.
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
    exhausted: bool = False  # nothing is left to try, or trying it crashes

    def __post_init__(self) -> None:
        self.history = self.history or [self.last.seconds]
        self.tested.add(self.first.config)

    @property
    def occurrences(self) -> int:
        """In all models."""
        return sum(self.weights)

    @property
    def first_seconds(self) -> float:
        """Of the first pick; predicted, until it is measured."""
        return self.history[0]

    @property
    def seconds(self) -> float:
        return self.history[-1]

    @property
    def flops(self) -> float:
        """What one run is counted for."""
        return self.first.sketch.workload(self.first.config).flops

    @property
    def slots(self) -> int:
        return len(self.history) - 1

    def add(self, timed: Timed, verdict: Verdict) -> None:
        """One slot's readings. The gains of rounds multiply: their seconds were read at different
        moments.
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
        """How the learned model and the analytic price ranked what was measured only afterwards;
        None of fewer than two programs.
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
        """What the report of a model says of the stage."""
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
    """What several rounds of tuning, one after the other, did to a model's stages, heaviest first:
    the first pick of the first, and the one that stands.
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
        found[key] = report | {"occurrences": counts[key], "last": stands}
    return sorted(found.values(), key=lambda r: -r["occurrences"] * r["first_seconds"])
