"""What becomes of readings: records of a race, what a partition saves, and results of stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor.space import Config
from gtco.tuning import race as module
from gtco.tuning.measure import Timed
from gtco.tuning.race import RaceReadings, race, saved
from gtco.tuning.result import StageResult, together
from gtco.tuning.trial import Trial
from gtco.tuning.verdict import Verdict
from tests.tuning.small import linear

STAGE = linear()


def pick(number: int) -> Any:
    return SimpleNamespace(config=Config("gemm", (("kc", number),)), seconds=1.0)


PICKS = [pick(number) for number in range(3)]


# races --------------------------------------------------------------------------------------------
def test_the_noise_of_a_race_is_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two readings of the stage are 2 ms and 3 ms."""

    def time(trials: list[Trial], *_: Any, **__: Any) -> list[Timed]:
        return [Timed(trial, np.full((5, 2), (2e-3, 3e-3))) for trial in trials]

    monkeypatch.setattr(module, "Measurer", lambda *_, **__: SimpleNamespace(time=time))
    known: dict[str, Any] = {"choices": {STAGE.key: PICKS[0]}, "kernels": {STAGE.key: None}}
    generated: Any = SimpleNamespace(stages=[STAGE], **known)
    workers: Any = None
    (found,) = race([generated], target("x86-64-v3"), workers, 1, 1.0).records
    assert (found.seconds, found.ratio) == (2.5e-3, 1.0)
    assert found.noise == pytest.approx(0.4)


def test_stages_of_different_numbers_of_rounds_are_compared() -> None:
    """By the rounds that all of them have. The last rounds of one do not count."""
    slow = np.full((40, 2), 3.0)
    slow[30:] = 0.1
    readings = RaceReadings({"slow": slow, "fast": np.full((30, 2), 1.0)}, ())
    assert saved({"slow": 1}, {"fast": 1}, readings) == pytest.approx(2.0)
    assert saved({"fast": 1}, {"slow": 1}, readings) == 0.0


# results of stages --------------------------------------------------------------------------------
def added(result: StageResult, wrong: frozenset[int] = frozenset(), ranked: bool = True) -> None:
    """A slot in which the first rival takes half of the pick's time, and the second twice as
    much.
    """
    seconds = np.array([[1.0, 0.5, 2.0, 1.0]] * 9)
    timed: Any = SimpleNamespace(trial=SimpleNamespace(picks=PICKS), readings=seconds, wrong=wrong)
    result.add(timed, Verdict(0, 1.0, 1.0, 0.0, ranked))


def read(result: StageResult) -> dict[int, float]:
    """Its readings, by the number of the pick."""
    numbers = {one.config: number for number, one in enumerate(PICKS)}
    return {numbers[config]: seconds for config, seconds in result.readings.items()}


def test_only_right_kernels_have_readings() -> None:
    """A learned model is taught by them."""
    result = StageResult(STAGE, (1,), PICKS[0], PICKS[0])
    added(result, wrong=frozenset({1}))
    assert read(result) == {0: 1.0, 2: 2.0}
    result = StageResult(STAGE, (1,), PICKS[0], PICKS[0])
    added(result, ranked=False)
    assert read(result) == {}
    added(result)
    assert read(result) == {0: 1.0, 1: 0.5, 2: 2.0}


def test_candidates_of_several_tunings_add_up() -> None:
    """The first pick is that of the first tuning, and the last one is what the model has."""
    results = [StageResult(STAGE, (2,), one, one) for one in PICKS[:2]]
    added(results[0]), added(results[1]), added(results[1])
    choices = {STAGE.key: PICKS[2]}
    generated: Any = SimpleNamespace(times=1, stages=[STAGE, STAGE], choices=choices)
    (found,) = together(results, generated)
    assert found["candidates"] == 6 and found["occurrences"] == 2
    assert found["first"] == PICKS[0].config.to_json()
    assert found["last"] == PICKS[2].config.to_json()
