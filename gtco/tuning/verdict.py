"""Decides whether a rival beats a stage's pick, from rounds in which all of them ran.

The throughput of a shared machine can halve for seconds, so times of different rounds are not
compared. The time of each rival is divided by the pick's time in the same round; the pick runs
before the rivals and again after them. A rival must win enough rounds, by enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from gtco.search.records.records import Outcome

LEAST_GAIN = 0.02  # the pick stays for a smaller gain: the next run may read the opposite
CHANCE = 0.05  # the probability that one of several equal rivals wins by luck
NOISE_FACTOR = 2.0  # a gain must be so many times the noise between equal kernels
NOISIEST = 0.1  # with more noise nothing is decided


@dataclass(frozen=True)
class Verdict:
    """``best``: the number of the kernel to take, 0 for the pick; its time and the pick's in
    seconds. ``noise``: the difference between two readings of the pick, as a share. ``ranked``: the
    machine was quiet enough, and the rounds were enough, to decide.
    """

    best: int
    seconds: float
    first_seconds: float
    noise: float
    ranked: bool = True


def judge(rounds: np.ndarray, wrong: frozenset[int] = frozenset()) -> Verdict:
    """``rounds``: seconds [rounds, kernels + 1]; the first and the last column are the pick.
    ``wrong``: kernels that must not be taken.
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
    """The outcome of a kernel that was timed and is not wrong."""
    if not verdict.ranked:
        return "noisy"
    if rival == verdict.best:
        return "taken" if rival else "kept"
    return "slower" if rival else "beaten"


def first_seconds(rounds: np.ndarray) -> np.ndarray:
    """Seconds of the pick in each round [rounds]: the mean of its readings before and after the
    rivals, by which the rivals' seconds are divided.
    """
    mean: np.ndarray = (rounds[:, 0] + rounds[:, -1]) / 2
    return mean


def luck(won: int, rounds: int) -> float:
    """The probability that one of two equal kernels wins so many rounds or more (sign test)."""
    return sum(comb(rounds, n) for n in range(won, rounds + 1)) / 2**rounds
