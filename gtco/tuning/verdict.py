"""Which of a stage's rivals is faster, from rounds in which all of them ran.

A shared machine's throughput can halve for seconds, so times of different rounds are not compared:
each rival's time is divided by the first one's of the same round, which is read before the rivals
and after them. A rival has to win enough of the rounds, by enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from gtco.search.records.records import Outcome

LEAST_GAIN = 0.02  # below it the choice stands: the next run may read the opposite
CHANCE = 0.05  # that of all a stage's rivals, were they equals, one wins by luck
NOISE_FACTOR = 2.0  # a gain must be so many times what noise makes of equals
NOISIEST = 0.1  # beyond it rivals are not told apart at all


@dataclass(frozen=True)
class Verdict:
    """The number of the rival to take; its time and the first one's, seconds; ``noise``, how far
    two readings of the first are apart, as a share. ``ranked``: was the machine quiet enough, and
    were there rounds enough, to say?
    """

    best: int
    seconds: float
    first_seconds: float
    noise: float
    ranked: bool = True


def judge(rounds: np.ndarray, wrong: frozenset[int] = frozenset()) -> Verdict:
    """``rounds``: seconds [rounds, rivals + 1], the last column once more the first rival.
    ``wrong``: rivals that are out of the question.
    """
    first = first_seconds(rounds)
    ratios = rounds / first[:, None]
    middle = np.median(ratios, axis=0)
    noise = abs(float(middle[0] - middle[-1]))
    most = 1.0 - max(LEAST_GAIN, NOISE_FACTOR * noise)
    rivals = range(1, rounds.shape[1] - 1)
    enough = luck(len(rounds), len(rounds)) * len(rivals) <= CHANCE
    ranked = enough and noise <= NOISIEST
    clear = [
        c
        for c in rivals
        if ranked
        and c not in wrong
        and middle[c] <= most
        and luck(int(np.sum(ratios[:, c] < 1.0)), len(rounds)) * len(rivals) <= CHANCE
    ]
    best = min(clear, key=lambda c: float(middle[c]), default=0)
    seconds = float(np.median(first))
    taken = seconds * float(middle[best]) if best else seconds
    return Verdict(best, taken, seconds, noise, ranked)


def outcome(verdict: Verdict, rival: int) -> Outcome:
    """What came of a rival that was timed and is not wrong."""
    if not verdict.ranked:
        return "noisy"
    if rival == verdict.best:
        return "taken" if rival else "kept"
    return "slower" if rival else "beaten"


def first_seconds(rounds: np.ndarray) -> np.ndarray:
    """Of the first rival in each round [rounds], the mean of its readings before and after the
    others: what their seconds are divided by.
    """
    mean: np.ndarray = (rounds[:, 0] + rounds[:, -1]) / 2
    return mean


def luck(won: int, rounds: int) -> float:
    """The chance that one of two equals wins so many of the rounds or more (the sign test)."""
    return sum(comb(rounds, n) for n in range(won, rounds + 1)) / 2**rounds
