"""How good the picks of ``bench helix`` are, and how long choosing takes.

Every candidate of a case is timed in this process in interleaved rounds. The one that these call
fastest is then timed again beside the pick, and the pick's share is that one's time over its own.
The best of many readings is partly luck, and the second reading takes this luck out of the share,
which may be above 1.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from gtco.runtime.convolutions import Convolutions
from gtco.runtime.products import Products

from .helix_systems import operands, problem_of

CLOCK = time.perf_counter
MOST_FLOPS = 4e8  # of a case whose candidates are all timed
ROUNDS, LEAST = 2, 1e-4  # of a candidate; seconds of one round
AGAIN, LONGER = 15, 4e-4  # the same, of the pick and of the fastest
CHOICES = 50  # of which the least time counts


@dataclass(frozen=True)
class Picked:
    """The fastest candidate's time over the pick's, and the choice's over the run's."""

    share: float
    overhead: float


def picked(
    products: Products, convolutions: Convolutions, sizes: Sequence[int], copies: int
) -> Picked:
    """Times all candidates of a product or a convolution."""
    x, weights = operands(sizes, copies)
    opened: Any = products  # or convolutions
    problem = problem_of(sizes)
    if len(sizes) == 3:
        out = np.empty((sizes[0], sizes[1]), np.float32)
    else:
        opened, c = convolutions, problem[0]
        out = np.empty((c.batch, *c.output, sizes[4]), np.float32)
    packed = [opened.pack(one).data for one in weights]
    turn = itertools.cycle([opened.runner(x, one, out) for one in packed])
    found = opened.candidates(*problem)
    pick = min(range(len(found)), key=lambda i: found[i][1])
    seconds = [float("inf")] * len(found)

    def times(number: int, least: float) -> list[float]:
        opened.set(*problem, found[number][0])
        next(turn)()
        end = CLOCK() + least
        each: list[float] = []
        while not each or CLOCK() < end:
            each.append(_timed(next(turn)))
        return each

    for _ in range(ROUNDS):
        for number in range(len(found)):
            seconds[number] = min(seconds[number], *times(number, LEAST))
    best = min(range(len(found)), key=seconds.__getitem__)
    again: dict[int, list[float]] = {pick: [], best: []}
    for _ in range(AGAIN):
        for number, medians in again.items():
            medians.append(median(times(number, LONGER)))
    run = median(again[pick])
    return Picked(median(again[best]) / run, choosing(opened, problem) / run)


def choosing(opened: Any, problem: tuple[Any, ...]) -> float:
    """Seconds of a choice that is not remembered, from Python. ``opened``: products or
    convolutions.
    """
    return min(_timed(lambda: opened.choose(*problem)) for _ in range(CHOICES))


def _timed(call: Callable[[], object]) -> float:
    begin = CLOCK()
    call()
    return CLOCK() - begin


def report(
    library: Path,
    cases: Sequence[tuple[str, Sequence[int], int]],
    threads: int,
    end: float,
    say: Callable[[str], None],
) -> None:
    """Prints each case (its name, sizes and copies of its weights) and the means."""
    found = []
    with Products(library, threads) as products, Convolutions(library, threads) as convolutions:
        for name, sizes, copies in cases:
            if time.monotonic() > end:
                break
            found.append(picked(products, convolutions, sizes, copies))
            say(f"{name}: {found[-1].share:.3f} of the best candidate")
    if found:
        shares = [one.share for one in found]
        overhead = geometric_mean([one.overhead for one in found])
        say(
            f"\n{len(found)} cases: the pick stands at {geometric_mean(shares):.3f} of the best "
            f"candidate, worst {min(shares):.3f}; a choice that is not remembered takes "
            f"{overhead:.2%} of a run (geometric means; from Python)"
        )
