"""Rewrites around roundings: fewer instructions for quantizing, with the same integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gtco.graph.exact_bfloat16 import exact_bfloat16
from gtco.graph.fusion.steps_in_floats import steps_in_floats
from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.quantized.byte_functions import byte_functions
from gtco.graph.rewrites.quantized.one_signedness import one_signedness
from gtco.graph.rewrites.quantized.padded_channels import padded_channels
from gtco.graph.rewrites.quantized.quantizations import quantizations
from gtco.graph.rewrites.quantized.quantized_concat import quantized_concat
from gtco.graph.rewrites.quantized.quantized_pooling import quantized_pooling
from gtco.graph.rewrites.quantized.reciprocal_scales import (
    reciprocal,
    reciprocal_scales,
    same_steps,
)
from gtco.machine.aarch64 import ARM_TARGETS
from gtco.machine.target import TARGETS
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType, make_stage
from tests.graphs import build, number
from tests.kernels import fresh_seed

SHAPE = (7, 300)


def quantized(
    scale: float,
    zero: int,
    dtype: str,
    *,
    offset: int | None = None,
    channels: tuple[int, ...] = (),
    more: Callable[[Graph, str], None] = lambda graph, q: None,
) -> Graph:
    """x quantized, and dequantized with the zero point ``offset``; ``more`` may read the 8 bits.
    The parameters have the shape ``channels``, and are the same in each.
    """
    kind, bounds = TensorType(SHAPE), np.iinfo(dtype)
    graph = Graph(("x",), ("y",), {"x": kind})
    s = graph.add_constant(np.full(channels, scale, np.float32))
    divided = graph.add("round", (graph.add("divide", ("x", s)),))
    shifted = graph.add("add", (divided, graph.add_constant(np.full(channels, zero, np.float32))))
    low, high = float(bounds.min), float(bounds.max)
    q = graph.add(
        "cast", (graph.add("clip", (shifted,), min=low, max=high),), TensorType(SHAPE, dtype)
    )
    wide = graph.add("cast", (q,), TensorType(SHAPE, "int32"))
    z = graph.add_constant(np.full(channels, zero if offset is None else offset, np.int32))
    steps = graph.add("cast", (graph.add("subtract", (wide, z)),), kind)
    graph.add("multiply", (steps, s), kind, output="y")
    more(graph, q)
    return graph.check()


def operators(graph: Graph) -> Graph:
    return quantizations(reciprocal_scales(graph)).check()


def drawn(scale: float, seed: int) -> np.ndarray:
    """Values around the middle of two steps, the extremes, and infinities."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    near = (rng.integers(-300, 300, SHAPE) + 0.5) * np.float64(scale)
    x = near.astype(np.float32).view(np.int32) + rng.integers(-3, 4, SHAPE).astype(np.int32)
    x = x.view(np.float32)
    x[0, :6] = np.inf, -np.inf, 3e38, -3e38, 0, np.float32(scale)
    return x


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("offset", [None, 5])
@pytest.mark.parametrize("channels", [(), (300,), (7, 1)])
def test_quantizing_and_dequantizing_are_one_operator_each(
    dtype: str, offset: int | None, channels: tuple[int, ...]
) -> None:
    before = quantized(0.037, 17, dtype, offset=offset, channels=channels)
    after = operators(before)
    assert after.histogram() == {"quantize": 1, "dequantize": 1}
    given = {"x": drawn(0.037, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


@pytest.mark.parametrize("offset", [None, 5])
def test_no_casts_in_a_stage_that_quantizes_and_dequantizes(offset: int | None) -> None:
    """Its 8 bits are gone; its values are the same."""
    graph = operators(quantized(0.037, 17, "uint8", offset=offset))
    stage = steps_in_floats(make_stage(graph.operators.values(), graph.types, graph.constants))
    assert [op.kind for op in stage.operators] == ["quantize", "dequantize"]
    assert {op.type.dtype for op in stage.operators} == {"float32"}
    values = {**graph.constants, "x": drawn(0.037, fresh_seed())}
    for op in stage.operators:
        values[op.output] = evaluate(op, *(values[x] for x in op.inputs))
    np.testing.assert_array_equal(values["y"], graph.evaluate({"x": values["x"]})["y"])


def test_bytes_that_a_product_reads_stay() -> None:
    """Of a stage that quantizes for a product and dequantizes too. One that ends with 8 bits, and
    one that begins with them, stay as they are.
    """
    graph = operators(quantized(0.037, 17, "uint8"))
    first, last = graph.operators.values()
    for op in (first, last):
        alone = make_stage([op], graph.types, graph.constants)
        assert steps_in_floats(alone) == alone
    w = graph.add_constant(np.ones((300, 4), np.int8))
    product = graph.add("matmul", (first.output, w), TensorType((7, 4), "int32"))
    wide = graph.add("cast", (product,), TensorType((7, 4)))
    sums = graph.add("sum", (last.output,), TensorType((7, 1)), axes=(1,), keepdims=True)
    graph.add("add", (wide, sums), TensorType((7, 4)), output="z")
    stage = make_stage(graph.operators.values(), graph.types, graph.constants)
    found = [op.type.dtype for op in steps_in_floats(stage).operators if op.kind == "quantize"]
    assert sorted(found) == ["float32", "uint8"]


def test_quantizations_that_stay_arithmetic() -> None:
    """By a division, and of values that are not rounded."""
    divided = quantized(1e-30, 3, "uint8")
    assert "quantize" not in operators(divided).histogram()
    unrounded = quantized(0.037, 3, "uint8")
    (rounding,) = (o for o in unrounded.operators.values() if o.kind == "round")
    unrounded.put(Operator("floor", rounding.inputs, rounding.output, rounding.type))
    assert "quantize" not in operators(unrounded).histogram()


@pytest.mark.parametrize(("zero", "moved"), [(17, 145), (-128, 0), (0, 128)])
def test_one_signedness(zero: int, moved: int) -> None:
    """int8 becomes uint8 where VPDPBUSD multiplies: the same values, no int8 left."""
    before = quantized(0.037, zero, "int8")
    after = one_signedness(before, TARGETS["icelake-server"]).check()
    assert {t.dtype for t in after.types.values()} == {"float32", "int32", "uint8"}
    (found,) = (o for o in operators(after).operators.values() if o.kind == "dequantize")
    assert operators(after).constants[found.inputs[2]] == moved
    given = {"x": drawn(0.037, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


def test_one_signedness_on_aarch64() -> None:
    """uint8 becomes int8 where SDOT multiplies."""
    before = quantized(0.037, 17, "uint8")
    after = one_signedness(before, ARM_TARGETS["neoverse-n1"]).check()
    assert {t.dtype for t in after.types.values()} == {"float32", "int32", "int8"}
    given = {"x": drawn(0.037, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


def test_bytes_that_others_read_keep_their_signedness() -> None:
    def read(graph: Graph, q: str) -> None:
        graph.add("identity", (q,), output="q")
        graph.outputs = ("y", "q")

    machine = TARGETS["icelake-server"]
    before = quantized(0.037, 17, "int8", more=read)
    assert one_signedness(before, machine).dump() == before.dump()
    unsigned = quantized(0.037, 17, "uint8")
    assert one_signedness(unsigned, machine).dump() == unsigned.dump()
    without = quantized(0.037, 17, "int8")
    assert one_signedness(without, TARGETS["x86-64-v3"]).dump() == without.dump()


@pytest.mark.parametrize("scale", [0.37, -0.37])
def test_a_maximum_is_found_before_it_is_dequantized(scale: float) -> None:
    """A negative scale turns the order around, so the maximum stays behind it."""
    kind = TensorType((2, 9, 8, 3))
    before = Graph(("q",), ("y",), {"q": TensorType(kind.shape, "uint8")})
    numbers = number(before, scale), number(before, 100.0)
    x = before.add("dequantize", ("q", *numbers), kind)
    window = dict(kernel=(3, 3), strides=(2, 2), padding=(1, 1, 1, 1), dilation=(1, 1))
    before.add(
        "max_pool2d", (before.add("relu", (x,)),), TensorType((2, 5, 4, 3)), output="y",
        layout="NHWC", **window,
    )  # fmt: skip
    after = quantized_pooling(before).check()
    assert (after.only_user("q").kind == "cast") == (scale > 0)
    given = {"q": np.random.default_rng(fresh_seed()).integers(0, 256, kind.shape).astype(np.uint8)}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_maximum_of_bytes_is_one_of_floats(dtype: str, layout: str) -> None:
    """Unless a window lies in the padding alone."""
    rng, taken = np.random.default_rng(fresh_seed()), set()
    for _ in range(120):
        kernel, strides, dilation = (tuple(map(int, rng.integers(1, 4, 2))) for _ in range(3))
        padding = tuple(map(int, rng.integers(0, 4, 4)))
        size = tuple(map(int, rng.integers(1, 11, 2)))
        out = tuple(
            (size[n] + padding[n] + padding[n + 2] - (kernel[n] - 1) * dilation[n] - 1)
            // strides[n] + 1
            for n in (0, 1)
        )  # fmt: skip
        if min(out) < 1:
            continue
        shape, made = ((2, *size, 3), (2, *out, 3))
        if layout == "NCHW":
            shape, made = (2, 3, *size), (2, 3, *out)
        before = Graph(("q",), ("y",), {"q": TensorType(shape, dtype)})
        before.add(
            "max_pool2d", ("q",), TensorType(made, dtype), output="y", layout=layout,
            kernel=kernel, strides=strides, padding=padding, dilation=dilation,
        )  # fmt: skip
        after = quantized_pooling(before.check()).check()
        taken.add(len(after.operators) == 3)
        bounds = np.iinfo(dtype)
        given = {"q": rng.integers(bounds.min, bounds.max + 1, shape).astype(dtype)}
        if len(after.operators) == 3:
            np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])
    assert taken == {True, False}


def test_rewrites_behind_a_maximum_read_whole_numbers() -> None:
    """They look up bytes, and multiply steps in bfloat16: a pooled tensor is one of bytes again."""
    kind, made = TensorType((2, 64, 64, 4)), TensorType((2, 32, 32, 4))
    before = Graph(("q",), ("y", "r"), {"q": TensorType(kind.shape, "int8")})
    x = before.add("dequantize", ("q", number(before, 0.05), number(before, -3)), kind)
    window = dict(kernel=(2, 2), strides=(2, 2), padding=(0, 0, 0, 0), dilation=(1, 1))
    pooled = before.add("max_pool2d", (x,), made, layout="NHWC", **window)
    high = np.float32(1 / 0.02)
    steps = [number(before, v) for v in (high, np.float32(1 / 0.02 - np.float64(high)), 9)]
    before.add(
        "quantize", (before.add("gelu", (pooled,)), *steps), replace(made, dtype="int8"),
        output="r", min=-128.0, max=127.0,
    )  # fmt: skip
    rows = before.add("reshape", (pooled,), TensorType((2, 1024, 4)))
    columns = before.add("permute", (rows,), axes=(0, 2, 1))
    before.add("matmul", (rows, columns), TensorType((2, 1024, 1024)), output="y")
    after = byte_functions(quantized_pooling(before.check()), TARGETS["icelake-server"])
    after = exact_bfloat16(after, TARGETS["znver4"]).check()
    kinds = {op.kind: after.types[op.inputs[0]].dtype for op in after.operators.values()}
    assert kinds["byte_function"] == "int8" and kinds["matmul"] == "bfloat16"
    assert kinds["dequantize"] == "int8"
    rng = np.random.default_rng(fresh_seed())
    given = {"q": rng.integers(-128, 128, kind.shape).astype(np.int8)}
    wanted, found = before.evaluate(given), after.evaluate(given)
    np.testing.assert_array_equal(found["r"], wanted["r"])
    np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("also_read", [False, True])
def test_parts_are_quantized_before_they_are_joined(also_read: bool) -> None:
    """If something else reads the floats of the whole, it stays as it is."""
    shapes = {"a": (3, 5), "b": (3, 2), "c": (3, 9)}
    before = Graph(tuple(shapes), (), {x: TensorType(shape) for x, shape in shapes.items()})
    whole = before.add("concat", tuple(shapes), TensorType((3, 16)), axis=1)
    numbers = number(before, 10.0), number(before, 1e-9), number(before, 7.0)
    q = before.add("quantize", (whole, *numbers), TensorType((3, 16), "uint8"), min=0.0, max=255.0)
    before.outputs = (q, before.add("relu", (whole,))) if also_read else (q,)
    after = quantized_concat(before.check()).check()
    if also_read:
        assert after.dump() == before.dump()
        return
    assert after.histogram() == {"quantize": 3, "concat": 1}
    assert after.producer(q).kind == "concat"
    rng = np.random.default_rng(fresh_seed())
    given = {x: rng.normal(0, 9, shape).astype(np.float32) for x, shape in shapes.items()}
    np.testing.assert_array_equal(after.evaluate(given)[q], before.evaluate(given)[q])


@pytest.mark.parametrize("scale", [0.037, 0.25, 1.0, 3.1e-4, 7.77e5])
def test_scales_become_reciprocals(scale: float) -> None:
    """Every integer is that of the division, also for infinities and at the middle of steps."""
    before = quantized(scale, 100, "uint8")
    after = reciprocal_scales(before).check()
    assert "divide" not in after.histogram() and after.histogram()["multiply_pair"] == 1
    given = {"x": drawn(scale, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


def test_a_reciprocal_is_tried_at_every_step() -> None:
    """Most scales fail with one float32 as their reciprocal, and nearly all pass with a pair; where
    a pair passes, no value of x gives another integer.
    """
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.uniform(-9, 3, 60)).astype(np.float32)
    single, pairs = 0, 0
    for scale in scales:
        high, low = reciprocal(float(scale))
        single += same_steps(float(scale), high, np.zeros_like(low), -255, 255)
        pairs += same_steps(float(scale), high, low, -255, 255)
        x = rng.uniform(-260, 260, 100_000).astype(np.float32) * scale
        multiplied = Operator("multiply_pair", ("x", "h", "l"), "y", TensorType(x.shape))
        got = np.rint(evaluate(multiplied, x, high, low))
        np.testing.assert_array_equal(got, np.rint(x / scale))
    assert single < 20 and pairs > 57


def test_divisions_that_stay() -> None:
    """Those whose results are not bounded, whose scale is computed or extreme, or not rounded."""
    kind = TensorType(SHAPE)
    unbounded = Graph(("x",), ("y",), {"x": kind})
    s = unbounded.add_constant(np.array(0.037, np.float32))
    unbounded.add("round", (unbounded.add("divide", ("x", s)),), kind, output="y")
    computed = quantized(0.037, 3, "uint8")
    computed.inputs, computed.types["s"] = ("x", "s"), TensorType(())
    (division,) = (o for o in computed.operators.values() if o.kind == "divide")
    computed.put(Operator("divide", ("x", "s"), division.output, kind))
    for graph in (unbounded, computed, quantized(1e-30, 3, "uint8"), quantized(0.0, 3, "uint8")):
        assert reciprocal_scales(graph).dump() == graph.dump()


@pytest.mark.parametrize("shows", ["round", "to integers", "comparison"])
def test_what_becomes_whole_keeps_its_last_bit(shows: str) -> None:
    """A division by 255 and a factor after another one, whose result goes on through element-wise
    operators and a move."""

    def steps(g: Graph, x: str) -> str:
        y = g.add("multiply", (g.add("multiply", (x, number(g, 0.3))), number(g, 0.7)))
        y = g.add("divide", (y, number(g, 255)))
        y = g.add("permute", (g.add("relu", (y,)),), TensorType((300, 7)), axes=(1, 0))
        if shows == "round":
            return g.add("round", (y,))
        if shows == "to integers":
            return g.add("cast", (y,), TensorType(g.types[y].shape, "int32"))
        return g.add("less", (y, number(g, 3)), TensorType(g.types[y].shape, "bool"))

    graph = build(steps, (7, 300))
    kinds = canonicalize(graph).histogram()
    assert kinds["divide"] == 1 and kinds["multiply"] == 2
    x = {"x": np.random.default_rng(5).uniform(-9e3, 9e3, (7, 300)).astype(np.float32)}
    (wanted,) = graph.evaluate(x).values()
    np.testing.assert_array_equal(canonicalize(graph).evaluate(x)["y"], wanted)


def test_channels_are_padded_to_whole_steps() -> None:
    """Of an image of 3 channels; a 1x1 convolution and one of 5 channels stay."""

    def convolution(channels: int, size: int) -> Graph:
        shape = (1, 8 + size, 7 + size, channels)
        graph = Graph(("q",), ("y",), {"q": TensorType(shape, "uint8")})
        drawn = np.random.default_rng(1).integers(-128, 128, (4, channels, size, size))
        w = graph.add_constant(drawn.astype(np.int8), "w")
        window = dict(strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1)
        made = TensorType((1, 9, 8, 4), "int32")
        graph.add("conv2d", ("q", w), made, output="y", layout="NHWC", **window)
        return graph

    before = convolution(3, 3)
    after = padded_channels(before).check()
    assert after.histogram() == {"pad": 1, "conv2d": 1}
    q = np.random.default_rng(fresh_seed()).integers(0, 256, before.types["q"].sizes)
    given = {"q": q.astype(np.uint8)}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])
    for stays in (convolution(3, 1), convolution(5, 3)):
        assert padded_channels(stays).dump() == stays.dump()
