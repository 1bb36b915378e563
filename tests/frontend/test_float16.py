"""float16 and bfloat16 files read as float32 ones: what changes in the message, and what does
not.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from gtco.frontend.bfloat16_products import NOTE, all_in_bfloat16
from gtco.frontend.onnx import load_onnx
from gtco.support.onnx_float32 import widen

HALF = np.array([1.0, 65504.0, 6e-8], np.float16)


def graph(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


def types(model: onnx.ModelProto) -> set[int]:
    """The types of all values inside, as ONNX infers them."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    return {v.type.tensor_type.elem_type for v in inferred.graph.value_info}


def test_a_model_without_float16_is_left_alone() -> None:
    model = graph("g (float[3] x) => (float[3] y) { y = Add(x, c) }", c=HALF.astype(np.float32))
    weights = {"w": np.zeros(3, np.float32)}
    same, kept, found = widen(model, weights)
    assert same is model and kept is weights and not found


@pytest.mark.parametrize(
    "body",
    [
        "y = Add(x, c)",
        "w = Cast<to = 1>(x)  e = Exp(w)  h = Cast<to = 10>(e)  y = Mul(h, c)",
        "l = CastLike(n, c)  y = Add(l, x)",
        "y = Identity(c)",
        "y = Constant<value = float16[3] {15360, 16384, 16896}>()",
        "s = Shape(x)  f = ConstantOfShape<value = float16[1] {18176}>(s)  y = Add(f, x)",
        """t = Constant<value = bool {1}>()
           y = If(t) <then_branch = a () => (float16[3] u) { d = Cast<to = 10>(n)  u = Add(d, x) },
                      else_branch = b () => (float16[3] v) { v = Mul(c, x) }>""",
    ],
)
def test_values_stay(body: str) -> None:
    text = f"g (float16[3] x, int64[3] n) => (float16[3] y) {{ {body} }}"
    model = graph(text, c=HALF)
    before = model.SerializeToString()
    wide, _, found = widen(model, {})
    assert found and model.SerializeToString() == before  # the message given is the caller's
    onnx.checker.check_model(wide, full_check=True)
    assert TensorProto.FLOAT16 not in types(wide)
    feeds = {"x": np.array([0.5, -2.0, 3.0], np.float16), "n": np.array([1, -2, 3])}
    (got,) = ReferenceEvaluator(wide).run(None, feeds)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, wanted, rtol=2e-3)


def test_bfloat16_is_widened_alone() -> None:
    """A file may have both; ``widen`` takes one of them. Weights are numpy's extension type."""
    text = """g (bfloat16[3] x, float16[3] h, bfloat16[3] w) => (bfloat16[3] y, float16[3] z)
              { y = Mul(x, w)  t = Cast<to = 16>(h)  z = Cast<to = 10>(t) }"""
    narrow = np.array([1.0, 3e38, 0.1], ml_dtypes.bfloat16)
    wide, weights, found = widen(graph(text), {"w": narrow}, TensorProto.BFLOAT16)
    assert found and TensorProto.BFLOAT16 not in types(wide)
    (value,) = weights.values()
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, narrow.astype(np.float32))
    kinds = [v.type.tensor_type.elem_type for v in (*wide.graph.input[:2], *wide.graph.output)]
    assert kinds == [TensorProto.BFLOAT16, TensorProto.FLOAT16] * 2


@pytest.mark.parametrize(
    ("text", "narrow", "noted"),
    [
        ("y = MatMul(x, w)  u = MatMul(y, w)", True, False),
        ("y = MatMul(x, w)  a = Cast<to=1>(y)  b = MatMul(a, v)  u = Cast<to=16>(b)", False, True),
        ("a = Cast<to=1>(x)  b = MatMul(a, v)  u = Cast<to=16>(b)", False, False),
        ("u = Add(x, w)", False, False),
    ],
)
def test_products_are_of_bfloat16_where_all_of_the_file_are(
    text: str, narrow: bool, noted: bool
) -> None:
    """Else float32 products would be rounded, because one tensor of the file is narrow."""
    model = graph(
        f"g (bfloat16[3, 3] x, bfloat16[3, 3] w, float[3, 3] v) => (bfloat16[3, 3] u) {{ {text} }}"
    )
    found, notes = all_in_bfloat16(model)
    assert (found, bool(notes)) == (narrow, noted)
    imported = load_onnx(model)
    assert imported.bfloat16 == narrow and (NOTE in imported.notes) == noted


def test_an_input_that_is_an_output_stays_what_it_is() -> None:
    model = graph("g (float16[3] x) => (float16[3] x, float16[3] y) { y = Neg(x) }")
    wide, _, _ = widen(model, {})
    x, y = ReferenceEvaluator(wide).run(None, {"x": HALF})
    np.testing.assert_array_equal(x, HALF)
    np.testing.assert_array_equal(y, -HALF)


def test_weights_keep_their_values_and_names_that_are_taken_are_evaded() -> None:
    """Weights are inputs of the graph. Here one is also an output, with a name that is already
    taken.
    """
    model = graph(
        """g (float16[3] x, float16[3] w) => (float16[3] w, float16[3] w_float32)
           { w_float32 = Add(x, w) }"""
    )
    wide, weights, _ = widen(model, {"w": HALF})
    (value,) = weights.values()
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, HALF)
    feeds = {name: np.asarray(array) for name, array in weights.items()}
    w, y = ReferenceEvaluator(wide).run(None, {"x": HALF, **feeds})
    np.testing.assert_array_equal(w, HALF)
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y[2:], (HALF + HALF)[2:])
