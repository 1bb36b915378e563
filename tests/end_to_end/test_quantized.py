"""Quantized models in ONNX's operators, against ONNX Runtime; integers must agree to the last
bit.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import gtco
from tests.kernels import fresh_seed

STATIC = """<ir_version: 9, opset_import: ["" : 17]>
static (float[3,5,67] x, float[3,5,67] d) =>
    (uint8[3,5,67] a, int8[3,5,67] b, float[3,5,67] c, float[3,5,67] e, int8[3,5,67] f)
<float scale = {0.02}, uint8 zero = {121}, float[5] scales = {0.02, 0.1, 3e-3, 1.0, 0.7},
 int8[5] zeros = {3, 0, -128, 127, -7}> {
    a = QuantizeLinear(x, scale, zero)
    b = QuantizeLinear <axis = 1> (x, scales, zeros)
    c = DequantizeLinear(a, scale, zero)
    e = DequantizeLinear <axis = -2> (b, scales, zeros)
    r = Abs(d) ten = Constant <value_float = 0.1> () step = Add(r, ten)
    one = ReduceMax <keepdims = 0> (step) f = QuantizeLinear(x, one, z0)
}"""
DYNAMIC = """<ir_version: 9, opset_import: ["" : 17]>
dynamic (float[3,K] x, uint8[3,K] u, uint8[K,5] v) => (int32[3,9] i, int32[3,5] j, float[3,9] y) {
    q, s, z = DynamicQuantizeLinear(x)
    i = MatMulInteger(q, w, z)
    j = MatMulInteger(u, v)
    f = Cast <to = 1> (i) y = Mul(f, s)
}"""


def compared(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], set[str]]:
    """Each output of gtco and of ONNX Runtime, and the sketches of gtco's stages."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = session.run(None, feeds)
    compiled = gtco.compile_model(model, tune="off", strict=True)
    got = compiled(*feeds.values())
    names = [o.name for o in model.graph.output]
    sketches = {stage["schedule"]["sketch"] for stage in compiled.stages}
    return {n: (g, w) for n, g, w in zip(names, got, wanted, strict=True)}, sketches


def test_quantize_and_dequantize() -> None:
    """By tensor and by channel, with a constant scale and with a computed one; this includes
    ties.
    """
    rng = np.random.default_rng(fresh_seed())
    x = rng.standard_normal((3, 5, 67)).astype(np.float32)
    halves = rng.integers(-300, 300, (5, 67)).astype(np.float32)
    x[0] = np.float32(0.01) * halves  # of a step
    x[1, 0, :4] = 1e9, -1e9, np.inf, -np.inf
    model = onnx.parser.parse_model(STATIC.replace("z0", "zeros0"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int8(-3), "zeros0"))
    outputs, sketches = compared(
        model, {"x": x, "d": rng.standard_normal((3, 5, 67)).astype(np.float32)}
    )
    for got, wanted in outputs.values():
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    assert "fallback" not in sketches


def test_scales_found_at_run_time_are_right_to_the_last_bit() -> None:
    """If a scale is off by its last bit, values near a half become the next integer."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        scales (float[3,1300] x) => (uint8[3,1300] q, float s, uint8 z) {
            q, s, z = DynamicQuantizeLinear(x)
        }"""
    )
    rng = np.random.default_rng(fresh_seed())
    compiled = gtco.compile_model(model, tune="off", strict=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for _ in range(200):
        x = rng.uniform(rng.uniform(-1, 0.5), 1, (3, 1300)).astype(np.float32)
        for got, wanted in zip(compiled(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("k", [7, 64, 1300])
def test_integer_products_are_exact(k: int) -> None:
    """This holds even if k terms exceed what float32 holds exactly: 1300 times 255 times 255 is 5
    times as much.
    """
    rng = np.random.default_rng(fresh_seed())
    model = onnx.parser.parse_model(DYNAMIC.replace("K", str(k)))
    w = rng.integers(100, 128, (k, 9)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    feeds = {
        "x": rng.uniform(0.5, 1, (3, k)).astype(np.float32),
        "u": rng.integers(200, 256, (3, k)).astype(np.uint8),
        "v": rng.integers(200, 256, (k, 5)).astype(np.uint8),
    }
    outputs, sketches = compared(model, feeds)
    for name in ("i", "j"):
        got, wanted = outputs[name]
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, wanted)
    assert np.abs(outputs["j"][0]).max() > 2**24 or k < 1000
    np.testing.assert_allclose(*outputs["y"], rtol=1e-6)
    assert "fallback" not in sketches
