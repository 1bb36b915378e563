"""Evolutionary search finds the optimum of spaces where it is known, within a budget. The same seed
gives the same search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import pytest

from gtco.machine.target import target
from gtco.search.learning import evolution
from gtco.search.learning.evolution import adapted, evolve
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Decision, Option, Space
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.kernels import config_with

V4 = target("x86-64-v4")
SIZE = 16


@dataclass(frozen=True)
class Hills:
    """Four numbers; the options of the last one depend on the first."""

    name: str = "hills"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        name = "abcd"[len(chosen)] if len(chosen) < 4 else None
        if name is None:
            return None
        first = int(chosen["a"]) if name == "d" else 0
        return Decision(name, "block", tuple(range(first, first + SIZE)))


def stage() -> Stage:
    kind = TensorType((4,))
    return make_stage([Operator("relu", ("x",), "y", kind)], {"x": kind}, [])


def hills(*names: str) -> Space:
    sketches = tuple(Hills(name) for name in names or ("hills",))
    return Space(stage(), V4, sketches)  # type: ignore[arg-type]


def height(config: Config) -> float:
    """The best is a=3, b=12, c=7, d=10; ``a`` and ``b`` help only together."""
    c = config.by_name
    a, b = abs(int(c["a"]) - 3), abs(int(c["b"]) - 12)
    return -(a * b + a + b + abs(int(c["c"]) - 7) + abs(int(c["d"]) - 10))


def heights(configs: Sequence[Config]) -> list[float]:
    return [height(config) for config in configs]


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_found_within_a_budget_of_trials(seed: int) -> None:
    """Rounds of eight, each starting from the best so far: within 160 of 65536 configs."""
    space, rng, measured = hills(), Random(seed), dict[Config, float]()
    while max(measured.values(), default=-inf) < 0:
        best = sorted(measured, key=lambda config: -measured[config])[:6]
        found = evolve(space, heights, best, 8, rng, measured)
        assert len(found) == len(set(found)) == 8 and not set(found) & set(measured)
        assert all(space.check(config) is None for config in found)
        measured.update({config: height(config) for config in found})
        assert len(measured) <= 160


def test_a_seed_says_all() -> None:
    once, again, other = (evolve(hills(), heights, [], 8, Random(seed)) for seed in (4, 4, 5))
    assert once == again != other


def test_what_has_no_program_is_never_proposed() -> None:
    """One sketch scores -inf everywhere, although most configs that are drawn are its own."""

    def score(configs: Sequence[Config]) -> list[float]:
        return [height(c) if c.sketch == "hills" else -inf for c in configs]

    found = evolve(hills("hills", "broken", "bad"), score, [], 10, Random(0))
    assert len(found) == 10 and {config.sketch for config in found} == {"hills"}
    assert evolve(hills("broken"), lambda configs: [-inf] * len(configs), [], 4, Random(0)) == []


def test_a_share_is_drawn_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds however sure the model is. Without the share, only the best are proposed."""
    monkeypatch.setattr(evolution, "EPSILON", 0.0)
    sure = evolve(hills(), heights, [], 10, Random(1))
    assert heights(sure) == sorted(heights(sure), reverse=True)
    monkeypatch.setattr(evolution, "EPSILON", 0.3)
    mixed = evolve(hills(), heights, [], 10, Random(1))
    assert mixed[:7] == sure[:7] and min(heights(mixed)) < min(heights(sure))


def test_a_small_space_ends() -> None:
    """Every config comes once, and there are no more than the space has."""
    kind = TensorType((4,), "int64")
    small = make_stage([Operator("relax", ("x",), "y", kind)], {"x": kind}, [])
    space = space_of(small, V4)
    only = Config("fallback")
    assert evolve(space, lambda found: [1.0] * len(found), [], 5, Random(0)) == [only]
    assert evolve(space, lambda found: [1.0] * len(found), [only], 5, Random(0), {only}) == []


def test_seeds_of_other_spaces_are_passed_over() -> None:
    stranger = Config("hills", (("a", 99),))
    best = Config("hills", (("a", 3), ("b", 12), ("c", 7), ("d", 10)))
    found = evolve(hills(), heights, [stranger, best], 3, Random(0))
    assert found[0] == best and stranger not in found


def product(m: int, k: int, n: int) -> Space:
    types = {"x": TensorType((m, k)), "w": TensorType((k, n))}
    y = Operator("matmul", ("x", "w"), "y", TensorType((m, n)))
    return space_of(make_stage([y], types, ["w"]), V4)


def test_a_config_of_a_similar_stage() -> None:
    """The same choices if they are options, otherwise the nearest number; None if nothing is
    similar.
    """
    one, other, rng = product(197, 192, 768), product(50, 96, 130), Random(0)
    for _ in range(50):
        config = one.sample(rng)
        assert adapted(one, config) == config
        there = adapted(other, config)
        if there is not None:
            assert other.check(there) is None
            assert there.by_name.get("tile") == config.by_name.get("tile")
    assert adapted(other, Config("gemm", (("tile", "99x9"),))) is None
    said = config_with(one.sketches[0], order="panels")
    before = tuple(choice for choice in said.choices if choice[0] != "order")
    # a config that was written when there was only one order
    assert adapted(one, Config("gemm", before)) == said
    assert adapted(other, Config("no such sketch")) is None
