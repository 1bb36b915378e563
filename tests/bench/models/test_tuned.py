"""Tuned libraries in the harness: what they are given, what is kept of it, and the tables that show
untuned, quick and tuned libraries of one run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from rich.console import Console

from bench import __main__ as entry
from bench.harness import ahead, suite
from bench.harness.build import Build, Tuning, build
from bench.harness.rounds import Comparison, Measurement
from bench.harness.workload import Workload
from bench.models import readme
from bench.models.end_to_end import summary
from bench.models.names import FIVE
from gtco.search.records.records import Records
from tests.driver.test_compiler import mlp

PEERS = ("onnxruntime", "openvino")
MINUTES = {"quick": 0.2, "full": 30.0}


def result(
    name: str, times: Mapping[str, float], minutes: Mapping[str, float | None] = MINUTES
) -> suite.Result:
    """A model whose systems took this many milliseconds; a system of 0 ms failed."""
    measured = tuple(
        Measurement(system, "1", ((ms / 1e3,) * 3,), difference=2e-6)
        if ms
        else Measurement(system, error="it failed")
        for system, ms in times.items()
    )
    build = Build("m.so", 3.0, 900_000_000, stages=7)
    work = Workload(name, Path("m.onnx"), None, Path("m.npz"), build, 2e9)
    tuned = {
        effort: Build("m.so", 9.0, 1, measured_seconds=None if m is None else 60 * m)
        for effort, m in minutes.items()
        if f"gtco:{effort}" in times
    }
    return suite.Result(work, Comparison(measured, (4e11,)), tuned)


def times(*milliseconds: float) -> dict[str, float]:
    names = ("gtco", "gtco:quick", "gtco:full", "onnxruntime", "onnxruntime:optimizer", "openvino")
    return dict(zip(names, milliseconds, strict=True))


SOME = [
    result("vit-ti-16", times(10, 8, 5, 30, 20, 25)),
    result("swin-t", times(10, 12.5, 8, 30, 30, 16)),
]
ROWS = [found.to_json() for found in SOME]


def written(run: list[suite.Result], file: Path) -> str:
    suite.write_json(file, run, 2, 7)
    return str(file)


# how far ahead ----------------------------------------------------------------------------------
def test_the_best_peer_is_the_best_setting_of_all_of_them() -> None:
    assert ahead.best(ROWS[0], PEERS) == (pytest.approx(2.0), "onnxruntime:optimizer")
    assert ahead.best(ROWS[1], PEERS) == (pytest.approx(1.6), "openvino")
    assert ahead.best(ROWS[1], ["onnxruntime"]) == (pytest.approx(3.0), "onnxruntime")
    assert ahead.best(ROWS[0], PEERS, "gtco:full") == (pytest.approx(4.0), "onnxruntime:optimizer")
    assert ahead.best(ROWS[0], ["torch"]) is None


def test_means_and_the_least_are_of_each_way() -> None:
    assert ahead.ways(ROWS) == ["gtco", "gtco:quick", "gtco:full"]
    assert ahead.mean(ROWS, PEERS) == "1.789 over 2 models"  # sqrt(2.0 * 1.6)
    assert ahead.mean(ROWS, PEERS, "gtco:quick") == "1.789 over 2 models"  # sqrt(2.5 * 1.28)
    assert ahead.mean(ROWS, PEERS, "gtco:full") == "2.828 over 2 models"  # sqrt(4 * 2)
    assert [name for _, name in ahead.least(ROWS, PEERS, "gtco:quick")] == ["swin-t", "vit-ti-16"]
    gains = ahead.gains(ROWS, "gtco:full")
    assert gains == {"vit-ti-16": pytest.approx(2.0), "swin-t": pytest.approx(1.25)}


def test_a_model_that_did_not_run_is_named_and_not_counted() -> None:
    failed = result("vit-s-16", times(10, 10, 0, 20, 20, 20)).to_json()
    alone = result("beit-b-16", times(10, 10, 5, 0, 0, 0)).to_json()
    rows = [*ROWS, failed, alone]
    without = "(without vit-s-16, beit-b-16)"
    assert ahead.mean(rows, PEERS, "gtco:full") == f"2.828 over 2 models {without}"
    assert ahead.mean(rows, PEERS).endswith("over 3 models (without beit-b-16)")
    assert ahead.mean([alone], PEERS) == "not known"
    assert ahead.milliseconds(failed, "gtco:full") == "failed"


@pytest.mark.parametrize(
    ("minutes", "title"),
    [
        ((30.0, 30.02), "tuned (30 min)"),
        ((12.0, 30.0), "tuned (12 to 30 min)"),
        ((0.5, 0.5), "tuned (0.5 min)"),
        ((30.0, None), "tuned"),
    ],
)
def test_the_title_says_how_long_was_measured(minutes: tuple[Any, Any], title: str) -> None:
    models = [
        result(str(n), times(3, 2, 1, 4, 4, 4), {"full": m}).to_json()
        for n, m in enumerate(minutes)
    ]
    assert ahead.title(models, "gtco:full") == title
    assert [ahead.title(models, way) for way in ("gtco", "gtco:quick")] == ["untuned", "quick"]


# tables -----------------------------------------------------------------------------------------
def test_the_readme_has_untuned_quick_and_tuned_columns() -> None:
    rows = readme.section({"machine": _machine(), "models": ROWS}).splitlines()
    assert (
        "| model | gtco ms | quick ms | tuned (30 min) ms | % of peak | ONNX Runtime | OpenVINO "
        "| compile s | quick s | compile peak GB |"
    ) in rows
    assert "| vit-ti-16 | 10.00 | 8.00 | 5.00 | 50 | 2.00 | 2.50 | 3.0 | 9.0 | 0.90 |" in rows
    text = " ".join(rows)
    assert "--efforts quick,full" in text
    assert "untuned not known, a row is missing; quick not" in text
    assert (
        "Geometric mean over the best peer of each model: untuned 1.789 over 2 models; quick 1.789 "
        "over 2 models; tuned (30 min) 2.828 over 2 models."
    ) in text
    assert "tuned (30 min) swin-t 2.00 (OpenVINO), vit-ti-16 4.00 (ONNX Runtime)." in text
    assert "Tuned (quick): 1.000 times as fast" in text and "least swin-t 0.800" in text
    assert "Tuned (30 min): 1.581 times as fast" in text and "least swin-t 1.250" in text


def test_each_peers_mean_is_told_of_each_way() -> None:
    five = [result(name, times(10, 8, 5, 12, 15, 20)).to_json() for name in FIVE]
    text = " ".join(readme.section({"machine": _machine(), "models": five}).split())
    assert "untuned 1.20 over ONNX Runtime, 2.00 over OpenVINO; quick 1.50 over ONNX" in text
    assert "tuned (30 min) 2.40 over ONNX Runtime, 4.00 over OpenVINO." in text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_best_peers_of_a_run_go_between_their_marks(precision: str, tmp_path: Path) -> None:
    rows_of = [{**row, "precision": precision} for row in ROWS]
    wider = rows_of[1] | {"model": "swinv2-t"}
    run = {"machine": _machine(), "models": [rows_of[0], wider]}
    file, table = tmp_path / "run.json", tmp_path / "benchmarks.md"
    file.write_text(json.dumps(run))
    marks = {p: (f"<!-- peers {p} -->", f"<!-- /peers {p} -->") for p in ("fp32", "bf16")}
    table.write_text("".join(f"{a}\nold {p}\n{b}\n" for p, (a, b) in marks.items()))
    assert entry.main(["readme", "--table", "peers", str(file), str(table)]) == 0
    text = table.read_text()
    assert f"old {precision}" not in text and text.count("old") == 1
    rows = text.splitlines()
    assert (
        "| model | untuned ms | quick ms | tuned (30 min) ms | best peer | its ms | untuned "
        "| quick | tuned (30 min) |"
    ) in rows
    row = ("vit-ti-16", "10.00", "8.00", "5.00", "ONNX Runtime (optimizer)", "20.00")
    assert f"| {' | '.join(row)} | 2.00 | 2.50 | 4.00 |" in rows
    said = " ".join(rows)
    assert "tuned (30 min) 2.828 over 2 models" in said
    assert "--suite wide --peers onnxruntime,openvino " in said and "batch 1 unless" in said
    assert "--suite" not in readme.section({"machine": _machine(), "models": ROWS})
    assert (f"--precision {precision}" in said) == (precision == "bf16")
    assert ("ran in fp32" in said) == (precision == "bf16")


def test_a_table_is_of_one_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROWS[0], {**ROWS[1], "precision": "bf16"}]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"machine": _machine(), "models": rows}))
    assert entry.main(["readme", "--table", "peers", str(file)]) == 1
    assert "of one precision" in capsys.readouterr().err


def test_the_summary_prints_each_way(tmp_path: Path) -> None:
    console = Console(record=True, width=250, file=open("/dev/null", "w"))
    summary(SOME, ("onnxruntime", "onnxruntime:optimizer", "openvino"), console)
    text = console.export_text()
    assert "tuned (30 min) ms" in text and "4.00 onnxruntime:optimizer" in text
    assert "geometric mean of each model's best peer / gtco: 1.789 over 2 models" in text
    assert "geometric mean of each model's best peer / gtco:full: 2.828 over 2 models" in text
    assert "least ahead, gtco:full: swin-t 2.00 (openvino); vit-ti-16 4.00" in text
    assert "geometric mean of gtco / gtco:quick: 1.000 over 2 models" in text
    assert "geometric mean of openvino / gtco:full: not known without vit-s-16" in text


def test_a_wrong_tuned_library_is_not_sound() -> None:
    assert suite.sound(SOME)
    wrong = Measurement("gtco:full", "1", ((1.0,),), disagrees="off by 1")
    assert not suite.sound([suite.Result(SOME[0].workload, Comparison((wrong,)))])


def _machine() -> dict[str, Any]:
    versions = {"onnxruntime": "1", "openvino": "2"}
    return {"cores": 2, "cpu": "CPU", "threads": 2, "date": "2026-01-01", "versions": versions}


# what a build is given --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--minutes", "30"], "are of the effort full"),
        (["--records", "r"], "are of the effort full"),
        (["--efforts", "full", "--minutes", "0"], "--minutes 0 measures nothing"),
        (["--efforts", "some"], "unknown effort some"),
        (["--efforts", "full", "--records", "/dev/null/r"], "/dev/null/r: Not a directory"),
    ],
)
def test_nonsense_budgets_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["end_to_end", "--models", "vit-ti-16", *given]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["-1", "nan", "inf", "ten"])
def test_minutes_are_a_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.main(["end_to_end", "--efforts", "full", "--minutes", minutes])
    assert "is not a number of minutes" in capsys.readouterr().err


def test_a_model_has_a_file_of_records_for_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def made(*arguments: Any, tuning: Tuning) -> Build:
        given.append(tuning)
        return Build("m.so", 1.0, 1, error="not now")

    monkeypatch.setattr(suite, "prepare", lambda *_: SOME[0].workload)
    monkeypatch.setattr(suite, "build", made)
    monkeypatch.setattr(suite, "tolerance", lambda _: 1e-3)
    monkeypatch.setattr(suite, "judge", lambda _: None)
    monkeypatch.setattr(suite, "compare", lambda *_, **__: Comparison(()))
    tunings = [Tuning("quick"), Tuning("full", 60.0, tmp_path)]
    for precision in ("fp32", "bf16"):
        found = suite.run_model(
            *("vit-ti-16", (), tmp_path, 2, 3, None, None, precision, tunings)
        )
        failed = {m.system: m.error for m in found.comparison.measurements}
        assert failed == {"gtco:quick": "not now", "gtco:full": "not now"}
    files = [tmp_path / f"vit-ti-16.{precision}.records" for precision in ("fp32", "bf16")]
    full = [Tuning("full", 60.0, file) for file in files]
    assert given == [Tuning("quick"), full[0], Tuning("quick"), full[1]]


def test_tuning_goes_on_from_its_records_and_its_minutes_add_up(tmp_path: Path) -> None:
    """Tuning without earlier records is an error. Then two builds measure, and one is made from
    records.
    """
    model, file = tmp_path / "mlp.onnx", tmp_path / "mlp.records"
    onnx.save(mlp(), model)
    nothing = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 0.0, file))
    assert nothing.error and "there is no file of records" in nothing.error
    assert not file.exists()
    Records(file).__exit__()
    nothing = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 0.0, file))
    assert nothing.error and "nothing that was measured on this machine" in nothing.error
    file.unlink()
    first = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 6.0, file))
    assert first.error is None and first.measured_seconds == dict(first.phases)["tune"] > 0
    with Records(file) as records:
        kept = records.all()
    assert kept
    again = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 6.0, file))
    spent = first.measured_seconds + dict(again.phases)["tune"]
    assert again.error is None and again.measured_seconds == pytest.approx(spent)
    with Records(file) as records:
        more = records.all()
    assert more[: len(kept)] == kept
    last = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 0.0, file))
    assert last.error is None and "tune" not in dict(last.phases)
    assert last.measured_seconds == pytest.approx(spent)
    with Records(file) as records:
        assert records.all() == more
    Tuning(records=file).ledger.unlink()  # type: ignore[union-attr]
    unknown = build(model, tmp_path / "m.so", 1, tuning=Tuning("full", 0.0, file))
    assert unknown.error is None and unknown.measured_seconds is None


def test_a_build_that_is_ended_counts_all_of_its_time(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    tuning = Tuning("full", 0.1, tmp_path / "r")
    (tmp_path / "r.seconds").write_text("nonsense")
    ended = build(tmp_path / "mlp.onnx", tmp_path / "m.so", 1, timeout=0.1, tuning=tuning)
    assert ended.error and "no result" in ended.error
    assert ended.measured_seconds == pytest.approx(ended.seconds)
    assert float((tmp_path / "r.seconds").read_text()) == pytest.approx(ended.seconds)
