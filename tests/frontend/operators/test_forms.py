"""Forms of operators that TVM's importer gets wrong or refuses, as whole models against ONNX
Runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError
from gtco.verification.float64.operators import Gemm

SIZES = {"sizes": np.array([5, 5]), "all": np.array([1, 2, 3, 5])}
PICTURE = "uint8[1,2,8,8] x"

# the inputs, the output, the nodes, the constants and the opset
CASES: dict[str, tuple[str, str, str, dict[str, np.ndarray], int]] = {
    "antialiased bytes": (
        PICTURE,
        "uint8[1,2,3,5] y",
        'y = Resize<mode="linear", antialias=1>(x, , , all)',
        SIZES,
        18,
    ),
    "bytes along some axes": (
        PICTURE,
        "uint8[1,2,5,5] y",
        'y = Resize<mode="linear", axes=[2, 3]>(x, , , sizes)',
        SIZES,
        18,
    ),
    "a line of bytes": (
        "uint8[1,2,6] x",
        "uint8[1,2,9] y",
        'y = Resize<mode="linear">(x, , , line)',
        {"line": np.array([1, 2, 9])},
        18,
    ),
    "cubic bytes": (
        PICTURE,
        "uint8[1,2,3,5] y",
        'y = Resize<mode="cubic", antialias=1>(x, , , all)',
        SIZES,
        18,
    ),
    "inserted before the last": (
        "float[2,3] x",
        "float[6,3] y",
        """n = Neg(x) a = Abs(x) s = SequenceConstruct(x, n) t = SequenceInsert(s, a, at)
           y = ConcatFromSequence<axis=0>(t)""",
        {"at": np.array(-1)},
        18,
    ),
    "a threshold of infinities": (
        "float[2,3] x",
        "float[2,3] y",
        "z = Div(x, zero) y = ThresholdedRelu<alpha=0.5>(z)",
        {"zero": np.float32(0)},
        18,
    ),
    "an axis as a number": (
        "float[2,3] x",
        "float[2,1,3] y",
        "y = Unsqueeze(x, at)",
        {"at": np.array(1)},
        18,
    ),
    "a window that begins in the padding": (
        "float[1,2,8,8] x",
        "float[1,2,3,3] y",
        "y = MaxPool<kernel_shape=[3, 3], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1>(x)",
        {},
        20,
    ),
    "a mean of such a window": (
        "float[1,2,8,8] x",
        "float[1,2,3,3] y",
        "y = AveragePool<kernel_shape=[3, 3], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1>(x)",
        {},
        20,
    ),
    "a mask of floats": (
        "float[2,3] x",
        "float[2,3] y",
        "d, mask = Dropout<ratio=0.5>(x) y = Neg(d)",
        {},
        7,
    ),
}


def model_of(name: str) -> onnx.ModelProto:
    inputs, outputs, nodes, constants, opset = CASES[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()
    )
    return model


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str) -> None:
    model = model_of(name)
    (value,) = model.graph.input
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    rng = np.random.default_rng()
    x = rng.normal(size=shape) if dtype == np.float32 else rng.integers(0, 256, shape)
    feeds = {value.name: x.astype(dtype)}
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    (got,) = lower(load_onnx(model, simplify=False)).evaluate(feeds).values()
    assert got.shape == want.shape and got.dtype == want.dtype
    # ONNX Runtime rounds bytes behind each axis; a cubic sum makes more of that
    off = 1e-6 if dtype != np.uint8 else 6 if "cubic" in name else 2
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=off)


def test_the_largest_in_any_order() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (float[3,9] x)
            => (float[3,4] y, int64[3,4] z) { y, z = TopK<sorted=0, largest=0>(x, k) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([4]), "k"))
    x = np.random.default_rng().normal(size=(3, 9)).astype(np.float32)
    values, places = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    np.testing.assert_array_equal(values, np.sort(x)[:, :4])
    np.testing.assert_array_equal(np.take_along_axis(x, places, 1), values)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_largest_none(axis: int) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[3,9] x)
            => (float[a,b] y, int64[a,b] z) {{ y, z = TopK<axis={axis}>(x, k) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "k"))
    x = np.zeros((3, 9), np.float32)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    got = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    for mine, its in zip(got, wanted, strict=True):
        assert mine.shape == its.shape and mine.dtype == its.dtype and not mine.size


def test_a_maximum_of_single_pixels_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        g (float[1,2,8,8] x, float[3,4] r, int64[3] i) => (float[3,2,1,1] y) {
            y = RoiAlign<mode="max">(x, r, i) }"""
    )
    with pytest.raises(UnsupportedError, match="mode max is not supported"):
        lower(load_onnx(model, simplify=False))


def test_a_mean_of_large_integers() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]> g (int32[2,3] x) => (int32[2,1] y) {
            y = ReduceMean<axes=[1]>(x) }"""
    )
    x = np.array([[2 * 10**9, 2 * 10**9, 1], [-2 * 10**9, -2 * 10**9 - 1, -7]], np.int32)
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    np.testing.assert_array_equal(got, [[1333333333], [-1333333336]])


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("split", [1, 2, 3, 4, 6, 9, 20, [5, 4], [9], [1, 2, 6], None, "squeezed"])
def test_parts_of_a_sequence(split: Any, axis: int) -> None:
    """The last one may be smaller. torch writes ``split`` so where an axis is dynamic."""
    shape = [2, 3, 4]
    shape[axis] = 9
    keep = "" if split != "squeezed" else ", keepdims=0"
    sizes = None if split in (None, "squeezed") else split
    parts = 9 if sizes is None else len(sizes) if isinstance(sizes, list) else -(-9 // sizes)
    takes = " ".join(f"y{n} = SequenceAt(s, p{n})" for n in range(parts))
    outputs = ", ".join(f"float[{'a,b' if keep else 'a,b,c'}] y{n}" for n in range(parts))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[{",".join(map(str, shape))}] x) => ({outputs}) {{
            s = SplitToSequence<axis={axis}{keep}>(x{"" if sizes is None else ", sizes"}) {takes}
        }}"""
    )
    given = {f"p{n}": np.array(n - parts if n % 2 else n) for n in range(parts)}
    if sizes is not None:
        given["sizes"] = np.array(sizes)
    for name, value in given.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    x = np.random.default_rng().standard_normal(shape).astype(np.float32)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    got = lower(load_onnx(model, simplify=False)).evaluate({"x": x})
    for n in range(parts):
        np.testing.assert_array_equal(got[f"y{n}"], wanted[n])


@pytest.mark.parametrize("dtype", ["float16", "double"])
@pytest.mark.parametrize("op", ["Elu", "Elu<alpha=0.5>", "Selu", "Selu<alpha=1.5, gamma=2.0>"])
def test_activations_of_other_types(op: str, dtype: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g ({dtype}[40] x) => ({dtype}[40] y) {{
            y = {op}(x) }}"""
    )
    x = np.linspace(-8, 8, 40).astype({"double": "float64"}.get(dtype, dtype))
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, wanted, rtol=2e-3 if dtype == "float16" else 1e-7, atol=2e-3)


@pytest.mark.parametrize("attributes", ["", ", alpha=0.5", ", transA=1, transB=1"])
def test_a_gemm_of_no_c_does_not_read_it(attributes: str) -> None:
    """As PyTorch's addmm, BLAS and ONNX Runtime."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[4,4] a, float[4,4] b, float[4] c)
            => (float[4,4] y) {{ y = Gemm<beta=0.0{attributes}>(a, b, c) }}"""
    )
    rng = np.random.default_rng()
    inputs = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in "ab"}
    inputs["c"] = np.float32([1, np.nan, np.inf, 0])
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    (got,) = lower(load_onnx(model, simplify=False)).evaluate(inputs).values()
    np.testing.assert_allclose(got, wanted[0], rtol=1e-5, atol=1e-6)
    (judged,) = ReferenceEvaluator(model, new_ops=[Gemm]).run(None, inputs)
    np.testing.assert_allclose(judged, wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
@pytest.mark.parametrize("more", ["", ", beta=0.5, bias=0.1"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_local_response_normalization(size: int, more: str, dtype: str) -> None:
    """Of other types as GPUs compute it, and of even sizes; TVM has neither."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g ({dtype}[2,6,3,5] x) => ({dtype}[2,6,3,5] y)
            {{ y = LRN<size={size}, alpha=0.3{more}>(x) }}"""
    )
    kind = {"double": "float64", "float": "float32"}.get(dtype, dtype)
    x = np.random.default_rng().normal(1, 3, (2, 6, 3, 5)).astype(kind)
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    assert got.dtype == kind
    wide = x.astype(np.float64)
    first = [c - (size - 1) // 2 for c in range(6)]
    sums = [(wide[:, max(0, c) : c + size] ** 2).sum(axis=1) for c in first]
    beta, bias = (0.5, 0.1) if more else (0.75, 1.0)
    wanted = wide / (bias + 0.3 / size * np.stack(sums, 1)) ** beta
    tolerance = {"float16": 4e-3, "float32": 1e-5}.get(kind, 1e-7)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", ["Add", "Max", "Pow", "MatMul", "Concat<axis=0>", "Where"])
def test_elements_of_a_sequence_with_each_other(op: str) -> None:
    """As torch writes ``split`` where its optimizer is off."""
    operands = "c, a, b" if op == "Where" else "a, b"
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[2,3,3] x) => (float[n,m,k] y) {{
            s = SplitToSequence<axis=0>(x, one) a = SequenceAt(s, zero) b = SequenceAt(s, one)
            c = Greater(a, b) y = {op}({operands}) }}"""
    )
    for name, value in (("zero", 0), ("one", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    x = np.random.default_rng().uniform(1, 2, (2, 3, 3)).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
