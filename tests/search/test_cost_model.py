"""The learned cost model: what it learns from few and from many trials, and how its quality is
computed.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from gtco.search.learning.cost_model import (
    LEAST,
    CostModel,
    Example,
    held_out,
    quality,
    spearman,
    throughputs,
)
from gtco.search.learning.features import NAMES

PREDICTED = NAMES.index("predicted")
MISSES = NAMES.index("beyond_2")


def examples(n: int, stages: int = 3, seed: int = 0) -> list[Example]:
    """Programs whose time is the analytic policy's prediction times something that the policy does
    not see: bytes from beyond L2. The scales of the stages differ by orders of magnitude.
    """
    random = np.random.default_rng(seed)
    found = []
    for number in range(stages):
        scale = 4.0 * number
        rows = random.random((n, len(NAMES))).astype(np.float32)
        rows[:, PREDICTED] = 14 + scale + rows[:, PREDICTED]
        rows[:, MISSES] = 20 + 3 * rows[:, MISSES]
        seconds = 2.0 ** (rows[:, PREDICTED] + 0.7 * (rows[:, MISSES] - 20))
        found += [
            Example(f"s{number}", row, rows[0], s) for row, s in zip(rows, seconds, strict=True)
        ]
    return found


def ranked(model: CostModel, held_out: list[Example]) -> list[float]:
    """The share of pairs in the right order, stage by stage."""
    shares = []
    for stage in dict.fromkeys(e.stage for e in held_out):
        mine = [e for e in held_out if e.stage == stage]
        scores = model.scores([e.features for e in mine], mine[0].first)
        shares.append(quality(scores, [e.seconds for e in mine]).pairs)
    return shares


def test_it_learns_what_the_analytic_price_does_not_see() -> None:
    """On programs and on stages that it did not see in training."""
    model = CostModel()
    held_out = examples(40, seed=1)
    before = ranked(model, held_out)
    assert not model.trained and max(before) < 0.75
    model.train(examples(80))
    assert model.trained and min(ranked(model, held_out)) > 0.85
    model.train([e for e in examples(60) if e.stage != "s2"])
    assert ranked(model, [e for e in held_out if e.stage == "s2"])[0] > max(before)


def test_too_few_trials_leave_the_analytic_ranking() -> None:
    model, few = CostModel(), examples(LEAST - 1, stages=1)
    for trained_before in (False, True):
        if trained_before:
            model.train(examples(LEAST))
            assert model.trained
        model.train(few)
        assert not model.trained
        rows = [e.features for e in few]
        order = np.argsort(-model.scores(rows, few[0].first))
        assert (order == np.argsort([row[PREDICTED] for row in rows])).all()
    assert len(model.scores([], few[0].first)) == 0


def test_a_seed_says_all() -> None:
    rows = [e.features for e in examples(30, seed=5)]

    def scores(seed: int) -> np.ndarray:
        model = CostModel(seed)
        model.train(examples(30))
        return model.scores(rows, rows[0])

    assert (scores(1) == scores(1)).all()
    assert (scores(1) != scores(2)).any()


def test_throughput_is_over_the_stages_best() -> None:
    """The unit of a stage's times does not matter."""
    made = examples(3, stages=2)
    wanted = throughputs(made)
    assert (wanted[:3].max(), wanted[3:].max()) == (1.0, 1.0) and (wanted > 0).all()
    again = [Example(e.stage, e.features, e.first, 7 * e.seconds) for e in made[:3]]
    assert throughputs(again) == pytest.approx(wanted[:3])


def test_quality_of_a_ranking() -> None:
    assert quality([3, 2, 1], [1.0, 2.0, 3.0]).pairs == 1
    assert quality([3, 2, 1], [1.0, 2.0, 3.0]).rank == pytest.approx(1)
    assert quality([1, 2, 3], [1.0, 2.0, 3.0]).pairs == 0
    assert quality([1, 1, 1], [1.0, 2.0, 3.0]).pairs == 0.5
    assert quality([3, 1, 2], [1.0, 2.0, 3.0]).pairs == pytest.approx(2 / 3)
    assert np.isnan(quality([1, 2], [1.0, 1.0]).pairs) and np.isnan(quality([1], [1.0]).rank)
    assert spearman([1, 5, 9, 9], [2, 3, 40, 40]) == pytest.approx(1)
    assert np.isnan(spearman([1, 1], [1, 2]))


def test_held_out_programs_are_not_known() -> None:
    """Random times are ranked by chance, whatever else the model has seen."""
    random = np.random.default_rng(3)
    made = examples(60)
    for price, model in held_out(made).values():
        assert model.pairs > price.pairs and model.programs == 60
    assert min(model.pairs for _, model in held_out(made, whole_stages=True).values()) > 0.75
    luck = [Example(e.stage, e.features, e.first, 1 + random.random()) for e in made]
    assert all(0.3 < model.pairs < 0.7 for _, model in held_out(luck).values())


def test_a_compile_that_does_not_tune_needs_no_xgboost() -> None:
    code = (
        "import sys; sys.modules['xgboost'] = None\n"
        "import gtco.compiler, gtco.tuning.tune\n"
        "from gtco.search.learning.cost_model import CostModel; CostModel().train([])\n"
        "print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
