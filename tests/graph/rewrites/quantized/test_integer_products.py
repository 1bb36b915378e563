"""Products of quantized tensors: which of them become products of integers, and that they stay the
same.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.graph import Graph
from gtco.graph.lower.walk import lower
from gtco.graph.precision import narrowed_operands
from gtco.graph.rewrites.pipeline import PIPELINE, canonicalize
from gtco.graph.rewrites.quantized.exact_products import exact_products
from gtco.graph.rewrites.quantized.integer_products import integer_products
from gtco.machine.target import TARGETS
from gtco.tensor.analysis.filtering import applicable
from gtco.tensor.sketch.strassen import cpu as strassen
from gtco.tensor.stage import make_stage
from tests.kernels import fresh_seed

MACHINE = TARGETS["icelake-server"]
SCALES = "0.5, 0.125, 2.0"  # powers of two: results of float32 are exact too
HEAD = '<ir_version: 9, opset_import: ["" : 19]> model '


def dense(a: str, zx: int, w: str, t: str = SCALES, z: str = "0, 0, 0", axis: int = 1) -> str:
    n = f"[{t.count(',') + 1}]" if "," in t else ""
    return f"""{HEAD}(float[5,4] x) => (float[5,3] y)
    <float s = {{0.03125}}, {a} zx = {{{zx}}}, {w}[4,3] w, float{n} t = {{{t}}},
     {w}{n} z = {{{z}}}> {{
        q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)
        b = DequantizeLinear <axis = {axis}> (w, t, z)
        y = MatMul(a, b)
    }}"""


def gemm(k: int) -> str:
    return f"""{HEAD}(float[5,{k}] x) => (float[5,3] y)
    <float s = {{0.03125}}, uint8 zx = {{7}}, int8[3,{k}] w, float[3] t = {{{SCALES}}},
     int8[3] z = {{0, 0, 0}}, float[3] c = {{1.0, -3.0, 0.5}}> {{
        q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)
        b = DequantizeLinear <axis = 0> (w, t, z)
        y = Gemm <transB = 1> (a, b, c)
    }}"""


MOVED = f"""{HEAD}(float[4,5] x) => (float[5,3] y)
    <float s = {{0.03125}}, uint8 zx = {{7}}, int8[4,3] w, float t = {{0.5}}, int8 z = {{0}}> {{
        q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)
        m = Transpose <perm = [1, 0]> (a)
        b = DequantizeLinear (w, t, z)
        y = MatMul(m, b)
    }}"""


def conv(
    a: str, zx: int, pads: str, groups: int = 1, channels: int = 4, zeros: str = "0, 0, 0"
) -> str:
    top, left, bottom, right = map(int, pads.split(","))
    size = f"{6 + top + bottom - 2},{7 + left + right - 1}"
    return f"""{HEAD}(float[2,{channels},6,7] x) => (float[2,3,{size}] y)
    <float s = {{0.03125}}, {a} zx = {{{zx}}}, int8[3,{channels // groups},3,2] w,
     float[3] t = {{{SCALES}}}, int8[3] z = {{{zeros}}}> {{
        q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)
        b = DequantizeLinear <axis = 0> (w, t, z)
        y = Conv <pads = [{pads}], group = {groups}> (a, b)
    }}"""


def pooled(a: str, zx: int) -> str:
    """Tools that quantize in front of a maximum, as NNCF, leave it between the quantization and the
    convolution."""
    return f"""{HEAD}(float[2,4,9,8] x) => (float[2,3,3,3] y)
    <float s = {{0.03125}}, {a} zx = {{{zx}}}, int8[3,4,3,2] w,
     float[3] t = {{{SCALES}}}, int8[3] z = {{0, 0, 0}}> {{
        q = QuantizeLinear(x, s, zx) a = DequantizeLinear(q, s, zx)
        m = MaxPool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0]> (a)
        b = DequantizeLinear <axis = 0> (w, t, z)
        y = Conv (m, b)
    }}"""


def integer(x: str, zx: int, w: str, zw: int) -> str:
    return f"""{HEAD}({x}[5,4] x) => (int32[5,3] y)
    <{x} zx = {{{zx}}}, {w}[4,3] w, {w} zw = {{{zw}}}> {{ y = MatMulInteger(x, w, zx, zw) }}"""


DYNAMIC = f"""{HEAD}(float[5,4] x) => (float[5,3] y) <int8[4,3] w, float t = {{0.25}}> {{
        q, s, z = DynamicQuantizeLinear(x)
        i = MatMulInteger(q, w, z) f = Cast <to = 1> (i)
        st = Mul(s, t) y = Mul(f, st)
    }}"""

TAKEN = {
    "uint8 by int8": dense("uint8", 119, "int8"),
    "no zero point": dense("uint8", 0, "int8"),
    "int8 by int8": dense("int8", -5, "int8"),
    "int8 without zero point": dense("int8", 0, "int8"),
    "one scale": dense("uint8", 255, "int8", "0.5", "0"),
    "weights around their zero point": dense("uint8", 3, "uint8", SCALES, "128, 128, 128"),
    "gemm": gemm(4),
    "moved": MOVED,
    "conv": conv("uint8", 119, "0,0,0,0"),
    "padded conv": conv("uint8", 119, "1,0,2,1"),
    "padded conv of int8": conv("int8", 0, "1,1,1,1"),
    "padded conv with zeros": conv("uint8", 0, "1,0,2,1"),
    "groups": conv("uint8", 11, "0,0,0,0", 3, 60),
    "behind a maximum": pooled("uint8", 119),
    "behind a maximum of int8": pooled("int8", -7),
    "uint8, int8": integer("uint8", 7, "int8", 0),
    "int8, int8": integer("int8", -128, "int8", 0),
    "int8, uint8": integer("int8", 127, "uint8", 128),
    "dynamic": DYNAMIC,
}
# A product and one that sums its rows.
FAR = {
    "weights far from their zero point": dense("uint8", 3, "uint8", SCALES, "0, 0, 0"),
    "some columns far": dense("int8", 3, "uint8", SCALES, "255, 128, 117"),
    "int8 at the end": dense("uint8", 3, "int8", SCALES, "-128, 0, 127"),
    "padded conv, far": conv("uint8", 119, "1,0,2,1", zeros="-128, 5, 127"),
    "conv, far": conv("int8", 0, "0,0,0,0", zeros="-128, 5, 127"),
    "uint8, uint8": integer("uint8", 7, "uint8", 0),
    "int8, uint8, far": integer("int8", -128, "uint8", 255),
    "dynamic, far": DYNAMIC.replace("(q, w, z)", "(q, w, z, zw)").replace(
        "<int8[4,3] w", "<uint8 zw = {117}, uint8[4,3] w"
    ),
}
LEFT = {
    "groups of weights that int8 does not hold": conv(
        "uint8", 11, "0,0,0,0", 3, 60, zeros="-128, 0, 0"
    ),
    "a scale for each row of weights": dense(
        "uint8", 3, "int8", "1.0, 2.0, 0.5, 4.0", "0,0,0,0", 0
    ),
    "depthwise": conv("uint8", 3, "0,0,0,0", 3, 3),
    "scales whose product float32 does not hold": dense("uint8", 3, "int8", "1.2e-38, 1.0, 2.0"),
}


def lowered(text: str, rng: np.random.Generator) -> Graph:
    """The graph before all rewrites, with drawn weights w."""
    declared = re.search(r"(u?int8)\[([\d,]+)\] w,? ?", text)
    assert declared is not None
    model = onnx.parser.parse_model(text.replace(declared[0], ""))
    bounds = np.iinfo(declared[1])
    drawn = rng.integers(bounds.min, bounds.max + 1, tuple(map(int, declared[2].split(","))))
    drawn.flat[:2] = bounds.min, bounds.max  # whatever the others are
    weights = onnx.numpy_helper.from_array(drawn.astype(declared[1]), "w")
    model.graph.initializer.append(weights)
    return lower(load_onnx(model, simplify=False))


def products(graph: Graph) -> list[tuple[str, ...]]:
    return [
        (graph.types[op.inputs[0]].dtype, graph.types[op.inputs[1]].dtype, op.type.dtype)
        for op in graph.operators.values()
        if op.kind in ("matmul", "conv2d")
    ]


def inputs(graph: Graph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    found = {}
    for name in graph.inputs:
        kind = graph.types[name]
        if kind.dtype == "float32":  # some beyond the range of the quantization
            found[name] = rng.uniform(-6, 6, kind.sizes).astype(np.float32)
        else:
            bounds = np.iinfo(kind.dtype)
            drawn = rng.integers(bounds.min, bounds.max + 1, kind.sizes)
            found[name] = drawn.astype(kind.dtype)
    return found


@pytest.mark.parametrize("text", (TAKEN | FAR).values(), ids=TAKEN | FAR)
def test_taken(text: str) -> None:
    """Products of float32 and of integers are both exact for these scales and sizes."""
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    before = lowered(text, rng)
    after = integer_products(before, MACHINE).check()
    count = 2 if text in FAR.values() else 1
    assert products(after) == count * [("uint8", "int8", "int32")]
    given = inputs(before, rng)
    wanted = before.evaluate(given, "float64")["y"]
    canonical = canonicalize(before, rewrites=(lambda g: integer_products(g, MACHINE), *PIPELINE))
    assert products(canonical) == count * [("uint8", "int8", "int32")]
    for graph in (after, canonical):
        got = graph.evaluate(given)["y"]
        if before.types["y"].dtype == "int32" or "DynamicQuantizeLinear" not in text:
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_left(text: str) -> None:
    """These stay as they are, and what remains of integers becomes exact float32."""
    rng = np.random.default_rng(fresh_seed())
    before = lowered(text, rng)
    after = integer_products(before, MACHINE)
    assert after.dump() == before.dump()
    exact = exact_products(after).check()
    assert all(kind == ("float32",) * 3 for kind in products(exact))
    given = inputs(before, rng)
    np.testing.assert_array_equal(exact.evaluate(given)["y"], before.evaluate(given)["y"])


def test_only_where_the_machine_multiplies_bytes() -> None:
    before = lowered(TAKEN["uint8 by int8"], np.random.default_rng(0))
    for name in ("x86-64-v3", "x86-64-v4", "skylake-avx512"):
        assert integer_products(before, TARGETS[name]) is before


def test_a_product_too_deep_for_int32_stays() -> None:
    before = lowered(gemm(30000), np.random.default_rng(0))
    assert integer_products(before, MACHINE).dump() == before.dump()


@pytest.mark.parametrize("zero", [-3, 300])
def test_padding_needs_a_zero_point_that_bytes_hold(zero: int) -> None:
    padded = f"""{HEAD}(uint8[2,4,6,7] x, float[3,4,3,3] w) => (float[2,3,6,7] y)
        <int32 z = {{{zero}}}> {{
            a = Cast <to = 6> (x) b = Sub(a, z) c = Cast <to = 1> (b)
            y = Conv <pads = [1, 1, 1, 1]> (c, w)
        }}"""
    for text in (padded, padded.replace("1, 1, 1, 1", "0, 0, 0, 0").replace("2,3,6,7", "2,3,4,5")):
        model = onnx.parser.parse_model(text.replace(", float[3,4,3,3] w", ""))
        drawn = np.random.default_rng(0).integers(-9, 9, (3, 4, 3, 3)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(drawn, "w"))
        before = lower(load_onnx(model, simplify=False))
        after = integer_products(before, MACHINE).check()
        given = inputs(before, np.random.default_rng(1))
        np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])
        if text is padded:
            assert after.dump() == before.dump()


def test_exact_products_stay_so() -> None:
    """No other numbers are multiplied instead (Strassen), nor are they rounded to fewer bits."""
    text = f"""{HEAD}(uint8[1,256,256] x, int8[256,192] w, int16[256,256] h) =>
        (int32[1,256,192] y, int32[1,256,256] t) <uint8 zx = {{0}}, int8 zw = {{0}}> {{
            y = MatMulInteger(x, w, zx, zw)
            i = Cast <to = 6> (h) c = Constant <value_int = 7> () e = Cast <to = 6> (c)
            s = Shape(h) f = Expand(e, s) a = Constant <value_ints = [0]> () n = Unsqueeze(i, a)
            t = MatMul(n, f)
        }}"""
    model = onnx.parser.parse_model(text.replace(", int8[256,192] w", ""))
    weights = np.random.default_rng(0).integers(100, 128, (256, 192)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    graph = canonicalize(exact_products(lower(load_onnx(model, simplify=False))))
    products = [op for op in graph.operators.values() if op.kind == "matmul"]
    assert len(products) >= 2 and all(op.get("exact") for op in products)
    for op in products:
        bits = op["exact"]
        assert bool(narrowed_operands(graph, op, "bfloat16")) == (bits <= 8), bits
        assert bool(narrowed_operands(graph, op, "float16")) == (bits <= 11), bits
    assert {op["exact"] for op in products} == {8, 15}
    graph = graph.prune()
    stage = next(op for op in products if op["exact"] == 8)
    types = {name: graph.types[name] for name in stage.inputs}
    plain = replace(stage, attrs=())
    for op, taken in ((stage, False), (plain, True)):
        made = make_stage([op], types, [op.inputs[1]])
        assert (strassen.match(made, TARGETS["x86-64-v3"]) is not None) == taken


@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_integers_are_exact_without_bytes(channels: int, groups: int) -> None:
    """In parts whose sums float32 holds, and not by minimal filtering, which sums other numbers."""
    rng = np.random.default_rng(fresh_seed())
    text = f"""{HEAD}(uint8[1,{groups * channels},6,7] x, uint8[4,{channels},3,3] w) =>
        (int32[1,4,6,7] y) <uint8 zx = {{3}}, uint8 zw = {{250}}> {{
            y = ConvInteger <group = {groups}, pads = [1, 1, 1, 1]> (x, w, zx, zw)
        }}"""
    before = lower(load_onnx(onnx.parser.parse_model(text), simplify=False))
    after = exact_products(before).check()
    made = [op for op in after.operators.values() if op.kind == "conv2d"]
    assert len(made) == {3: 1, 40: 2}[channels]
    for op in made:
        assert op.type.dtype == "float32" and op.get("exact")
        assert not applicable(op, after.types[op.inputs[1]].shape)
    given = inputs(before, rng)
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])
