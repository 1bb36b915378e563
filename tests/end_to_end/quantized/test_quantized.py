"""Quantized models in ONNX's operators, against ONNX Runtime; integers must agree to the last
bit.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import gtco
from gtco.machine.target import detect
from gtco.tensor.intrinsics.table import kinds
from tests.few_nodes import by_onnxruntime
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

# A block of a quantized network: a padded convolution, a product of int8 without a zero point, an
# activation between, and outputs in both 8-bit formats.
NETWORK = """<ir_version: 9, opset_import: ["" : 20]>
network (float[2,5,9,11] x) => (uint8[2,24,99] y, int8[2,21,99] z, float[2,21,99] f)
<float sx = {0.03}, uint8 zx = {113}, float sh = {0.05}, int8 zh = {0}, float sf = {0.04},
 int8 zf = {-6}, float sy = {0.02}, uint8 zy = {3}, int64[3] flat = {2, 24, 99}> {
    q = QuantizeLinear(x, sx, zx) a = DequantizeLinear(q, sx, zx)
    w = DequantizeLinear <axis = 0> (w1, s1, z1)
    c = Conv <pads = [1, 1, 1, 1]> (a, w, b1)
    h = Reshape(c, flat)
    y = QuantizeLinear(h, sy, zy) e = DequantizeLinear(y, sy, zy)
    g = Gelu(e)
    p = QuantizeLinear(g, sh, zh) d = DequantizeLinear(p, sh, zh)
    t = Transpose <perm = [0, 2, 1]> (d)
    v = DequantizeLinear <axis = 1> (w2, s2, z2)
    m = MatMul(t, v)
    r = Transpose <perm = [0, 2, 1]> (m)
    z = QuantizeLinear(r, sf, zf) f = DequantizeLinear(z, sf, zf)
}"""


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """``NETWORK`` with drawn weights, which take all of int8."""
    model = onnx.parser.parse_model(NETWORK)
    drawn = {
        "w1": rng.integers(-128, 128, (24, 5, 3, 3)).astype(np.int8),
        "s1": rng.uniform(1e-3, 3e-3, 24).astype(np.float32),
        "z1": np.zeros(24, np.int8),
        "b1": rng.standard_normal(24).astype(np.float32),
        "w2": rng.integers(-128, 128, (24, 21)).astype(np.int8),
        "s2": rng.uniform(1e-3, 6e-3, 21).astype(np.float32),
        "z2": np.zeros(21, np.int8),
    }
    for name, value in drawn.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def compared(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], set[str]]:
    """Each output of gtco and of ONNX Runtime, and the sketches of gtco's stages."""
    wanted = by_onnxruntime(model, feeds)
    compiled = gtco.compile_model(model, tune="off", strict=True)
    got = compiled(*feeds.values())
    names = [o.name for o in model.graph.output]
    schedules = [stage["schedule"] for stage in compiled.stages]
    sketches = {schedule["sketch"] for schedule in schedules}
    # the kinds of micro-kernels too
    sketches |= {str(s["tile"]).rpartition(":")[0] for s in schedules if "tile" in s}
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
    drawn = [rng.uniform(rng.uniform(-1, 0.5), 1, (3, 1300)) for _ in range(200)]
    # a tensor of zeros has no range: ONNX Runtime's scale is 1, ONNX's definition divides by 0
    for x in (np.float32(x) for x in (*drawn, np.zeros((3, 1300)), np.full((3, 1300), -2.5))):
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


@pytest.mark.parametrize("unsigned", [False, True])
def test_products_by_quantized_weights(unsigned: bool) -> None:
    """Products of integers where the machine has them. gtco's sums are exact and ONNX Runtime's are
    of float32, so a result may round to the next step.
    """
    rng = np.random.default_rng(fresh_seed())
    model = network(rng)
    if unsigned:  # weights around 128, as some quantizers write them
        for name in ("w", "z"):
            for tensor in model.graph.initializer:
                if tensor.name in (f"{name}1", f"{name}2"):
                    shifted = onnx.numpy_helper.to_array(tensor).astype(np.int16) + 128
                    value = shifted.astype(np.uint8)
                    tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    x = rng.uniform(-4, 4, (2, 5, 9, 11)).astype(np.float32)
    outputs, sketches = compared(model, {"x": x})
    for name in ("y", "z"):
        got, wanted = (a.astype(int) for a in outputs[name])
        assert len(np.unique(wanted)) > 100
        # One step at most in y. A step of y moves a sum of z by less than one of its steps.
        apart = np.abs(got - wanted)
        assert apart.max() <= 1 and (apart > 0).mean() < 0.01
    np.testing.assert_allclose(*outputs["f"], atol=0.0401)
    assert "fallback" not in sketches
    rows = {kind.name for kind in kinds(detect(), "int8")}
    assert not rows or rows & sketches  # by one of them, where there are several


def test_dynamic_products_by_quantized_weights() -> None:
    """Scale and zero point are found at run time; the integers are exact."""
    rng = np.random.default_rng(fresh_seed())
    model = onnx.parser.parse_model(DYNAMIC.replace("K", "67"))
    w = rng.integers(-128, 128, (67, 9)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    feeds = {
        "x": rng.standard_normal((3, 67)).astype(np.float32),
        "u": rng.integers(0, 256, (3, 67)).astype(np.uint8),
        "v": rng.integers(0, 256, (67, 5)).astype(np.uint8),
    }
    outputs, sketches = compared(model, feeds)
    for name in ("i", "j"):
        np.testing.assert_array_equal(*outputs[name])
    rows = {kind.name for kind in kinds(detect(), "int8")}
    assert not rows or rows & sketches
