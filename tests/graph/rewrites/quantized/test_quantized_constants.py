"""Weights that a file has in float32 behind a QuantizeLinear: products by them are of integers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.graph import Graph
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites.pipeline import PIPELINE, canonicalize
from gtco.graph.rewrites.quantized.integer_products import integer_products
from gtco.graph.rewrites.quantized.one_signedness import one_signedness
from gtco.graph.rewrites.quantized.quantized_constants import quantized_constants
from gtco.machine.target import TARGETS
from tests.kernels import fresh_seed

MACHINE = TARGETS["icelake-server"]
HEAD = '<ir_version: 9, opset_import: ["" : 19]> model '
ACTIVATION = "q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)"
SCALES = "float[3] t = {0.5, 0.125, 2.0}, int8[3] z = {0, 0, 0}"


def dense(between: str = "p = Identity(c)", behind: str = "b = Identity(d)") -> str:
    return f"""{HEAD}(float[5,4] x) => (float[5,3] y)
    <float s = {{0.03125}}, int8 zx = {{-5}}, {SCALES}, int8 least = {{-127}},
     int8 most = {{127}}> {{
        {ACTIVATION} c = QuantizeLinear <axis = 1> (w, t, z) {between}
        d = DequantizeLinear <axis = 1> (p, t, z) {behind} y = MatMul(a, b)
    }}"""


GEMM = f"""{HEAD}(float[5,4] x) => (float[5,3] y)
    <float s = {{0.03125}}, uint8 zx = {{7}}, {SCALES}, float[3] e = {{1.0, -3.0, 0.5}}> {{
        {ACTIVATION} c = QuantizeLinear <axis = 0> (w, t, z)
        b = DequantizeLinear <axis = 0> (c, t, z) y = Gemm <transB = 1> (a, b, e)
    }}"""
TRANSPOSED = f"""{HEAD}(float[5,4] x) => (float[5,3] y)
    <float s = {{0.03125}}, uint8 zx = {{7}}, float[1] t = {{0.5}}, int8[1] z = {{0}}> {{
        {ACTIVATION} c = QuantizeLinear(w, t, z) d = DequantizeLinear(c, t, z)
        b = Transpose(d) y = MatMul(a, b)
    }}"""
CONV = f"""{HEAD}(float[2,4,6,7] x) => (float[2,3,6,7] y)
    <float s = {{0.03125}}, uint8 zx = {{7}}, {SCALES}> {{
        {ACTIVATION} c = QuantizeLinear <axis = 0> (w, t, z)
        b = DequantizeLinear <axis = 0> (c, t, z) y = Conv <pads = [1, 1, 1, 1]> (a, b)
    }}"""
FILES = {
    "matmul": (dense(), (4, 3)),
    "a clip of quantization-aware training": (dense("p = Clip(c, least, most)"), (4, 3)),
    "gemm": (GEMM, (3, 4)),
    "transposed, scales of one element": (TRANSPOSED, (3, 4)),
    "convolution": (CONV, (3, 4, 3, 3)),
}


def lowered(text: str, shape: tuple[int, ...], rng: np.random.Generator) -> Graph:
    """The graph before all rewrites, with drawn weights w, some beyond what is quantized."""
    model = onnx.parser.parse_model(text)
    weights = rng.uniform(-80, 80, shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return lower(load_onnx(model, simplify=False))


@pytest.mark.parametrize(("text", "shape"), FILES.values(), ids=FILES)
def test_products_of_integers(text: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(fresh_seed())
    before = lowered(text, shape, rng)

    def integers(graph: Graph) -> Graph:
        return integer_products(one_signedness(quantized_constants(graph), MACHINE), MACHINE)

    after = canonicalize(before, rewrites=(integers, *PIPELINE)).check()
    products = [op for op in after.operators.values() if op.kind in ("matmul", "conv2d")]
    types = [tuple(after.types[x].dtype for x in (*op.inputs, op.output)) for op in products]
    assert types == [("uint8", "int8", "int32")]
    given = {"x": rng.uniform(-6, 6, before.types["x"].sizes).astype(np.float32)}
    wanted = before.evaluate(given, "float64")["y"]
    np.testing.assert_allclose(after.evaluate(given)["y"], wanted, rtol=1e-5, atol=1e-5)


def test_what_is_computed_stays() -> None:
    text = f"""{HEAD}(float[4] x, float s) => (int8[4] q, int8[3] k)
        <int8 z = {{0}}, float[3] w = {{1.0, 2.0, 3.0}}, float t = {{0.5}}> {{
            q = QuantizeLinear(x, s, z) k = QuantizeLinear(w, s, z)
        }}"""
    before = lower(load_onnx(onnx.parser.parse_model(text), simplify=False))
    assert quantized_constants(before).dump() == before.dump()
