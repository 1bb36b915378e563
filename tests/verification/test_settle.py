"""The reference and a compiled model differ: float64 decides, and the cost of rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from gtco.runtime.plan import TensorSpec
from gtco.support.errors import VerificationError
from gtco.verification import VerificationReport, verify
from gtco.verification.float64.judge import OnnxJudge
from gtco.verification.floors import output_floors
from gtco.verification.reference import Reference

Array = np.ndarray
FILTERS = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32) / 8
BIAS = np.full(24, -15, np.float32)


@dataclass(frozen=True)
class Fake:
    """A "compiled model" y = function(x)."""

    function: Callable[[Array], Array]
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", (4, 16)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "float32", (4, 24)),)
    metadata: dict[str, str] = field(default_factory=dict)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return {"y": self.function(inputs["x"]).astype(np.float32)}


def sure(tail: str = "y = Sigmoid(b)", opsets: str = "") -> onnx.ModelProto:
    """A map that is nearly 0 everywhere: the error of ONNX Runtime's logistic is larger than its
    values.
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17{opsets}]>
        g (float[4,16] x) => (float[4,24] y) {{ a = MatMul(x, w) b = Add(a, c) {tail} }}"""
    )
    for name, value in (("w", FILTERS), ("c", BIAS)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def logits(x: Array) -> Array:
    return x @ FILTERS + BIAS


def sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e))


def judged(report: VerificationReport) -> set[str]:
    return {d.case for d in report.differences if d.judged}


def test_what_is_right_by_float64_is_right():
    report = verify(Fake(lambda x: sigmoid(logits(x))), sure())
    assert report.passed and judged(report) >= {"random", "zeros", "constant"}
    assert report.judge == "float64 (ONNX's reference operators)" and report.unjudged is None
    assert max(d.relative for d in report.differences if d.judged) < 1e-5
    off = max(d.reference_error for d in report.differences)
    assert 1e-9 < off < 2e-7
    assert f"of them; ONNX Runtime's own error against it is up to {off:.1e}" in str(report)


@pytest.mark.parametrize("lane", [0, 7, 23])
@pytest.mark.parametrize("factor", [0.0, 0.9, 1.1])
def test_a_broken_lane_of_a_map_that_is_nearly_zero_is_caught(lane: int, factor: float):
    """Its values are smaller than the error of the reference."""

    def broken(x: Array) -> Array:
        y = sigmoid(logits(x))
        y[:, lane] *= factor
        return y

    report = verify(Fake(broken), sure(), check=False)
    assert {"random", "zeros", "constant"} <= {d.case for d in report.failures}
    with pytest.raises(VerificationError, match=r"(?s)reference .*, float64 .*\(ONNX's.*bug of"):
        report.check()


def test_a_reference_that_is_wrong_is_said_to_be():
    """InstanceNormalization of one element: ONNX Runtime 1.32 gives -2.015625 for the bias."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[96,3,1] x) => (float[96,3,1] y) { y = InstanceNormalization(x, s, b) }""")
    values = {"s": [0.27, -0.18, 2.09], "b": [0.952, 0.256, -2.0153975]}
    for name, value in values.items():
        array = np.array(value, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    specs = [(TensorSpec(name, "float32", (96, 3, 1)),) for name in ("x", "y")]
    bias = np.array(values["b"], np.float32)[:, None]
    right = Fake(lambda x: np.broadcast_to(bias, x.shape), *specs)
    report = verify(right, model, tolerance=1e-5)
    assert report.passed and "; ONNX Runtime's own error against it is up to" in str(report)
    off = Fake(lambda x: np.broadcast_to(bias * np.float32(1.01), x.shape), *specs)
    assert verify(off, model, tolerance=1e-5, check=False).failures


def test_where_float64_cannot_decide_the_report_says_why():
    """The reference runs an operator that has no meaning in float64 here."""
    known = sure()
    unknown = sure("d = com.microsoft.Strange(b) y = Sigmoid(d)", ', "com.microsoft": 1')

    def opened(*_: Any) -> Reference:
        session = onnxruntime.InferenceSession(known.SerializeToString())
        return Reference(
            "ONNX Runtime",
            lambda inputs: session.run(None, dict(inputs)),
            judge=OnnxJudge(lambda: unknown),
            floors=output_floors(known.graph),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["gtco.verification.verify"], "open_reference", opened)
        report = verify(Fake(lambda x: sigmoid(logits(x))), known)
        assert report.passed and report.judge is None
        assert report.unjudged == "it has no com.microsoft.Strange"
        assert "float64 could not decide: it has no com.microsoft.Strange" in str(report)
        wrong = verify(Fake(lambda x: sigmoid(logits(x)) + np.float32(3e-5)), known, check=False)
        with pytest.raises(VerificationError, match=r"float64 could not decide: it has no com"):
            wrong.check()


def test_a_judge_of_another_model_is_not_believed():
    """If the reference and the compiled model agree and only float64 differs, float64 is wrong."""
    model = sure()

    def opened(*_: Any) -> Reference:
        session = onnxruntime.InferenceSession(model.SerializeToString())
        other = sure("n = Neg(b) y = Sigmoid(n)")
        return Reference(
            "ONNX Runtime",
            lambda inputs: session.run(None, dict(inputs)),
            judge=OnnxJudge(lambda: other),
        )

    def broken(x: Array) -> Array:
        y = sigmoid(logits(x))
        y[:, 3] = 0.1
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["gtco.verification.verify"], "open_reference", opened)
        report = verify(Fake(broken), model, check=False)
    assert report.failures and "it differs from both in" in report.unjudged


def largest(rows: Array, scores: Array, few: int = 8) -> Array:
    """Of each of several lists of scores the rows of the largest few."""
    return rows[np.argsort(-scores, axis=1, kind="stable")[:, :few]]


def test_rounding_may_decide_which_elements_are_the_largest():
    """Four scores are larger than the others, which are nearly equal: float64 has another order of
    those than the reference and the compiled model, and these are right. The first four rows are
    not excused.
    """
    rng = np.random.default_rng(3)
    weights = np.repeat(rng.standard_normal((16, 1)) ** 2, 24, axis=1)
    weights[:, :4] *= [1.5, 1.4, 1.3, 1.2]
    weights = (weights * (1 + 1e-8 * rng.standard_normal(weights.shape))).astype(np.float32)
    rows = rng.standard_normal((24, 16)).astype(np.float32)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[4,16] x) => (float[4,8,16] y) {
            a = Abs(x) s = MatMul(a, w) v, i = TopK(s, k) y = Gather(t, i)
        }""")
    for name, value in (("w", weights), ("t", rows), ("k", np.array([8]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))

    def backwards(x: Array) -> Array:
        scores = np.zeros((4, 24), np.float32)
        for k in reversed(range(16)):
            scores += np.abs(x[:, k : k + 1]) * weights[k]
        return largest(rows, scores)

    def wrong(x: Array) -> Array:
        y = backwards(x)
        y[2, 3] = rows[7]
        return y

    outputs = (TensorSpec("y", "float32", (4, 8, 16)),)
    report = verify(Fake(backwards, outputs=outputs), model)
    assert report.unjudged is None and any(d.unstable for d in report.differences)
    report = verify(Fake(wrong, outputs=outputs), model, check=False)
    assert report.unjudged is None and {d.case for d in report.failures} >= {"random", "large"}


def test_floors_are_of_outputs_that_are_bounded_as_a_whole():
    def floors(text: str) -> list[float]:
        return output_floors(onnx.parser.parse_graph(text))

    assert floors("g (float[8] x) => (float[8] y) { p = Sigmoid(x) y = Identity(p) }")[0] > 0
    assert floors("g (float[8] x) => (float[8] y) { p = Tanh(x) y = Concat<axis=0>(p, x) }") == [0]
    assert floors("g (float[8] x) => (float[8] y) { p = Sigmoid(x) y = Mul(p, x) }") == [0]
    assert floors("g (float[8] x) => (float[8] x) { p = Sigmoid(x) }") == [0]


def test_bf16_is_held_to_what_its_roundings_cost():
    """Logits of about 30 have errors of 0.1 in bf16, and tails of the logistic have a tenth of
    their value.
    """
    import ml_dtypes

    def narrow(x: Array) -> Array:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    half = {"precision": "bf16"}
    model = sure()

    def rounded(x: Array) -> Array:
        return sigmoid(narrow(x) @ narrow(FILTERS) + BIAS)

    report = verify(Fake(rounded, metadata=half), model)
    assert report.passed and "random" in judged(report)
    assert not verify(Fake(rounded), model, check=False).passed  # in fp32 that is a failure

    def dropped(x: Array) -> Array:
        return sigmoid(narrow(x[:, :15]) @ narrow(FILTERS[:15]) + BIAS)

    assert not verify(Fake(dropped, metadata=half), model, check=False).passed


def test_pytorch_in_float64_decides_too():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(16, 24)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(FILTERS.T.copy()))
        layer.bias.copy_(torch.from_numpy(BIAS))

    class Naive(torch.nn.Module):
        """1 - s(-z) of its float32, with an error of 6e-8 like ONNX Runtime's logistic."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return 1 - torch.sigmoid(-self.layer(x))

    report = verify(Fake(lambda x: sigmoid(logits(x))), Naive())
    assert report.passed and report.judge == "float64 (PyTorch)" and judged(report)
    assert layer.weight.dtype == torch.float32 and torch.get_default_dtype() == torch.float32
    wrong = verify(Fake(lambda x: sigmoid(logits(x)) * 10), Naive(), check=False)
    assert wrong.failures

    class Single(Naive):
        def forward(self, x: Any) -> Any:
            return super().forward(x).to(torch.float32)

    report = verify(Fake(lambda x: sigmoid(logits(x)) * 10), Single(), check=False)
    assert report.unjudged == "the module makes float32 of its own"
