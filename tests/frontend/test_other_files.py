"""Files that are not float32 ONNX models: saved programs are compiled, quantized models get a note,
and other formats are named.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import gtco
from gtco.frontend.onnx import load_onnx
from gtco.frontend.pytorch.export import load_program
from gtco.frontend.pytorch.load import load_pytorch
from gtco.frontend.source import is_onnx
from gtco.support.errors import ModelError, ShapeError, UnsupportedError


def test_a_saved_program_is_compiled_from_its_file(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=({0: rows},))
    path = tmp_path / "mlp.pt2"
    torch.export.save(program, path)
    assert not is_onnx(path)
    with pytest.raises(ShapeError, match=r"--shape input\.0=1"):
        gtco.compile_to_file(path, tmp_path / "mlp.so")
    report = gtco.compile_to_file(path, tmp_path / "mlp.so", shapes={"input": (5, 8)}, verify=True)
    assert report.verification.reference == "PyTorch"
    x = torch.randn(5, 8)
    with gtco.load(tmp_path / "mlp.so") as compiled:
        y = compiled(x.numpy())
    with torch.no_grad():
        wanted = module.double()(x.double()).numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_a_symbol_of_a_program_is_one_size_also_within_an_input() -> None:
    module = nn.Conv2d(3, 2, 3, padding=1).eval()
    side = torch.export.Dim("side", min=4, max=64)
    dims = ({2: side, 3: side},)
    program = torch.export.export(module, (torch.randn(1, 3, 8, 8),), dynamic_shapes=dims)
    with pytest.raises(ShapeError, match=r"--shape side=SIZE \(in Python: shapes={'side': ...}\)"):
        load_pytorch(program)
    imported = load_pytorch(program, shapes={"side": 6}, simplify=False)
    assert imported.inputs["input"].shape == (1, 3, 6, 6)


def test_a_file_that_torch_reads_no_program_from(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt2"
    torch.save({"w": torch.ones(2)}, path)
    with pytest.raises(ModelError, match=r"no ExportedProgram from .*weights\.pt2.*export\.save"):
        load_program(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("m.pth", r"'\.pth' is PyTorch's weights.*gtco\.compile_model"),
        ("m.tflite", "TensorFlow's"),
        ("m.xml", "OpenVINO's"),
        ("m.txt", "export it again"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and what is behind it")
    with pytest.raises(ModelError, match=rf"{name}' is not an ONNX model.*{said}"):
        load_onnx(tmp_path / name)


def quantized(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """x -> nodes -> y, with weights w and scales s and t."""
    weights = {
        "w": np.arange(-8, 8, dtype=np.int8).reshape(4, 4),
        "s": np.array(0.5, np.float32),
        "t": np.array(0.25, np.float32),
        "z": np.array(0, np.uint8),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 4))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def test_a_quantized_model_comes_with_a_note() -> None:
    model = quantized(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["f"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["g"]),
        helper.make_node("MatMul", ["f", "g"], ["y"]),
    )
    (note,) = load_onnx(model, simplify=False).notes
    assert "quantized (2 DequantizeLinear, 1 QuantizeLinear)" in note
    assert "in int8 if the target has VNNI" in note


def test_operators_of_quantized_models_are_refused_with_what_to_do() -> None:
    node = helper.make_node("MatMulBnb4", ["q", "w", "s", "t"], ["y"], domain="com.microsoft")
    model = quantized(helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]), node)
    with pytest.raises(UnsupportedError, match=r"MatMulBnb4 is of a quantized.*QDQ"):
        load_onnx(model)
