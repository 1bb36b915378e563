"""``bench int8``: the quantizers' files, and what is said of the times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bench.harness import quantizers, suite
from bench.harness.agreement import losses
from bench.harness.build import Build
from bench.harness.workload import Workload
from bench.models import int8, int8_table, readme
from bench.models.int8 import Row
from gtco.support.errors import ModelError


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.standard_normal((8, 4)).astype("float32"), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4])],
        [weights],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_a_quantized_file_is_made_once(model, tmp_path, monkeypatch):
    made = quantizers.quantize("onnxruntime", model, 2, tmp_path)
    kinds = [node.op_type for node in onnx.load(made).graph.node]
    assert kinds.count("MatMul") == 1 and "QuantizeLinear" in kinds and "DequantizeLinear" in kinds
    monkeypatch.setattr(quantizers, "QUANTIZERS", {})
    assert quantizers.quantize("onnxruntime", model, 2, tmp_path) == made


@pytest.mark.parametrize("what", ["samples", "version", "model", "note", "gtco"])
def test_a_quantized_file_is_made_anew_where_what_made_it_is_another(
    what, model, tmp_path, monkeypatch
):
    ran = []

    def copy(source, data, part):
        ran.append(len(data))
        part.write_bytes(source.read_bytes())

    name = "gtco" if what == "gtco" else "onnxruntime"
    monkeypatch.setitem(quantizers.QUANTIZERS, name, copy)
    made = [quantizers.quantize(name, model, 2, tmp_path) for _ in range(2)]
    assert ran == [2] and made[0] == made[1]
    match what:
        case "version":
            monkeypatch.setattr(quantizers, "package_version", lambda _: "another")
        case "gtco":  # its files say more than its version
            monkeypatch.setattr(quantizers, "own_digest", lambda: "another")
        case "model":
            graph = onnx.load(model)
            graph.doc_string = "another"
            onnx.save(graph, model)
        case "note":
            made[0].with_name(f"{made[0].name}.made").unlink()
    again = [quantizers.quantize(name, model, 3 if what == "samples" else 2, tmp_path)] * 2
    assert len(ran) == 2 and again == made
    assert made[0].read_bytes() == model.read_bytes()


def test_a_file_of_a_quantizer_that_is_not_installed_is_taken(model, tmp_path, monkeypatch):
    made = tmp_path / "m.nncf-int8.onnx"
    made.write_bytes(b"from another machine")
    monkeypatch.setattr(quantizers, "installed", lambda _: False)
    assert quantizers.quantize("nncf", model, 2, tmp_path) == made
    assert made.read_bytes() == b"from another machine"


def test_engines_may_differ_by_steps_on_a_quantized_file(model, tmp_path):
    work = Workload("m", model, None, tmp_path / "x.npz", Build("m.so", 0.0, 0), None)
    assert suite.tolerance(work) == suite.TOLERANCES["fp32"]
    made = quantizers.quantize("onnxruntime", model, 2, tmp_path)
    assert suite.tolerance(replace(work, onnx=made)) == suite.QUANTIZED


def test_a_quantizer_that_fails_leaves_no_file(model, tmp_path, monkeypatch):
    def fail(source, data, made):
        made.write_bytes(b"half of it")
        raise RuntimeError("out of range")

    monkeypatch.setitem(quantizers.QUANTIZERS, "nncf", fail)
    with pytest.raises(ModelError, match=r"nncf cannot quantize .*m\.onnx: out of range"):
        quantizers.quantize("nncf", model, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_the_best_peer_is_the_fastest_on_any_file():
    times = {"gtco": 2.0, "gtco:fp32": 5.0, "onnxruntime": 4.0, "openvino": 3.5}
    row = Row("m", "gtco", {**times, "openvino:nncf": 3.0}, {}, 0.27, 0.01)
    assert row.gain == 2.5 and row.best == (1.5, "openvino:nncf")


def test_a_row_without_a_peer_is_shown_and_not_counted(monkeypatch, capsys, tmp_path):
    """As where neither is installed, or neither runs the file."""
    alone = Row("a", "gtco", {"gtco": 2.0, "gtco:fp32": 5.0}, {"openvino": "crashed"}, 0.3, None)
    beside = replace(alone, model="b", milliseconds={**alone.milliseconds, "openvino": 3.0})
    assert alone.best is None
    rows = {row.model: row for row in (alone, beside)}
    monkeypatch.setattr(int8, "measure", lambda name, _: rows[name])
    (tmp_path / "a.onnx").touch()
    (tmp_path / "b.onnx").touch()
    assert int8.main(["--models", "a", "--folder", str(tmp_path)]) == 0
    assert "best peer / gtco: " not in capsys.readouterr().out
    assert int8.main(["--models", "a,b", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "fp32 / int8: geometric mean 2.500, least 2.500, over 2 models" in said
    assert "best peer / gtco: geometric mean 1.500, least 1.500, over 1 models" in said
    about = {"cpu": "C", "cores": 2, "threads": 2, "date": "2026-01-02T03:04:05", "versions": {}}
    text = int8_table.section({"machine": about, "models": [asdict(alone), asdict(beside)]})
    assert "| a | 2.00 | 5.00 | - | - | - | 2.50 | - | 0.30 |" in text
    assert "best peer / gtco: 1.50 in the geometric mean of 1 models" in " ".join(text.split())
    text = int8_table.section({"machine": about, "models": [asdict(alone)]})
    assert "least a 2.50." in text and "best peer / gtco:" not in text


def test_a_loss_is_relative_to_the_outputs_of_the_float_model():
    true = [np.array([3.0, 4.0]), np.array([12.0])]
    near = [np.array([3.0, 4.0]), np.array([13.3])]
    outputs = {"f": true, "a": near, "b": true, "other": [np.zeros(3)]}
    assert losses(outputs, "f") == {"a": pytest.approx(0.1), "b": 0.0}
    assert losses(outputs, "missing") == {}


def test_the_table_of_int8_is_written_from_one_run(tmp_path, capsys):
    times = {"gtco": 2.0, "gtco:fp32": 5.0, "onnxruntime": 4.0, "openvino:nncf": 1.0}
    rows = [
        Row("a", "gtco", times, {}, 0.27, 0.01, None, {"gtco": 0.031, "onnxruntime": 0.032}),
        Row("b", "gtco", {**times, "openvino:nncf": 4.0}, {}, 0.3, 0.01),
    ]
    about = {
        **{"cpu": "Some CPU", "cores": 2, "threads": 2, "date": "2026-01-02T03:04:05"},
        "versions": {"onnxruntime": "1.0", "openvino": None},
    }
    run, page = tmp_path / "run.json", tmp_path / "page.md"
    run.write_text(json.dumps({"machine": about, "models": [asdict(row) for row in rows]}))
    page.write_text("before\n<!-- int8 -->\nold\n<!-- /int8 -->\nafter\n")
    assert readme.main(["--table", "int8", str(run), str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    row = "| a | 2.00 | 5.00 | 4.00 | - | 1.00 | 2.50 | 0.50 | 0.27 | 3.1% | 3.2% | - | - |"
    assert row in text.splitlines()
    mean = "best peer / gtco: 1.00 in the geometric mean of 2 models, least a 0.50."
    assert mean in " ".join(text.split())
    mixed = [asdict(replace(rows[0], quantizer=q)) for q in ("gtco", "nncf")]
    run.write_text(json.dumps({"machine": about, "models": mixed}))
    assert readme.main(["--table", "int8", str(run)]) == 1
