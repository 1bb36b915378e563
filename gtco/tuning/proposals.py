"""What is worth measuring next for one stage. It neither builds kernels nor measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from gtco.search.policy import Policy, priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tuning.result import StageResult

MUTATIONS = 2  # one of so many picks is a mutation, from a stage's second round on
DRAWS = 8  # for one mutation that was not tested yet
KNOWN_FIRST = 2  # of a stage's first round: what stood for it elsewhere
HOPELESS = 3.0  # times the pick's predicted time: nothing that is worth building


class Proposals(Protocol):
    """Where candidates come from."""

    @property
    def failures(self) -> Sequence[str]:
        """What went wrong inside sketches so far, in words."""
        ...

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        """Up to ``n`` picks, the most promising first; none of them ``result.tested``, none twice.
        """
        ...


class AnalyticProposals:
    """The policy's alternatives to the pick that stands (coordinate descent over the decisions of
    the space); from the second round on mutations of that pick go along, which the policy's own
    model would never propose.
    """

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.policy, self.random = policy, Random(seed)
        self.failures: tuple[str, ...] = ()  # the policy's own are told when stages are picked

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        mutated = self._mutations(result, n // MUTATIONS) if result.rounds else []
        found = self.policy.alternatives(result.stage, result.last, result.tested)
        picks = {pick.config: pick for pick in (*found[: n - len(mutated)], *mutated)}
        least = HOPELESS * result.last.seconds
        return [pick for pick in picks.values() if pick.seconds <= least]

    def _mutations(self, result: StageResult, n: int) -> list[Pick]:
        """The pick with a decision changed at random, for every draw that was not tested yet."""
        space = space_of(result.stage, self.policy.target)
        found: dict[Config, Pick] = {}
        for _ in range(DRAWS * n):
            config = space.mutate(result.last.config, self.random)
            if config in result.tested or config in found or len(found) == n:
                continue
            pick = priced(self.policy, space, config)
            assert pick is not None
            found[config] = pick
        return list(found.values())


class KnownFirst:
    """``proposals``, and before them, in a stage's first round, what stood for this very stage
    elsewhere: ``known`` by stage, the likeliest first. What its space has no more is passed over.
    """

    def __init__(
        self, proposals: Proposals, policy: Policy, known: Mapping[str, Sequence[Config]]
    ) -> None:
        self.proposals, self.policy, self.known = proposals, policy, known

    @property
    def failures(self) -> Sequence[str]:
        return self.proposals.failures

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        first = [] if result.rounds else self._first(result)
        return before(first, self.proposals.propose(result, n), n)

    def _first(self, result: StageResult) -> list[Pick]:
        known = self.known.get(result.stage.key)
        if not known:
            return []
        space = space_of(result.stage, self.policy.target)
        configs = dict.fromkeys(space.spelled_out(config) for config in known)
        new = (priced(self.policy, space, c) for c in configs if c not in result.tested)
        return [pick for pick in new if pick is not None][:KNOWN_FIRST]


def before(first: Sequence[Pick], others: Sequence[Pick], n: int) -> list[Pick]:
    """``n`` at most, those of ``others`` behind that ``first`` has not."""
    configs = {pick.config for pick in first}
    return [*first, *(pick for pick in others if pick.config not in configs)][:n]
