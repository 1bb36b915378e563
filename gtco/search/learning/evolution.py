"""Evolutionary search in a stage's space (GTCO Section IV-E, as in Ansor): generations of configs,
each made from the one before by mutation and crossover of decisions, better ones by preference, as
a cost model scores them. Nothing is measured here.

A seed says all that comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil, inf
from random import Random

from gtco.tensor.space import Config, Option, Space

POPULATION = 32  # configs of one generation; each is a program to build, some 10 ms
GENERATIONS = 2
MUTATED = 0.85  # share of children that are mutants of one parent; the others have two
EPSILON = 0.1  # share of what is proposed that is drawn blindly, whatever the model says of it
DRAWS = 4  # for each child that is wanted: many are known already, in small spaces most

# Higher is better; -inf for a config that has no program. Of as many configs as are given.
Score = Callable[[Sequence[Config]], Sequence[float]]


def evolve(
    space: Space,
    score: Score,
    seeds: Iterable[Config],
    count: int,
    rng: Random,
    avoid: Collection[Config] = (),
    *,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    epsilon: float = EPSILON,
) -> list[Config]:
    """Up to ``count`` different configs that are worth measuring, none of them to ``avoid`` and
    none scored -inf: the best of all generations, best first, and behind them a share ``epsilon``
    drawn blindly.

    ``seeds`` are the first generation, filled up with random configs; those that are no points of
    the space are passed over.
    """
    scored: dict[Config, float] = {}

    def known(configs: Sequence[Config]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in scored]
        scored.update(zip(new, score(new), strict=True))

    generation = [config for config in dict.fromkeys(seeds) if space.check(config) is None]
    _fill(generation, population, lambda: space.sample(rng))
    known(generation)
    for _ in range(generations):
        generation = _children(space, generation, scored, population, rng)
        known(generation)
    blind = ceil(epsilon * count)
    ranked = sorted(scored, key=lambda config: -scored[config])
    worth = [config for config in ranked if config not in avoid and scored[config] > -inf]
    drawn: list[Config] = []
    _fill(drawn, DRAWS * blind, lambda: space.sample(rng), {*avoid, *worth[: count - blind]})
    known(drawn)
    possible = [config for config in drawn if scored[config] > -inf]
    return list(dict.fromkeys((*worth[: count - blind], *possible[:blind], *worth)))[:count]


def adapted(space: Space, config: Config) -> Config | None:
    """A config of another stage as one of this space: every decision as there where it is an
    option, a number as near to it as there is; None where something else is no option here.
    """
    wanted = config.to_json()
    chosen: dict[str, Option] = {}
    while decision := space.next_decision(chosen):
        choice, options = wanted.get(decision.name, decision.unsaid), decision.options
        numbers = [option for option in options if isinstance(option, int)]
        if choice in options:
            chosen[decision.name] = options[options.index(choice)]
        elif isinstance(choice, int) and numbers:
            chosen[decision.name] = min(numbers, key=lambda n: abs(n - choice))
        elif choice is None and len(options) == 1:
            chosen[decision.name] = options[0]
        else:
            return None
    return Config.from_json(chosen)


def _children(
    space: Space,
    generation: Sequence[Config],
    scored: Mapping[Config, float],
    count: int,
    rng: Random,
) -> list[Config]:
    """The next generation. Parents are drawn by their rank, those in front more often; what has no
    program is none.
    """
    ranked = sorted(generation, key=lambda config: -scored[config])
    ranked = [config for config in ranked if scored[config] > -inf] or ranked
    weights = [(rank + 1) ** -0.5 for rank in range(len(ranked))]

    def child() -> Config:
        one, other = rng.choices(ranked, weights, k=2)
        if rng.random() >= MUTATED and (both := space.crossover(one, other, rng)):
            return both
        return space.mutate(one, rng)

    found: list[Config] = []
    _fill(found, count, child, scored)
    return found or ranked


def _fill(
    found: list[Config], count: int, draw: Callable[[], Config], known: Collection[Config] = ()
) -> None:
    """Draw until there are ``count`` different ones, or nothing new comes any more."""
    for _ in range(DRAWS * max(count - len(found), 0)):
        if len(found) >= count:
            return
        config = draw()
        if config not in found and config not in known:
            found.append(config)
