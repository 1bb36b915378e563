"""Where two engines differ, float64 decides whose outputs are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gtco.verification.outputs import OutputJudge


def moments(path: Path) -> Path:
    """A normalisation whose variance is the mean of squares less the square of the mean."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axis"], ["m"]),
        helper.make_node("Mul", ["x", "x"], ["xx"]),
        helper.make_node("ReduceMean", ["xx", "axis"], ["mm"]),
        helper.make_node("Mul", ["m", "m"], ["square"]),
        helper.make_node("Sub", ["mm", "square"], ["v"]),
        helper.make_node("Add", ["v", "one"], ["v1"]),
        helper.make_node("Sqrt", ["v1"], ["s"]),
        helper.make_node("Sub", ["x", "m"], ["d"]),
        helper.make_node("Div", ["d", "s"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "moments",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 64])],
        [
            helper.make_tensor("axis", TensorProto.INT64, [1], [-1]),
            helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
        ],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture
def case(tmp_path):
    """The judge, the outputs of float64 and those of ONNX Runtime, which are off by a percent."""
    path = moments(tmp_path / "moments.onnx")
    x = np.random.default_rng(0).normal(800, 3, (4, 64)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1)
    (theirs,) = session.run(None, {"x": x})
    assert np.abs(theirs - exact).max() > 2e-3 * np.abs(exact).max()
    return OutputJudge(path, {"x": x}), exact.astype(np.float32), theirs


def test_what_float64_agrees_with_is_right(case):
    judge, exact, theirs = case
    verdict = judge([exact], [theirs], "onnxruntime")
    assert verdict.right
    assert "float64 agrees with it, and onnxruntime is off by" in verdict.why


def test_what_is_wrong_stays_wrong(case):
    judge, exact, theirs = case
    verdict = judge([exact + 0.5], [theirs], "onnxruntime")
    assert not verdict.right and "by float64 too output 0 is wrong: off by" in verdict.why


def test_without_float64_the_reference_is_believed(case, monkeypatch):
    judge, exact, theirs = case
    monkeypatch.setattr("gtco.verification.float64.judge.SECONDS", 0.0)
    verdict = judge([exact + 0.5], [theirs], "onnxruntime")
    assert not verdict.right and "float64 could not decide: " in verdict.why
