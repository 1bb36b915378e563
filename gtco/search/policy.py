"""What the compiler asks of a policy: points in the spaces of stages. It neither builds nor
measures, and nothing downstream knows who picked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from gtco.machine.target import Machine
from gtco.tensor.space import Config, Pick, Rejection, Sketch, Space
from gtco.tensor.stage import Operator, Stage, TensorType


class Policy(Protocol):
    """Picks points in the spaces of stages; all policies share them. It goes by the roles of
    decisions, not by their names or by who has them.
    """

    @property
    def target(self) -> Machine:
        """The machine that kernels are picked for."""
        ...

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The best sketch and config; None where no sketch is left but those that ``without``
        names.
        """
        ...

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        """Up to ``n`` picks, the most promising first: what :meth:`choose` takes, and would take if
        those before were out of the question too.
        """
        ...

    def predict(self, stage: Stage) -> float:
        """Seconds of the stage as one kernel, which DPOF adds up; infinity where none can do it."""
        ...

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        """Seconds that no stage with this operator is predicted to take less than."""
        ...

    def possible(self, anchors: tuple[str, ...]) -> bool:
        """May a stage with these complex operators and reductions (kinds in topological order), or
        one that more operators make of it, be done by one kernel?
        """
        ...

    def peak(self, operand: str) -> float:
        """FLOP/s of products of operands of this dtype, on all cores by the fastest micro-kernel.
        """
        ...

    def propose(self, stage: Stage, n: int) -> list[Config]:
        """Up to ``n`` different configs of the stage that are worth measuring, the most promising
        first; some may be such as are not picked before that.
        """
        ...

    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of this very config."""
        ...

    @property
    def failures(self) -> list[str]:
        """What went wrong inside sketches so far, in words."""
        ...

    def alternatives(self, stage: Stage, pick: Pick, tested: Collection[Config]) -> list[Pick]:
        """What is worth measuring beside ``pick``, the most promising first; nothing ``tested``."""
        ...


def priced(policy: Policy, space: Space, config: Config) -> Pick | None:
    """The config as a pick at the policy's price; None where it is no point of the space."""
    sketch = space.sketch(config)
    if isinstance(sketch, Rejection):
        return None
    return Pick(sketch, config, policy.price(sketch, config))
