"""A forest that corrects prices by measured times. It learns from a config's decisions and the
product's sizes by how much the config's time differs from its price.

Only ratios between the configs of one product count, because nothing else decides a pick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .examples import DECISIONS, Example, repriced
from .fit import FIRST, FOREST

LEAST = 200  # measured configs that a correction needs


@dataclass(frozen=True)
class Measured:
    """Configs of a product that were measured: their terms, prices and seconds."""

    terms: np.ndarray
    price: np.ndarray
    seconds: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """The logarithm of seconds over price, 0 in the median of the product."""
        found = np.log(self.seconds / self.price)
        return found - np.median(found)


class Correction:
    """Factors on prices, learned from measured products. With too few of them all factors are 1."""

    def __init__(self, measured: Sequence[Measured], seed: int = 0) -> None:
        self.forest: Any = None
        if sum(len(one.seconds) for one in measured) < LEAST:
            return
        import xgboost

        inputs = np.concatenate([features(one.terms) for one in measured])
        wanted = np.concatenate([one.ratios for one in measured])
        settings = {**FOREST, "seed": seed, "min_child_weight": 4.0, "num_parallel_tree": 200}
        self.forest = xgboost.train(settings, xgboost.DMatrix(inputs, wanted), 1)

    def factor(self, terms: np.ndarray) -> np.ndarray:
        """By how much each config takes longer than its price, beside the others."""
        if self.forest is None:
            return np.ones(len(terms))
        import xgboost

        predicted = self.forest.predict(xgboost.DMatrix(features(terms)))
        return np.exp(np.asarray(predicted, float))

    def importance(self) -> list[tuple[str, float]]:
        """What the forest asks for, by its share of the gain, the most first."""
        if self.forest is None:
            return []
        gains = self.forest.get_score(importance_type="total_gain")
        whole = sum(gains.values())
        named = {f"f{n}": name for n, name in enumerate(NAMES)}
        found = [(named[key], value / whole) for key, value in gains.items()]
        return sorted(found, key=lambda item: -item[1])


def features(terms: np.ndarray) -> np.ndarray:
    """The logarithms of the sizes, the coordinates of the decisions, and what a block, a panel and
    a task take: logarithms again, so sums of these.
    """
    sizes, own = terms[:, 1:6], terms[:, FIRST:]
    at = _places()
    m, n, k = sizes[:, 1], sizes[:, 2], sizes[:, 3]
    rows, vectors = own[:, at["tile"]], own[:, at["tile"] + 1]
    kc, by_m, by_n = own[:, at["kc"]], own[:, at["chunks_m"]], own[:, at["chunks_n"]]
    made = [
        rows + vectors,
        rows + kc,
        vectors + kc,
        m - by_m + kc,
        n - by_n + kc,
        m - by_m + n - by_n,
        m - rows,
        n - vectors,
        k - kc,
    ]
    return np.concatenate([sizes, own, np.stack(made, axis=1)], axis=1)


def _places() -> dict[str, int]:
    """Where the coordinates of each decision begin."""
    found, begin = {}, 0
    for name, (width, _, _) in DECISIONS.items():
        found[name] = begin
        begin += width
    return found


NAMES = (
    *("batch", "m", "n", "k", "cores"),
    *(f"{name} {n}" for name, (width, _, _) in DECISIONS.items() for n in range(width)),
    *("tile", "block of A", "panel of B", "A of a task", "B of a task", "C of a task"),
    *("row blocks", "panels", "blocks of k"),
)


def corrected(examples: Sequence[Example], correction: Correction) -> list[Example]:
    """The examples with their costs as the correction has them."""
    return [repriced(one, correction.factor(one.rows.terms)) for one in examples]
