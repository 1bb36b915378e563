"""The policy that picks by the language model, without measuring (TLM, Section 6.4: "no necessity
for measurement").

A model of language has no price, so stages are priced and cut by the policy that it wraps. Only the
pick of a stage is its own. The model learned from measured times, and the price knows loops and
caches, so each is right where the other errs. Of sentences that the model writes and the best
picks of the other policy the one is taken for which both together say the least time:

    log(time) = log(price) - log(likelihood) / SHARPNESS
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from random import Random
from typing import Any

from gtco.search.calibration.rates import RateTable
from gtco.search.language.generation import Author
from gtco.search.language.model import SHIPPED, loaded
from gtco.search.policy import Policy, priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

SHARPNESS = 24.0  # nats of likelihood that a model learns to give for each nat of time
CANDIDATES = 8  # configs of the model, and as many of the other policy
TEMPERATURE = 0.5  # the model's configs are drawn with it: few are unlikely


@dataclass
class LanguagePolicy:
    """Wraps ``policy``; ``rates`` is the machine's table. Raises :class:`OptionError` if the
    model's ``file`` cannot be read.
    """

    policy: Policy
    rates: RateTable | None = None
    file: Path = SHIPPED
    _picked: dict[str, Pick | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.model = loaded(self.file)

    def __getattr__(self, name: str) -> Any:
        if name == "policy" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.policy, name)

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The candidate of the least time; the wrapped policy's pick if some sketches are ruled
        out.
        """
        if without:
            return self.policy.choose(stage, without)
        if stage.key not in self._picked:
            self._picked[stage.key] = min(self._judged(stage), key=lambda each: each[0])[1]
        return self._picked[stage.key]

    def _judged(self, stage: Stage) -> list[tuple[float, Pick | None]]:
        """The candidates, each with the logarithm of its time up to a constant."""
        theirs = self.policy.best(stage, CANDIDATES)
        if not theirs:
            return [(0.0, None)]
        space = space_of(stage, self.policy.target)
        author = Author(self.model, space, self.rates)
        picks = {pick.config: pick for pick in theirs}
        for config in author.propose(CANDIDATES, Random(stage.key), temperature=TEMPERATURE):
            if config not in picks and (pick := priced(self.policy, space, config)) is not None:
                picks[config] = pick
        return [(log_time(author, pick), pick) for pick in picks.values()]


def log_time(author: Author, pick: Pick) -> float:
    """The logarithm of the pick's time by price and likelihood together, up to a constant."""
    return log(pick.seconds) - author.score(pick.config) / SHARPNESS
