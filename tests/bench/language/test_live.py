"""The language model beside other searches: the arithmetic, and a small product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.lines import append
from bench.language.evaluation import live
from bench.language.evaluation.live import Drawn, Row
from bench.language.options import SYSTEMS
from gtco.codegen.workers import Workers
from gtco.machine.target import detect
from gtco.search.analytic import AnalyticPolicy
from gtco.search.language.model import SHIPPED
from gtco.search.records.records import Outcome, Record
from gtco.tensor.space import Config, Pick
from gtco.tuning.result import StageResult
from tests.tuning.small import linear

STAGE = linear(24, 32, 40).canonical
POLICY = AnalyticPolicy(replace(detect(), cores=2))


def _record(config: Config, ratio: float, outcome: Outcome) -> Record:
    pick: Any = Pick(None, config, 1.0)  # type: ignore[arg-type]
    return Record.of(STAGE, pick, "", outcome, (7.0, ratio, 0.0))


def _row(ratios: dict[str, dict[int, float]]) -> Row:
    seconds = {name: {k: 2.0 * k for k in each} for name, each in ratios.items()}
    return Row("vit", "matmul", "key", 0, ratios, seconds)


def test_after_so_many_trials_stands_the_best_of_them() -> None:
    configs = [Config("gemm", (("number", n),)) for n in range(12)]
    rows = [_record(configs[0], 1.0, "kept")]
    rows += [_record(configs[n], 1.0 + 0.1 * n, "slower") for n in range(1, 11)]
    rows += [_record(configs[0], 1.0, "beaten"), _record(configs[11], 0.5, "taken")]
    found = live.traced(configs[0], rows, [(1, 0.2), (9, 3.0), (12, 5.0)])
    assert found.tried == 12
    assert found.best == {1: configs[0], 10: configs[0], 12: configs[11]}
    assert found.seconds == {1: 0.2, 10: 5.0, 12: 5.0}


def test_speed_is_beside_the_search_of_most_trials_and_the_last_count_goes_on() -> None:
    rows = [
        _row({"search": {1: 1.0, 10: 0.9, 1000: 0.8}, "language model": {1: 0.8, 10: 0.4}}),
        _row({"search": {1: 1.0, 10: 0.8}, "random": {1: 4.0}}),
    ]
    assert live.quality(rows, "search", 1, ("search", 1000)) == (pytest.approx(0.8), 2)
    assert live.quality(rows, "language model", 64, ("search", 1000)) == (pytest.approx(2.0), 1)
    text = "\n".join(live.lines(rows))
    assert "after 1000 trials" in text and "random" in text and "0.200" in text


def test_a_file_that_was_cut_off_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    assert live.read_rows(path) == []
    row = _row({"search": {1: 1.0}})
    append(path, row)
    path.write_text(path.read_text() + '{"model": "v')
    assert live.read_rows(path) == [row]


def test_drawn_configs_are_new_and_follow_from_the_seed() -> None:
    pick = POLICY.choose(STAGE)
    assert pick is not None
    result = StageResult(STAGE, (1,), pick, pick)
    first = [p.config for p in Drawn(POLICY, 3).propose(result, 8)]
    assert len(set(first)) == 8 and pick.config not in first
    assert [p.config for p in Drawn(POLICY, 3).propose(result, 8)] == first
    assert [p.config for p in Drawn(POLICY, 4).propose(result, 8)] != first


def test_every_system_searches_and_is_timed_beside_the_others() -> None:
    trials = {name: 4 for name in SYSTEMS if name != live.METASCHEDULE}
    with Workers(2) as workers:
        row = live.live("toy", STAGE, POLICY, workers, SHIPPED, trials, 1, 60.0)
    assert set(row.ratios) == set(row.seconds) == set(trials)
    for name, ratios in row.ratios.items():
        assert 1 in ratios and len(ratios) == 2, name
        assert all(ratio > 0 for ratio in ratios.values())
    assert row.ratios["search"][1] == row.ratios["analytic"][1]  # the same config, timed once
