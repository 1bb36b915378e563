"""Verification against references that are right, slightly off, and wrong: what it catches and what
it accepts.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gtco.runtime.plan import TensorSpec
from gtco.support.errors import VerificationError
from gtco.verification import compare, verify
from gtco.verification.cases import nudged
from gtco.verification.reference import open_reference
from gtco.verification.report import Top1
from gtco.verification.top1 import is_classifier


@dataclass(frozen=True)
class Fake:
    """A "compiled model" y = function(x)."""

    function: object
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", (2, 8)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "float32", (2, 8)),)

    def run(self, inputs):
        return {"y": self.function(inputs["x"])}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def naive_softmax(x):  # overflows: the classic error, which only large inputs show
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.fixture
def softmax_onnx() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def in_form(model: onnx.ModelProto, form: str, folder: Path) -> onnx.ModelProto | Path:
    """The model itself ("proto"), or a file of it with all weights beside it ("path")."""
    if form == "proto":
        return model
    path = folder / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


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


def off(actual, expected, tolerance=1e-3, noise=None):
    return compare("c", "y", np.asarray(actual), np.asarray(expected), tolerance, noise)


def test_a_bfloat16_module_is_a_reference_too():
    torch = pytest.importorskip("torch")

    class Double(torch.nn.Module):
        def forward(self, x):
            return x + x

    half = (TensorSpec("x", "bfloat16", (2, 8)),), (TensorSpec("y", "bfloat16", (2, 8)),)
    assert verify(Fake(lambda x: x + x, *half), Double()).passed
    assert not verify(Fake(lambda x: x + x + x, *half), Double(), check=False).passed


@pytest.mark.parametrize("form", ["proto", "path"])
def test_a_bfloat16_file_is_run_in_float32(form, tmp_path):
    """ONNX Runtime has no product of bfloat16, and its Python calls take no such tensors."""
    half = ml_dtypes.bfloat16
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (bfloat16[2,8] x) => (bfloat16[2,8] y) { t = MatMul(x, w) y = Relu(t) }"""
    )
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(half)
    model.graph.initializer.append(
        helper.make_tensor("w", TensorProto.BFLOAT16, (8, 8), w.tobytes(), raw=True)
    )
    source = in_form(model, form, tmp_path)
    specs = (TensorSpec("x", "bfloat16", (2, 8)),), (TensorSpec("y", "bfloat16", (2, 8)),)

    def right(x):
        return np.maximum(x.astype(np.float32) @ w.astype(np.float32), 0).astype(half)

    found = verify(Fake(right, *specs), source)
    assert found.passed and found.reference == "ONNX Runtime in float32"
    assert not verify(Fake(lambda x: x, *specs), source, check=False).passed
    assert not verify(Fake(lambda x: right(x) * half(1.3), *specs), source, check=False).passed


def test_an_error_counts_against_the_magnitudes_around_it():
    expected = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    assert off(expected * np.float32(1 + 1e-5), expected).failure is None
    for where in ((0, 0), (3, 63), (2, 17)):
        wrong = expected.copy()
        wrong[where] += 0.01
        found = off(wrong, expected)
        assert found.absolute == pytest.approx(0.01, rel=1e-3) and found.relative > 1e-3
        assert "tolerance 0.001" in found.failure and f"at {list(where)}" in found.failure


@pytest.mark.parametrize("huge", [(0, 0), (3, 5), (1, 63)])
def test_a_huge_element_hides_no_other_error(huge):
    expected = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    expected[huge] = 1e8
    assert off(expected, expected).failure is None
    for where in ((3, 6), (huge[0], (huge[1] + 1) % 64)):
        wrong = expected.copy()
        wrong[where] += 0.1
        assert off(wrong, expected).failure
    # the same if rows are shorter than any block: boxes and single logits
    assert off([[1e8, 1.0, 1.0, 1.1]], [[1e8, 1.0, 1.0, 1.0]]).failure
    assert off([1e8, 1.1], [1e8, 1.0]).failure


def test_rows_of_rounding_errors_are_no_failures():
    """If the reference is nearly zero relative to its inputs, it consists only of the last bits."""
    rng = np.random.default_rng(1)
    expected = rng.standard_normal((8, 32))
    expected[3] = 1e-7 * rng.standard_normal(32)
    expected[4] = 0
    actual = expected + 1e-7 * rng.standard_normal(expected.shape)
    assert off(actual, expected).failure is None
    assert off(np.full(3, 1e-7), np.zeros(3)).failure is None
    # softmax's tails: subnormal numbers come out as zero on some paths
    tails = np.array([1.0] + [1e-42] * 31, np.float32)
    assert off(np.where(tails < 1e-38, 0, tails).astype(np.float32), tails).failure is None


def test_what_the_reference_cannot_hold_either_is_unstable_and_no_failure():
    expected = np.linspace(1, 2, 32)
    actual = expected + 0.01
    assert off(actual, expected).failure
    excused = off(actual, expected, noise=np.full(32, 0.001))
    assert excused.failure is None and excused.unstable
    assert off(actual, expected, noise=np.full(32, 1e-5)).failure
    one = np.zeros(32)
    one[0] = np.inf  # the rounding decides whether the reference overflows there
    overflowed = np.where(one, np.inf, expected)
    assert off(overflowed, expected).failure
    assert off(overflowed, expected, noise=one).failure is None


def test_integers_are_excused_as_far_as_rounding_moves_them():
    """A sixteenth of the elements moves by a step. Others may too, but not all, and bytes not by
    many steps.
    """
    expected = np.arange(256, dtype=np.uint8)
    noise = (np.arange(256) % 16 == 0).astype(np.float64)
    some = np.arange(256) % 8 == 1
    for dtype in (np.uint8, np.int64):
        value = expected.astype(dtype)
        few = off(np.where(some, value + 1, value).astype(dtype), value, noise=noise)
        assert few.failure is None and few.unstable
        assert off(value[::-1].copy(), value, noise=noise).failure
    far = np.where(some, 255 - expected, expected)
    assert off(far.astype(np.uint8), expected, noise=noise).failure
    assert off(far.astype(np.int64), expected.astype(np.int64), noise=noise).failure is None


def test_zeros_around_a_spike_are_nudged_as_zeros_alone_are():
    """MaskFormer's GroupNorm of a nearly constant image: the zeros decide how far off the reference
    itself is, and the mean of a spike among them is almost 0.
    """
    spike = np.zeros((1, 3, 64, 64), np.float32)
    spike[0, 0, 9, 9] = 100.0
    moved = nudged({"x": spike}, [], np.random.default_rng(0), 2.0**-20)["x"]
    step = np.abs(moved[spike == 0])
    assert step.max() > 0.5 * 2.0**-20 * np.sqrt(np.square(spike).mean())
    zeros = np.zeros_like(spike)
    alone = nudged({"x": zeros}, [], np.random.default_rng(0), 2.0**-20)["x"]
    assert 0.5 * 2.0**-20 < np.abs(alone).max() <= 2.0**-20


def test_integers_are_equal_or_wrong():
    expected = np.arange(50_000, 50_100)
    assert off(expected, expected).failure is None
    wrong = expected + (np.arange(100) == 7)
    assert "1 of 100 elements differ" in off(wrong, expected).failure
    assert off(wrong, expected, noise=np.zeros(100)).failure
    tie = off(wrong, expected, noise=(np.arange(100) == 9) * 1.0)
    assert tie.failure is None and tie.unstable


def test_half_precision_may_round():
    expected = np.linspace(1, 2, 64).astype(np.float16)
    assert off(np.nextafter(expected, np.float16(9)), expected).failure is None
    assert off(expected * np.float16(1.1), expected).failure


def test_nonfinite_values_must_be_in_the_same_places():
    nan, inf = np.nan, np.inf
    expected = np.array([1.0, inf, nan])
    assert compare("c", "y", expected.copy(), expected, 1e-3).failure is None
    for actual in ([1.0, -inf, nan], [1.0, inf, 0.0], [nan, inf, nan], [1.0, 5.0, nan]):
        assert "infinite or NaN" in compare("c", "y", np.array(actual), expected, 1e-3).failure
    assert compare("c", "y", np.full(2, nan), np.full(2, nan), 1e-3).relative == 0.0


def test_nan_everywhere_is_no_agreement():
    nan = Fake(lambda x: np.full_like(x, np.nan))
    report = verify(nan, lambda inputs: [np.full((2, 8), np.nan, np.float32)], check=False)
    assert not report.passed
    assert "nothing was compared" in report.failures[0].failure
    with pytest.raises(VerificationError, match="y on all inputs: nothing was compared"):
        report.check()
    # in one of several cases the model does this
    some = Fake(lambda x: np.where(np.abs(x).max() > 50, np.nan, x).astype(np.float32))
    assert verify(some, lambda inputs: [some.function(inputs["x"])]).passed


def test_complex_outputs_are_compared_as_a_library_has_them():
    """As floats with a last axis of 2; torch's own tensor may stand for the conjugate."""
    torch = pytest.importorskip("torch")

    class Conjugate(torch.nn.Module):
        def forward(self, x):
            return torch.complex(x, 2 * x).conj(), torch.complex(x, x).conj().imag

    class Both(Fake):
        def run(self, inputs):
            x = inputs["x"]
            return {"z": np.stack([x, -2 * x], axis=-1), "i": -x}

    outputs = (TensorSpec("z", "float32", (2, 8, 2)), TensorSpec("i", "float32", (2, 8)))
    assert verify(Both(None, outputs=outputs), Conjugate(), example_inputs=torch.zeros(2, 8)).passed


def test_a_library_of_several_sizes_is_opened_with_one_of_them():
    several = Fake(None, outputs=(TensorSpec("y", "float32", ("batch", 8)),))
    with pytest.raises(VerificationError, match=r"several sizes of 'batch'.*dims="):
        verify(several, lambda inputs: [inputs["x"]])


def test_another_shape_dtype_or_number_of_outputs_is_a_failure():
    assert "shape" in compare("c", "y", np.zeros(3), np.zeros(2), 1e-3).failure
    other = compare("c", "y", np.zeros(3, np.float64), np.zeros(3, np.float32), 1e-3)
    assert "dtype float64, the reference's is float32" in other.failure
    with pytest.raises(VerificationError, match="2 outputs, the compiled model has 1"):
        verify(Fake(softmax), lambda inputs: [inputs["x"], inputs["x"]])


def test_a_reference_that_fails_or_is_nothing_known_says_so(tmp_path):
    def broken(inputs):
        raise RuntimeError("no such kernel")

    with pytest.raises(VerificationError, match="cannot run the model on random inputs: no such"):
        verify(Fake(softmax), broken)
    with pytest.raises(VerificationError, match="cannot verify against a int"):
        verify(Fake(softmax), 3)
    with pytest.raises(VerificationError, match=r"ONNX Runtime \S+ cannot open"):
        verify(Fake(softmax), tmp_path / "absent.onnx")


@pytest.mark.parametrize("form", ["proto", "path"])
def test_a_format_newer_than_onnx_runtime_reads(form, tmp_path):
    """A model is verified whatever its format number. An opset that ONNX Runtime lacks is a reason
    not to.
    """
    model = onnx.parser.parse_model(
        """<ir_version: 99, opset_import: ["": 23]>
        g (float[1,1,5,4] q, float[1,1,7,4] k) => (float[1,1,5,4] y) { y = Attention(q, k, v) }"""
    )
    v = np.random.default_rng(0).standard_normal((1, 1, 7, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(v, "v"))
    source = in_form(model, form, tmp_path)
    feeds = {name: np.zeros((1, 1, n, 4), np.float32) for name, n in (("q", 5), ("k", 7))}
    with ExitStack() as stack:
        reference = open_reference(source, stack, ["q", "k"])
        for run in (reference.run, reference.otherwise):
            wanted = np.broadcast_to(v.mean(2, keepdims=True), (1, 1, 5, 4))
            np.testing.assert_allclose(run(feeds)[0], wanted, rtol=1e-5)
    model.opset_import[0].version = 99
    advice = r"ONNX Runtime \d.*opset 99.*Export it for an opset that this version has"
    with pytest.raises(VerificationError, match=re.compile(advice, re.S | re.I)):
        verify(Fake(softmax), model)


def test_a_model_that_breaks_a_rule_of_types_needs_no_other_opset():
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[2] x, float16[2] h) => (float[2] y) { y = Add(x, h) }"""
    )
    with pytest.raises(VerificationError, match=r"Type Error.*break a rule of ONNX") as said:
        verify(Fake(softmax), model)
    assert "opset that this version has" not in str(said.value)


@pytest.mark.parametrize("form", ["proto", "path"])
def test_a_row_that_finfo_min_masks_is_the_mean_for_onnxs_attention_too(form, tmp_path):
    """ONNX Runtime's kernel for it gives 0. ONNX's definition, PyTorch and gtco give the mean of
    V.
    """
    rng = np.random.default_rng(0)
    v = rng.standard_normal((2, 7, 4)).astype(np.float32)[:, None]
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]>
        g (float[2,1,5,4] q, float[2,1,7,4] k, float[2,1,5,7] m) => (float[2,1,5,4] y)
        { y = Attention(q, k, v, m) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(v, "v"))
    model = in_form(model, form, tmp_path)
    feeds = {"q": rng.standard_normal((2, 1, 5, 4)), "k": rng.standard_normal((2, 1, 7, 4))}
    feeds["m"] = np.zeros((2, 1, 5, 7))
    feeds["m"][:, :, 2] = np.finfo(np.float32).min
    feeds["m"][:, :, 3] = -np.inf
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    with ExitStack() as stack:
        reference = open_reference(model, stack, ["q", "k", "m"])
        runs = reference.run(feeds)[0], reference.otherwise(feeds)[0]
    for y in runs:
        mean = np.broadcast_to(v.mean(2), (2, 1, 4))
        np.testing.assert_allclose(y[:, :, 2], mean, rtol=1e-5, atol=1e-6)
        assert (y[:, :, 3] == 0).all() and (y[:, :, 1] != 0).all()
    assert reference.roles["m"].mask == "additive"


# less than fp32 -----------------------------------------------------------------------------------
CLASSES = np.random.default_rng(2).standard_normal((8, 5)).astype(np.float32)


@dataclass(frozen=True)
class Half(Fake):
    """A classifier of four images, compiled in bf16."""

    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", (4, 8)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "float32", (4, 5)),)
    metadata: dict[str, str] = field(default_factory=lambda: {"precision": "bf16"})


def classes(inputs):
    return [inputs["x"] @ CLASSES]


def rounded(x):
    half = ml_dtypes.bfloat16
    wide = [a.astype(half).astype(np.float32) for a in (x, CLASSES)]
    return wide[0] @ wide[1]


def test_roundings_of_bf16_are_no_failures_but_more_is():
    report = verify(Half(rounded), classes)
    assert report.passed and 1e-3 < report.worst.relative < report.tolerance == 0.1
    assert verify(Half(lambda x: x @ CLASSES), classes).top1 == Top1(32, 32, 0)
    assert not verify(Fake(rounded, Half.inputs, Half.outputs), classes, check=False).passed  # fp32
    kept = np.arange(8) < 7
    wrong = verify(Half(lambda x: rounded(x * kept)), classes, check=False)
    assert wrong.failures and wrong.top1.wrong


def test_another_class_first_is_a_failure_unless_two_are_near():
    """The class is asked on separate images. It decides even if every element is within bounds."""

    def reference(inputs):
        x = inputs["x"]
        y = np.zeros((4, 5), np.float32)
        y[:, 0], y[:, 1] = 1 + np.abs(x[:, 0]), 1
        return [y]

    def swapped(x):
        return reference({"x": x})[0][:, [1, 0, 2, 3, 4]]

    report = verify(Half(swapped), reference, check=False)
    assert report.top1.agreed < 4 and 0 < report.top1.wrong < 32 - report.top1.agreed  # some near
    assert "near ties" in str(report.top1)
    with pytest.raises(VerificationError, match="the same class first on"):
        report.check()


def test_a_reference_that_refuses_an_image_whose_class_is_asked_says_so():
    def refusing(inputs):
        calls.append(inputs)
        if len(calls) == last:
            raise IndexError("out of range")
        return classes(inputs)

    calls, last = [], 0
    exact = Half(lambda x: x @ CLASSES)
    verify(exact, refusing)
    calls, last = [], len(calls)  # the images are the last calls
    with pytest.raises(VerificationError, match=r"the reference cannot run .*: out of range"):
        verify(exact, refusing)


def test_only_classifiers_are_asked_for_classes():
    for dtype, shape in (("float32", (4, 5, 2)), ("float32", (4, 1)), ("int64", (4, 5))):
        assert not is_classifier(Half.inputs, (TensorSpec("y", dtype, shape),))
    assert is_classifier(Half.inputs, Half.outputs)
    assert not is_classifier(Half.inputs, Half.outputs * 2)
    assert not is_classifier((TensorSpec("ids", "int64", (4, 8)),), Half.outputs)


def test_what_nearly_cancels_is_held_to_its_neighbours_in_bf16():
    """A class map that is nearly zero everywhere may have the same error as the others."""

    def reference(inputs):
        y = np.ones((2, 6, 32), np.float32)
        y[:, 2] = 1e-3
        return [y]

    outputs = (TensorSpec("y", "float32", (2, 6, 32)),)

    def off_by(part):
        return Half(lambda x: reference({})[0] + np.float32(part), Half.inputs, outputs)

    assert verify(off_by(0.02), reference).passed
    assert not verify(off_by(0.2), reference, check=False).passed
