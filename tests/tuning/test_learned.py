"""Proposals of a learned model, in rounds on a made-up machine that differs from the analytic
policy's predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import Kernel
from gtco.codegen.workers import Workers
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.learning.cost_model import LEAST
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Record, Records
from gtco.support.options import Tune
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage
from gtco.tuning import learned
from gtco.tuning.learned import ABSENT, LearnedProposals
from gtco.tuning.measure import Measurer, Timed
from gtco.tuning.proposals import AnalyticProposals, Proposals
from gtco.tuning.result import StageResult
from gtco.tuning.trial import Trial
from gtco.tuning.tune import tune
from tests.tuning.small import linear
from tests.tuning.test_verdict import rounds

V4 = target("x86-64-v4")


def machine(policy: AnalyticPolicy, pick: Pick) -> float:
    """Seconds on a machine where the rows of a tile, reading A in place, and chunks of columns cost
    more than predicted.
    """
    chosen = pick.config.by_name
    rows = int(str(chosen.get("tile", "1x1")).partition("x")[0])
    direct = 1.3 if chosen.get("a") == "direct" else 1.0
    return pick.seconds * (1 + rows / 10) * direct * (1 + int(chosen.get("chunks_n", 0)) / 5)


def result_of(policy: AnalyticPolicy, stage: Stage) -> StageResult:
    pick = policy.choose(stage)
    assert pick is not None
    return StageResult(stage, (1,), pick, pick, readings={pick.config: machine(policy, pick)})


def round_of(proposals: Proposals, policy: AnalyticPolicy, result: StageResult) -> list[Pick]:
    """What the tuner does with a stage in one slot, without building or timing."""
    picks = proposals.propose(result, 8)
    configs = [pick.config for pick in picks]
    assert len(set(configs)) == len(configs) <= 8 and not set(configs) & result.tested
    space = space_of(result.stage, policy.target)
    assert all(space.check(config) is None for config in configs)
    result.tested.update(configs)
    result.rounds += 1
    result.measured += len(picks)
    for pick in picks:
        result.readings[pick.config] = machine(policy, pick)
        if result.readings[pick.config] < result.readings[result.last.config]:
            result.last = pick
    return picks


def test_until_it_knows_enough_the_analytic_proposals_stand() -> None:
    """After that, it ranks unseen configs better than they do. The same seed gives the same
    proposals.
    """
    policy = AnalyticPolicy(V4)
    tried: list[list[Config]] = []
    for learned_rounds in (2, 1):
        result, other = (result_of(policy, linear(197, 192, 768)) for _ in range(2))
        proposals = LearnedProposals(policy, {result.stage.key: result})
        analytic = AnalyticProposals(policy)
        while len(result.readings) < LEAST:
            assert round_of(proposals, policy, result) == round_of(analytic, policy, other)
            assert not proposals.model.trained and result.rankings is None
        for _ in range(learned_rounds):
            round_of(proposals, policy, result)
        assert proposals.model.trained and proposals.failures == []
        model, price = result.rankings or pytest.fail("nothing was predicted")
        assert model.programs == len(result.predicted) == 8 * learned_rounds
        assert model.pairs > price.pairs
        assert len(result.to_json()["ranking"]) == 2
        tried.append(list(result.readings))
    assert tried[0][: len(tried[1])] == tried[1]


def test_it_begins_with_what_earlier_runs_measured() -> None:
    """Records of the same circumstances are examples before anything is measured."""
    policy, stage = AnalyticPolicy(V4), linear(197, 192, 768)
    result, earlier = result_of(policy, stage), result_of(policy, stage)
    analytic = AnalyticProposals(policy)
    while len(earlier.readings) < 2 * LEAST:
        round_of(analytic, policy, earlier)
    records = recorded(earlier, policy)
    result.tested.update(earlier.readings)
    proposals = LearnedProposals(policy, {stage.key: result}, records)
    round_of(proposals, policy, result)
    assert proposals.model.trained and len(proposals.examples()) >= 2 * LEAST
    assert len(result.predicted) == result.measured


def recorded(result: StageResult, policy: AnalyticPolicy) -> list[Record]:
    """The records of what was measured of a stage, in the order of a file."""
    first = machine(policy, result.first)
    stage = result.stage
    return [
        Record(
            *(stage.key, stage.label, "{}", json.dumps(config.to_json()), "slower"),
            ratio=seconds / first,
        )
        for config, seconds in result.readings.items()
    ]


def test_it_learns_from_other_models_too() -> None:
    """It learns from stages that the records know and that are not tuned now. Stages that are not
    known by name are left out.
    """
    policy, other = AnalyticPolicy(V4), linear(64, 256, 320)
    earlier = result_of(policy, other)
    analytic = AnalyticProposals(policy)
    while len(earlier.readings) < 2 * LEAST:
        round_of(analytic, policy, earlier)
    records = recorded(earlier, policy)
    for stages in ({}, {other.key: other}):
        result = result_of(policy, linear(197, 192, 768))
        proposals = LearnedProposals(policy, {result.stage.key: result}, records, (), stages)
        round_of(proposals, policy, result)
        assert proposals.model.trained == bool(stages) == bool(result.predicted)
        assert len({example.stage for example in proposals.examples()}) == 1 + len(stages)


def test_what_stood_for_a_similar_stage_is_tried_first() -> None:
    """The stage had another size and another machine: its times are not used."""
    policy, stage = AnalyticPolicy(V4), linear(197, 192, 768)
    result = result_of(policy, stage)
    options = [p for p in policy.alternatives(stage, result.last, set()) if p.sketch.name == "gemm"]
    stood = options[-1].config
    record = Record("other", stage.label, "{}", json.dumps(stood.to_json()), "taken", ratio=0.01)
    unlike = Record("third", "softmax", "{}", json.dumps({"sketch": "rows"}), "taken")
    proposals = LearnedProposals(policy, {stage.key: result}, others=[record, unlike])
    picks = round_of(proposals, policy, result)
    assert picks[0].config == stood and proposals.examples()[0].features is not None
    assert len(proposals.examples()) == len(result.readings)


def test_tuning_asks_what_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loop on the made-up machine; a second run knows what the first one measured."""
    policy, stage = AnalyticPolicy(V4), linear(197, 192, 768)

    def built(
        self: object, stage: Stage, first: Pick, kernel: Kernel, picks: Sequence[Pick]
    ) -> tuple[Trial, list[Any]]:
        return Trial(stage, (first, *picks), (kernel,) * (1 + len(picks))), []

    def read(self: object, trials: Sequence[Trial], seconds: float) -> Iterator[Timed]:
        for t in trials:
            yield Timed(t, rounds(*(machine(policy, pick) for pick in t.picks)))

    monkeypatch.setattr(Measurer, "build", built)
    monkeypatch.setattr(Measurer, "time", read)
    ends = []
    for trials in (2 * LEAST, 8):
        with Records(tmp_path / "records") as records, Workers(1) as workers:
            chooser = RecordedPolicy(policy, records)
            pick = chooser.choose(stage)
            assert pick is not None
            made = Generated([stage], {stage.key: Kernel("k", b"", 1, 0, {})}, {stage.key: pick})
            effort = Tune(trials=trials, patience=9)
            (result,) = tune([made], chooser, workers, threads=1, effort=effort, records=records)
            assert records.stages() == {stage.key: stage}
        assert made.notes == [] and made.choices[stage.key] == result.last
        assert result.measured == trials and result.predicted
        ends.append((machine(policy, pick), machine(policy, result.last)))
    (untuned, tuned), (from_records, last) = ends
    assert last <= from_records == tuned < untuned


def test_without_xgboost_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear(197, 192, 768))
    proposals = LearnedProposals(policy, {result.stage.key: result})
    monkeypatch.setattr(learned, "available", lambda: False)
    while len(result.readings) < 2 * LEAST:
        assert round_of(proposals, policy, result)
    assert proposals.failures == [ABSENT] and not result.predicted


def test_a_sketch_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs are not examples. The stage continues with the analytic proposals."""
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear())

    def broken(*_: object) -> None:
        raise RuntimeError("no such statement")

    monkeypatch.setattr(learned, "features", broken)
    proposals = LearnedProposals(policy, {result.stage.key: result})
    assert round_of(proposals, policy, result) and round_of(proposals, policy, result)
    (said,) = proposals.failures
    assert "no such statement" in said and proposals.examples() == []
