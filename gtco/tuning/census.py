"""How large the spaces of stages are, and what becomes of configs drawn from them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gtco.codegen.jobs import Failure, Job
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Option, Sketch
from gtco.tensor.stage import Stage

COUNTED = 4000  # configs that are counted one by one; more are estimated
PROBES = 400  # walks that an estimate is made of
DRAWS = 8  # configs of a stage that are built


@dataclass(frozen=True)
class Size:
    """How many configs a sketch has; where it is not ``exact``, the mean of an unbiased estimate.
    """

    configs: int
    exact: bool


@dataclass(frozen=True)
class Census:
    """A stage's space: the size by sketch; of ``drawn`` configs that were built, how many gave no
    kernel, by reason.
    """

    stage: Stage
    occurrences: int
    sizes: Mapping[str, Size]
    drawn: int
    rejections: Mapping[str, int]

    @property
    def size(self) -> Size:
        """Of all sketches."""
        sizes = self.sizes.values()
        return Size(sum(s.configs for s in sizes), all(s.exact for s in sizes))


def census(
    stages: Sequence[Stage],
    target: Machine,
    workers: Workers,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Census]:
    """Each different stage's, in the order of their first occurrence."""
    random = Random(0)
    counts = Counter(stage.key for stage in stages)
    different = {stage.key: stage.canonical for stage in stages}
    found = []
    for number, (key, stage) in enumerate(different.items()):
        space = space_of(stage, target)
        samples = {space.sample(random): None for _ in range(4 * DRAWS)}
        drawn = list(samples)[:DRAWS]
        jobs = [Job(f"gtco_{key}_{n}", stage, c, target) for n, c in enumerate(drawn)]
        failed = [a for a in workers.build(jobs) if isinstance(a, Failure)]
        reasons = Counter(failure.rejected or "build failed" for failure in failed)
        sizes = {sketch.name: size(sketch, random) for sketch in space.sketches}
        found.append(Census(stage, counts[key], sizes, len(drawn), reasons))
        progress(number + 1, len(different))
    return found


def size(sketch: Sketch, random: Random) -> Size:
    """Counted one by one up to ``COUNTED``; beyond, Knuth's estimate: the product of the numbers of
    options along a random walk down the decisions is the number of configs in the mean.
    """
    counted = _count(sketch, {}, COUNTED + 1)
    if counted <= COUNTED:
        return Size(counted, True)
    return Size(round(statistics.fmean(_probe(sketch, random) for _ in range(PROBES))), False)


def _count(sketch: Sketch, chosen: dict[str, Option], most: int) -> int:
    """Configs that begin with ``chosen``, ``most`` where there are more."""
    decision = sketch.next_decision(chosen)
    if decision is None:
        return 1
    total = 0
    for option in decision.options:
        total += _count(sketch, {**chosen, decision.name: option}, most - total)
        if total >= most:
            return most
    return total


def _probe(sketch: Sketch, random: Random) -> float:
    chosen: dict[str, Option] = {}
    product = 1.0
    while decision := sketch.next_decision(chosen):
        product *= len(decision.options)
        chosen[decision.name] = random.choice(decision.options)
    return product
