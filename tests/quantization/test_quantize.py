"""The steps as a whole, by ONNX Runtime in place of gtco's compiler: what is chosen, kept in float,
reported and refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from gtco.quantization import calibration, quantize
from gtco.quantization.quantize import ALONE, quantize_model
from gtco.support.errors import GtcoError, ModelError, OptionError, QuantizationError
from gtco.support.options import OBSERVERS, Quantization
from tests.quantization.models import Evaluated, block, evaluator, images, quantized


def relative(model: onnx.ModelProto, other: onnx.ModelProto, samples: np.ndarray) -> float:
    """The relative error of ``other`` on these images."""
    one, two = Evaluated(model), Evaluated(other)
    wanted, got = (
        np.stack([m.run({"image": x[None]})["logits"] for x in samples]) for m in (one, two)
    )
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_the_verdict_is_that_of_the_file(tmp_path: Path) -> None:
    """The error in the report is the error of the written file on every fourth sample."""
    model, data = block(), images()
    q = quantized(model, data)
    onnx.checker.check_model(q.model, full_check=True)
    (output,) = q.report.outputs
    np.testing.assert_allclose(output.error, relative(model, q.model, data[3::4]), rtol=1e-3)
    assert 0.001 < output.error < 0.1 and output.cosine > 0.99
    assert output.rows == q.report.held_out == 12 and q.report.samples == 36
    assert q.report.observer == min(q.report.tried, key=lambda one: one.error).observer
    assert {one.observer for one in q.report.tried} == set(OBSERVERS) - {"auto"}
    assert q.save(tmp_path / "q.onnx").read_bytes() == q.model.SerializeToString()
    found = json.loads(q.report.save(tmp_path / "r.json").read_text())
    assert found["version"] == 1 and found["relative_error"] == output.error
    assert [layer["name"] for layer in found["layers"]][:2] == ["/p/Conv", "/q/MatMul"]
    by_node = {layer["node"]: layer for layer in found["layers"]}
    assert by_node["/p/Conv"]["precision"] == "float32"
    assert by_node["/h/MatMul"]["operations"] == 2 * 24 * 40 * 4  # of 4 tokens
    assert set(found["ranges"]) == {"n", "c", "r", "g", "y", "g2"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.onnx", "r.json"]


def test_the_same_samples_give_the_same_file() -> None:
    first, second = (quantized(block(), images(), smooth="auto") for _ in range(2))
    assert first.model.SerializeToString() == second.model.SerializeToString()
    assert first.report.to_json() == second.report.to_json()


def test_sensitivity_is_the_error_of_one_product_alone() -> None:
    model, data = block(), images()
    q = quantized(model, data, observer="minmax")
    others = [layer.node for layer in q.report.layers if layer.node != "/m/MatMul"]
    alone = quantized(model, data, observer="minmax", exclude=others)
    (asked,) = [layer for layer in q.report.layers if layer.node == "/m/MatMul"]
    chosen = np.delete(data, np.s_[3::4], axis=0)
    some = chosen[np.linspace(0, len(chosen) - 1, ALONE).round().astype(int)]
    np.testing.assert_allclose(asked.sensitivity, relative(model, alone.model, some), rtol=1e-3)


def test_what_arrives_is_the_error_of_what_a_product_reads() -> None:
    """Beside the written file, run by ONNX Runtime; four of the twelve samples held out."""
    model, data = block(), images()
    q = quantized(model, data)
    read = {"/h/MatMul": "r", "/m/MatMul": "g", "/q/MatMul": "n"}
    both = []
    for one in (model, q.model):
        shown = onnx.ModelProto()
        shown.CopyFrom(one)
        for name in read.values():
            shown.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
        both.append(Evaluated(shown))
    held_out = data[3::4]
    some = held_out[np.linspace(0, len(held_out) - 1, 4).round().astype(int)]
    found = {layer.node: layer.input_error for layer in q.report.layers}
    for node, name in read.items():
        wanted, got = (
            np.stack([m.run({"image": x[None]})[name] for x in some]) for m in both
        )
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        np.testing.assert_allclose(found[node], error, rtol=1e-3, atol=1e-7)
    assert found["/q/MatMul"] < 1e-6 < found["/h/MatMul"] < 0.1  # nothing is in int8 before q
    assert found["/p/Conv"] is None  # the stem, in float


def test_a_budget_keeps_the_most_sensitive_in_float() -> None:
    model, data = block(), images()
    free = quantized(model, data)
    budget = 60 * free.report.error  # percent: six tenths of it
    q = quantized(model, data, max_drop=budget)
    kept = [layer for layer in q.report.layers if layer.float_because == "max-drop"]
    assert kept and q.report.quantized
    assert 100 * q.report.error <= 1.01 * budget
    price = {
        layer.node: layer.sensitivity**2 / layer.operations
        for layer in free.report.layers
        if layer.sensitivity
    }
    assert min(price[k.node] for k in kept) >= max(price[k.node] for k in q.report.quantized)
    # with one more in int8 it would not hold
    last = min(kept, key=lambda layer: price[layer.node])
    others = [layer.node for layer in kept if layer is not last]
    more = quantized(model, data, exclude=others) if others else free
    assert 100 * more.report.error > 0.99 * budget


def test_a_budget_that_the_final_file_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decided was another library than the one that is judged in the end."""
    kept = SimpleNamespace(outputs=())
    monkeypatch.setattr(quantize, "within_budget", lambda *_: kept)
    (note,) = quantized(block(), images(), max_drop=1e-4).report.notes
    assert "max_drop is 0.0001 %" in note


def test_a_budget_that_nothing_keeps() -> None:
    said = (
        r"max_drop=0.0001: no choice .* best found loses 0\.\d+ %, with '/.*/MatMul' alone in int8"
    )
    with pytest.raises(QuantizationError, match=said):
        quantized(block(), images(), max_drop=1e-4)


def test_a_module_is_quantized_by_its_names() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(16, 5))
    x = torch.randn(40, 8)
    q = quantized(module, [(one[None], 3) for one in x], x[:1], exclude=["2"])
    kept = {layer.label: layer.float_because for layer in q.report.layers}
    # nothing but the ends would be left
    assert kept == {"0": "", "2": "excluded", "4": ""}
    with torch.no_grad():
        wanted = module(x[:1]).numpy()
    (got,) = Evaluated(q.model).run({q.model.graph.input[0].name: x[:1].numpy()}).values()
    assert 0 < np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.1


def older() -> onnx.ModelProto:
    """A model of opset 11."""
    text = """<ir_version: 6, opset_import: ["" : 11]>
    old (float[N,4] image) => (float[N,4] logits) {
        a = MatMul(image, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) logits = MatMul(d, w)
    }"""
    made = onnx.parser.parse_model(text)
    w = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return made


def test_an_older_opset_is_raised() -> None:
    data = np.random.default_rng(4).standard_normal((40, 4)).astype(np.float32)
    q = quantized(older(), data)
    assert q.model.opset_import[0].version == 13
    onnx.checker.check_model(q.model, full_check=True)
    assert [layer.float_because for layer in q.report.layers] == [
        "reads the input",
        "",
        "makes the output",
    ]


def test_a_quantized_model_is_refused() -> None:
    q = quantized(block(), images())
    with pytest.raises(ModelError, match="quantized already"):
        quantized(q.model, images())


def test_a_float_model_that_makes_infinities() -> None:
    model = block()
    for tensor in model.graph.initializer:
        if tensor.name in ("w1", "b1"):
            value = numpy_helper.to_array(tensor) * np.float32(3e38)
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    with pytest.raises(ModelError, match="makes NaN or infinity in 'g' of sample 0"):
        quantized(model, images())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"observer": "best"}, "unknown observer 'best': choose from auto, minmax"),
        ({"smooth": 1.5}, "smooth=1.5: give off, auto, or a number between 0 and 1"),
        ({"smooth": "much"}, "smooth='much'"),
        ({"max_drop": 0}, "max_drop=0: give a percentage above 0"),
        ({"max_drop": float("nan")}, "max_drop=nan"),
        ({"max_drop": "1 %"}, "max_drop='1 %': give a number"),
        ({"exclude": "head"}, r"exclude='head': give a list of names"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        quantized(block(), images(), **settings)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In the middle of observing; the samples and the model stay as they were."""
    model, data = block(), images()
    before = model.SerializeToString()
    seen = 0
    add = calibration.Histogram.add

    def interrupted(self: Any, values: np.ndarray) -> None:
        nonlocal seen
        seen += 1
        if seen == 20:
            raise error
        add(self, values)

    monkeypatch.setattr(calibration.Histogram, "add", interrupted)
    phases: list[str] = []
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else GtcoError):
        quantize_model(model, data, Quantization(), evaluator, lambda name, *_: phases.append(name))
    assert phases[-1] == "observe" and model.SerializeToString() == before
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantized(block(), images(), observer="minmax")
    (tmp_path / "q.onnx").write_bytes(b"older")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gtco.quantization.report.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            q.save(tmp_path / "q.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["q.onnx"]
    assert (tmp_path / "q.onnx").read_bytes() == b"older"
    with pytest.raises(OptionError, match="does not exist"):
        q.save(tmp_path / "none" / "q.onnx")


def test_a_model_that_makes_nan_is_as_wrong_as_can_be(tmp_path: Path) -> None:
    """Values so small that 8 bits make zeros of them are divided by their norm."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[1,16] x) => (float[1,16] y) {
            a = MatMul(x, v) b = Relu(a) c = MatMul(b, w) d = Relu(c) e = MatMul(d, u)
            n = ReduceL2<axes=[1], keepdims=1>(e) y = Div(e, n) }"""
    )
    rng = np.random.default_rng(0)
    for name in "vwu":
        weights = np.abs(rng.normal(size=(16, 16))).astype(np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    data = np.abs(rng.normal(size=(64, 16))).astype(np.float32)
    data[1::2] *= 1e-5
    made = quantized(model, data)
    assert made.report.error == np.inf
    saved = json.loads(made.report.save(tmp_path / "r.json").read_text())
    assert saved["outputs"][0]["relative_error"] is None
    with pytest.raises(QuantizationError, match="no choice of products keeps the outputs within"):
        quantized(model, data, max_drop=5.0)
