"""The subgraph scheduler on synthetic histories: which tasks get slots, and when they stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from gtco.search.scheduler import Task, allot, gradient, latency, prospect


def objective(tasks: Sequence[Task], requirements: Sequence[float] = (0.0,)) -> float:
    """f of equation 3 in seconds; ``requirements`` has the L_j of each model."""
    return sum(max(latency(tasks, j), least) for j, least in enumerate(requirements))


def follow(
    tasks: list[Task],
    curves: list[Callable[[int], float]],
    slots: int,
    requirements: tuple[float, ...] = (0.0,),
    batch: int = 1,
) -> list[Task]:
    """Gives out ``slots``; task i reads ``curves[i](t)`` after its slot t."""
    left = slots
    while left > 0:
        given = allot(tasks, min(batch, left), requirements)
        if not any(given):
            break
        left -= sum(given)
        for i, n in enumerate(given):
            for _ in range(n):
                seconds = min(tasks[i].seconds, curves[i](tasks[i].slots + 1))
                tasks[i] = replace(tasks[i], history=(*tasks[i].history, seconds))
    return tasks


def falling(start: float, rate: float, limit: float) -> Callable[[int], float]:
    """A curve that falls geometrically towards ``limit``."""
    return lambda t: limit + (start - limit) * rate**t


def test_the_first_slots_are_one_for_each() -> None:
    tasks = [Task((w,), (1.0,)) for w in (12, 1, 6)]
    assert allot(tasks, 1) == [1, 1, 1]
    tasks[1] = replace(tasks[1], history=(1.0, 0.9))
    assert allot(tasks, 5) == [1, 0, 1]
    tasks[0] = replace(tasks[0], exhausted=True)
    assert allot(tasks, 5) == [0, 0, 1]


def test_the_heavier_of_two_equals_gets_more() -> None:
    """Twelve occurrences against one; both gain as long as they are searched."""
    curves = [falling(1.0, 0.9, 0.2)] * 2
    heavy, light = follow([Task((12,), (1.0,)), Task((1,), (1.0,))], curves, 30)
    assert heavy.slots > 2 * light.slots > 0


def test_the_longer_of_two_equals_gets_more() -> None:
    curves = [falling(4.0, 0.9, 1.0), falling(1.0, 0.9, 0.25)]
    long, short = follow([Task((1,), (4.0,)), Task((1,), (1.0,))], curves, 30)
    assert long.slots > short.slots


def test_what_still_gains_gets_more_than_what_gains_little() -> None:
    """Equal weights and seconds; one started from twice as much, and the other from 1 % more."""
    fast, slow = (Task((1,), (before, before, before, 1.0), patience=9) for before in (2.0, 1.01))
    assert allot([slow, fast], 1) == [0, 1]
    assert gradient([fast])[0] > gradient([slow])[0] > 0


def test_a_stage_without_gains_stops_for_good() -> None:
    flat, gaining = follow(
        [Task((100,), (1.0,), patience=3), Task((1,), (1.0,), patience=3)],
        [lambda t: 1.0, falling(1.0, 0.9, 0.0)],
        40,
    )
    assert flat.slots == 3 and flat.stopped
    assert gaining.slots == 37
    assert gradient([flat, gaining])[0] == 0
    # once all tasks have stopped, the other slots are not spent
    tasks = follow([Task((1,), (1.0,)), Task((5,), (2.0,))], [lambda t: 1.0, lambda t: 2.0], 100)
    assert [t.slots for t in tasks] == [2, 2] and not any(allot(tasks, 10))


def test_a_model_that_is_fast_enough_gets_no_more() -> None:
    """Two models share the second stage; the first model meets its requirement early."""
    curves = [falling(1.0, 0.7, 0.0)] * 3
    tasks = [Task((1, 0), (1.0,)), Task((1, 1), (1.0,)), Task((0, 1), (1.0,))]
    needs = (1.2, 0.0)
    first, shared, second = follow(tasks, curves, 60, needs)
    tasks = [first, shared, second]
    assert latency(tasks, 0) <= needs[0]
    # from then on the first model's own stage got no slots, and the shared stage did
    assert first.slots < shared.slots and first.slots < second.slots
    assert gradient(tasks, needs)[0] == 0
    assert objective(tasks, needs) == pytest.approx(needs[0] + latency(tasks, 1))
    # both models meet their requirements: no slot is given
    assert not any(allot(tasks, 10, (5.0, 5.0)))
    assert not any(allot([Task((1,), (1.0,))], 10, (2.0,)))


def test_no_slot_beyond_the_floor() -> None:
    """A stage at the machine's peak cannot gain, whatever its weight."""
    at_peak = Task((50,), (1.0, 0.8), floor=0.8, patience=9)
    far = Task((1,), (1.0, 0.8), patience=9)
    assert gradient([at_peak])[0] < gradient([replace(at_peak, floor=0.4)])[0]
    assert prospect(at_peak, 10) == 0 < prospect(far, 10) <= 0.8


def test_slots_that_cost_less_are_preferred() -> None:
    cheap, dear = Task((1,), (1.0, 0.9), cost=1.0), Task((1,), (1.0, 0.9), cost=10.0)
    assert allot([dear, cheap], 1) == [0, 1]


def test_what_more_slots_would_gain() -> None:
    assert prospect(Task((1,), (1.0, 1.0, 1.0)), 100) == 0
    assert prospect(Task((1,), (1.0,)), 100) == 0
    gaining = Task((1,), (1.0, 0.9, 0.8))
    assert 0 < prospect(gaining, 1) < prospect(gaining, 10) < 0.8
    assert prospect(gaining, 1) == pytest.approx(0.1 * 2 / 3)


def test_less_time_than_round_robin_on_the_same_curves() -> None:
    """Thirty tasks with many weights. For nearly every number of slots f is at most that of
    round-robin, and its sum is smaller.
    """
    random = Random(3)
    starts = [random.uniform(0.1, 3.0) for _ in range(30)]
    curves = [falling(s, random.uniform(0.5, 0.99), s * random.uniform(0.3, 1)) for s in starts]
    tasks = [Task((random.choice((1, 2, 6, 12)),), (s,), patience=3) for s in starts]
    for slots in (60, 90, 120):
        turns = [slots // 30] * 30
        equal = sum(
            task.weights[0] * curve(n)
            for task, curve, n in zip(tasks, curves, turns, strict=True)
        )
        assert objective(follow(list(tasks), curves, slots)) < equal
