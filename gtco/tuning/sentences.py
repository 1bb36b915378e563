"""Proposals that a language model writes (TLM, Algorithm 2), beside those of the search.

In a stage's first rounds all candidates are sentences. Later half of them are, and the search,
whose population starts from sentences too, has the other half. More sentences are written than
measured: those are taken for which likelihood and price together say the least time, as
:mod:`gtco.search.language.policy` does. The seed determines everything. Nobody downstream knows who
wrote a config.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.rates import RateTable
from gtco.search.language.generation import TEMPERATURE, Author
from gtco.search.language.model import SHIPPED, loaded
from gtco.search.language.policy import LanguagePolicy, log_time
from gtco.search.policy import Policy, priced
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import OptionError
from gtco.support.options import Tune
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage
from gtco.tuning.proposals import Proposals, before
from gtco.tuning.result import StageResult

ROUNDS = 2  # rounds of a stage in which only sentences are measured
SEVERAL = 3  # sentences for each one that is measured
WARMER = 0.25  # the temperature rises so much each round: what is likely was tried


class Writer:
    """Writes configs of stages. Raises :class:`OptionError` if ``file`` cannot be read."""

    def __init__(self, policy: Policy, seed: int = 0, file: Path = SHIPPED) -> None:
        self.policy, self.seed = policy, seed
        self.model = loaded(file)
        self._authors: dict[str, Author] = {}

    def author(self, stage: Stage) -> Author:
        if stage.key not in self._authors:
            space = space_of(stage, self.policy.target)
            self._authors[stage.key] = Author(self.model, space, rates_of(self.policy))
        return self._authors[stage.key]

    def configs(self, result: StageResult, n: int, avoid: Collection[Config] = ()) -> list[Config]:
        """Up to ``n`` different configs without those to ``avoid``, the greedy one first."""
        random = Random(f"{self.seed} {result.stage.key} {result.rounds}")
        temperature = TEMPERATURE + WARMER * result.rounds
        return self.author(result.stage).propose(n, random, avoid, temperature)


def writer_of(policy: Policy, effort: Tune) -> Writer | None:
    """The writer that an effort asks for; None if it asks for none."""
    if effort.policy != "language-model":
        return None
    return Writer(policy, file=Path(effort.weights) if effort.weights else SHIPPED)


class SentenceProposals:
    """Sentences, and from round :data:`ROUNDS` on also the proposals of ``others``."""

    def __init__(self, writer: Writer, others: Proposals) -> None:
        self.writer, self.others = writer, others
        self._failures: list[str] = []

    @property
    def failures(self) -> Sequence[str]:
        return [*self._failures, *self.others.failures]

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        wanted = n if result.rounds < ROUNDS else (n + 1) // 2
        picks = self._written(result, wanted)
        left = n - len(picks)
        return before(picks, self.others.propose(result, left + len(picks)), n) if left else picks

    def _written(self, result: StageResult, n: int) -> list[Pick]:
        try:
            author = self.writer.author(result.stage)
            configs = self.writer.configs(result, SEVERAL * n, result.tested)
        except OptionError as error:  # what cannot be said, as a number of too many digits
            said = f"no sentence for stage {result.stage.label}: {error}"
            if said not in self._failures:
                self._failures.append(said)
            return []
        picks = (priced(self.writer.policy, author.space, config) for config in configs)
        found = [pick for pick in picks if pick is not None]
        return sorted(found, key=lambda pick: log_time(author, pick))[:n]


def rates_of(policy: Policy) -> RateTable | None:
    """The table of rates by which the policy prices; None for a GPU."""
    inner = policy.policy if isinstance(policy, RecordedPolicy) else policy
    inner = inner.policy if isinstance(inner, LanguagePolicy) else inner
    return inner.rates if isinstance(inner, AnalyticPolicy) else None
