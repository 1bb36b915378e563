"""What is worth measuring next for one stage. It neither builds nor measures."""

from __future__ import annotations

from random import Random

from gtco.search.policy import Policy
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection
from gtco.tuning.result import StageResult

MUTATIONS = 2  # one of so many picks is a mutation, from a stage's second round on
DRAWS = 8  # for one mutation that was not tested yet
HOPELESS = 3.0  # times the pick's predicted time: nothing that is worth building


def propose(result: StageResult, policy: Policy, random: Random, n: int) -> list[Pick]:
    """Up to ``n`` picks, the most promising first; none of them ``result.tested``, none twice.

    They are the policy's alternatives to the pick that stands (coordinate descent over the
    decisions of the space); from the second round on mutations of that pick go along, which the
    policy's own model would never propose.
    """
    mutated = mutations(result, policy, random, n // MUTATIONS) if result.rounds else []
    found = policy.alternatives(result.stage, result.last, result.tested)[: n - len(mutated)]
    picks = {pick.config: pick for pick in (*found, *mutated)}
    least = HOPELESS * result.last.seconds
    return [pick for pick in picks.values() if pick.seconds <= least]


def mutations(result: StageResult, policy: Policy, random: Random, n: int) -> list[Pick]:
    """The pick with a decision changed at random, for every draw that was not tested yet."""
    space = space_of(result.stage, policy.target)
    found: dict[Config, Pick] = {}
    for _ in range(DRAWS * n):
        config = space.mutate(result.last.config, random)
        if config in result.tested or config in found or len(found) == n:
            continue
        sketch = space.sketch(config)
        assert not isinstance(sketch, Rejection)
        found[config] = Pick(sketch, config, policy.price(sketch, config))
    return list(found.values())
