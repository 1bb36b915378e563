"""Proposals of a learned cost model, in rounds of propose, measure and learn (GTCO Section IV-E).

The model learns from every stage that is tuned and from records of the same circumstances. An
evolutionary search over a stage's space asks the model what is worth measuring. The search starts
from the configs that the analytic policy ranks first, those that were measured to be fast, and
those that were best for stages with the same operators and other sizes, also on other machines.
Until the model knows enough, the analytic proposals are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from types import MappingProxyType

import numpy as np

from gtco.search.learning.cost_model import LEAST, CostModel, Example, available
from gtco.search.learning.evolution import adapted, evolve
from gtco.search.learning.features import features
from gtco.search.policy import Policy, priced
from gtco.search.recorded import by_stage
from gtco.search.records.records import STANDING, Record
from gtco.search.records.standing import relative
from gtco.support.errors import describe, installing
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection, Space
from gtco.tensor.stage import Stage
from gtco.tuning.proposals import HOPELESS, KNOWN_FIRST, AnalyticProposals, before
from gtco.tuning.result import Prediction, StageResult
from gtco.tuning.sentences import Writer

RANKED = 16  # of the analytic ranking, that a search begins with
FASTEST = 6  # of the stage's measured configs, likewise
WRITTEN = 8  # by the language model, if there is one
SIMILAR = 8  # of those that stood for stages with the same operators
RECORDED = 48  # programs of one stage that are learned from records, the latest
RECORDED_STAGES = 12  # that are not tuned now: building a program takes some 10 ms
ABSENT = (
    "XGBoost is not installed, so nothing was learned from what was measured and the analytic "
    f"policy proposed all candidates: {installing('tune')}"
)


class LearnedProposals:
    """Proposals for all stages that are tuned together.

    - ``results``: their results, by stage key;
    - ``known``: records of the same circumstances, also of other ``stages`` (by key) that are not
      tuned now;
    - ``others``: all other records; the search starts from their configs, and their times are not
      used;
    - ``writer``: a language model, whose sentences the search starts from as well.
    """

    def __init__(
        self,
        policy: Policy,
        results: Mapping[str, StageResult],
        known: Sequence[Record] = (),
        others: Sequence[Record] = (),
        stages: Mapping[str, Stage] = MappingProxyType({}),
        writer: Writer | None = None,
    ) -> None:
        self.policy, self.results, self.writer = policy, results, writer
        self.analytic = AnalyticProposals(policy)
        self.random, self.model = Random(0), CostModel()
        self.known = by_stage(known)
        elsewhere = [key for key in self.known if key in stages and key not in results]
        self.stages = {key: stages[key] for key in elsewhere[-RECORDED_STAGES:]}
        self.stood: dict[str, list[Config]] = {}  # by label
        for record in (*others, *known):
            if record.outcome in STANDING:
                self.stood.setdefault(record.label, []).append(record.parsed)
        self.failures: list[str] = []
        self._features: dict[tuple[str, Config], np.ndarray | None] = {}
        self._learned = -1  # examples at the last training

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        space = space_of(result.stage, self.policy.target)
        self._learn()
        if not self.model.trained:
            return self._unlearned(space, result, n)
        first = self._of(result.stage, space, result.first.config)
        if first is None:
            return self.analytic.propose(result, n)
        prices: dict[Config, float] = {}
        scores: dict[Config, float] = {}

        def score(configs: Sequence[Config]) -> list[float]:
            rows: dict[Config, np.ndarray] = {}
            for config in configs:
                prices[config] = price = self._price(space, config)
                if price <= HOPELESS * result.last.seconds:
                    row = self._of(result.stage, space, config, price)
                    if row is not None:
                        rows[config] = row
            found = self.model.scores(list(rows.values()), first).tolist()
            scores.update(zip(rows, found, strict=True))
            return [scores.get(config, -inf) for config in configs]

        seeds = self._seeds(space, result)
        chosen = evolve(space, score, seeds, n, self.random, result.tested)
        for config in chosen:
            result.predicted[config] = Prediction(scores[config], -prices[config])
        return [self._pick(space, config) for config in chosen]

    def _unlearned(self, space: Space, result: StageResult, n: int) -> list[Pick]:
        """The analytic proposals; in the first round with some configs that stood elsewhere."""
        if result.rounds:
            return self.analytic.propose(result, n)
        elsewhere = [c for c in self._elsewhere(space, result) if c not in result.tested]
        picks = [self._pick(space, config) for config in elsewhere[:KNOWN_FIRST]]
        picks = [p for p in picks if p.seconds <= HOPELESS * result.last.seconds]
        return before(picks, self.analytic.propose(result, n), n)

    def _seeds(self, space: Space, result: StageResult) -> list[Config]:
        fastest = sorted(result.readings, key=lambda config: result.readings[config])
        alternatives = self.policy.alternatives(result.stage, result.last, result.tested)
        return [
            result.last.config,
            *fastest[:FASTEST],
            *self._elsewhere(space, result),
            *(pick.config for pick in alternatives),
            *self.policy.propose(result.stage, RANKED),
            *(self.writer.configs(result, WRITTEN) if self.writer is not None else ()),
        ]

    def _elsewhere(self, space: Space, result: StageResult) -> list[Config]:
        """Configs that stood for stages with the same operators, here or in records, if this space
        contains them.
        """
        same = [
            r.last.config
            for r in self.results.values()
            if r is not result and r.measured and r.stage.label == result.stage.label
        ]
        stood = [*same, *reversed(self.stood.get(result.stage.label, ()))]
        fitting = (adapted(space, config) for config in dict.fromkeys(stood))
        return list(dict.fromkeys(config for config in fitting if config))[:SIMILAR]

    # what is learned ------------------------------------------------------------------------------
    def _learn(self) -> None:
        """Trains the model again if something was measured since the last training."""
        count = sum(len(result.readings) for result in self.results.values())
        if count == self._learned or ABSENT in self.failures:
            return
        self._learned = count
        examples = self.examples()
        if len(examples) >= LEAST and not available():
            self.failures.append(ABSENT)
        else:
            self.model.train(examples)

    def examples(self) -> list[Example]:
        """Every program that was measured here, and the latest ones from the records."""
        found = []
        for key, result in self.results.items():
            space = space_of(result.stage, self.policy.target)
            first = self._of(result.stage, space, result.first.config)
            if first is not None:
                found += self._measured(key, space, first, result.readings)
                found += self._measured(f"{key} recorded", space, first, self._recorded(key))
        for key, stage in self.stages.items():
            space, times = space_of(stage, self.policy.target), relative(self.known[key])
            began = next(iter(times), None)
            if began is None or space.check(began) is not None:
                continue
            first = self._of(stage, space, began)
            if first is not None:
                found += self._measured(key, space, first, self._recorded(key))
        return found

    def _recorded(self, key: str) -> dict[Config, float]:
        """The latest configs of a stage in the records, with their times relative to the first one.
        """
        return dict(list(relative(self.known.get(key, ())).items())[-RECORDED:])

    def _measured(
        self, group: str, space: Space, first: np.ndarray, times: Mapping[Config, float]
    ) -> list[Example]:
        """An example for each config that has a program; ``times`` can be compared with each other.
        """
        legal = [config for config in times if space.check(config) is None]
        rows = ((config, self._of(space.stage, space, config)) for config in legal)
        return [Example(group, row, first, times[c]) for c, row in rows if row is not None]

    def _of(
        self, stage: Stage, space: Space, config: Config, price: float | None = None
    ) -> np.ndarray | None:
        """The features of the config's program, with ``price`` if it is known. None if the config
        has no program.
        """
        key = (stage.key, config)
        if key not in self._features:
            self._features[key] = self._read(stage, space, config, price)
        return self._features[key]

    def _read(
        self, stage: Stage, space: Space, config: Config, price: float | None
    ) -> np.ndarray | None:
        try:
            program = space.build(config, "program")
            if isinstance(program, Rejection):
                return None
            price = self._price(space, config) if price is None else price
            return features(program, stage, self.policy.target, price)
        except Exception as error:  # of a sketch: the others go on
            what = f"a program of stage {stage.label} ({stage.key}) has no features"
            said = f"{what}: {describe(error)}"
            if said not in self.failures:
                self.failures.append(said)
            return None

    def _price(self, space: Space, config: Config) -> float:
        return self._pick(space, config).seconds

    def _pick(self, space: Space, config: Config) -> Pick:
        pick = priced(self.policy, space, config)
        assert pick is not None
        return pick
