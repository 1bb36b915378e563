"""Integers of 4 and 2 bits: as constants in the file and beside it, and between two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError, UnsupportedError
from tests.few_nodes import by_onnxruntime
from tests.kernels import fresh_seed

KINDS = ("int4", "uint4", "int2", "uint2")


def values(kind: str, rng: np.random.Generator, *shape: int) -> Any:
    bounds = ml_dtypes.iinfo(kind)
    return rng.integers(bounds.min, int(bounds.max) + 1, shape).astype(getattr(ml_dtypes, kind))


def weights_model(kind: str, rng: np.random.Generator) -> onnx.ModelProto:
    """x @ dequantize(transpose(w)) + dequantize(c), with c a Constant node."""
    c = numpy_helper.from_array(values(kind, rng, 1, 7), "c_value")
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["t", "s", "z"], ["f"], axis=0, block_size=5),
        helper.make_node("MatMul", ["x", "f"], ["m"]),
        helper.make_node("Constant", [], ["c"], value=c),
        helper.make_node("DequantizeLinear", ["c", "one"], ["d"]),
        helper.make_node("Add", ["m", "d"], ["y"]),
    ]
    constants = {
        "w": values(kind, rng, 7, 13),
        "s": rng.uniform(0.1, 1, (3, 7)).astype(np.float32),
        "z": values(kind, rng, 3, 7),
        "one": np.float32(0.5),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 13))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, 7))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = 25 if kind.endswith("2") else 21
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def evaluated(source: Any, x: np.ndarray) -> np.ndarray:
    (found,) = lower(load_onnx(source, simplify=False)).evaluate({"x": x}).values()
    return np.asarray(found)


@pytest.mark.parametrize("kind", KINDS)
def test_constants_of_few_bits(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(fresh_seed())
    model = weights_model(kind, rng)
    x = rng.standard_normal((4, 13)).astype(np.float32)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    steps = constants["w"].T.astype(np.float64)
    spread = np.repeat(constants["z"].astype(np.float64), 5, 0)[:13]
    w = (steps - spread) * np.repeat(constants["s"], 5, 0)[:13]
    c = numpy_helper.to_array(model.graph.node[3].attribute[0].t).astype(np.float64)
    want = x @ w + 0.5 * c
    np.testing.assert_allclose(evaluated(model, x), want, atol=1e-4)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    np.testing.assert_allclose(evaluated(path, x), want, atol=1e-4)
    whole = (tmp_path / "model.data").read_bytes()
    (tmp_path / "model.data").write_bytes(whole[:9])
    with pytest.raises(ModelError, match=r"too short"):
        load_onnx(path, simplify=False)


@pytest.mark.parametrize("by", ["zero point", "output_dtype"])
@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_a_tensor_that_is_quantized_to_few_bits_inside(kind: str, by: str) -> None:
    rng = np.random.default_rng(fresh_seed())
    number = getattr(TensorProto, kind.upper())
    zero = ["z"] if by == "zero point" else []
    attrs = {} if zero else {"output_dtype": number}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", *zero], ["q"], **attrs),
        helper.make_node("Reshape", ["q", "shape"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "s", *zero], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 13))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (52,))],
        [
            numpy_helper.from_array(np.float32(0.3), "s"),
            numpy_helper.from_array(values(kind, rng), "z"),
            numpy_helper.from_array(np.array([52]), "shape"),
        ],
        value_info=[helper.make_tensor_value_info("q", number, (4, 13))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = (3 * rng.standard_normal((4, 13))).astype(np.float32)
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    del plain.graph.node[1]  # ONNX Runtime reshapes no int4
    plain.graph.node[1].input[0] = "q"
    plain.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    (want,) = by_onnxruntime(plain, {"x": x})
    assert 2 < len(np.unique(want)) <= 16
    np.testing.assert_array_equal(evaluated(model, x), want.reshape(-1))


def test_quantizing_to_few_bits_in_an_old_file_is_refused() -> None:
    """ONNX Runtime's operator has int4 in every opset; a Clip of integers came with opset 12."""
    node = helper.make_node(
        "QuantizeLinear", ["x", "s", "z"], ["q"], name="n", domain="com.microsoft"
    )
    back = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain="com.microsoft")
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in "xy"]
    constants = [
        numpy_helper.from_array(np.float32(0.5), "s"),
        numpy_helper.from_array(np.array(1).astype(ml_dtypes.int4), "z"),
    ]
    graph = helper.make_graph([node, back], "g", given[:1], given[1:], constants)
    for opset in (11, 17):
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        x = np.float32([-9, 0.4, 9])
        if opset == 17:
            np.testing.assert_array_equal(evaluated(model, x), np.float32([-4.5, 0.5, 3.0]))
            continue
        with pytest.raises(UnsupportedError, match=r"node 'n'.*int4 in a file of opset 11: export"):
            load_onnx(model, simplify=False)
