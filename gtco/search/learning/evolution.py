"""Evolutionary search in a stage's space (GTCO Section IV-E, as in Ansor). Each generation of
configs is made from the one before by mutation and crossover of decisions, and configs that a cost
model scores higher are preferred. Nothing is measured here. The seed determines the result.
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
DRAWS = 4  # draws for each child that is wanted: many are known already, in small spaces most

# Gives a score for each config, in their order. Higher is better; -inf: it has no program.
Score = Callable[[Sequence[Config]], Sequence[float]]


def evolve(
    space: Space,
    score: Score,
    seeds: Iterable[Config],
    count: int,
    rng: Random,
    avoid: Collection[Config] = (),
) -> list[Config]:
    """Up to ``count`` different configs that are worth measuring, without those to ``avoid`` and
    those that score -inf: the best of all generations, best first, followed by a share
    :data:`EPSILON` of random ones.

    The first generation is ``seeds``, filled up with random configs. Seeds that are not in the
    space are ignored.
    """
    scored: dict[Config, float] = {}

    def known(configs: Sequence[Config]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in scored]
        scored.update(zip(new, score(new), strict=True))

    generation = [config for config in dict.fromkeys(seeds) if space.check(config) is None]
    _fill(generation, POPULATION, lambda: space.sample(rng))
    known(generation)
    for _ in range(GENERATIONS):
        generation = _children(space, generation, scored, rng)
        known(generation)
    blind = ceil(EPSILON * count)
    ranked = sorted(scored, key=lambda config: -scored[config])
    worth = [config for config in ranked if config not in avoid and scored[config] > -inf]
    drawn: list[Config] = []
    _fill(drawn, DRAWS * blind, lambda: space.sample(rng), {*avoid, *worth[: count - blind]})
    known(drawn)
    possible = [config for config in drawn if scored[config] > -inf]
    return list(dict.fromkeys((*worth[: count - blind], *possible[:blind], *worth)))[:count]


def adapted(space: Space, config: Config) -> Config | None:
    """A config of another stage as a config of this space. Every decision is copied if its value is
    an option here; a number becomes the nearest option. None if another value is not one.
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
    rng: Random,
) -> list[Config]:
    """The next generation. Parents are drawn by rank, the better ones more often. A child without a
    program is dropped.
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
    _fill(found, POPULATION, child, scored)
    return found or ranked


def _fill(
    found: list[Config], count: int, draw: Callable[[], Config], known: Collection[Config] = ()
) -> None:
    """Draws until there are ``count`` different configs, or until nothing new comes."""
    for _ in range(DRAWS * max(count - len(found), 0)):
        if len(found) >= count:
            return
        config = draw()
        if config not in found and config not in known:
            found.append(config)
