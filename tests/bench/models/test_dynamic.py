"""``python -m bench dynamic``: which shapes and models, and what becomes of the times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from bench.harness.rounds import Comparison, Measurement
from bench.models import dynamic
from gtco.support.errors import OptionError
from gtco.support.sizes import Range
from gtco.verification.outputs import OutputJudge


def test_drawn_shapes_are_different_and_have_the_ends() -> None:
    dims = {"batch": Range(1, 4), "width": [64, 128]}
    found = dynamic.drawn(dims, 5)
    assert found == dynamic.drawn(dims, 5) and len(found) == 5
    assert found[:2] == [{"batch": 1, "width": 64}, {"batch": 4, "width": 128}]
    every = dynamic.drawn(dims, 100)
    assert len(every) == 8 == len({tuple(shape.items()) for shape in every})
    assert dynamic.drawn({"batch": [3]}, 5) == [{"batch": 3}]


def test_a_shape_as_text() -> None:
    assert dynamic.at("batch=3,width=64") == {"batch": 3, "width": 64}
    for text in ("3", "=3", "batch=", "batch=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=SIZE"):
            dynamic.at(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit-ti-16", "--dim", "width=32,64"], "sizes of vit-ti-16 that can be open are batch"),
        (["m.onnx", "--at", "batch=65"], "--at batch=65: give a size of each --dim"),
        (["m.onnx", "--at", "width=3"], "--at width=3: give a size of each --dim"),
        (["--at", "batch=3"], "belong to a model"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dynamic.main(arguments)


def test_the_suite_has_models_that_can_be_open_there() -> None:
    from models import MODELS

    for name, dims in dynamic.SUITE.items():
        assert dims.keys() <= set(MODELS[name].open.values()), name


TIMES = {dynamic.OPEN: 0.002, dynamic.STATIC: 0.001, "onnxruntime": 0.004}


def test_ratios_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx"
    )

    def compare(chosen: Any, rounds: int, judge: OutputJudge) -> Comparison:
        assert judge.model == tmp_path / "m.onnx" and judge.inputs["x"].shape == (3, 8)
        return Comparison(
            tuple(
                Measurement(one.name, "1", ((TIMES[one.name],),) * rounds)
                if one.name in TIMES
                else Measurement(one.name, error="not here")
                for one in chosen
            )
        )

    monkeypatch.setattr(dynamic, "compare", compare)
    file = tmp_path / "r.json"
    arguments = [str(tmp_path / "m.onnx"), "--dim", "batch=1..4", "--at", "batch=3"]
    arguments += ["--rounds", "2", "--json", str(file), "--threads", "1"]
    assert dynamic.main([*arguments, "--peers", "onnxruntime"]) == 0
    (report,) = json.loads(file.read_text())["models"]
    assert report["dims"] == {"batch": "1..4"} and report["rows"][0]["at"] == {"batch": 3}
    assert dynamic.ratios_of(report["rows"], dynamic.STATIC) == [0.5]
    assert dynamic.ratios_of(report["rows"], "onnxruntime") == [2.0]
    assert "batch=3" in capsys.readouterr().out
    file.unlink()
    arguments[2] = "batch=1,3"
    assert dynamic.main([*arguments, "--peers", "openvino"]) == 1
    (report,) = json.loads(file.read_text())["models"]
    assert dynamic.ratios_of(report["rows"], "openvino") == [] and not report["sound"]
    assert "openvino: not here" in capsys.readouterr().out
