"""Products, convolutions, norms and activations of ONNX Runtime's domain, against ONNX Runtime, or
against numpy if it has them only for GPUs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tests.few_nodes import by_onnxruntime, compare, model, node, normal, refused

FEW = settings(max_examples=30, deadline=None)


@FEW
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    turns=st.tuples(*[st.booleans()] * 4),
    alpha=st.sampled_from([None, 1.0, -0.25]),
)
def test_fused_matmul(batch, sizes, turns, alpha):
    m, k, n = sizes
    turn_a, turn_b, front_a, front_b = turns
    if not batch:
        front_a = front_b = False  # it moves the batch axes, and there are none

    def given_shape(rows: int, columns: int, turned: bool, front: bool) -> list[int]:
        shape = [*batch, *((columns, rows) if turned else (rows, columns))]
        if front:  # the result is to be [batch..., second last, last]
            shape = [shape[-2], *shape[:-2], shape[-1]]
        return shape

    arrays = {
        "a": normal(1, *given_shape(m, k, turn_a, front_a)),
        "b": normal(2, *given_shape(k, n, turn_b, front_b)),
    }
    flags = {"transA": turn_a, "transB": turn_b, "transBatchA": front_a, "transBatchB": front_b}
    made = node("FusedMatMul", ["a", "b"], alpha=alpha, **{k: int(v) for k, v in flags.items()})
    compare(model([made], arrays), arrays)


def test_transpose_matmul_and_vectors():
    arrays = {"a": normal(1, 4, 3), "b": normal(2, 4, 5)}
    compare(model([node("TransposeMatMul", ["a", "b"], transA=1, alpha=2.0)], arrays), arrays)
    arrays = {"a": normal(1, 4), "b": normal(2, 5, 4)}
    compare(model([node("FusedMatMul", ["a", "b"], transA=1, transB=1)], arrays), arrays)


ACTIVATIONS = {
    "Relu": [],
    "Sigmoid": [],
    "Tanh": [],
    "LeakyRelu": [0.3],
    "Clip": [-0.4, 0.7],
    "HardSigmoid": [0.3, 0.4],
}


@pytest.mark.parametrize("kind", [None, *ACTIVATIONS])
@pytest.mark.parametrize("addend", [False, True])
def test_fused_conv(kind, addend):
    arrays = {"x": normal(1, 2, 4, 7, 6)}
    weights = {"w": normal(2, 6, 2, 3, 3), "b": normal(3, 6)}
    inputs = ["x", "w", "b"]
    if addend:
        arrays["z"] = normal(4, 2, 6, 4, 3)
        inputs.append("z")
    parameters = ACTIVATIONS[kind] or None if kind else None
    shape = {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    made = node("FusedConv", inputs, activation=kind, activation_params=parameters, **shape)
    if not addend:
        compare(model([made], arrays, weights), arrays)
        return
    # ONNX Runtime's kernel for CPUs takes an addend only with Relu
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], **shape),
        helper.make_node("Add", ["c", "z"], ["s" if kind else "y"]),
    ]
    names = {"LeakyRelu": ["alpha"], "HardSigmoid": ["alpha", "beta"]}.get(kind or "", [])
    attrs = dict(zip(names, ACTIVATIONS.get(kind or "", []), strict=False))
    bounds = {"low": np.float32(-0.4), "high": np.float32(0.7)} if kind == "Clip" else {}
    if kind:
        nodes.append(helper.make_node(kind, ["s", *bounds], ["y"], **attrs))
    plain = model(nodes, arrays, weights | {k: np.asarray(v) for k, v in bounds.items()})
    same(model([made], arrays, weights), plain, arrays)


def same(fused, plain, arrays, tolerance=1e-6):
    """Both become the same canonical operators, and the values of the plain one are right."""
    kinds = [op.kind for op in compare(plain, arrays).operators.values()]
    graph = compare(fused, arrays, by_onnxruntime(plain, arrays), tolerance)
    assert [op.kind for op in graph.operators.values()] == kinds


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        (None, {}),
        ("Relu", {}),
        ("LeakyRelu", {"activation_alpha": 0.2}),
        ("Tanh", {}),
        ("Elu", {"activation_alpha": 0.5}),
        ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.6}),
        ("ThresholdedRelu", {"activation_alpha": 0.5}),
    ],
)
def test_fused_gemm(kind, attrs):
    arrays = {"a": normal(1, 5, 3), "b": normal(2, 5, 4), "c": normal(3, 4)}
    given = attrs | {"transA": 1, "alpha": 0.5, "beta": 2.0, "activation": kind}
    if kind is not None:
        compare(model([node("FusedGemm", ["a", "b", "c"], **given)], arrays), arrays)
    else:
        with_none = model([node("FusedGemm", ["a", "b", "c"], **given)], arrays)
        compare(with_none, arrays, [0.5 * arrays["a"].T @ arrays["b"] + 2 * arrays["c"]])


def test_an_activation_that_is_not_known_is_refused():
    arrays = {"a": normal(1, 5, 3), "b": normal(2, 3, 4)}
    made = model([node("FusedGemm", ["a", "b"], activation="Swoosh")], arrays)
    refused(made, r"the FusedGemm.*'Swoosh' is not supported")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_channels_last_convolutions(last, group):
    """The weights have their channels last, as the optimizer writes them, or first, as the
    specification says.
    """
    arrays = {"x": normal(1, 2, 7, 6, 4)}
    weight = normal(2, 6, 4 // group, 3, 2)
    attrs = {"group": group, "pads": [1, 0, 1, 0], "strides": [2, 1], "kernel_shape": [3, 2]}
    given = weight.transpose(0, 2, 3, 1) if last else weight
    fused = model(
        [node("NhwcConv", ["x", "w", "b"], **attrs)], arrays, {"w": given, "b": normal(3, 6)}
    )
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w", "b"], ["c"], **attrs),
        helper.make_node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
    ]
    plain = model(nodes, arrays, {"w": weight, "b": normal(3, 6)})
    wanted = by_onnxruntime(plain, arrays)
    compare(fused, arrays, wanted)
    made = node("NhwcFusedConv", ["x", "w", "b", "z"], activation="Relu", **attrs)
    arrays["z"] = normal(4, *wanted[0].shape)
    compare(
        model([made], arrays, {"w": weight, "b": normal(3, 6)}),
        arrays,
        [np.maximum(wanted[0] + arrays["z"], 0)],
    )


def test_channels_last_pooling():
    x = np.random.default_rng(0).integers(-99, 99, (1, 6, 5, 3)).astype(np.int8)
    made = model([node("NhwcMaxPool", ["x"], kernel_shape=[2, 2])], {"x": x})
    compare(made, {"x": x})


# -- norms -----------------------------------------------------------------------------------------


def group_norm(x, gamma, beta, groups, epsilon, silu, last):
    x = np.asarray(x, np.float64)
    x = np.moveaxis(x, -1, 1) if last else x
    apart = x.reshape(x.shape[0], groups, -1)
    mean, variance = apart.mean(2, keepdims=True), apart.var(2, keepdims=True)
    y = ((apart - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
    along = (-1,) + (1,) * (x.ndim - 2)
    y = y * gamma.reshape(along) + beta.reshape(along)
    y = y / (1 + np.exp(-y)) if silu else y
    return np.moveaxis(y, 1, -1) if last else y


@FEW
@given(
    groups=st.integers(1, 3),
    size=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(2, 5), st.integers(1, 3)),
    last=st.booleans(),
    silu=st.booleans(),
    epsilon=st.sampled_from([None, 1e-2]),
    half=st.booleans(),
    skip=st.sampled_from([None, "whole", "pixel", "flat"]),
    bias=st.booleans(),
)
def test_group_norms(groups, size, last, silu, epsilon, half, skip, bias):
    n, h, w, c = size[0], size[1], size[2], groups * size[3]
    shape = (n, h, w, c) if last else (n, c, h, w)
    dtype = np.float16 if half else np.float32
    arrays = {"x": normal(1, *shape).astype(dtype)}
    constants = {"gamma": normal(2, c), "beta": normal(3, c)}
    attrs = {"groups": groups, "activation": int(silu), "channels_last": int(last)}
    kind, inputs, outputs = "GroupNorm", ["x", "gamma", "beta"], ["y"]
    total = arrays["x"]
    if skip:
        kind, outputs = "SkipGroupNorm", ["y", "s"]
        alone = (n, 1, 1, c) if last else (n, c, 1, 1)
        given_shape = {"whole": shape, "pixel": alone, "flat": (n, c)}[skip]
        arrays["skip"] = normal(4, *given_shape).astype(dtype)
        inputs.append("skip")
        total = total + arrays["skip"].reshape(alone if skip == "flat" else given_shape)
        if bias:
            constants["bias"] = normal(5, c).astype(dtype)
            inputs.append("bias")
            total = total + constants["bias"].reshape((c,) if last else (c, 1, 1))
    y = group_norm(
        total, constants["gamma"], constants["beta"], groups, epsilon or 1e-5, silu, last
    )
    made = model(
        [node(kind, inputs, outputs, epsilon=epsilon, **attrs)], arrays, constants, outputs
    )
    wanted = [y.astype(dtype), total][: len(outputs)]
    compare(made, arrays, wanted, 4e-3 if half else 2e-5)


@pytest.mark.parametrize("opset", [11, 14, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_of_the_standard_domain(opset, bias):
    """ONNX Runtime writes LayerNormalization into the standard domain even before opset 17, which
    introduced it.
    """
    arrays = {"x": normal(1, 2, 5, 8) + 3}
    constants = {"g": normal(2, 8), "b": normal(3, 8)}
    inputs = ["x", "g", "b"] if bias else ["x", "g"]
    outputs = ["y", "mean", "inverse"]
    made = helper.make_node("LayerNormalization", inputs, outputs, axis=-1, epsilon=1e-3)
    graph = compare(model([made], arrays, constants, outputs, opset), arrays)
    assert graph.operators
    made = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-3)
    compare(model([made], arrays, constants, ["y"], opset), arrays)
    made = helper.make_node("SimplifiedLayerNormalization", ["x", "gg"], ["y"], axis=1)
    compare(model([made], arrays, {"gg": normal(3, 5, 8)}, ["y"], opset), arrays)


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_operators_that_pytorch_exported_before_onnx_had_them(opset):
    """They come from ``onnxruntime.tools.pytorch_export_contrib_ops``; the shapes after them are
    known.
    """
    arrays = {"x": normal(1, 2, 3, 5, 6), "grid": 0.7 * normal(2, 2, 4, 8, 2)}
    for mode in ("bilinear", "nearest"):
        for corners in (0, 1):
            made = node("GridSample", ["x", "grid"], mode=mode, align_corners=corners)
            compare(model([made], arrays, opset=opset), arrays)
    for upper in (0, 1, None):
        made = model([node("Trilu", ["x", "k"], upper=upper)], {"x": arrays["x"]}, opset=opset)
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(1), "k"))
        compare(made, {"x": arrays["x"]})
    nodes = [
        node("GridSample", ["x", "grid"], ["s"]),
        node("Trilu", ["s"], ["t"]),
        node("BiasSplitGelu", ["t", "bias"]),
    ]
    sampled = by_onnxruntime(model(nodes[:2], arrays, {}, ["t"], opset), arrays)[0]
    wanted = (sampled[..., :4] * gelu(sampled[..., 4:])).astype(np.float32)
    compare(model(nodes, arrays, {"bias": np.zeros(8, np.float32)}, opset=opset), arrays, [wanted])


def test_a_domain_that_is_used_and_not_imported():
    """``onnxruntime.transformers`` leaves such a model in memory."""
    arrays = {"x": normal(1, 2, 5)}
    made = model([node("QuickGelu", ["x"])], arrays)
    wanted = by_onnxruntime(made, arrays)
    assert made.opset_import.pop().domain == "com.microsoft"
    compare(made, arrays, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 8), (7, 8)])
def test_skip_simplified_layer_norm(bias, shape):
    arrays = {"x": normal(1, *shape), "r": normal(2, *shape)}
    inputs = ["x", "r", "g", *(["b"] if bias else [])]
    made = node("SkipSimplifiedLayerNormalization", inputs, ["y", "", "", "s"], epsilon=1e-4)
    compare(model([made], arrays, {"g": normal(3, 8), "b": normal(4, 8)}, ["y", "s"]), arrays)


@FEW
@given(
    segments=st.booleans(),
    mask=st.booleans(),
    places=st.sampled_from([None, 1, 2]),
    opset=st.sampled_from([12, 17]),
)
def test_embed_layer_norm(segments, mask, places, opset):
    rng = np.random.default_rng(0)

    def integers(rows: int, high: int) -> np.ndarray:
        return rng.integers(0, high, (rows, 6)).astype(np.int32)

    arrays = {"ids": integers(2, 11)}
    constants = {"words": normal(1, 11, 8), "places": normal(2, 9, 8), "kinds": normal(3, 2, 8)}
    constants |= {"gamma": normal(4, 8), "beta": normal(5, 8)}
    inputs = ["ids", "segments", "words", "places", "kinds", "gamma", "beta", "mask", "where"]
    outputs = ["y", "count", "sum"]
    if segments:
        arrays["segments"] = integers(2, 2)
    else:
        inputs[1] = inputs[4] = ""
        del constants["kinds"]
    if mask:
        arrays["mask"] = np.asarray([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], np.int32)
    else:
        inputs[7] = ""
    if places:
        arrays["where"] = integers(places, 9)
    else:
        inputs.pop()
    made = node("EmbedLayerNormalization", inputs, outputs, epsilon=1e-5, mask_index_type=1)
    compare(model([made], arrays, constants, outputs, opset), arrays)


# -- activations and additions ---------------------------------------------------------------------


def gelu(x):
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf)(np.asarray(x, np.float64) / np.sqrt(2)))


@pytest.mark.parametrize("alpha", [None, 1.0, 1.702, 0.5])
def test_quick_gelu(alpha):
    arrays = {"x": normal(1, 3, 5, scale=3)}
    compare(model([node("QuickGelu", ["x"], alpha=alpha)], arrays), arrays)


def test_additions_of_diffusion_models():
    arrays = {"x": normal(1, 2, 3, 8), "bias": normal(2, 8), "skip": normal(3, 2, 3, 8)}
    total = arrays["x"] + arrays["bias"]
    wanted = [total + arrays["skip"]]
    compare(model([node("BiasAdd", ["x", "bias", "skip"])], arrays), arrays, wanted)
    del arrays["skip"]
    wanted = [(total[..., :4] * gelu(total[..., 4:])).astype(np.float32)]
    compare(model([node("BiasSplitGelu", ["x", "bias"])], arrays), arrays, wanted)


def test_a_product_with_fast_gelu():
    arrays = {"x": normal(1, 2, 3, 4), "w": normal(2, 4, 5), "b": normal(3, 5)}
    x = (arrays["x"] @ arrays["w"] + arrays["b"]).astype(np.float64)
    y = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    made = model([node("GemmFastGelu", ["x", "w", "b"])], arrays)
    compare(made, arrays, [y.astype(np.float32)])


@pytest.mark.parametrize(
    ("inner", "axis", "bias"),
    [(0, 3, (4, 5)), (0, 2, (3, 4, 5)), (1, 3, (2, 1, 1, 5)), (1, 3, (2, 5)), (1, 2, (2, 4, 5))],
)
def test_bias_softmax(inner, axis, bias):
    arrays = {"x": normal(1, 2, 3, 4, 5), "b": normal(2, *bias)}
    full = bias
    if inner and len(bias) < 4:
        lead = len(bias) - (4 - axis)
        full = (*bias[:lead], *(1,) * (4 - len(bias)), *bias[lead:])
    scores = (arrays["x"] + arrays["b"].reshape(full)).astype(np.float64)
    flat = scores.reshape(*scores.shape[:axis], -1)
    powers = np.exp(flat - flat.max(-1, keepdims=True))
    y = (powers / powers.sum(-1, keepdims=True)).reshape(scores.shape).astype(np.float32)
    made = node("BiasSoftmax", ["x", "b"], axis=axis, is_inner_broadcast=inner)
    compare(model([made], arrays), arrays, [y])


def test_dropout_with_a_bias_drops_nothing():
    arrays = {"x": normal(1, 2, 3, 8), "bias": normal(2, 8), "r": normal(3, 2, 3, 8)}
    made = node("BiasDropout", ["x", "bias", "r"])
    compare(model([made], arrays), arrays, [arrays["x"] + arrays["bias"] + arrays["r"]])
    constants = {"ratio": np.float32(0.5), "training": np.asarray(True)}
    constants = {k: np.asarray(v) for k, v in constants.items()}
    made = node("BiasDropout", ["x", "bias", "r", "ratio", "training"])
    refused(model([made], arrays, constants), "training_mode is set")


@pytest.mark.parametrize("kind", ["Gelu", "FastGelu", "BiasGelu", "SkipLayerNormalization"])
def test_shapes_behind_operators_that_onnx_does_not_infer_are_constants(kind):
    """onnxruntime.transformers.optimizer writes them into models that upsample."""
    arrays = {"x": normal(1, 2, 3, 8)}
    more = {"BiasGelu": ["b"], "SkipLayerNormalization": ["x", "s", "b"]}.get(kind, [])
    constants = {
        "s": normal(2, 8),
        "b": normal(3, 8),
        "start": np.array([0]),
        "stop": np.array([2]),
        "sizes": np.array([4, 10]),
    }
    made = [
        node(kind, ["x", *more], ["tokens"]),
        helper.make_node("Unsqueeze", ["tokens", "start"], ["a"]),
        helper.make_node("Shape", ["a"], ["shape"]),
        helper.make_node("Slice", ["shape", "start", "stop"], ["front"]),
        helper.make_node("Concat", ["front", "sizes"], ["all"], axis=0),
        helper.make_node("Resize", ["a", "", "", "all"], ["y"], mode="linear"),
    ]
    compare(model(made, arrays, constants), arrays)


def test_all_unsupported_operators_are_in_one_message():
    """Operators without a rule come before a use that no rule accepts."""
    arrays = {"x": normal(1, 2, 4)}
    nodes = [
        node("FusedGemm", ["x", "x"], ["a"], activation="Swoosh"),
        node("MatMulBnb4", ["a"], ["b"]),
        node("QMoE", ["b"], ["y"]),
    ]
    text = refused(model(nodes, arrays), r"com.microsoft::MatMulBnb4 \(1\)")
    assert "com.microsoft::QMoE (1)" in text
    assert "FusedGemm" not in text


def test_weights_in_the_order_of_one_machine_are_refused_with_advice():
    made = helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")
    proto = model([made], {"x": normal(1, 1, 4, 4, 4)})
    proto.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    refused(proto, "ORT_ENABLE_EXTENDED")
