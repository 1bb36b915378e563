"""Models whose weights do not fit in one message of protobuf, by small models and a lower limit."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import gtco
from gtco.cli.commands.quantize_command import check_output
from gtco.frontend.onnx import read_onnx
from gtco.quantization import writing
from gtco.quantization.weights_only import quantize_weights
from gtco.support.errors import BuildError, OptionError
from tests.quantization.models import quantized

SIDE, LAYERS = 256, 5  # 64 KiB of int8 in a matrix: more than the least weight


@pytest.fixture(autouse=True)
def _low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MOST_BYTES", SIDE * SIDE)


def saved(folder: Path, side: int = SIDE, layers: int = LAYERS) -> Path:
    """A stack of products with its weights beside the file."""
    rng = np.random.default_rng(3)
    nodes, weights, x = [], [], "x"
    for n in range(layers):
        w = rng.standard_normal((side, side)).astype(np.float32) / np.float32(side**0.5)
        # as many exporters write it: the matrix of a linear layer, turned
        weights.append(numpy_helper.from_array(w, f"layers.{n}.weight"))
        nodes.append(onnx.helper.make_node("Transpose", [f"layers.{n}.weight"], [f"w{n}"]))
        nodes.append(onnx.helper.make_node("MatMul", [x, f"w{n}"], [f"m{n}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"m{n}"], [f"y{n}"]))
        x = f"y{n}"
    inputs = [onnx.helper.make_tensor_value_info("x", 1, [2, side])]
    outputs = [onnx.helper.make_tensor_value_info(x, 1, [2, side])]
    graph = onnx.helper.make_graph(nodes, "stack", inputs, outputs, weights)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 9
    path = folder / "float.onnx"
    onnx.save(model, path, save_as_external_data=True, location="float.onnx.data")
    return path


def samples() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((64, SIDE)).astype(np.float32)


def run(model: str | bytes) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": samples()[:2]})[0]


def test_the_weights_go_beside_the_model(tmp_path: Path) -> None:
    """And what ONNX Runtime and gtco read there is the quantized model."""
    made = quantized(saved(tmp_path), samples())
    path = made.save(tmp_path / "q.onnx")
    beside = tmp_path / "q.onnx.data"
    assert path.stat().st_size < 20_000
    floats = sum(not layer.float_because == "" for layer in made.report.layers)
    wanted = SIDE * SIDE * (len(made.report.quantized) + 4 * floats)
    assert wanted <= beside.stat().st_size < wanted + LAYERS * 4096
    onnx.checker.check_model(path)
    inside = made.model
    assert not any(t.data_location for t in inside.graph.initializer)
    np.testing.assert_array_equal(run(str(path)), run(inside.SerializeToString()))
    read, given = read_onnx(path), made.source
    assert read.identity == given.identity and set(read.weights) == set(given.weights)
    for name, value in given.weights.items():
        np.testing.assert_array_equal(read.weights[name], value)
    compiled = gtco.compile_model(path, tune="off", verify=True)
    narrow = sum("int8" in "".join(s["inputs"]) for s in compiled.stages)
    assert narrow == len(made.report.quantized)
    again = gtco.compile_model(made, tune="off")
    x = samples()[:2]
    first, second = (next(iter(c.run({"x": x}).values())) for c in (compiled, again))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("bits", "block"), [(8, None), (4, 32)])
def test_weights_alone(bits: int, block: int | None, tmp_path: Path) -> None:
    made = quantize_weights(saved(tmp_path), bits=bits, block_size=block)
    path = made.save(tmp_path / "q.onnx")
    beside = path.with_name("q.onnx.data").stat().st_size
    scales = SIDE // (block or SIDE) * SIDE * 4 if block else 0
    assert beside <= LAYERS * (SIDE * SIDE * bits // 8 + scales + 8192)
    np.testing.assert_array_equal(run(str(path)), run(made.model.SerializeToString()))
    for name, value in read_onnx(path).weights.items():
        np.testing.assert_array_equal(value, made.source.weights[name])


def test_the_float_weights_are_not_copied(tmp_path: Path) -> None:
    """They stay in their file, of which memory holds one matrix at a time."""
    side, layers = 512, 12
    path = saved(tmp_path, side, layers)
    floats = 4 * side * side * layers
    tracemalloc.start()
    quantize_weights(path).save(tmp_path / "q.onnx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert floats / 4 < peak < 0.7 * floats


def test_the_float_model_is_not_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = (tmp_path / "float.onnx.data").read_bytes()
    (tmp_path / "model.onnx").write_bytes(path.read_bytes())
    path.unlink()
    with pytest.raises(OptionError, match=r"would be written over '.*float\.onnx\.data'.*another"):
        quantize_weights(tmp_path / "model.onnx").save(path)
    with pytest.raises(OptionError, match="would be written over"):  # before any work
        check_output(tmp_path / "model.onnx", path)
    assert (tmp_path / "float.onnx.data").read_bytes() == content and not path.exists()


def test_a_full_disk_leaves_the_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quantize_weights(saved(tmp_path))
    path = made.save(tmp_path / "q.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "_write", full)
    said = r"q\.onnx: No space.*takes about 0\.\d+ MB.*\d MB are free"
    with pytest.raises(BuildError, match=said):
        made.save(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_place_that_cannot_be_written_is_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot write /proc/q\.onnx"):
        check_output(saved(tmp_path), Path("/proc/q.onnx"))
