"""The numpy meaning of operators, against math, ONNX's reference implementation and results
computed by hand without torch.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from gtco.tensor.reference import evaluate
from gtco.tensor.special_functions import erf
from gtco.tensor.stage import Operator, TensorType, make_attrs

RNG = np.random.default_rng(0)


def operator(
    kind: str, shape: tuple[int, ...], dtype: str = "float32", **attrs: object
) -> Operator:
    return Operator(kind, ("x",), "y", TensorType(shape, dtype), make_attrs(**attrs))


def onnx_run(op: str, inputs: list[np.ndarray], opset: int = 19, **attrs: object) -> np.ndarray:
    names = [f"i{n}" if v is not None else "" for n, v in enumerate(inputs)]
    node = helper.make_node(op, names, ["y"], **attrs)
    given_inputs = {n: v for n, v in zip(names, inputs, strict=True) if v is not None}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in given_inputs.items()
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", infos, [output]),
        opset_imports=[helper.make_opsetid("", opset)],
    )
    return ReferenceEvaluator(model).run(None, given_inputs)[0]


def test_erf_is_within_1e15_of_math() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, np.inf, -np.inf]])
    assert np.abs(erf(x) - np.vectorize(math.erf)(x)).max() < 1e-15
    assert np.isnan(erf(np.array([np.nan])))[0]


def test_float64_inputs_give_float64_and_cast_rounds() -> None:
    x = RNG.standard_normal((3, 4))
    assert evaluate(operator("gelu", (3, 4)), x).dtype == np.float64
    assert evaluate(operator("cast", (3, 4)), x).dtype == np.float32
    assert evaluate(operator("cast", (3, 4)), x, dtype="float64").dtype == np.float64


def test_wrong_declared_shape_is_caught() -> None:
    with pytest.raises(AssertionError, match="declared"):
        evaluate(operator("relu", (4, 3)), np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "strides, padding, dilation",
    [
        ((1, 1), (0, 0, 0, 0), (1, 1)),
        ((2, 1), (1, 2, 0, 1), (1, 1)),
        ((1, 2), (2, 2, 2, 2), (2, 1)),
    ],
)
def test_conv2d(
    groups: int, strides: tuple[int, int], padding: tuple[int, ...], dilation: tuple[int, int]
) -> None:
    x = RNG.standard_normal((2, 4, 9, 8)).astype(np.float32)
    w = RNG.standard_normal((8, 4 // groups, 3, 2)).astype(np.float32)
    wanted = onnx_run(
        "Conv", [x, w], group=groups, strides=strides, pads=padding, dilations=dilation
    )
    attrs = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    y = evaluate(operator("conv2d", wanted.shape, layout="NCHW", **attrs), x, w)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    last = tuple(wanted.shape[i] for i in (0, 2, 3, 1))
    y = evaluate(operator("conv2d", last, layout="NHWC", **attrs), x.transpose(0, 2, 3, 1), w)
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), wanted, rtol=1e-5, atol=1e-5)


def test_max_pool_never_takes_padding() -> None:
    x = -1 - np.abs(RNG.standard_normal((1, 3, 7, 7))).astype(np.float32)
    wanted = onnx_run("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    y = evaluate(
        operator(
            "max_pool2d",
            wanted.shape,
            kernel=(3, 3),
            strides=(2, 2),
            padding=(1, 1, 1, 1),
            dilation=(1, 1),
            layout="NCHW",
        ),
        x,
    )
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("include", [0, 1])
def test_avg_pool(include: int) -> None:
    x = RNG.standard_normal((1, 3, 8, 7)).astype(np.float32)
    wanted = onnx_run(
        "AveragePool",
        [x],
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        count_include_pad=include,
    )
    y = evaluate(
        operator(
            "avg_pool2d",
            wanted.shape,
            kernel=(3, 3),
            strides=(2, 2),
            padding=(1, 1, 1, 1),
            count_include_pad=bool(include),
            layout="NCHW",
        ),
        x,
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("out", [(8, 10), (3, 2), (7, 13)])
@pytest.mark.parametrize(
    "coordinates", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
)
@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_resize(out: tuple[int, int], coordinates: str, method: str) -> None:
    x = RNG.standard_normal((1, 2, 4, 5)).astype(np.float32)
    sizes = np.array([1, 2, *out], np.int64)
    wanted = onnx_run(
        "Resize", [x, None, None, sizes], mode=method, coordinate_transformation_mode=coordinates
    )
    y = evaluate(
        operator(
            "resize2d",
            wanted.shape,
            method=method,
            coordinates=coordinates,
            rounding="round_prefer_floor",
            cubic_alpha=-0.75,
            layout="NCHW",
        ),
        x,
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric"])
def test_resize_nearest(rounding: str, coordinates: str) -> None:
    x = RNG.standard_normal((1, 1, 4, 6)).astype(np.float32)
    sizes = np.array([1, 1, 8, 3], np.int64)
    wanted = onnx_run(
        "Resize",
        [x, None, None, sizes],
        mode="nearest",
        nearest_mode=rounding,
        coordinate_transformation_mode=coordinates,
    )
    y = evaluate(
        operator(
            "resize2d",
            wanted.shape,
            method="nearest",
            coordinates=coordinates,
            rounding=rounding,
            cubic_alpha=-0.75,
            layout="NCHW",
        ),
        x,
    )
    np.testing.assert_array_equal(y, wanted)


def test_attention_equals_its_parts() -> None:
    q, k = RNG.standard_normal((2, 3, 5, 8)), RNG.standard_normal((2, 3, 7, 8))
    v, bias = RNG.standard_normal((2, 3, 7, 4)), RNG.standard_normal((3, 5, 7))
    scores = np.einsum("bhmd,bhnd->bhmn", q, k) * 0.3 + bias
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = evaluate(operator("attention", (2, 3, 5, 4), scale=0.3), q, k, v, bias)
    np.testing.assert_allclose(y, np.einsum("bhmn,bhne->bhme", weights, v), rtol=1e-12)


def test_layer_norm_and_integer_division() -> None:
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    gamma, beta = RNG.standard_normal((2, 6)).astype(np.float32)
    wanted = onnx_run("LayerNormalization", [x, gamma, beta], epsilon=1e-5)
    y = evaluate(operator("layer_norm", (4, 6), epsilon=1e-5), x, gamma, beta)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    y = evaluate(operator("divide", (2,), "int64"), np.array([-7, 7]), np.array([2, -2]))
    np.testing.assert_array_equal(y, [-3, -3])  # towards zero, as in C


@given(st.integers(1, 9), st.integers(0, 8), st.sampled_from([1, 2, 3, -1, -2]))
def test_slice_is_numpys(size: int, begin: int, stride: int) -> None:
    begin = min(begin, size - 1)
    wanted = np.arange(size)[begin::stride]
    y = evaluate(
        operator("slice", wanted.shape, "int64", begin=(begin,), strides=(stride,)), np.arange(size)
    )
    np.testing.assert_array_equal(y, wanted)
