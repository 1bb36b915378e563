"""A run of a benchmark prints a table and writes JSON; the pages' tables follow from the JSON."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
from rich.console import Console

from bench import __main__ as entry
from bench.harness import ahead, by_model, suite
from bench.harness.peers import OPENERS, SETTINGS
from bench.harness.rounds import Comparison, Measurement
from bench.harness.workload import check_peers
from bench.models import readme
from bench.models.end_to_end import summary
from bench.models.int8 import Row
from bench.models.names import FIVE
from gtco.support.errors import BuildError, OptionError


def result(workload, ours=0.010, ort=0.012, **changes):
    measurements = (
        Measurement("gtco", "0.1", ((ours,) * 3,), difference=2e-6, **changes),
        Measurement("onnxruntime", "1.31", ((ort,) * 3,), difference=0.0),
        Measurement("torch", error="no source"),
    )
    return suite.Result(workload, Comparison(measurements, (4e11,)))


def printed(show, *arguments):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))
    show(*arguments, console)
    return console.export_text()


def test_the_table_shows_time_rate_share_and_ratio(workload, capsys):
    suite.show(result(workload))
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "onnxruntime 1.31" in line)
    assert "12.00" in row and "1.20" in row and "166.7" in row and "41.7%" in row
    assert "torch failed: no source" in text and "note: fell back" in text and "7 stages" in text


def test_a_system_that_float64_sides_with_is_shown_and_sound(workload, capsys):
    judged = result(workload, judged="float64 agrees with it")
    suite.show(judged)
    assert "gtco differs and is right: float64 agrees with it" in capsys.readouterr().out
    assert suite.sound([judged])


def test_json_holds_machine_versions_and_raw_rounds(workload, tmp_path):
    file = tmp_path / "r.json"
    suite.write_json(file, [result(workload)], 2, 5)
    data = json.loads(file.read_text())
    assert (
        data["machine"]["threads"] == 2
        and data["machine"]["cpu"]
        and data["machine"]["versions"]["numpy"]
    )
    ours, ort, torch = data["models"][0]["systems"]
    assert ours["rounds_s"] == [[0.01, 0.01, 0.01]] and ort["ratio_to_gtco"] == pytest.approx(1.2)
    assert ours["share_of_peak"] == pytest.approx(0.5) and torch["error"] == "no source"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(OptionError, match="does not exist"):
        suite.write_json(tmp_path / "no" / "r.json", [], 2, 5)


def test_what_was_kept_stays_until_the_next_file_is_whole(tmp_path, monkeypatch):
    """A kill or a full disk ends the writing of a row."""

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    file = tmp_path / "rows.json"
    row = Row("m", "gtco", {"gtco": float("nan")}, {}, 1.0, None)
    by_model.write_rows(file, [row])
    kept = file.read_text()
    assert json.loads(kept)[0]["milliseconds"] == {"gtco": None} and "NaN" not in kept
    monkeypatch.setattr("gtco.runtime.publish._flush", full)
    with pytest.raises(BuildError, match="cannot write"):
        by_model.write_rows(file, [row, row])
    assert file.read_text() == kept


def test_no_benchmark_writes_its_rows_in_place(root):
    """Those that keep what they have after each model write a whole file."""
    names = ("int8", "dynamic", "disturbed", "runtime_overhead")
    files = [root / "bench" / "models" / f"{name}.py" for name in names]
    for file in (*files, root / "bench" / "gpu" / "gpu.py"):
        assert "options.json.write_text" not in file.read_text(), file


def test_a_failing_or_wrong_gtco_is_not_sound(workload):
    assert suite.sound([result(workload)])
    assert not suite.sound([result(workload, disagrees="off by 1")])
    assert not suite.sound([result(workload, error="crashed")])


def test_peers_that_were_not_compared_are_named_with_their_reasons(workload):
    assert suite.failed_peers(result(workload), ["onnxruntime"]) == []
    failed = suite.failed_peers(result(workload), ["onnxruntime", "torch"])
    assert failed == [f"torch with {workload.name} (no source)"]


def test_a_peer_counts_in_its_best_setting(workload):
    measurements = (
        Measurement("gtco", "0.1", ((0.010,),)),
        Measurement("torch", "2", ((0.030,),)),
        Measurement("torch:channels-last", "2", ((0.020,),)),
        Measurement("torch-compile", error="no compiler"),
    )
    row = suite.Result(workload, Comparison(measurements)).to_json()
    ratio, system = ahead.best(row, ["torch"])
    assert system == "torch:channels-last" and ratio == pytest.approx(2.0)
    assert ahead.best(row, ["torch-compile"]) is None and ahead.best(row, ["openvino"]) is None


def test_the_mean_is_withheld_when_a_model_is_missing(workload):
    five = [result(replace(workload, name=name)) for name in FIVE]
    text = printed(lambda c: summary(five, ("onnxruntime", "onnxruntime:optimizer"), c))
    assert "geometric mean of onnxruntime / gtco: 1.200 over vit-ti-16" in text
    assert "least ahead" in text and "1.20 (onnxruntime)" in text
    text = printed(lambda c: summary(five[1:], ("onnxruntime",), c))
    assert "geometric mean of onnxruntime / gtco: not known without vit-ti-16" in text


def test_a_peer_stands_for_its_settings_and_one_of_them_for_itself():
    assert check_peers("torch,openvino") == ("torch", "torch:channels-last", "openvino")
    assert check_peers("torch:channels-last") == ("torch:channels-last",)
    assert check_peers("onnxruntime,onnxruntime:optimizer") == (
        "onnxruntime",
        "onnxruntime:optimizer",
    )
    systems = {system for settings in SETTINGS.values() for system in settings}
    assert systems == set(OPENERS) - {"gtco", "peak"}


def test_the_readme_is_written_from_one_run(workload, tmp_path):
    five = [
        result(replace(workload, name=name), ort=0.011 + n / 1e3) for n, name in enumerate(FIVE)
    ]
    run, target = tmp_path / "run.json", tmp_path / "README.md"
    suite.write_json(run, five, 2, 7)
    target.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    assert entry.main(["readme", str(run), str(target)]) == 0
    text = target.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == "| model | gtco ms | % of peak | ONNX Runtime | compile s | compile peak GB |"
    assert rows[1] == "| vit-ti-16 | 10.00 | 50 | 1.10 | 3.0 | 0.90 |" and len(rows) == 6
    assert "Tuned" not in text
    assert max(map(len, text.splitlines())) <= 118
    text = " ".join(text.split())
    assert "Geometric mean over vit-ti-16" in text and "1.29 over ONNX Runtime" in text
    assert "Least ahead of the best peer: vit-ti-16 1.10 (ONNX Runtime), vit-s-16 1.20" in text
    alone = five[0].to_json()["systems"][0] | {"difference": None}
    compared = [{**found.to_json(), "systems": [alone]} for found in five]
    data = json.loads(run.read_text())
    assert "outputs agree with ONNX Runtime's to 2e-06" in text
    assert "outputs agree" not in readme.section({**data, "models": compared})
    target.write_text("no marks")
    assert entry.main(["readme", str(run), str(target)]) == 1
    assert target.read_text() == "no marks"
