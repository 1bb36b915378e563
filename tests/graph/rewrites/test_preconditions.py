"""Graphs that look like what a rewrite looks for and are something else: a constant that broadcasts
the result, integers, a maximum without its axis, slices that also crop.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize

RNG = np.random.default_rng()
WIDE = np.ones((2, 1), np.float32)
AXIS = {"axis": np.array([-1])}
NORM = """u = ReduceMean<keepdims=1>(x, axis) d = Sub(x, u) q = Mul(d, d)
    v = ReduceMean<keepdims=1>(q, axis) w = Add(v, eps) r = Sqrt(w) y = Div(d, r)"""
SOFTMAX = """m = ReduceMax<keepdims=1>(x, over) d = Sub(x, m) e = Exp(d)
    s = ReduceSum<keepdims=%d>(e, axis) y = Div(e, s)"""
FIRST, TWO = {"zero": np.array([0])}, np.array([1, 1])
SLICES = {"first": np.array([4]), "last": np.array([-100]), "zero": np.array([0])}
SLICES |= {"back": np.array([-1]), "along": np.array(0)}

# the inputs, the outputs, the nodes and the constants
CASES: dict[str, tuple[str, str, str, dict[str, np.ndarray]]] = {
    "silu": (
        "float[3] x",
        "float[2,3] y",
        "s = Sigmoid(x) t = Mul(x, s) y = Mul(t, c)",
        {"c": WIDE},
    ),
    "rounded by a number without fractions": (
        "float[64] x",
        "float[64] y",
        "a = Add(x, c) y = Sub(a, c)",
        {"c": np.float32(1.5 * 2**23)},
    ),
    "gelu": (
        "float[3] x",
        "float[2,3] y",
        "q = Mul(x, k) e = Erf(q) s = Add(e, one) t = Mul(x, s) y = Mul(t, c)",
        {"k": np.float32(0.5**0.5), "one": np.float32(1), "c": 0.5 * WIDE},
    ),
    "elu": (
        "float[3] x",
        "float[2,3] y",
        "r = Relu(x) e = Exp(x) d = Sub(o, e) t = Relu(d) y = Sub(r, t)",
        {"o": WIDE},
    ),
    "softplus": (
        "float[3] x",
        "float[2,3] y",
        "r = Relu(x) a = Abs(x) n = Neg(a) e = Exp(n) d = Add(e, o) l = Log(d) y = Add(r, l)",
        {"o": WIDE},
    ),
    "mish": (
        "float[3] x",
        "float[2,3] y",
        "e = Exp(x) d = Add(e, o) l = Log(d) t = Tanh(l) y = Mul(x, t)",
        {"o": WIDE},
    ),
    "layer_norm": (
        "float[1,2,8] x",
        "float[3,2,8] y",
        NORM,
        AXIS | {"eps": np.full((3, 1, 1), 1e-5, np.float32)},
    ),
    "layer_norm of one more axis": (
        "float[2,8] x",
        "float[1,2,8] y",
        NORM,
        AXIS | {"eps": np.full((1, 1, 1), 1e-5, np.float32)},
    ),
    "rms_norm": (
        "float[1,2,8] x",
        "float[3,2,8] y",
        """q = Mul(x, x) v = ReduceMean<keepdims=1>(q, axis) w = Add(v, eps) r = Sqrt(w)
           y = Div(x, r)""",
        AXIS | {"eps": np.full((3, 1, 1), 1e-5, np.float32)},
    ),
    "softmax": (
        "float[4,4] x",
        "float[4,4] y",
        """m = ReduceMax<keepdims=0>(x, axis) d = Sub(x, m) e = Exp(d)
           s = ReduceSum<keepdims=1>(e, axis) y = Div(e, s)""",
        AXIS,
    ),
    "softmax whose sum lost its axis": (
        "float[4,4] x",
        "float[4,4] y",
        SOFTMAX % 0,
        AXIS | {"over": np.array([-1])},
    ),
    "softmax whose maximum is of another axis": (
        "float[4,4] x",
        "float[4,4] y",
        SOFTMAX % 1,
        AXIS | {"over": np.array([0])},
    ),
    "a roll of a part's end": (
        "float[6,4] x",
        "float[6,4] y",
        "p = Slice(x, b, c, zero) q = Slice(x, d, e, zero) y = Concat<axis=0>(p, q)",
        FIRST | {n: np.array([i]) for n, i in zip("bcde", (2, 6, 1, 3), strict=True)},
    ),
    "a roll that leaves out the last": (
        "float[6,4] x",
        "float[6,4] y",
        "p = Slice(x, b, c, zero) q = Slice(x, d, e, zero) y = Concat<axis=0>(p, q)",
        FIRST | {n: np.array([i]) for n, i in zip("bcde", (1, 5, 0, 2), strict=True)},
    ),
    "slices of other steps": (
        "float[6,4] x",
        "float[4,2] y",
        """p = Slice(x, b, c, both, step) q = Slice(x, d, e, both, ones)
           y = Concat<axis=0>(p, q)""",
        {"b": 0 * TWO, "c": np.array([2, 4]), "d": np.array([2, 0]), "e": np.array([4, 2])}
        | {"both": np.array([0, 1]), "step": np.array([1, 2]), "ones": TWO},
    ),
    "division by a large number": (
        "float[4] x",
        "float[4] y",
        "t = Mul(x, c) z = Div(t, c) y = Neg(z)",
        {"c": np.float32(1e38)},
    ),
    "the largest float as a bound": (
        "float[4] x",
        "float[4] y",
        "t = Mul(x, c) z = Clip(t, zero, most) y = Neg(z)",
        {"c": np.float32(3e38), "zero": np.float32(0), "most": np.float32(3.4028235e38)},
    ),
    "a bound beyond float32": (
        "double[4] x",
        "double[4] y",
        "t = Mul(x, c) z = Clip(t, zero, most) y = Neg(z)",
        {"c": np.float64(1e40), "zero": np.float64(0), "most": np.float64(1e39)},
    ),
    "sums from the end of a part": (
        "float[10] x",
        "float[3] y",
        "s = Slice(x, first, last, zero, back) c = CumSum(s, along) "
        "z = Slice(c, two, last, zero, back) y = Relu(z)",
        SLICES | {"two": np.array([2])},
    ),
    "a slice of nothing": (
        "float[1,8] x",
        "float[0,8] y, float[1,8] z",
        "e = Exp(x) s = Slice(e, one, last) y = Neg(s) z = Relu(x)",
        {"one": np.array([1]), "last": np.array([9])},
    ),
    "integer weights": (
        "uint8[1,2,5,5] x",
        "int32[1,3,5,5] y",
        "p = ConvInteger(x, w) y = Mul(p, c)",
        {"w": np.full((3, 2, 1, 1), 100, np.int8), "c": np.int32(7)},
    ),
    "biases that broadcast": (
        "float[1,5,8] x",
        "float[2,5,8] y",
        """q0 = MatMul(x, wq) q = Add(q0, bq) k0 = MatMul(x, wk) k1 = Add(k0, bk) v0 = MatMul(x, wv)
           v = Add(v0, bk) k = Transpose<perm=[0, 2, 1]>(k1) s = MatMul(q, k)
           p = Softmax<axis=-1>(s) y = MatMul(p, v)""",
        {name: RNG.standard_normal((8, 8)).astype(np.float32) for name in ("wq", "wk", "wv")}
        | {"bq": np.ones((2, 1, 8), np.float32), "bk": np.ones(8, np.float32)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_only_looks_like_it(name: str) -> None:
    inputs, outputs, nodes, constants = CASES[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()
    )
    (value,) = model.graph.input
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    x = (3 * RNG.standard_normal(shape)).astype(dtype)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    with np.errstate(all="ignore"):
        want = session.run(None, {value.name: x})
        graph = canonicalize(lower(load_onnx(model, simplify=False))).check()
        got = graph.evaluate({value.name: x})
    for a, b in zip(got.values(), want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
