"""The partition of a model by records is the one that its last finished tuning ended with, whatever
was measured of its stages since. Configs that computed something wrong do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from gtco.driver.compilation import Compilation, silent
from gtco.driver.phases import Facts, Whole
from gtco.graph.fusion.stages import Partition, fuse
from gtco.graph.graph import Graph
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Outcome, Record, Records
from gtco.search.records.standing import only_standing
from gtco.support.options import CompileOptions
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage, TensorType
from tests.driver.test_cooptimize import block, record


@dataclass
class Cut:
    """Two models that share operators, partitioned by records."""

    records: Records
    compilation: Compilation
    policy: RecordedPolicy

    def price(self, stage: Stage) -> float:
        return self.policy.policy.predict(stage)

    def by(self, graph: Graph) -> dict[str, int]:
        self.policy.observe()
        return self.compilation.partitioned(Whole(graph, Facts(), self.policy)).partition.weights()

    def as_predicted(self, graph: Graph, without: str = "none") -> Partition:
        """The cheapest partition that has no stage with both gelu and this kind."""

        def price(stage: Stage) -> float:
            kinds = stage.label.split("+")
            return self.price(stage) * (99.0 if {"gelu", without} <= {*kinds} else 1.0)

        return fuse(graph, price, self.policy.policy.floor, self.policy.possible)[1]

    def end(self, graph: Graph, partition: Partition, day: int, seconds: float = 1.0) -> None:
        """Adds the records of a tuning of the model that ended; its stages take ``seconds`` times
        their predictions.
        """
        for stage in {s.key: s for s in partition.stages}.values():
            found = self.row(stage, seconds, "chosen", day)
            self.records.add([replace(found, reason=graph.key)])

    def row(self, stage: Stage, seconds: float, outcome: Outcome, day: int) -> Record:
        assert isinstance(self.policy.policy, AnalyticPolicy)
        known = {"outcome": outcome, "time": f"2026-01-{day:02}"}
        return record(self.policy.policy, stage, seconds * self.price(stage), **known)


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Cut]:
    compilation = Compilation(b"", tmp_path / "m.so", None, CompileOptions(), silent)
    with Records(tmp_path / "r") as records:
        policy = compilation.policy_for(target("native"), records)
        yield Cut(records, compilation, policy)


def followed(graph: Graph) -> Graph:
    """The same graph with one more operator."""
    graph = graph.copy()
    graph.outputs = (graph.add("matmul", [graph.outputs[0], graph.add_constant(LAST)]),)
    return graph.check()


LAST = np.ones((64, 2000), "float32")


def test_models_that_share_stages_keep_their_own_partitions(cut: Cut) -> None:
    """This does not depend on what the other model's stages took, or on which model was tuned
    last.
    """
    one, two = block(), followed(block())
    fused, apart = cut.as_predicted(one), cut.as_predicted(two, without="matmul")
    gelu = [s for s in fused.stages if "gelu" in s.label]
    assert gelu and not {s.key for s in gelu} & apart.weights().keys()
    for day, seconds in enumerate([9.0, 0.01], 1):  # expensive for the other model, then cheap
        cut.end(one, fused, 2 * day)
        cut.end(two, apart, 2 * day + 1, seconds)
        assert cut.by(one) == fused.weights()
        assert cut.by(two) == apart.weights()
    # copied to another file, in the order of the stages' names
    lines = only_standing(cut.records.all())
    cut.policy.records = Records(":memory:")
    cut.policy.records.add(reversed(lines))
    assert cut.by(one) == fused.weights() and cut.by(two) == apart.weights()
    # and shipped, after each stage was measured again
    cut.policy.records = Records(":memory:")
    cut.policy.shipped = lines
    cut.policy.records.add(cut.row(s, 1.0, "kept", 9) for s in {*fused.stages, *apart.stages})
    del cut.policy._shipped
    assert cut.by(one) == fused.weights() and cut.by(two) == apart.weights()


def test_the_last_end_counts_wherever_it_is_in_the_file(cut: Cut) -> None:
    """As after a merge with an older file."""
    graph = block()
    fused, apart = cut.as_predicted(graph), cut.as_predicted(graph, without="matmul")
    cut.end(graph, apart, day=2)
    cut.end(graph, fused, day=1, seconds=0.1)
    assert cut.by(graph) == apart.weights()
    cut.end(graph, fused, day=3, seconds=9.0)
    assert cut.by(graph) == fused.weights()


def test_what_ships_without_a_model_stands_though_stages_were_measured_since(cut: Cut) -> None:
    graph = block()
    apart = cut.as_predicted(graph, without="matmul")
    assert cut.by(graph) != apart.weights()
    cut.policy.shipped = [cut.row(s, 9.0, "chosen", 1) for s in apart.stages]
    del cut.policy._shipped
    assert cut.by(graph) == apart.weights()
    cut.records.add(cut.row(s, 9.0, "kept", 2) for s in apart.stages)
    assert cut.by(graph) == apart.weights()


def test_sizes_are_compared_by_predictions_though_one_was_measured(cut: Cut) -> None:
    """The parts of a range: records of batch 1 alone must not make a part of 4 look dear."""
    graph = block()
    cut.end(graph, cut.as_predicted(graph), day=1, seconds=0.5)
    cut.policy.observe()
    fused = cut.compilation.partitioned(Whole(graph, Facts(), cut.policy))
    stages = fused.partition.stages
    assert sum(map(cut.policy.predict, stages)) < 0.6 * sum(map(cut.price, stages))
    assert fused.predicted() == pytest.approx(sum(map(cut.price, stages)))


def test_a_newer_reading_changes_the_kernel_and_not_the_partition(cut: Cut) -> None:
    """The exception is a wrong kernel. Then an older one that was right is taken. If there is none,
    the model is partitioned by the other records.
    """
    graph = block()
    apart = cut.as_predicted(graph, without="matmul")
    fused = cut.by(graph)
    cut.end(graph, apart, day=1)
    stage = next(s for s in apart.stages if "matmul" in s.label and s.key not in fused)
    first = cut.policy.policy.choose(stage)
    assert first is not None
    *_, other = (p for p in cut.policy.best(stage, 9) if p.config != first.config)
    newer = replace(
        cut.row(stage, 0.5, "taken", 2), config=json.dumps(other.config.to_json())
    )

    def picked() -> Config:
        pick = cut.policy.choose(stage)
        assert pick is not None
        return pick.config

    for found, config in ((newer, other.config), (wrong(newer), first.config)):
        cut.records.add([found])
        assert cut.by(graph) == apart.weights()
        assert picked() == config
    cut.records.add([wrong(cut.row(stage, 1.0, "chosen", 3))])
    assert cut.by(graph) != apart.weights()
    assert picked() not in (first.config, other.config)


def wrong(found: Record) -> Record:
    return replace(found, outcome="wrong", seconds=None)


def test_what_computed_something_else_is_no_price(cut: Cut) -> None:
    """Its earlier reading does not count either. The reading of the config before it does, because
    that config is the pick.
    """
    stage = next(s for s in cut.as_predicted(block()).stages if "matmul" in s.label)
    other = cut.policy.best(stage, 2)[1].config.to_json()
    fast = replace(cut.row(stage, 1e-3, "taken", 2), config=json.dumps(other))
    cut.records.add([cut.row(stage, 3.0, "kept", 1), fast])
    cut.policy.observe()
    assert cut.policy.predict(stage) == 1e-3 * cut.price(stage)
    cut.records.add([wrong(fast)])
    cut.policy.observe()
    assert cut.policy.predict(stage) == 3.0 * cut.price(stage)
    assert cut.policy.calibration.bias("gemm") == pytest.approx(3.0)


def test_a_model_has_a_key() -> None:
    """The key depends on what the model computes, including its outputs, and not on names and
    weights.
    """

    def made(x: str, value: float = 1.0, width: int = 64, both: bool = False) -> str:
        graph = Graph((x,), (), {x: TensorType((50, width))})
        w = graph.add_constant(np.full((width, 8), value, "float32"), f"{x}w")
        y = graph.add("matmul", [x, w], output=f"{x}y")
        z = graph.add("gelu", [y], output=f"{x}z")
        graph.outputs = (y, z) if both else (z,)
        return graph.check().key

    assert made("x") == made("other", 2.0)
    assert len({made("x"), made("x", width=32), made("x", both=True)}) == 3


def test_an_export_of_what_stands_has_the_ends(cut: Cut) -> None:
    """The last end of each model comes before the newest record of the pick."""
    one, two = block(), followed(block())
    partition = cut.as_predicted(one)
    for day, model in enumerate([one, two, one], 1):
        cut.end(model, partition, day)
    cut.records.add(cut.row(s, 1.0, "kept", 4) for s in partition.stages)
    left = only_standing(cut.records.all())
    ends = [(two.key, "chosen", "2026-01-02"), (one.key, "chosen", "2026-01-03")]
    for stage in partition.stages:
        rows = [(r.reason, r.outcome, r.time) for r in left if r.stage == stage.key]
        assert rows == [*ends, ("", "kept", "2026-01-04")]
