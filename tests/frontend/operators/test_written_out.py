"""Pad, Col2Im, Attention and others as the importer writes them out, against ONNX Runtime.

The graphs are evaluated with numpy. Other tests check the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from gtco.frontend.onnx import load_onnx
from gtco.frontend.schema_functions import write_out
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError, UnsupportedError
from gtco.tensor.reference_spatial import conv_transpose2d
from tests.frontend.operators.one_node import Arrays, check, node_model

# -- Pad -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["reflect", "edge", "wrap", "constant"]))
def test_pad_repeats_elements_as_movement(data, mode):
    """By slices only, without an operator that the fallback would compile. A negative amount cuts
    first.
    """
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    widths = []
    for n in shape:
        cuts = data.draw(st.tuples(*[st.integers(0, min(2, (n - 1) // 2))] * 2))
        most = n - sum(cuts) - 1
        widths.append(tuple(-cut or data.draw(st.integers(0, most)) for cut in cuts))
    if mode == "edge" and data.draw(st.booleans()):
        widths[-1] = (7, 3)
    pads = np.array([w[0] for w in widths] + [w[1] for w in widths], np.int64)
    model = node_model(
        "Pad",
        {"x": np.zeros(shape, np.float32)},
        {"pads": pads},
        ["x", "pads"],
        1,
        mode=mode,
    )
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    check(model, {"x": x})
    kinds = {op.kind for op in lower(load_onnx(model, simplify=False)).operators.values()}
    assert kinds <= {"slice", "broadcast", "concat", "identity", "pad"}
    assert mode == "constant" or "pad" not in kinds


# -- Col2Im ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    image=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    block=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 1)] * 4),
)
def test_col2im(image, block, strides, dilations, pads):
    counts = [
        (image[i] + pads[i] + pads[i + 2] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1
        for i in range(2)
    ]
    shape = (2, 3 * block[0] * block[1], counts[0] * counts[1])
    x = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    constants = {"image": np.array(image, np.int64), "block": np.array(block, np.int64)}
    model = node_model(
        "Col2Im",
        x,
        constants,
        ["x", "image", "block"],
        1,
        strides=strides,
        dilations=dilations,
        pads=pads,
    )
    check(model, x)


# -- Attention -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 7)),
    flat=st.booleans(),
    causal=st.booleans(),
    mask=st.sampled_from(["", "bool", "float", "constant"]),
    past=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    mode=st.sampled_from([0, 1, 2, 3]),
    scale=st.sampled_from([None, 0.3]),
)
def test_attention(heads, lengths, flat, causal, mask, past, softcap, mode, scale):
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    (q_heads, kv_heads), (rows, keys) = heads, lengths
    if causal:
        keys = rows  # ONNX Runtime 1.31 gives another meaning if they differ
    inputs: Arrays = {
        "q": normal(2, rows, q_heads * 8) if flat else normal(2, q_heads, rows, 8),
        "k": normal(2, keys, kv_heads * 8) if flat else normal(2, kv_heads, keys, 8),
        "v": normal(2, keys, kv_heads * 5) if flat else normal(2, kv_heads, keys, 5),
    }
    total = keys + (3 if past else 0)
    constants: Arrays = {}
    if mask:
        allowed = rng.random((2, 1, rows, total)) < 0.7
        allowed[..., 0] = True  # rows without any key: the test below
        value = normal(rows, total) if mask in ("float", "constant") else allowed
        (constants if mask == "constant" else inputs)["mask"] = value
    if past:
        inputs |= {"pk": normal(2, kv_heads, 3, 8), "pv": normal(2, kv_heads, 3, 5)}
    attrs: dict[str, Any] = {"is_causal": int(causal), "softcap": softcap}
    attrs["qk_matmul_output_mode"] = mode
    if flat:
        attrs |= {"q_num_heads": q_heads, "kv_num_heads": kv_heads}
    if scale:
        attrs["scale"] = scale
    order = ["q", "k", "v", "mask" if mask else "", *(["pk", "pv"] if past else [])]
    # with a cache, its new contents and the scores are outputs
    check(node_model("Attention", inputs, constants, order, 4 if past else 1, **attrs), inputs)


def test_rows_that_see_no_key_are_zeros_and_masks_may_be_short():
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 6, 4), "v": (1, 2, 6, 4)}
    inputs: Arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    inputs["mask"] = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    model = node_model("Attention", inputs, {}, ["q", "k", "v", "mask"], 1)
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y0", TensorProto.FLOAT, (1, 2, 3, 4))
    )
    (got,) = lower(load_onnx(model, simplify=False)).evaluate(inputs).values()
    assert not got[:, :, 1].any() and np.isfinite(got).all()
    np.testing.assert_allclose(got[:, :, 2], inputs["v"][:, :, 0], rtol=1e-6)


# -- BatchNormalization in training mode -----------------------------------------------------------


def standardized(weight: np.ndarray, inputs: Arrays, constants: Arrays) -> onnx.ModelProto:
    """``weight`` normalised channel by channel, as BiT's convolutions do with their weights."""
    channels, size = weight.shape[0], weight.size // weight.shape[0]
    ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    stored = {"shape": np.array([1, channels, size], np.int64), "mean": zeros + 0.5, "var": ones}
    constants = {**constants, **stored, "scale": 2 * ones, "bias": ones}
    order = ["flat", "scale", "bias", "mean", "var"]
    made = ["y0", "y1", "y2"]
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["w", "shape"], ["flat"]),
            helper.make_node(
                "BatchNormalization", order, made, training_mode=1, momentum=0.7, epsilon=1e-3
            ),
        ],
        "test",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_weights_are_standardized_by_their_own_statistics():
    """ONNX Runtime has no such kernel, so this compares with the operator's reference in onnx."""
    weight = np.random.default_rng(0).normal(size=(6, 5, 3, 3)).astype(np.float32)
    model = standardized(weight, {}, {"w": weight})
    wanted = ReferenceEvaluator(model).run(None, {})
    for value, array in zip(model.graph.output, wanted, strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, array.shape))
    got = list(lower(load_onnx(model, simplify=False)).evaluate({}).values())
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_in_training_mode_is_refused():
    weight = np.zeros((6, 5, 3, 3), np.float32)
    model = standardized(weight, {"w": weight}, {})
    for value in model.graph.output:
        shape = (1, 6, 45) if value.name == "y0" else (6,)
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))
    with pytest.raises(UnsupportedError, match=r"model\.eval"):
        lower(load_onnx(model, simplify=False))


def test_an_operator_with_constant_inputs_is_written_out():
    """The rotary embeddings of opset 23, whose tables are constants in most models."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]>
        g (float[2,3,5,8] x, int64[2,5] p) => (float[2,3,5,8] y)
        { a = Relu(x) y = RotaryEmbedding(a, c, s, p) }"""
    )
    for name in "cs":
        table = rng.standard_normal((16, 4)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    written = write_out(model, {"Relu"})
    assert all(node.op_type != "RotaryEmbedding" for node in written.graph.node)
    feeds = {"x": rng.standard_normal((2, 3, 5, 8)).astype(np.float32)}
    feeds["p"] = rng.integers(0, 16, (2, 5))
    results = [
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)[0]
        for m in (model, written)
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "operator",
    [
        "y = Swish(x)",
        "y = MeanVarianceNormalization(x)",
        "r = Relu(x) y = com.example.twice(r)",
    ],
)
def test_attributes_left_to_their_defaults(operator: str) -> None:
    """ONNX's inliner leaves them out of the definition, which is then not valid."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 24, "com.example": 1]>
        g (float[2,3,4,5] x) => (float[2,3,4,5] y) {{ {operator} }}
        <domain: "com.example", opset_import: ["": 24]>
        twice (x) => (y) {{ h = Swish(x) y = Swish(h) }}"""
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    (got,) = lower(load_onnx(model)).evaluate({"x": x}).values()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_constant_channel_is_normalized_to_zeros() -> None:
    """And one whose mean is large beside its deviation keeps its digits."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (float[2,3,8,8] x) => (float[2,3,8,8] y) {
            y = MeanVarianceNormalization(x) }"""
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    x[:, 0], x[:, 1] = 0.25, 1000 + 0.1 * x[:, 1]
    wide = x.astype(np.float64)
    axes = (0, 2, 3)
    wanted = (wide - wide.mean(axes, keepdims=True)) / (wide.std(axes, keepdims=True) + 1e-9)
    (got,) = lower(load_onnx(model)).evaluate({"x": x}).values()
    assert not got[:, 0].any()
    np.testing.assert_allclose(got[:, 1:], wanted[:, 1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm", ["GroupNormalization", "MeanVarianceNormalization"])
def test_behind_what_onnx_infers_no_type_of(norm):
    """Celu's definition asks for the type of its input. Of two Celus, the type of the second one is
    inferred from the first.
    """
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype(np.float32)}
    groups = {"num_groups": 2} if norm == "GroupNormalization" else {}
    scales = ["ones", "ones"] if groups else []
    nodes = [
        helper.make_node(norm, ["x", *scales], ["n"], **groups),
        helper.make_node("Celu", ["n"], ["c"]),
        helper.make_node(norm, ["c", *scales], ["m"], **groups),
        helper.make_node("Celu", ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs["x"].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(6, np.float32), "ones")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    written = write_out(model, {"Sub", "Mul", norm})
    assert "Celu" not in {node.op_type for node in written.graph.node}
    check(written, inputs)


@pytest.mark.parametrize("alpha", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4)])
def test_celu_keeps_the_shape(shape: tuple[int, ...], alpha: float) -> None:
    """This includes a scalar: ONNX's definition adds a vector of one element."""
    x = np.asarray(np.random.default_rng(0).normal(size=shape), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Celu", ["x"], ["y"], alpha=alpha)],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    (got,) = lower(load_onnx(helper.make_model(graph))).evaluate({"x": x}).values()
    wanted = np.where(x > 0, x, alpha * np.expm1(x / np.float64(alpha)))
    assert got.shape == shape and got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("strides", "pads", "more", "groups"),
    [
        ([1, 2], [0, 1, 1, 0], [2, 3], 1),
        ([2, 2], [0, 1, 1, 3], [2, 3], 2),
        ([2], [1, 0], [4], 1),
    ],
)
def test_an_output_padding_of_a_stride_or_more(
    strides: list[int], pads: list[int], more: list[int], groups: int
) -> None:
    """The result has zeros and the bias after the product. ONNX Runtime and TVM refuse such a
    padding; PyTorch accepts it if a dilation is larger.
    """
    space, rng = len(strides), np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 4, 5)[: 2 + space]).astype(np.float32)
    constants = {
        "w": rng.normal(size=(4, 3, 2, 3)[: 2 + space]).astype(np.float32),
        "b": rng.normal(size=3 * groups).astype(np.float32),
    }
    attrs = {"strides": strides, "pads": pads, "output_padding": more, "group": groups}
    model = node_model("ConvTranspose", {"x": x}, constants, ["x", "w", "b"], 1, **attrs)
    names = ["n", "c", "h", "w"][: 2 + space]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", TensorProto.FLOAT, names))
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()

    def image(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float64) if space == 2 else a.astype(np.float64)[:, :, None]

    wanted = conv_transpose2d(
        image(x),
        image(constants["w"]),
        strides=strides if space == 2 else [1, *strides],
        padding=pads if space == 2 else [0, pads[0], 0, pads[1]],
        output_padding=more if space == 2 else [0, *more],
        groups=groups,
        layout="NCHW",
    )
    wanted = wanted.reshape(got.shape) + constants["b"].reshape(1, -1, *[1] * space)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(18))
def test_an_output_shape_of_a_transposed_convolution(seed: int) -> None:
    """As Keras's files have it. It may be smaller than the product, and larger."""
    rng = np.random.default_rng(seed)
    space, groups = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    sizes, kernel, strides, dilations = (
        rng.integers(low, high, space).tolist() for low, high in ((2, 7), (1, 5), (1, 4), (1, 3))
    )
    whole = [
        s * (n - 1) + d * (k - 1) + 1
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    more = [int(rng.integers(0, min(s, 2))) for s in strides]
    # ONNX Runtime takes as many more as a strided convolution would skip. The inference of shapes
    # gives too few axes for a size that is smaller than the input's
    wanted = [
        max(size, n + int(rng.integers(-3, s)))
        for size, n, s in zip(sizes, whole, strides, strict=True)
    ]
    x = rng.normal(size=(2, 2 * groups, *sizes)).astype(np.float32)
    constants = {
        "w": rng.normal(size=(2 * groups, 3, *kernel)).astype(np.float32),
        "b": rng.normal(size=3 * groups).astype(np.float32),
    }
    attrs = {"strides": strides, "dilations": dilations, "group": groups, "output_padding": more}
    attrs |= {"output_shape": wanted, "kernel_shape": kernel}
    if style := ("", "SAME_UPPER", "SAME_LOWER")[seed % 3]:
        attrs["auto_pad"] = style
    model = node_model("ConvTranspose", {"x": x}, constants, ["x", "w", "b"], 1, **attrs)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    assert got.shape == (2, 3 * groups, *wanted)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Max", "Min", "Mean", "Sum"])
@pytest.mark.parametrize("other", [(1,), (1, 1, 1, 1), (2, 3, 1, 1)])
def test_a_size_of_one_beside_none(kind: str, other: tuple[int, ...]) -> None:
    """The result has no elements, as ONNX's broadcasting says."""
    inputs = {"x": np.ones((1, 1, 2, 1), np.float32), "y": np.ones(other, np.float32)}
    model = node_model(kind, inputs, {"nothing": np.zeros(1, np.int64)}, ["none", "y"], 1)
    cut = helper.make_node("Slice", ["x", "nothing", "nothing", "axis"], ["none"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "axis"))
    model.graph.node.insert(0, cut)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    (got,) = lower(load_onnx(model, simplify=False)).evaluate(inputs).values()
    assert got.shape == want.shape and got.size == 0 and got.dtype == want.dtype


def test_what_breaks_a_rule_before_an_operator_is_named() -> None:
    """It, and not the operator behind it whose shape follows from it."""
    tokens = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 4, 8))
    gamma = numpy_helper.from_array(np.ones(8, np.float32), "gamma")
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "table"], ["placed"], name="add_table"),
            helper.make_node(
                "SkipLayerNormalization", ["placed", "x", "gamma"], ["y"], domain="com.microsoft"
            ),
        ],
        "table_of_three",
        [tokens],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [gamma, numpy_helper.from_array(np.ones((3, 4, 8), np.float32), "table")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    load_onnx(model, shapes={"batch": 3}, simplify=False)
    for simplify in (False, True):
        with pytest.raises(ModelError, match=r"'add_table' \(Add\) breaks a rule of ONNX"):
            load_onnx(model, shapes={"batch": 2}, simplify=simplify)
