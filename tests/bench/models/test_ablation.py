"""The variants of ``bench ablation``: each is the same model without the part that its name
says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from bench.models import ablation
from gtco import compiler, load
from gtco.driver import compilation
from gtco.driver.compiled import CompileReport
from gtco.tensor.intrinsics.table import MicroKernel

SIDE, WIDTH = 16, 64
TOKENS = SIDE * SIDE
SHAPE = (2, WIDTH, SIDE, SIDE)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """A 3x3 convolution, and attention over its result: relu(conv(x)), softmax(q k^T) v."""
    rng = np.random.default_rng(0)
    shapes = {"w": (WIDTH, WIDTH, 3, 3), "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH)}
    values = {n: (0.03 * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Reshape", ["r", "flat"], ["f"]),
        helper.make_node("Transpose", ["f"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "wq"], ["q"]),
        helper.make_node("MatMul", ["t", "wk"], ["k"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "t"], ["y"]),
    ]
    values["flat"] = np.array([2, WIDTH, TOKENS], np.int64)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, TOKENS, WIDTH))],
        [onnx.numpy_helper.from_array(v, n) for n, v in values.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )


def sketches(report: CompileReport) -> list[str]:
    return [stage["schedule"]["sketch"] for stage in report.stages]


def cells(report: CompileReport) -> int:
    """The results that the micro-kernels of all stages hold in registers."""
    names = [stage["schedule"].get("tile") for stage in report.stages]
    tiles = [MicroKernel.parse(name, 8) for name in names if name]
    return sum(tile.rows * tile.columns for tile in tiles)


def compiled(model: onnx.ModelProto, path: Path) -> CompileReport:
    return compiler.compile_to_file(model, path, target="x86-64-v3", threads=2)


@pytest.fixture(scope="module")
def whole(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> CompileReport:
    return compiled(model, tmp_path_factory.mktemp("whole") / "whole.so")


@pytest.mark.parametrize("name", ablation.VARIANTS)
def test_a_variant_is_the_same_model_without_what_it_says(
    name: str, model: onnx.ModelProto, whole: CompileReport, tmp_path: Path
) -> None:
    with ablation.compiled_by(ablation.VARIANTS[name][1]):
        report = compiled(model, tmp_path / "without.so")
    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted: Any = session.run(None, {"x": x})[0]
    with load(tmp_path / "without.so") as library:
        np.testing.assert_allclose(library.run({"x": x})["y"], wanted, rtol=0, atol=1e-4)
    assert "winograd" in sketches(whole) and "attention" in sketches(whole)
    match name:
        case "alone":
            assert len(report.stages) > len(whole.stages)
            assert all(len(stage["operators"]) == 1 for stage in report.stages)
        case "greedy":
            assert len(report.stages) > len(whole.stages)
        case "parts":
            assert "attention" not in sketches(report)
        case "winograd":
            assert "winograd" not in sketches(report)
        case "windows":
            assert not {"winograd", "convolution"} & set(sketches(report))
        case "registers":
            assert cells(report) >= cells(whole)
    assert compilation.Compilation is not ablation.VARIANTS[name][1]
