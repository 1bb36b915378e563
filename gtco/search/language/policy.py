"""The policy that picks what the language model writes, without measuring (TLM, Section 6.4: "no
necessity for measurement").

A model of language has no price, so stages are priced and cut by the policy that it wraps. Only the
pick of a stage is its own: the greedy sentence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtco.search.calibration.rates import RateTable
from gtco.search.language.generation import Author
from gtco.search.language.model import SHIPPED, loaded
from gtco.search.policy import Policy, priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage


@dataclass
class LanguagePolicy:
    """Wraps ``policy``; ``rates`` is the machine's table. Raises :class:`OptionError` if the
    model's ``file`` cannot be read.
    """

    policy: Policy
    rates: RateTable | None = None
    file: Path = SHIPPED
    _written: dict[str, Config] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.model = loaded(self.file)

    def __getattr__(self, name: str) -> Any:
        if name == "policy" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.policy, name)

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The greedy sentence; the wrapped policy's pick if that is of a sketch in ``without``."""
        first = self.policy.choose(stage, without)
        if first is None:
            return None
        space = space_of(stage, self.policy.target)
        if stage.key not in self._written:
            self._written[stage.key] = Author(self.model, space, self.rates).greedy()
        config = self._written[stage.key]
        return first if config.sketch in without else priced(self.policy, space, config)
