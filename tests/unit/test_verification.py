"""Verification against references that are right, slightly off, and wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gtco.errors import VerificationError
from gtco.verification import cases, compare, verify


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fake:
    """A "compiled model" y = function(x)."""

    function: object
    inputs: tuple[Spec, ...] = (Spec("x", "float32", (2, 8)),)
    outputs: tuple[Spec, ...] = (Spec("y", "float32", (2, 8)),)

    def run(self, inputs):
        return {"y": self.function(inputs["x"])}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def naive_softmax(x):  # overflows: the classic error that only large inputs show
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.fixture
def softmax_onnx() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("form", ["proto", "bytes", "path", "str"])
def test_a_right_model_passes_against_onnxruntime(softmax_onnx, form, tmp_path):
    onnx.save(softmax_onnx, tmp_path / "m.onnx")
    reference = {
        "proto": softmax_onnx,
        "bytes": softmax_onnx.SerializeToString(),
        "path": tmp_path / "m.onnx",
        "str": str(tmp_path / "m.onnx"),
    }[form]
    report = verify(Fake(softmax), reference)
    assert report.passed and report.reference == "ONNX Runtime"
    assert [d.case for d in report.differences] == ["random", "large", "zeros", "constant", "spike"]
    assert report.worst.relative < 1e-6
    assert report.to_json()["passed"] is True
    assert str(report).startswith("agrees with ONNX Runtime in 5 comparisons, largest relative")


def test_overflow_is_found_by_the_adversarial_cases_only(softmax_onnx):
    report = verify(Fake(naive_softmax), softmax_onnx, check=False)
    assert {d.case for d in report.failures} == {"spike"}
    with pytest.raises(VerificationError, match=r"y on spike inputs: .*infinite or NaN"):
        verify(Fake(naive_softmax), softmax_onnx)


def test_torch_modules_are_references():
    torch = pytest.importorskip("torch")
    module = torch.nn.Softmax(-1)
    assert verify(Fake(softmax), module).reference == "PyTorch"
    exported = torch.export.export(module, (torch.zeros(2, 8),))
    assert verify(Fake(softmax), exported).reference == "PyTorch"
    with pytest.raises(VerificationError, match="off by"):
        verify(Fake(lambda x: softmax(x) * 1.01), module)


def test_tolerance_is_relative_to_the_largest_magnitude():
    expected = np.array([1000.0, 0.001])
    assert compare("c", "y", expected + 0.5, expected, 1e-3).failure is None
    off = compare("c", "y", expected + np.array([0.0, 1.5]), expected, 1e-3)
    assert off.absolute == pytest.approx(1.5) and off.relative == pytest.approx(1.5e-3)
    assert "tolerance 0.001" in off.failure


def test_nonfinite_values_must_be_in_the_same_places():
    nan, inf = np.nan, np.inf
    expected = np.array([1.0, inf, nan])
    assert compare("c", "y", expected.copy(), expected, 1e-3).failure is None
    for actual in ([1.0, -inf, nan], [1.0, inf, 0.0], [nan, inf, nan], [1.0, 5.0, nan]):
        assert "infinite or NaN" in compare("c", "y", np.array(actual), expected, 1e-3).failure
    assert compare("c", "y", np.full(2, nan), np.full(2, nan), 1e-3).relative == 0.0


def test_another_shape_or_number_of_outputs_is_a_failure():
    assert "shape" in compare("c", "y", np.zeros(3), np.zeros(2), 1e-3).failure
    with pytest.raises(VerificationError, match="2 outputs, the compiled model has 1"):
        verify(Fake(softmax), lambda inputs: [inputs["x"], inputs["x"]])


def test_a_reference_that_fails_or_is_nothing_known_says_so(tmp_path):
    def broken(inputs):
        raise RuntimeError("no such kernel")

    with pytest.raises(VerificationError, match="cannot run the model on random inputs: no such"):
        verify(Fake(softmax), broken)
    with pytest.raises(VerificationError, match="cannot verify against a int"):
        verify(Fake(softmax), 3)
    with pytest.raises(VerificationError, match="ONNX Runtime cannot open"):
        verify(Fake(softmax), tmp_path / "absent.onnx")


def test_cases_are_what_they_say_and_repeat():
    specs = (Spec("x", "float32", (3, 5)), Spec("ids", "int64", (4,)), Spec("mask", "bool", (4,)))
    seen, again = cases(specs, seed=1), cases(specs, seed=1)
    for case, inputs in seen.items():
        assert inputs["x"].dtype == np.float32 and inputs["ids"].dtype == np.int64
        assert 0 <= inputs["ids"].min() and inputs["ids"].max() < 4
        assert inputs["mask"].dtype == np.bool_
        np.testing.assert_array_equal(inputs["x"], again[case]["x"])
    np.testing.assert_allclose(seen["large"]["x"], seen["random"]["x"] * 30, rtol=1e-6)
    assert (seen["spike"]["x"] != 0).sum() == 1 and not seen["zeros"]["x"].any()
    assert list(cases(specs[1:])) == ["random"]
