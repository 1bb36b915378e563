"""The policy that knows what was measured: a config that records leave standing is the pick, and
its measured time is the stage's price.

Prices that the fusion search adds up must be of one scale. Predictions are for an unloaded machine
and too low by a factor that differs from sketch to sketch, so beside measured times they would win
by being predictions. A stage that was not measured is therefore priced at what tuning made of
stages of the same sketch: its prediction times the median, over those, of measured over predicted
time; over all measured stages where none has the sketch. And since that is a guess, it counts for
:data:`DOUBT` more: a partition whose stages were measured does not give way to one that only
promises as much.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Any

from gtco.machine.target import Machine
from gtco.search.policy import Policy, priced
from gtco.search.records.records import Record, Records, circumstances, measured_gpu
from gtco.search.records.standing import all_standing, last_ends, standing, stood
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection, Sketch
from gtco.tensor.stage import Operator, Stage, TensorType

DOUBT = 1.05  # times its price: a stage that was not measured
NOT_CHOSEN = 1e3  # times its price, so that no partition with it is found again
MODEL_PICKS = "kernels are picked by the model of the GPU"


@dataclass(frozen=True)
class Calibration:
    """What readings say of predictions: seconds measured over seconds predicted of the sketches'
    stages, and of all.
    """

    ratios: Mapping[str, tuple[float, ...]]

    def bias(self, sketch: str) -> float:
        """What a predicted second of this sketch comes to once it is tuned and measured."""
        every = [ratio for ratios in self.ratios.values() for ratio in ratios]
        return median(self.ratios.get(sketch) or every or (1.0,))

    @property
    def least(self) -> float:
        """No price is lower than its prediction by more than this."""
        return min([1.0, *(ratio for ratios in self.ratios.values() for ratio in ratios)])


def calibrated(stages: Iterable[Iterable[Record]]) -> Calibration:
    """From the records of each stage: the time of what stands, over the least prediction, which was
    the choice of the policy that predicts; under that one's sketch.
    """
    ratios: dict[str, list[float]] = {}
    for records in stages:
        seconds = measured_seconds(records)
        priced = [r for r in records if r.predicted]
        if seconds is None or not priced:
            continue
        first = min(priced, key=lambda r: r.predicted or inf)
        assert first.predicted
        ratios.setdefault(first.parsed.sketch, []).append(seconds / first.predicted)
    return Calibration({sketch: tuple(found) for sketch, found in ratios.items()})


def by_stage(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each stage, in their order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.stage, []).append(record)
    return found


def measured_seconds(records: Iterable[Record]) -> float | None:
    """The latest reading of what stands; readings of one moment, which the last ones of a tuning
    are, compare best.
    """
    found = [r.seconds for r in all_standing(records) if r.seconds]
    return found[-1] if found else None


def last_reading(records: Iterable[Record], config: Config) -> float | None:
    """Seconds of this config by the latest trial that could tell rivals apart, whether it stood or
    not.
    """
    told = [r for r in records if r.seconds and r.outcome not in ("noisy", "wrong")]
    return next((r.seconds for r in reversed(told) if r.parsed == config), None)


def _last_chosen(stages: Mapping[str, Sequence[Record]]) -> set[str]:
    """Of stages with their records those whose newest that stood is ``chosen``."""
    newest = {key: stood(records) for key, records in stages.items()}
    return {key for key, record in newest.items() if record and record.outcome == "chosen"}


@dataclass
class RecordedPolicy:
    """Wraps a policy and overrules it by what was measured.

    A stage's pick is the config that ``records`` of this very machine, target, thread count and
    version leave standing, if the stage's space still contains it. Without records every answer is
    that of ``policy``. ``circumstances`` are given where the machine is not this one. ``shipped``
    are records that come with gtco: those of the same circumstances count as older records, if the
    space still contains their config.
    """

    policy: Policy
    records: Records | None = None
    circumstances: str = ""
    shipped: Sequence[Record] = ()
    passed_over: dict[str, str] = field(default_factory=dict, repr=False)  # by stage, in words
    _prices: dict[str, float] = field(default_factory=dict, repr=False)
    _known: dict[str, list[Record]] = field(default_factory=dict, repr=False)

    def observe(self) -> None:
        """Reads the records again, because something was measured since."""
        self.__dict__.pop("_all", None)  # what ships stays as it is
        self.__dict__.pop("calibration", None)
        self._prices.clear()
        self._known.clear()

    @cached_property
    def _all(self) -> dict[str, list[Record]]:
        return by_stage(self.records.under(self._here)) if self.records is not None else {}

    @cached_property
    def _shipped(self) -> dict[str, list[Record]]:
        return by_stage(r for r in self.shipped if r.circumstances == self._here)

    @cached_property
    def _here(self) -> str:
        return self.circumstances or circumstances(self.target)

    @cached_property
    def calibration(self) -> Calibration:
        every = dict.fromkeys((*self._shipped, *self._all))
        return calibrated([*self._shipped.get(k, ()), *self._all.get(k, ())] for k in every)

    @property
    def target(self) -> Machine:
        return self.policy.target

    @property
    def source(self) -> str:
        """Where the records come from, in words."""
        return str(self.records.path) if self.records is not None else "what ships with gtco"

    @property
    def failures(self) -> list[str]:
        return self.policy.failures

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        pick = self.policy.choose(stage, without)
        if pick is None:
            return None
        known = self.known(stage)
        config = standing(known)
        if config is not None and config.sketch not in without:
            space = space_of(stage, self.target)
            if followed := priced(self.policy, space, config):
                return followed
            self.passed_over[stage.key] = (
                f"what {self.source} says of {stage.label} ({stage.key}) is not followed: "
                f"{space.check(config)}"
            )
        wrong = {record.parsed for record in known if record.outcome == "wrong"}
        if pick.config not in wrong:
            return pick
        promising = self.best(stage, len(wrong) + 1, without)
        return next((other for other in promising if other.config not in wrong), None)

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        return self.policy.best(stage, n, without)

    def known(self, stage: Stage) -> list[Record]:
        """The stage's records under these circumstances, of configs as its space now has them."""
        key = stage.key
        if key not in self._all and key not in self._shipped:
            return []
        if key not in self._known:
            space = space_of(stage, self.target)
            found = [
                replace(r, config=json.dumps(space.spelled_out(r.parsed).to_json()))
                for r in (*self._shipped.get(key, ()), *self._all.get(key, ()))
            ]
            # A shipped config that the space no longer contains is ignored.
            old = len(self._shipped.get(key, ()))
            legal = [r for r in found[:old] if space.check(r.parsed) is None]
            self._known[key] = [*legal, *found[old:]]
        return self._known[key]

    def follows_shipped(self, stage: Stage) -> bool:
        """Is the pick of this stage what ships says of it?"""
        return stage.key not in self._all and standing(self.known(stage)) is not None

    def said_elsewhere(self, stages: Iterable[Stage], picks: Mapping[str, Pick]) -> list[str]:
        """Of a GPU elsewhere: how many of the stages have the kernel that the records say."""
        if not self.circumstances:
            return []
        different = {stage.key: stage for stage in stages}
        known = {key: rows for key, stage in different.items() if (rows := self.known(stage))}
        gpu = json.loads(self.circumstances)["gpu"]
        said = f"what {self.source} says of a {gpu}"
        if not known:
            return [f"nothing of {said} is of this model's stages: {MODEL_PICKS}"]
        followed = sum(standing(rows) == picks[key].config for key, rows in known.items())
        others = f"; the others' {MODEL_PICKS}" if followed < len(different) else ""
        return [f"{followed} of {len(different)} different stages follow {said}{others}"]

    @property
    def measured(self) -> bool:
        return bool(self._all or self._shipped)

    def ends(self, model: str) -> list[frozenset[str]]:
        """What tunings ended with, keys of stages, the likeliest to be this model's first: what the
        last one of this very model did; every stage whose newest record that stood is ``chosen``,
        for whatever model; those of what ships, whatever was measured of them since.
        """
        every = dict.fromkeys((*self._shipped, *self._all))
        both = {k: [*self._shipped.get(k, ()), *self._all.get(k, ())] for k in every}
        own = last_ends(r for rows in both.values() for r in rows if r.reason == model)
        found: list[frozenset[str]] = []
        for end in ({r.stage for r in own}, _last_chosen(both), _last_chosen(self._shipped)):
            if end and not any(end <= other for other in found):
                found.append(frozenset(end))
        return found

    def chosen(self, stages: Iterable[Stage], end: Collection[str]) -> bool:
        """Are they all of those that a tuning ended with, and does something of each still stand?
        """
        return all(s.key in end and stood(self.known(s)) is not None for s in stages)

    def found_again(self, end: Collection[str]) -> Callable[[Stage], float]:
        """Prices by which the cheapest partition is the one that a tuning ended with, where there
        is one.
        """
        return lambda s: self.predict(s) * (1.0 if self.chosen([s], end) else NOT_CHOSEN)

    def predict(self, stage: Stage) -> float:
        if stage.key not in self._prices:
            self._prices[stage.key] = self._price(stage)
        return self._prices[stage.key]

    def _price(self, stage: Stage) -> float:
        """Measured, where what stands is still a point of the space; else predicted, and put on the
        scale of what was measured.
        """
        if not self.measured:
            return self.policy.predict(stage)
        pick = self.policy.choose(stage)
        if pick is None:
            return inf
        config, seconds = standing(self.known(stage)), measured_seconds(self.known(stage))
        if config and seconds:
            if not isinstance(space_of(stage, self.target).sketch(config), Rejection):
                return seconds
        return DOUBT * pick.seconds * self.calibration.bias(pick.sketch.name)

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        return self.policy.floor(op, types) * self.calibration.least

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


def measured_elsewhere(
    policy: Policy, records: Records, metadata: Mapping[str, Any]
) -> tuple[RecordedPolicy, list[str]]:
    """The policy of a GPU, overruled by what was measured on the GPU that ``records`` are of. Where
    no record counts for the target and versions of ``metadata`` there is a note that says so.
    """
    if known := measured_gpu(records, metadata):
        return RecordedPolicy(policy, records, known), []
    return RecordedPolicy(policy), [
        f"{records.path} holds nothing that was measured for '{policy.target.name}' with these "
        f"versions of gtco, TVM and NVRTC: {MODEL_PICKS}"
    ]
