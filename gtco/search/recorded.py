"""The policy that knows records. The pick of a stage is the config that stands in the records, and
the price of the stage is its measured time.

The fusion search adds up prices, so all prices must have one scale. Predictions are too low, by a
factor that differs from sketch to sketch. Beside measured times they would win only because they
are predictions. The price of a stage that was not measured is therefore its prediction times the
median of measured over predicted time, taken over the measured stages of the same sketch (or over
all measured stages if none has the sketch). This is still a guess, so it is multiplied by
:data:`DOUBT`: a partition that was measured does not give way to one that only promises as much.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.search.policy import Policy, priced
from gtco.search.records.records import (
    Record,
    Records,
    circumstances,
    measured_cpu,
    measured_gpu,
)
from gtco.search.records.standing import all_standing, last_ends, standing, stood
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection, Sketch
from gtco.tensor.stage import Operator, Stage, TensorType

DOUBT = 1.05  # a stage that was not measured costs so many times its price
LEAST_SECONDS = 1e-12  # less than a cycle: no prediction
NOT_CHOSEN = 1e3  # times the price of a stage that the partition looked for does not have
MODEL_PICKS = "kernels are picked by the model of the machine"


@dataclass(frozen=True)
class Calibration:
    """Seconds measured over seconds predicted, for the stages of each sketch."""

    ratios: Mapping[str, tuple[float, ...]]

    def bias(self, sketch: str) -> float:
        """Measured seconds for each predicted second of this sketch, after tuning."""
        every = [ratio for ratios in self.ratios.values() for ratio in ratios]
        return median(self.ratios.get(sketch) or every or (1.0,))

    @property
    def least(self) -> float:
        """The smallest factor between a price and its prediction."""
        return min([1.0, *(ratio for ratios in self.ratios.values() for ratio in ratios)])


def calibrated(stages: Iterable[Iterable[Record]]) -> Calibration:
    """Compares measured with predicted times, from the records of each stage. The measured time is
    that of the config that stands; the prediction is the least one, whose config the predicting
    policy picked. The ratio counts for the sketch of that pick.
    """
    ratios: dict[str, list[float]] = {}
    for records in stages:
        seconds = measured_seconds(records)
        priced = [r for r in records if r.predicted and r.predicted > LEAST_SECONDS]
        if seconds is None or not priced:
            continue
        first = min(priced, key=lambda r: r.predicted or inf)
        assert first.predicted
        ratios.setdefault(first.parsed.sketch, []).append(seconds / first.predicted)
    return Calibration({sketch: tuple(found) for sketch, found in ratios.items()})


def by_stage(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each stage, in their given order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.stage, []).append(record)
    return found


def measured_seconds(records: Iterable[Record]) -> float | None:
    """The latest reading of a stage's records that stand. The last readings of a tuning are taken
    at about the same time, so that they can be compared.
    """
    found = [r.seconds for r in all_standing(records) if r.seconds]
    return found[-1] if found else None


def last_reading(records: Iterable[Record], config: Config) -> float | None:
    """Seconds of this config from the latest trial that could compare its candidates, whether the
    config stands or not.
    """
    told = [r for r in records if r.seconds and r.outcome not in ("noisy", "wrong")]
    return next((r.seconds for r in reversed(told) if r.parsed == config), None)


def _last_chosen(stages: Mapping[str, Sequence[Record]]) -> set[str]:
    """The stages whose newest record that stands is ``chosen``."""
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
    passed_over: dict[str, str] = field(default_factory=dict, repr=False)  # why, by stage
    _prices: dict[str, float] = field(default_factory=dict, repr=False)
    _known: dict[str, list[Record]] = field(default_factory=dict, repr=False)

    def observe(self) -> None:
        """Reads the records again, because something was measured since."""
        self.__dict__.pop("_all", None)  # shipped records do not change
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
        """Where the records come from, for messages."""
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
        if pick.config not in self.wrong(stage):
            return pick
        return next(iter(self.best(stage, 1, without)), None)

    def best(self, stage: Stage, n: int, without: Collection[str] = ()) -> list[Pick]:
        """By price, without configs that were measured to compute something else."""
        wrong = self.wrong(stage)
        found = self.policy.best(stage, n + len(wrong), without)
        return [pick for pick in found if pick.config not in wrong][:n]

    def known(self, stage: Stage) -> list[Record]:
        """The stage's records under these circumstances, their configs written as the stage's space
        writes them now.
        """
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

    def wrong(self, stage: Stage) -> set[Config]:
        """Configs of the stage that were measured to compute something else."""
        return {record.parsed for record in self.known(stage) if record.outcome == "wrong"}

    def follows_shipped(self, stage: Stage) -> bool:
        """True if a shipped record decides the pick of this stage."""
        return stage.key not in self._all and standing(self.known(stage)) is not None

    def won(self, stage: Stage, config: Config) -> bool:
        """True if the user's own records leave this config of the stage standing."""
        return stage.key in self._all and standing(self.known(stage)) == config

    def said_elsewhere(self, stages: Iterable[Stage], picks: Mapping[str, Pick]) -> list[str]:
        """For records of a GPU or a CPU elsewhere, a note on how many stages follow them."""
        if not self.circumstances:
            return []
        different = {stage.key: stage for stage in stages}
        known = {key: rows for key, stage in different.items() if (rows := self.known(stage))}
        measured = json.loads(self.circumstances)
        said = f"what {self.source} says of a {measured.get('gpu') or measured['mcpu']}"
        if not known:
            return [f"nothing of {said} is of this model's stages: {MODEL_PICKS}"]
        followed = sum(standing(rows) == picks[key].config for key, rows in known.items())
        others = f"; the others' {MODEL_PICKS}" if followed < len(different) else ""
        return [f"{followed} of {len(different)} different stages follow {said}{others}"]

    @property
    def measured(self) -> bool:
        return bool(self._all or self._shipped)

    def ends(self, model: str) -> list[frozenset[str]]:
        """The ends of tunings that may be this model's, as keys of stages, the most likely first:

        1. the end of the last tuning of this very model;
        2. every stage whose newest record that stands is ``chosen``, for any model;
        3. the same of the shipped records alone, whatever was measured later.
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
        """True if the end contains all these stages and each of them has a record that stands."""
        return all(s.key in end and stood(self.known(s)) is not None for s in stages)

    def found_again(self, end: Collection[str]) -> Callable[[Stage], float]:
        """Prices that make the partition of this end the cheapest one, if the graph has it."""
        return lambda s: self.predict(s) * (1.0 if self.chosen([s], end) else NOT_CHOSEN)

    def predict(self, stage: Stage) -> float:
        if stage.key not in self._prices:
            self._prices[stage.key] = self._price(stage)
        return self._prices[stage.key]

    def _price(self, stage: Stage) -> float:
        """The measured time if the config that stands is still in the space; else the prediction,
        put on the scale of measured times.
        """
        if not self.measured:
            return self.policy.predict(stage)
        pick = self.cheapest(stage)
        if pick is None:
            return inf
        config, seconds = standing(self.known(stage)), measured_seconds(self.known(stage))
        if config and seconds:
            if not isinstance(space_of(stage, self.target).sketch(config), Rejection):
                return seconds
        return DOUBT * pick.seconds * self.calibration.bias(pick.sketch.name)

    def cheapest(self, stage: Stage) -> Pick | None:
        """The wrapped policy's, which knows no measured time."""
        return self.policy.cheapest(stage)

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
    """The policy of a GPU, or of a CPU of another kind than this machine's, overruled by what was
    measured on the one that ``records`` are of. Where no record counts for the target and versions
    of ``metadata`` there is a note that says so.
    """
    gpu = isinstance(policy.target, GpuTarget)
    known = measured_gpu(records, metadata) if gpu else measured_cpu(records, policy.target)
    if known:
        return RecordedPolicy(policy, records, known), []
    return RecordedPolicy(policy), [
        f"{records.path} holds nothing that was measured for '{policy.target.name}' with these "
        f"versions of gtco, TVM and NVRTC: {MODEL_PICKS}"
    ]
