"""How good the picks of ``bench helix`` are: every candidate of a product is timed in this process,
in interleaved rounds, and the pick stands at its share of the best. What the choice itself takes
stands beside it. The best of many readings is partly luck, so the share is a lower bound.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from gtco.runtime.products import Products

CLOCK = time.perf_counter
MOST_FLOPS = 4e8  # of a product whose candidates are all timed
ROUNDS, LEAST = 3, 2e-4  # of a candidate; seconds of one round
CHOICES = 50  # of which the least time counts


@dataclass(frozen=True)
class Picked:
    """The best candidate's time over the pick's, and the choice's over the product's."""

    share: float
    overhead: float


def picked(library: Products, m: int, n: int, k: int, copies: int) -> Picked:
    """Times all candidates of a product."""
    random = np.random.default_rng(0)
    a = random.random((m, k), np.float32)
    packed = [library.pack(random.random((k, n), np.float32)) for _ in range(copies)]
    out = np.empty((m, n), np.float32)
    turn = itertools.cycle([library.runner(a, one, out) for one in packed])
    found = library.candidates(m, n, k)
    pick = min(range(len(found)), key=lambda i: found[i][1])
    seconds = [float("inf")] * len(found)
    for _ in range(ROUNDS):
        for number, (config, _price) in enumerate(found):
            library.set(m, n, k, config)
            next(turn)()
            end = CLOCK() + LEAST
            while True:
                begin = CLOCK()
                next(turn)()
                now = CLOCK()
                seconds[number] = min(seconds[number], now - begin)
                if now > end:
                    break
    choosing = min(_timed(lambda: library.choose(m, n, k)) for _ in range(CHOICES))
    return Picked(min(seconds) / seconds[pick], choosing / seconds[pick])


def _timed(call: Callable[[], object]) -> float:
    begin = CLOCK()
    call()
    return CLOCK() - begin


def report(
    library: Path,
    products: Sequence[tuple[str, int, int, int, int]],
    threads: int,
    end: float,
    say: Callable[[str], None],
) -> None:
    """Prints each product (its name, m, n, k and copies of its weights) and the means."""
    found = []
    with Products(library, threads) as opened:
        for name, m, n, k, copies in products:
            if time.monotonic() > end:
                break
            found.append(picked(opened, m, n, k, copies))
            say(f"{name}: {found[-1].share:.3f} of the best candidate")
    if found:
        shares = [one.share for one in found]
        overhead = geometric_mean([one.overhead for one in found])
        say(
            f"\n{len(found)} products: the pick stands at {geometric_mean(shares):.3f} of the best "
            f"candidate, worst {min(shares):.3f}; a choice that is not remembered takes "
            f"{overhead:.2%} of the product (geometric means; from Python)"
        )
