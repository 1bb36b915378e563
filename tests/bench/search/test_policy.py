"""``python -m bench policy``: picks compared with the best that was measured, by records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gtco
from gtco.search.records.records import Record, Records
from tests.tuning.small import small_model


def test_the_policy_benchmark_reads_records(tmp_path: Path) -> None:
    """One row for each stage of the untuned model that has more timed configs than its pick."""
    import onnx

    from bench.search.policy import kept
    from gtco.machine.cores import allowed_cores

    onnx.save(small_model(), tmp_path / "m.onnx")
    effort, file = gtco.Tune(trials=8, learned=False), tmp_path / "m.fp32.records"
    compiled = gtco.compile_model(tmp_path / "m.onnx", tune=effort, records=file)
    with Records(file) as records:
        timed = {r.label for r in records.all() if r.outcome in ("slower", "taken", "beaten")}
    rows = kept("m", tmp_path / "m.onnx", tmp_path, allowed_cores())
    assert {r.stage for r in rows} == timed and all(0 < r.of_best <= 1 for r in rows)
    assert [r.runs * r.measured for r in rows] == sorted((r.measured for r in rows), reverse=True)
    assert compiled.report.tuning


def test_the_policy_benchmark_follows_a_pick_through_rounds() -> None:
    """Round one: b beats a by a tenth. Round two is relative to b, and c beats b by a fifth."""
    from bench.search.policy import row

    def reading(config: str, outcome: str, predicted: float, ratio: float) -> Record:
        written = json.dumps({"sketch": config})
        return Record("s", "matmul", "{}", written, outcome, predicted, 1e-3 * ratio, ratio, 0.0)  # type: ignore[arg-type]

    timed = [
        reading("a", "beaten", 1e-3, 1.0),
        reading("b", "taken", 2e-3, 0.9),
        reading("b", "beaten", 2e-3, 1.0),
        reading("c", "taken", 3e-3, 0.8),
        reading("d", "slower", 4e-3, 1.5),
    ]
    found = row("m", "matmul", 3, timed)
    assert found.candidates == 4 and found.of_best == pytest.approx(0.72)
    assert found.predicted == pytest.approx(1e3) and found.measured == pytest.approx(1e3)
    assert found.rank == pytest.approx(0.2)  # a b c d by 1 .9 .72 1.35: ranks 3 2 1 4
