"""The policy that knows what was measured: a config that records leave standing is the pick."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gtco.search.policy import Policy
from gtco.search.records import Record, Records, circumstances, standing
from gtco.target import Target
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection, Sketch
from gtco.tensor.stage import Operator, Stage, TensorType


@dataclass
class RecordedPolicy:
    """``policy``, overruled where ``records`` of this very machine, target, thread count and
    version have a config of the stage that stood, and that its space still has.
    """

    policy: Policy
    records: Records
    _known: dict[str, list[Record]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._circumstances = circumstances(self.target)

    @property
    def target(self) -> Target:
        return self.policy.target

    @property
    def failures(self) -> list[str]:
        return self.policy.failures

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        pick = self.policy.choose(stage, without)
        config = standing(self.known(stage))
        if pick is None or config is None or config.sketch in without:
            return pick
        sketch = space_of(stage, self.target).sketch(config)
        if isinstance(sketch, Rejection):
            return pick
        return Pick(sketch, config, self.policy.price(sketch, config))

    def known(self, stage: Stage) -> list[Record]:
        """The stage's records under these circumstances."""
        if stage.key not in self._known:
            self._known[stage.key] = self.records.of(stage.key, self._circumstances)
        return self._known[stage.key]

    def predict(self, stage: Stage) -> float:
        return self.policy.predict(stage)

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        return self.policy.floor(op, types)

    def possible(self, anchors: tuple[str, ...]) -> bool:
        return self.policy.possible(anchors)

    def peak(self, operand: str) -> float:
        return self.policy.peak(operand)

    def price(self, sketch: Sketch, config: Config) -> float:
        return self.policy.price(sketch, config)

    def propose(self, stage: Stage, n: int) -> list[Config]:
        return self.policy.propose(stage, n)

    def alternatives(self, stage: Stage, pick: Pick, tested: Collection[Config]) -> list[Pick]:
        return self.policy.alternatives(stage, pick, tested)
