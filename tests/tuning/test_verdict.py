"""When readings show that a rival beats the pick: :mod:`gtco.tuning.verdict`."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tuning.verdict import judge, luck, outcome


def rounds(*factors: float, noise: float = 0.0, drift: float = 0.0, n: int = 40) -> np.ndarray:
    """Seconds [n, rivals + 1] on a machine whose throughput changes by ``drift`` between rounds and
    by ``noise`` within one.
    """
    random = np.random.default_rng(1)
    scale = 1 + drift * random.random((n, 1))
    return scale * np.array([*factors, factors[0]]) * (1 + noise * random.random((n, 1)))


def test_a_faster_rival_is_taken_though_rounds_differ_threefold() -> None:
    verdict = judge(rounds(1.0, 0.95, 0.9, 1.2, drift=2.0))
    assert verdict.best == 2
    assert verdict.seconds == pytest.approx(0.9 * verdict.first_seconds)
    assert verdict.noise == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.99), (1.0, 1.3, 1.1), (1.0,)])
def test_the_pick_stands_where_nothing_clearly_beats_it(factors: tuple[float, ...]) -> None:
    verdict = judge(rounds(*factors, drift=1.0))
    assert verdict.best == 0 and verdict.seconds == verdict.first_seconds


def test_a_gain_within_the_noise_of_equals_is_none() -> None:
    """The two readings of the first differ by 10 %, so a rival that is 12 % faster proves
    nothing.
    """
    readings = rounds(1.0, 0.88)
    readings[:, -1] *= 1.1
    verdict = judge(readings)
    assert verdict.best == 0 and verdict.noise == pytest.approx(0.1, abs=0.01)
    assert judge(rounds(1.0, 0.88)).best == 1


def test_on_a_noisy_machine_nothing_is_decided() -> None:
    """The two readings of the first candidate differ by 30 %. A decision by them would be chance,
    and the cost model would learn it.
    """
    readings = rounds(1.0, 0.5, 2.0)
    readings[:, -1] *= 1.3
    verdict = judge(readings)
    assert not verdict.ranked and verdict.best == 0
    assert [outcome(verdict, rival) for rival in range(3)] == ["noisy"] * 3
    verdict = judge(rounds(1.0, 0.5, 2.0))
    assert [outcome(verdict, rival) for rival in range(3)] == ["beaten", "taken", "slower"]


def test_one_lucky_half_is_not_enough() -> None:
    """A rival that is much faster in a little over half of the rounds, and slower in the others."""
    readings = rounds(1.0, 0.5, n=40)
    readings[22:, 1] = 1.2
    assert judge(readings).best == 0


def test_few_rounds_prove_nothing() -> None:
    """In one trial of five, one of seven equal rivals wins all of five rounds by luck."""
    assert luck(5, 5) == 1 / 32 and luck(0, 9) == 1 and luck(2, 3) == 1 / 2
    factors = (1.0, *(1.1,) * 6, 0.8)
    assert judge(rounds(*factors, n=5)).best == 0 and not judge(rounds(*factors, n=5)).ranked
    assert judge(rounds(*factors, n=9)).best == 7
    equal = np.random.default_rng(4).lognormal(0, 0.1, (2000, 12, 9))
    taken = sum(judge(r).best != 0 for r in equal)
    assert taken <= 0.05 * 2000


def test_a_wrong_rival_is_out_of_the_question() -> None:
    assert judge(rounds(1.0, 0.8, 0.5), frozenset({2})).best == 1
