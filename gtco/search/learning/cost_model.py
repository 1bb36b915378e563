"""The learned cost model: gradient-boosted trees over features of programs, trained on measured
trials (GTCO Section IV-E, equation 4).

The model predicts the throughput of a program over the best one of its stage, y in (0, 1]. The loss
of a program is w (f - y)^2 with w = y, so that the model is most exact for fast programs. The trees
see the features of a program twice: as they are, and minus those of the stage's first pick, which
is the part that carries over from stage to stage. The trees add to the analytic ranking. With fewer
than :data:`LEAST` measured programs they add nothing.

XGBoost is imported when a model is trained, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from gtco.search.learning.features import NAMES

LEAST = 24  # measured programs that a model needs
TREES = 120
FOLDS = 4  # programs are held out in so many parts
PARAMETERS = {
    "objective": "reg:squarederror",
    "eta": 0.1,
    "max_depth": 4,
    "min_child_weight": 2.0,
    "lambda": 2.0,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "tree_method": "hist",
    "nthread": 1,  # the others' work is timed; and sums in one order
    "verbosity": 0,
}
PREDICTED = NAMES.index("predicted")


def available() -> bool:
    """True if XGBoost is installed."""
    return find_spec("xgboost") is not None


@dataclass(frozen=True)
class Example:
    """A measured program: the key of its stage, its features, the features of the stage's first
    pick, and its time in any unit, the same for the whole stage.
    """

    stage: str
    features: np.ndarray
    first: np.ndarray
    seconds: float


class CostModel:
    """Scores programs; a higher score is faster. The same examples and seed give the same scores.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._booster: Any = None

    @property
    def trained(self) -> bool:
        """True if the model knows more than the analytic ranking."""
        return self._booster is not None

    def train(self, examples: Sequence[Example]) -> None:
        """Trains on these examples from scratch. Too few examples leave the model untrained."""
        self._booster = None
        if len(examples) < LEAST:
            return
        import xgboost

        wanted = throughputs(examples)
        inputs, analytic = self._inputs(examples)
        data = xgboost.DMatrix(inputs, wanted, weight=wanted, base_margin=analytic)
        self._booster = xgboost.train({**PARAMETERS, "seed": self.seed}, data, TREES)

    def scores(self, features: Sequence[np.ndarray], first: np.ndarray) -> np.ndarray:
        """A score for each program of one stage, whose first pick has the features ``first``."""
        return self.rated([Example("", x, first, 0.0) for x in features])

    def rated(self, examples: Sequence[Example]) -> np.ndarray:
        """A score for each of these programs; their times are not used."""
        if not examples:
            return np.zeros(0)
        inputs, analytic = self._inputs(examples)
        if self._booster is None:
            return analytic
        import xgboost

        return np.asarray(self._booster.predict(xgboost.DMatrix(inputs, base_margin=analytic)))

    @staticmethod
    def _inputs(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
        """The rows that the trees see, and the analytic throughput over that of the first pick."""
        own = np.stack([e.features for e in examples])
        first = np.stack([e.first for e in examples])
        analytic = 2.0 ** (first[:, PREDICTED] - own[:, PREDICTED])
        return np.concatenate([own, own - first], axis=1), analytic


def throughputs(examples: Sequence[Example]) -> np.ndarray:
    """The throughput of each program over the best one of its stage."""
    best: dict[str, float] = {}
    for e in examples:
        best[e.stage] = min(best.get(e.stage, e.seconds), e.seconds)
    return np.array([best[e.stage] / e.seconds for e in examples])


@dataclass(frozen=True)
class Quality:
    """How well scores rank the programs of a stage: the share of pairs in the right order (1/2 is
    chance), and Spearman's correlation.
    """

    pairs: float
    rank: float
    programs: int


def quality(
    scores: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> Quality:
    """The quality of scores for programs of one stage; higher scores should take fewer ``seconds``.
    A pair of equal scores counts as half right. NaN if there are not two different times.
    """
    s, t = np.asarray(scores, float), np.asarray(seconds, float)
    n = len(t)
    one, other = np.triu_indices(n, 1)
    different = t[one] != t[other]
    agrees = np.sign(s[one] - s[other]) * np.sign(t[other] - t[one])
    pairs = (agrees[different] + 1) / 2
    return Quality(float(pairs.mean()) if len(pairs) else np.nan, -spearman(s, t), n)


def held_out(
    examples: Sequence[Example], *, whole_stages: bool = False
) -> dict[str, tuple[Quality, Quality]]:
    """For each stage, how the analytic price and a model rank programs that the model has not seen:
    a share ``1 / FOLDS`` of all programs or, if ``whole_stages``, all programs of the stage.
    """
    if whole_stages:
        fold_of = {stage: n for n, stage in enumerate(dict.fromkeys(e.stage for e in examples))}
        parts = np.array([fold_of[e.stage] for e in examples])
    else:
        parts = np.random.default_rng(0).permutation(len(examples)) % FOLDS
    scores = np.zeros((2, len(examples)))
    for part in np.unique(parts):
        model = CostModel()
        asked = [e for e, p in zip(examples, parts, strict=True) if p == part]
        scores[0, parts == part] = model.rated(asked)
        model.train([e for e, p in zip(examples, parts, strict=True) if p != part])
        scores[1, parts == part] = model.rated(asked)
    found = {}
    for stage in dict.fromkeys(e.stage for e in examples):
        mine = [n for n, e in enumerate(examples) if e.stage == stage]
        seconds = [examples[n].seconds for n in mine]
        found[stage] = (quality(scores[0, mine], seconds), quality(scores[1, mine], seconds))
    return found


def spearman(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float:
    """The correlation of ranks; equal values have the same rank. NaN if one of the two is constant.
    """
    ranks = []
    for values in (np.asarray(one, float), np.asarray(other, float)):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        ranks.append((ends - (counts - 1) / 2)[inverse])
    if min(np.ptp(r) if len(r) else 0.0 for r in ranks) == 0:
        return float("nan")
    return float(np.asarray(np.corrcoef(ranks))[0, 1])
