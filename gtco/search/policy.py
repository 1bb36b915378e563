"""What the compiler asks of a policy: points in the spaces of stages. It neither builds nor
measures, and nothing downstream knows who picked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from gtco.machine.target import Machine
from gtco.tensor.space import Config, Pick, Rejection, Sketch, Space
from gtco.tensor.stage import Operator, Stage, TensorType


class Prices(Protocol):
    """What fusion and the tuner ask of a policy that prices configs. Seconds are of one call."""

    @property
    def target(self) -> Machine:
        """The machine that kernels are picked for."""
        ...

    def predict(self, stage: Stage) -> float:
        """Seconds of the stage as one kernel, which DPOF adds up; infinity where none can do it."""
        ...

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        """Seconds that no stage with this operator is predicted to take less than."""
        ...

    def possible(self, anchors: tuple[str, ...]) -> bool:
        """True if one kernel may do a stage with these complex operators and reductions (kinds in
        topological order), or a stage that more operators make of it.
        """
        ...

    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of this very config."""
        ...

    def peak(self, operand: str) -> float:
        """FLOP/s of products of operands of this dtype, on all cores by the fastest micro-kernel.
        """
        ...


class Policy(Prices, Protocol):
    """Picks points in the spaces of stages; all policies share these spaces. A policy knows
    decisions by their roles, and not by their names or by the sketch that has them.
    """

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The best sketch and config. None if the stage has no sketch but those that ``without``
        names.
        """
        ...

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        """Up to ``n`` picks, the most promising first. The first is what :meth:`choose` takes; each
        later one is what it would take if those before were not allowed.
        """
        ...

    def cheapest(self, stage: Stage) -> Pick | None:
        """The pick of the least predicted time, which is not always what :meth:`choose` takes.
        None if the stage has no sketch.
        """
        ...

    def propose(self, stage: Stage, n: int) -> list[Config]:
        """Up to ``n`` different configs of the stage that are worth measuring, the most promising
        first. Some of them may not be picked before they are measured.
        """
        ...

    def alternatives(self, stage: Stage, pick: Pick, tested: Collection[Config]) -> list[Pick]:
        """What is worth measuring beside ``pick``, the most promising first, without ``tested``."""
        ...

    @property
    def failures(self) -> list[str]:
        """What went wrong inside sketches so far, in words."""
        ...


def priced(policy: Prices, space: Space, config: Config) -> Pick | None:
    """The config as a pick at the policy's price; None where it is not a point of the space."""
    sketch = space.sketch(config)
    if isinstance(sketch, Rejection):
        return None
    return Pick(sketch, config, policy.price(sketch, config))
