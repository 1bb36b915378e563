"""The common part of policies that price every config by a model of the machine: they find the best
configs of each sketch and alternatives to a pick, and they note failures inside sketches.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf, prod
from typing import Protocol, TypeVar

import numpy as np

from gtco.machine.target import Machine
from gtco.support.errors import describe
from gtco.tensor.sketch import possible, space_of
from gtco.tensor.space import Config, Pick, Sketch, check
from gtco.tensor.stage import Operator, Stage, TensorType

# The share of the least time for products that a floor may count on. Strassen's algorithm
# multiplies 7/8 of what is written.
CERTAIN = 0.86


class _Priced(Protocol):
    @property
    def seconds(self) -> float: ...

    @property
    def config(self) -> Config: ...


P = TypeVar("P", bound=_Priced)


def products(op: Operator, types: Mapping[str, TensorType]) -> float:
    """Multiply-adds of a contraction as it is written. 0 for other operators, for convolutions in
    groups, and if a size is symbolic.
    """
    if op.kind not in ("matmul", "attention") and not (op.kind == "conv2d" and op["groups"] == 1):
        return 0.0
    a, b = (types[x].shape for x in op.inputs[:2])
    if any(isinstance(d, str) for d in (*a, *b, *op.type.shape)):
        return 0.0
    if op.kind == "attention":  # q k^T and its product with v
        rows = float(op.type.size // int(op.type.shape[-1]))
        return rows * int(b[-2]) * (int(a[-1]) + int(op.type.shape[-1]))
    return float(op.type.size) * (
        prod(int(d) for d in b[1:]) if op.kind == "conv2d" else int(a[-1])
    )


class PricingPolicy(ABC):
    """Picks the config of a stage with the least predicted time on ``target``. Subclasses say what
    a config costs.
    """

    def __init__(self, target: Machine) -> None:
        self.target = target
        self._stages: dict[str, tuple[Pick, ...]] = {}
        self._failures: dict[str, list[str]] = {}

    @abstractmethod
    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of this very config."""

    @abstractmethod
    def compared(self, sketch: Sketch) -> tuple[Sequence[Config], np.ndarray]:
        """The candidates, and the seconds by which they are compared with each other."""

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The best sketch and config, or None if no rule matches the stage. ``without`` names
        sketches that are not allowed.
        """
        return next((c for c in self.standings(stage) if c.sketch.name not in without), None)

    def standings(self, stage: Stage) -> tuple[Pick, ...]:
        """The best pick of each sketch, by predicted time."""
        key = stage.key
        if key not in self._stages:
            self._stages[key] = tuple(self._of_sketches(stage, self.picks))
        return self._stages[key]

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        """The ``n`` picks of least predicted time over all sketches, best first."""
        found = self._of_sketches(stage, lambda sketch: self.picks(sketch, n))
        return [pick for pick in found if pick.sketch.name not in without][:n]

    def propose(self, stage: Stage, n: int) -> list[Config]:
        """The ``n`` configs of least predicted time over all sketches, best first."""
        return [pick.config for pick in self.best(stage, n)]

    def others(self, stage: Stage, structure: str) -> list[Pick]:
        """The best pick of each sketch but that of this name, by predicted time."""
        return self._of_sketches(stage, self.picks, (structure,))

    def _of_sketches(
        self,
        stage: Stage,
        priced: Callable[[Sketch], Sequence[P]],
        without: Collection[str] = (),
    ) -> list[P]:
        """The results of ``priced`` for each sketch but those in ``without``, by predicted time. A
        sketch that raises is skipped and noted.
        """
        found: list[P] = []

        def failed(rule: str, error: Exception) -> None:
            what = f"sketch '{rule}' failed: {describe(error)}"
            self._failures.setdefault(what, []).append(f"{stage.label} ({stage.key})")

        for sketch in space_of(stage, self.target, failed).sketches:
            if sketch.name in without:
                continue
            try:
                of_sketch = priced(sketch)
                for one in of_sketch:
                    if not one.seconds >= 0:
                        raise ValueError(f"{one.seconds} predicted for {one.config.to_json()}")
            except Exception as error:
                failed(sketch.name, error)
            else:
                found += of_sketch
        return sorted(found, key=lambda one: one.seconds)

    @property
    def failures(self) -> list[str]:
        """The failures inside sketches so far, as sentences with the stages and the cause."""
        return [
            f"{what}, at stage {stages[0]}"
            + (f" and {len(stages) - 1} more that were considered" if len(stages) > 1 else "")
            + "; it was passed over there"
            for what, stages in self._failures.items()
        ]

    def predict(self, stage: Stage) -> float:
        """Predicted seconds of the stage; infinity where no kernel can do it (temp[V'] of GTCO's
        Algorithm 1).
        """
        chosen = self.cheapest(stage)
        return chosen.seconds if chosen else inf

    def cheapest(self, stage: Stage) -> Pick | None:
        """The pick of the least predicted time: what :meth:`choose` takes."""
        return self.choose(stage)

    def possible(self, anchors: tuple[str, ...]) -> bool:
        """True if a stage with these anchors, or a stage that grows from it, may have a kernel."""
        return possible(anchors)

    def picks(self, sketch: Sketch, n: int = 1) -> list[Pick]:
        """The ``n`` candidates of least predicted time, best first."""
        found, seconds = self.compared(sketch)
        if not found:
            return []
        order = [np.argmin(seconds)] if n == 1 else np.argsort(seconds, kind="stable")[:n]
        best = (found[int(i)] for i in order)
        return [Pick(sketch, c, self.price(sketch, c)) for c in best]

    def alternatives(self, stage: Stage, pick: Pick, tested: Collection[Config]) -> list[Pick]:
        """What is worth measuring beside ``pick``: the best config of each other sketch and, for
        each decision of ``pick``, the best config that decides it differently. Configs in
        ``tested`` are left out. The least predicted time comes first.
        """

        def of_sketch(sketch: Sketch) -> list[Pick]:
            configs, seconds = self.compared(sketch)
            order = [configs[int(i)] for i in np.argsort(seconds, kind="stable")]
            left = [config for config in order if config not in tested]
            if sketch.name != pick.sketch.name:
                picked: list[Config | None] = [*left[:1]]
            else:
                picked = [
                    next((c for c in left if c.by_name.get(name) != option), None)
                    or next(
                        (c for c in _otherwise(sketch, pick.config, name) if c not in tested), None
                    )
                    for name, option in pick.config.choices
                ]
            different = dict.fromkeys(filter(None, picked))
            return [Pick(sketch, config, self.price(sketch, config)) for config in different]

        return self._of_sketches(stage, of_sketch)


def _otherwise(sketch: Sketch, config: Config, name: str) -> Iterator[Config]:
    """The configs that differ from this one in the decision ``name`` alone."""
    before = dict(itertools.takewhile(lambda choice: choice[0] != name, config.choices))
    decision = sketch.next_decision(before)
    assert decision is not None and decision.name == name
    for option in decision.options:
        choices = tuple((n, option if n == name else c) for n, c in config.choices)
        other = Config(config.sketch, choices)
        if other != config and check(sketch, other) is None:
            yield other
