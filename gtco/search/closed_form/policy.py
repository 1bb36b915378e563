"""The policy that picks products by the closed form, in constant time and with no search (DyGen,
Section III-B).

It wraps a policy that prices, which picks all other stages. A product's price is that of its own
pick. So the fusion search, which asks for hundreds of stages around each product, searches none of
their spaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from gtco.machine.target import Target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import SHIPPED, Trained, loaded
from gtco.search.closed_form.form import ClassForm, Machine
from gtco.search.closed_form.products import Product, product_of
from gtco.search.policy import Policy
from gtco.search.recorded import RecordedPolicy
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Sketch
from gtco.tensor.stage import Stage


@dataclass
class ClosedFormPolicy:
    """Wraps ``policy``, which prices. Raises :class:`OptionError` if the ``file`` of coefficients
    cannot be read.
    """

    policy: Policy
    file: Path = SHIPPED
    _picks: dict[str, Pick | None] = field(default_factory=dict, repr=False)
    _chosen: dict[object, Config] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.trained, self.known = nearest(loaded(self.file), self.policy.target)
        self.machine = facts_of(self.policy)

    def __getattr__(self, name: str) -> Any:
        if name == "policy" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.policy, name)

    @property
    def notes(self) -> list[str]:
        """A note if the coefficients are of other machines than the target."""
        target = self.policy.target
        if self.machine is None:
            return [
                f"the closed form has no coefficients for '{target.name}': all kernels are picked "
                "by the prices of the analytic policy"
            ]
        if self.known:
            return []
        names = ", ".join(one.mcpu for one in loaded(self.file))
        return [
            f"the closed form was trained on {names} and not on {self._mcpu}: its picks are taken "
            f"from {self.trained.mcpu} and may be slow here; "
            "python -m gtco.bench closed_form trains it"
        ]

    @property
    def _mcpu(self) -> str:
        target = self.policy.target
        return target.mcpu if isinstance(target, Target) else target.name

    def form_of(self, product: Product | None) -> ClassForm | None:
        """The polynomials for a product; None if its class was not trained."""
        if product is None or self.machine is None:
            return None
        return self.trained.classes.get(product.operator_class)

    def config(self, product: Product, sketch: Sketch, form: ClassForm) -> Config:
        """The closed form's config of a product for its sketch."""
        assert self.machine is not None
        return form.choose(product, sketch, self.machine)

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        """The closed form's pick, or the wrapped policy's pick if the stage is not a product of a
        trained class, or if the pick is of a sketch in ``without``.
        """
        own = self.formed(stage)
        if own is None or own.sketch.name in without:
            return self.policy.choose(stage, without)
        return own

    def formed(self, stage: Stage) -> Pick | None:
        """The closed form's own pick; None if the stage is left to the wrapped policy."""
        if stage.key not in self._picks:
            self._picks[stage.key] = self._formed(stage)
        return self._picks[stage.key]

    def _formed(self, stage: Stage) -> Pick | None:
        product = product_of(stage)
        form = self.form_of(product)
        if product is None or form is None:
            return None
        sketches = space_of(stage, self.policy.target).sketches
        sketch = next((s for s in sketches if s.name == form.sketch), None)
        if sketch is None:
            return None
        signature = getattr(sketch, "signature", None)
        config = self._chosen.get(signature)
        if config is None:
            config = self.config(product, sketch, form)
            if signature is not None:
                self._chosen[signature] = config
        own = Pick(sketch, config, self.policy.price(sketch, config))
        # Other loop structures, as that for products of few columns, are compared by price.
        assert isinstance(self.policy, AnalyticPolicy)
        others = self.policy.others(stage, sketch.name) if len(sketches) > 1 else []
        return min([own, *others], key=lambda pick: pick.seconds)

    def predict(self, stage: Stage) -> float:
        """Seconds of the pick; the wrapped policy's where that picks."""
        own = self.cheapest(stage)
        return own.seconds if own is not None else inf

    def cheapest(self, stage: Stage) -> Pick | None:
        """What :meth:`choose` takes."""
        return self.choose(stage)

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        """The closed form's pick first, then the wrapped policy's best."""
        own, others = self.choose(stage, without), self.policy.best(stage, n, without)
        if own is None:
            return others
        return [own, *(pick for pick in others if pick.config != own.config)][:n]

    def propose(self, stage: Stage, n: int) -> list[Config]:
        return [pick.config for pick in self.best(stage, n)]


def nearest(machines: tuple[Trained, ...], target: object) -> tuple[Trained, bool]:
    """The coefficients for a target, and whether they were trained on its kind of machine. For
    another machine they are the first ones of the file.
    """
    mcpu = getattr(target, "mcpu", "")
    own = next((one for one in machines if one.mcpu == mcpu), None)
    return (machines[0], False) if own is None else (own, True)


def facts_of(policy: Policy) -> Machine | None:
    """What the rules ask of the policy's machine; None if it is not a CPU with a table of rates."""
    if not isinstance(policy, AnalyticPolicy):
        return None
    target = policy.target
    bandwidth = target.memory[-1].bandwidth / target.cores
    return Machine(target.cores, target.lanes, bandwidth, policy.rates.rate)


def written(policy: Policy, stages: Iterable[Stage]) -> dict[str, Config]:
    """The closed form's config of each stage that is a product of a trained class, by stage key,
    for a tuner that measures it first. ``policy`` is the one that prices, records or not.
    """
    inner = policy.policy if isinstance(policy, RecordedPolicy) else policy
    own = inner if isinstance(inner, ClosedFormPolicy) else ClosedFormPolicy(inner)
    found = ((stage.key, own.formed(stage)) for stage in stages)
    return {key: pick.config for key, pick in found if pick is not None}
