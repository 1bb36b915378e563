"""Proposes what to measure next for one stage. It neither builds kernels nor measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from random import Random
from typing import Protocol

from gtco.search.policy import Policy, priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tuning.result import StageResult

MUTATIONS = 2  # one of so many picks is a mutation, from a stage's second round on
DRAWS = 8  # draws for one mutation that was not tested yet
KNOWN_FIRST = 2  # picks of a stage's first round that stood for it elsewhere
HOPELESS = 3.0  # times the pick's predicted time: nothing that is worth building


class Proposals(Protocol):
    """A source of candidates."""

    @property
    def failures(self) -> Sequence[str]:
        """The failures inside sketches so far, as sentences."""
        ...

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        """Up to ``n`` different picks, the most promising first, without ``result.tested``."""
        ...


class AnalyticProposals:
    """Proposes in turn the policy's alternatives to the current pick (coordinate descent over the
    decisions of the space) and what the policy ranks first in the whole space. Replayed on the
    readings of two machines, both together find more than the alternatives alone, and as much as
    the ranking alone, which never leaves what the policy's own model holds for best. From the
    second round on it adds mutations of the pick, which that model would never propose.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.random = policy, Random(0)
        self.failures: tuple[str, ...] = ()  # the policy's own are told when stages are picked

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        mutated = self._mutations(result, n // MUTATIONS) if result.rounds else []
        found = self._ranked(result, n)[: n - len(mutated)]
        return list({pick.config: pick for pick in (*found, *mutated)}.values())

    def _ranked(self, result: StageResult, n: int) -> list[Pick]:
        known, most = {*result.tested, result.last.config}, HOPELESS * result.last.seconds
        others = self.policy.alternatives(result.stage, result.last, known)
        best = self.policy.best(result.stage, n + len(known))
        both = {
            pick.config: pick
            for pick in chain.from_iterable(zip_longest(others, best))
            if pick is not None and pick.config not in known and pick.seconds <= most
        }
        return list(both.values())

    def _mutations(self, result: StageResult, n: int) -> list[Pick]:
        """The pick with one decision changed at random, once for every draw that was not tested
        yet.
        """
        space = space_of(result.stage, self.policy.target)
        found: dict[Config, Pick] = {}
        for _ in range(DRAWS * n):
            config = space.mutate(result.last.config, self.random)
            if config in result.tested or config in found or len(found) == n:
                continue
            pick = priced(self.policy, space, config)
            assert pick is not None
            if pick.seconds <= HOPELESS * result.last.seconds:
                found[config] = pick
        return list(found.values())


class KnownFirst:
    """Wraps ``proposals``. In the first round of a stage it proposes first the configs that stood
    elsewhere for this very stage: ``known``, by stage, the most promising first. A config that the
    stage's space no longer contains is ignored.
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
    """At most ``n`` picks: ``first``, and then those of ``others`` that are not in it."""
    configs = {pick.config for pick in first}
    return [*first, *(pick for pick in others if pick.config not in configs)][:n]
