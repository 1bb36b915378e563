"""Fits the polynomials to examples (DyGen, Section III-A3).

Many configs of a product cost the same within a percent, and the very best of them is chance. A
polynomial through the best ones would follow that chance. So each product's target is drawn towards
the law: after a fit, the target becomes the config that costs little and lies near to what the fit
gives, and the polynomials are fitted again (:func:`fit`). The paper smooths with a random forest
instead, whose predictions the polynomials are fitted to (:func:`through_forest`); both are here,
and ``train`` keeps the one whose picks cost less on products that were held apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gtco.search.closed_form.form import ClassForm
from gtco.search.closed_form.products import feature_names

from .examples import DECISIONS, Example, Rows, blank

ROUNDS = 10
STRICTNESS = 30.0  # what doubling the price is worth in units of distance, over ln 2
RIDGE = 3e-3
# Coordinates that are worth a unit of distance: chunks matter less than tiles.
SCALE = {
    "tile": 1.0,
    "chunks_m": 2.0,
    "chunks_n": 2.0,
    "a": 0.5,
    "b": 0.5,
    "kc": 1.5,
    "order": 0.5,
    "mc": 2.0,
    "prefetch": 0.5,
}
FIRST = len(feature_names())


def fit(examples: Sequence[Example], strictness: float = STRICTNESS) -> ClassForm:
    """The polynomials of one operator class."""
    targets = [int(one.rows.cost.argmin()) for one in examples]
    form = blank()
    for _ in range(ROUNDS):
        form = regressed([(one.rows, t) for one, t in zip(examples, targets, strict=True)])
        targets = [
            int(np.argmin(strictness * np.log(one.rows.cost) + distances(form, one.rows)))
            for one in examples
        ]
    return form


def regressed(targets: Sequence[tuple[Rows, int]]) -> ClassForm:
    """Least squares through one config of each product, where the space left a choice."""
    terms = np.array([rows.terms[n] for rows, n in targets])
    opened = np.array([rows.open[n] for rows, n in targets])
    return _each(lambda number, end, width: _solved(terms, opened[:, number], end, width))


def through_forest(examples: Sequence[Example], seed: int = 0, top: int = 8) -> ClassForm:
    """The paper's way: a random forest learns each coordinate from the ``top`` configs of each
    product, and the polynomials are fitted to what it predicts there.
    """
    import xgboost

    some = [one.rows.cost.argsort()[:top] for one in examples]
    terms = np.concatenate([one.rows.terms[n] for one, n in zip(examples, some, strict=True)])
    opened = np.concatenate([one.rows.open[n] for one, n in zip(examples, some, strict=True)])

    def smoothed(number: int, end: int, width: int) -> np.ndarray:
        kept = opened[:, number]
        if kept.sum() < 2 * FIRST:
            return np.zeros((width, end))
        inputs, wanted = terms[kept, :end], terms[kept, end : end + width].copy()
        data = xgboost.DMatrix(inputs, wanted)
        forest = xgboost.train({**FOREST, "seed": seed}, data, 1)
        predicted = forest.predict(data).reshape(wanted.shape)
        return _least_squares(inputs, predicted)

    return _each(smoothed)


FOREST = {  # one round of many trees, each of a part of rows and columns
    "num_parallel_tree": 100,
    "eta": 1.0,
    "subsample": 0.7,
    "colsample_bynode": 0.5,
    "max_depth": 8,
    "lambda": 0.0,
    "tree_method": "hist",
    "multi_strategy": "one_output_per_tree",
    "nthread": 1,
    "verbosity": 0,
}


def _each(weights: Callable[[int, int, int], np.ndarray]) -> ClassForm:
    """A form whose decisions get ``weights(number, terms, coordinates)``."""
    found, end = [], FIRST
    empty = blank()
    for number, form in enumerate(empty.decisions):
        width = DECISIONS[form.name][0]
        found.append(replace(form, weights=weights(number, end, width)))
        end += width
    return replace(empty, decisions=tuple(found))


def _solved(terms: np.ndarray, kept: np.ndarray, end: int, width: int) -> np.ndarray:
    if kept.sum() < 4:
        return np.zeros((width, end))
    return _least_squares(terms[kept, :end], terms[kept, end : end + width])


def _least_squares(inputs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Ridge regression; the constant term, the first one, is not held back."""
    scale = inputs.std(axis=0)
    scale[scale == 0] = 1.0
    x = inputs / scale
    held = RIDGE * len(x) * np.eye(x.shape[1])
    held[0, 0] = 1e-9
    return (np.linalg.solve(x.T @ x + held, x.T @ wanted) / scale[:, None]).T


def distances(form: ClassForm, rows: Rows) -> np.ndarray:
    """How far each config lies from what the polynomials give, decision by decision."""
    far, end = np.zeros(len(rows.terms)), FIRST
    for number, one in enumerate(form.decisions):
        width = one.coordinates
        missed = rows.terms[:, end : end + width] - rows.terms[:, :end] @ one.weights.T
        far += rows.open[:, number] * (missed**2).sum(axis=1) / SCALE[one.name] ** 2
        end += width
    return far
