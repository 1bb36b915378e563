"""Which products are quantized, and the graph that this gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from gtco.frontend.onnx import read_onnx
from gtco.frontend.weights import whole
from gtco.quantization.insertion import insert, steps_of, steps_of_blocks, with_switches
from gtco.quantization.observers import Range
from gtco.quantization.products import Constants, Product, products_of
from gtco.support.errors import ModelError, OptionError
from tests.quantization.models import block, evaluate, images

WIDE = Range(-4.0, 4.0)


def inserted(model: onnx.ModelProto, exclude: tuple[str, ...] = ()) -> onnx.ModelProto:
    products = [p for p in of(model, exclude) if not p.float_because]
    return put(model, products, {p.tensor: WIDE for p in products})


def of(model: onnx.ModelProto, exclude: Sequence[str] = ()) -> list[Product]:
    return products_of(read_onnx(model), exclude)


def put(
    model: onnx.ModelProto, products: Sequence[Product], ranges: Mapping[str, Range]
) -> onnx.ModelProto:
    made = insert(read_onnx(model), products, ranges)
    return whole(made.skeleton, made.weights)


def test_the_graph_has_a_pair_for_each_tensor_and_each_weight() -> None:
    model = block()
    made = inserted(model)
    onnx.checker.check_model(made, full_check=True)
    counts = Counter(node.op_type for node in made.graph.node)
    # n, c, r, g, y, g2 are read by products; wq, wk, wv, wo, w1 and w2 are weights
    assert counts["QuantizeLinear"] == 6 and counts["DequantizeLinear"] == 12
    assert counts["Transpose"] == 2  # that of the weights is gone
    tensors = {t.name: t for t in made.graph.initializer}
    for name in ("wq", "wk", "wv", "wo", "w1", "w2"):
        assert name not in tensors
    for name in ("stem_weight", "head_weight"):
        assert tensors[name].data_type == onnx.TensorProto.FLOAT
    assert len(made.SerializeToString()) < 0.65 * len(model.SerializeToString())
    readers = [n for n in made.graph.node if n.op_type == "MatMul" and "n_dequantized" in n.input]
    assert len(readers) == 3
    assert made.opset_import[0].version == 17 and made.producer_name == "gtco"


def test_the_values_are_those_of_rounded_operands() -> None:
    """By hand for one product, with the weights' largest at 127."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        one (float[4,6] x) => (float[4,5] y) {
            r = MatMul(x, w0) h = MatMul(r, w) y = MatMul(h, w2)
        }"""
    )
    rng = np.random.default_rng(2)
    given = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {"w0": (6, 6), "w": (6, 5), "w2": (5, 5)}.items()
    }
    for name, value in given.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    model.graph.output.append(onnx.helper.make_tensor_value_info("h", 1, [4, 5]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("r", 1, [4, 6]))
    products = [p for p in of(model) if p.output == "h"]
    chosen = Range(-3.0, 2.0)
    made = put(model, products, {"r": chosen})
    x = rng.standard_normal((4, 6)).astype(np.float32)
    got = evaluate(made, {"x": x})
    steps, scales = steps_of(given["w"], 1)
    assert steps.dtype == np.int8 and np.abs(steps).max(axis=0).tolist() == [127] * 5
    np.testing.assert_allclose(steps * scales, given["w"], atol=scales.max() / 1.99)
    q = np.clip(np.rint(got["r"] / np.float32(chosen.scale)) + chosen.zero, 0, 255)
    wanted = ((q - chosen.zero) * chosen.scale) @ (steps * scales)
    np.testing.assert_allclose(got["h"], wanted, rtol=1e-4, atol=1e-5)


def test_channels_of_zeros_and_of_tiny_weights() -> None:
    w = np.zeros((3, 4), np.float32)
    w[:, 1], w[:, 2], w[:, 3] = 1e-44, [1.0, -2.0, 0.5], 1e-38
    steps, scales = steps_of(w, 1)
    assert np.isfinite(scales).all() and (scales >= np.finfo(np.float32).tiny).all()
    np.testing.assert_allclose(steps * scales, w, atol=0.01)


@pytest.mark.parametrize("drawn", range(4))
def test_switches_choose_between_float_and_int8(drawn: int) -> None:
    """Any choice gives what the model with just those products quantized gives; none gives the
    float model, to the last bit.
    """
    model = block()
    products = of(model)
    switched = with_switches(read_onnx(model), products)
    rng = np.random.default_rng(drawn)
    chosen = rng.random(len(switched.products)) < (0.0 if drawn == 0 else 0.5)
    image = images(1)
    some = [p for p, taken in zip(switched.products, chosen, strict=True) if taken]
    settings = switched.settings(dict.fromkeys(switched.tensors, WIDE), [p.output for p in some])
    made = whole(switched.model.skeleton, switched.model.weights)
    got = evaluate(made, {"image": image, **settings})
    alone = put(model, some, {p.tensor: WIDE for p in some}) if some else model
    wanted = evaluate(alone, {"image": image})
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)
    if drawn == 0:
        np.testing.assert_array_equal(got["logits"], wanted["logits"])
        assert set(switched.observed) == {"n", "c", "r", "g", "y", "g2"}


def test_what_stays_in_float() -> None:
    products = {p.output: p for p in of(block())}
    assert set(products) == {"p", "q", "k", "v", "o", "h", "m", "m2", "m3", "logits"}
    assert products["p"].float_because == "reads the input"
    assert products["logits"].float_because == "makes the output"
    assert {p.float_because for p in products.values()} == {
        "",
        "reads the input",
        "makes the output",
    }
    np.testing.assert_array_equal(products["o"].weights, Constants(block().graph, {}).value("wo").T)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("wq", {"q"}),  # weights
        ("/h/MatMul", {"h"}),  # a node
        ("m2", {"m2"}),  # a part of a node's name, or the output's
        ("b1", {"h"}),  # the bias
        ("w[12]", {"h", "m", "m2", "m3"}),  # a pattern
        ("/[qkv]/*", {"q", "k", "v"}),
    ],
)
def test_exclude_finds_names(name: str, left: set[str]) -> None:
    products = of(block(), [name])
    assert {p.output for p in products if p.float_because == "excluded"} == left


@pytest.mark.parametrize("name", ["blocks.0.q", "blocks.*.q", "block?.0.q", "blocks.0", "*.q"])
def test_exclude_finds_what_the_table_shows(name: str) -> None:
    """It shows a linear layer of PyTorch without ``.weight``."""
    model = block()
    for value in model.graph.initializer:
        value.name = value.name.replace("wq", "blocks.0.q.weight")
    for node in model.graph.node:
        node.input[:] = [n.replace("wq", "blocks.0.q.weight") for n in node.input]
    products = of(model, [name])
    assert [p.label for p in products if p.float_because == "excluded"] == ["blocks.0.q"]


@pytest.mark.parametrize("name", ["wz", "w", "MatMul2", "q/Mat"])
def test_a_name_that_no_product_has(name: str) -> None:
    with pytest.raises(OptionError, match=f"called '{name}'. (Near it are|There are) /"):
        of(block(), [name])


def test_nothing_to_quantize() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        none (float[4,4] x) => (float[4,4] y) { y = MatMul(x, x) }"""
    )
    with pytest.raises(ModelError, match="no product to quantize"):
        of(model)
    with pytest.raises(ModelError, match="no product is left to quantize: '/p/Conv' is excluded"):
        of(block(), ["*"])


def test_a_model_of_ends_alone_has_them_quantized() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        one (float[4,4] x) => (float[4,4] y)
        <float[4,4] w = {1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}> { y = MatMul(x, w) }"""
    )
    (product,) = of(model)
    assert product.float_because == ""


def test_weights_that_are_no_numbers() -> None:
    model = block()
    for tensor in model.graph.initializer:
        if tensor.name == "w1":
            value = numpy_helper.to_array(tensor).copy()
            value[0, 0] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(value, "w1"))
    with pytest.raises(ModelError, match="'w1' of '/h/MatMul' hold NaN"):
        of(model)


@pytest.mark.parametrize(
    ("bits", "block", "lost"), [(4, 16, 0.08), (4, 128, 0.13), (8, 32, 0.006)]
)
def test_steps_of_blocks(bits: int, block: int, lost: float) -> None:
    """The largest step is at most clipped a little, and scales are float16's where that is wide
    enough.
    """
    rng = np.random.default_rng(block)
    w = rng.standard_normal((70, 9)).astype(np.float32)
    w[:block, 0] = 0
    w[0, 1] = -1e7  # its scale is beyond float16
    w[1:, 1] = 0
    for axis in (0, 1):
        given = w if axis else np.ascontiguousarray(w.T)
        steps, scale = steps_of_blocks(given, axis, bits, block)
        assert steps.shape == given.shape and steps.dtype == np.int8
        assert steps.min() >= -(2 ** (bits - 1)) and steps.max() < 2 ** (bits - 1)
        wide = np.moveaxis(np.repeat(scale, block, axis=1 - axis), axis, 1)[: len(w)]
        back = np.moveaxis(steps, axis, 1) * wide
        assert (np.abs(back - w) <= 0.2 * np.abs(w) + 0.5 * np.abs(wide)).all()
        assert np.linalg.norm((back - w)[:, 2:]) < lost * np.linalg.norm(w[:, 2:])
        np.testing.assert_allclose(back[0, 1], w[0, 1], 1e-6)
        with np.errstate(over="ignore"):
            held = scale.astype(np.float16).astype(np.float32) == scale
        assert held.sum() == held.size - 1 and (scale != 0).all()


def test_blocks_that_lose_nothing() -> None:
    """Some scales lose more than the one before and less than the best."""
    w = np.full((256, 1), 3, np.float32)
    w[0] = -8
    steps, scale = steps_of_blocks(w, 1, 4, 256)
    np.testing.assert_array_equal(steps * scale, w)


def test_weights_that_are_read_along_both_axes() -> None:
    """Each of the two products has scales along its own output channels."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        both (float[2,8] x) => (float[2,8] y) {
            a = Relu(x) b = MatMul(a, w) c = Relu(b) y = Gemm<transB=1>(c, w)
        }"""
    )
    w = np.random.default_rng(0).standard_normal((8, 8)) * np.arange(1, 9)
    model.graph.initializer.append(numpy_helper.from_array(w.astype(np.float32), "w"))
    products = of(model)
    made = put(model, products, {p.tensor: WIDE for p in products})
    axes = {
        attribute.i
        for node in made.graph.node
        if node.op_type == "DequantizeLinear"
        for attribute in node.attribute
        if attribute.name == "axis"
    }
    assert axes == {0, 1}


def test_products_of_one_bias_have_names_of_their_own() -> None:
    """Exporters store biases with equal contents once."""
    given = np.ones((4, 4), np.float32)
    nodes, x = [], "x"
    for n in range(3):
        nodes.append(helper.make_node("MatMul", [x, f"w{n}"], [f"m{n}"], name=f"/layer{n}/MatMul"))
        nodes.append(helper.make_node("Add", [f"m{n}", "layer0.bias"], [f"y{n}"]))
        x = f"y{n}"
    graph = helper.make_graph(
        nodes,
        "three",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (2, 4))],
        [helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, (2, 4))],
        [numpy_helper.from_array(given * n, f"w{n}") for n in range(3)]
        + [numpy_helper.from_array(np.zeros(4, np.float32), "layer0.bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert [p.label for p in of(model)] == [f"/layer{n}/MatMul" for n in range(3)]


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1.0, 1e15, 1e20])
def test_blocks_of_any_size(size: float) -> None:
    weights = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    scale, steps = steps_of_blocks(weights * np.float32(size), 1, 4, 32)
    off = np.abs(scale * steps.astype(np.float64) - weights * np.float64(size)).max()
    assert off < 0.1 * np.abs(weights * np.float64(size)).max()
