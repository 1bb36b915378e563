"""How much memory the compile of a file with weights of 8 and 4 bits takes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gtco
from gtco.verification.float64.quantized import GatherBlockQuantized
from tests.end_to_end.nodes.runner import InProcess
from tests.end_to_end.quantized.test_weights_only import TARGET

SIDE, LAYERS, BLOCK = 1024, 16, 32


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, which already has TVM."""
    monkeypatch.setattr("gtco.driver.making.Workers", InProcess)


def stack(kind: str, layers: int, folder: Path) -> Path:
    """Products one after the other, with their weights beside the file: ``channels`` and ``blocks``
    are dequantized from int8 and int4, ``cast`` are cast from int8 and multiplied, ``packed`` are
    MatMulNBits of 4 bits, ``half`` is float16.
    """
    rng = np.random.default_rng(7)
    nodes, weights, x = [], [], "x"

    def add(op: str, inputs: list[str], output: str, **attrs: Any) -> None:
        nodes.append(helper.make_node(op, inputs, [output], **attrs))

    for n in range(layers):
        q, s, w, y = f"q{n}", f"s{n}", f"w{n}", f"y{n}"
        count = SIDE if kind in ("channels", "cast") else SIDE * SIDE // BLOCK
        scales = rng.uniform(1e-3, 1e-2, count).astype(np.float16).astype(np.float32)
        match kind:
            case "half":
                floats = rng.standard_normal((SIDE, SIDE), np.float32).astype(np.float16)
                tensor = numpy_helper.from_array(floats, w)
            case "channels":
                steps = rng.integers(-127, 128, (SIDE, SIDE), np.int8)
                tensor = numpy_helper.from_array(steps, q)
                add("DequantizeLinear", [q, s], w, axis=1)
            case "cast":
                steps = rng.integers(-127, 128, (SIDE, SIDE), np.int8)
                tensor = numpy_helper.from_array(steps, q)
                add("Cast", [q], f"f{n}", to=TensorProto.FLOAT)
                add("Mul", [f"f{n}", s], w)
            case "blocks":
                tensor = TensorProto(name=q, data_type=TensorProto.INT4)
                tensor.raw_data = rng.bytes(SIDE * SIDE // 2)
                tensor.dims.extend((SIDE, SIDE))
                scales = scales.reshape(SIDE // BLOCK, SIDE)
                add("DequantizeLinear", [q, s], w, axis=0, block_size=BLOCK)
            case "packed":
                steps = rng.integers(0, 256, (SIDE, SIDE // BLOCK, BLOCK // 2), np.uint8)
                tensor = numpy_helper.from_array(steps, q)
                sizes = {"K": SIDE, "N": SIDE, "bits": 4, "block_size": BLOCK}
                add("MatMulNBits", [x, q, s], f"m{n}", domain="com.microsoft", **sizes)
        weights += [tensor] if kind == "half" else [tensor, numpy_helper.from_array(scales, s)]
        if kind != "packed":
            add("MatMul", [x, w], f"m{n}")
        add("Relu", [f"m{n}"], y)  # without it, two products would become one
        x = y
    dtype = TensorProto.FLOAT16 if kind == "half" else TensorProto.FLOAT
    inputs, outputs = (helper.make_tensor_value_info(t, dtype, [16, SIDE]) for t in ("x", x))
    graph = helper.make_graph(nodes, "stack", [inputs], [outputs], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path = folder / f"{kind}{layers}.onnx"
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path


@pytest.mark.parametrize(
    ("kind", "held"), [("channels", 1), ("cast", 1), ("blocks", 1), ("packed", 1), ("half", 2)]
)
def test_weights_are_float32_one_layer_at_a_time(kind: str, held: int, tmp_path: Path) -> None:
    """While they are rewritten, each is ``held`` in so many bytes, and then packed for the library,
    which takes no more. The rest is what is computed of one layer.
    """
    library = tmp_path / "library.so"

    def compiled(layers: int) -> None:
        gtco.compile_to_file(stack(kind, layers, tmp_path), library, tune="off", target=TARGET)

    compiled(1)  # what Python and TVM keep
    path = stack(kind, LAYERS, tmp_path)
    tracemalloc.start()
    gtco.compile_to_file(path, library, tune="off", target=TARGET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    weights, layer = LAYERS * SIDE * SIDE, 4 * SIDE * SIDE
    print(f"{peak / 1e6:.1f} MB for {weights / 1e6:.1f} million weights")
    assert library.stat().st_size < 1.2 * held * weights  # none are float32 there
    assert peak < held * weights + 6 * layer + 4e6


def table(rows: int, folder: Path) -> Path:
    """The rows of a table of 4 bits with scales and zero points of blocks, beside the file."""
    rng = np.random.default_rng(rows)
    blocks = SIDE // BLOCK
    constants = {
        "table": rng.integers(0, 256, (rows, SIDE // 2), np.uint8),
        "scales": rng.uniform(1e-3, 1e-2, (rows, blocks)).astype(np.float32),
        "zeros": rng.integers(0, 256, (rows, blocks // 2), np.uint8),
    }
    sizes = {"bits": 4, "block_size": BLOCK, "domain": "com.microsoft"}
    inputs = ["table", "ids", "scales", "zeros"]
    node = helper.make_node("GatherBlockQuantized", inputs, ["y"], **sizes)
    graph = helper.make_graph(
        [node],
        "table",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 7, SIDE])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path = folder / f"table{rows}.onnx"
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path


def test_tables_are_never_floats(tmp_path: Path) -> None:
    """A number of 4 bits takes a byte, and only the rows that are read are dequantized."""
    library, rows = tmp_path / "library.so", 1 << 14
    gtco.compile_to_file(table(64, tmp_path), library, tune="off", target=TARGET)
    path = table(rows, tmp_path)
    tracemalloc.start()
    gtco.compile_to_file(path, library, tune="off", target=TARGET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    count = rows * SIDE
    print(f"{peak / 1e6:.1f} MB for {count / 1e6:.1f} million numbers")
    assert peak < 3.5 * count  # floats would be 4, beside the packed ones
    assert library.stat().st_size < 1.25 * count  # scales are 4 / 32, zero points 1 / 32
    ids = np.array([[0, -1, 5, rows - 1, -rows, 77, 5]], np.int64)
    evaluator = ReferenceEvaluator(str(path), new_ops=[GatherBlockQuantized])
    wanted = evaluator.run(None, {"ids": ids})[0]
    (got,) = gtco.load(library).run({"ids": ids}).values()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
