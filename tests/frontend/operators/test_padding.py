"""``auto_pad`` of convolutions and poolings."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.layout import channels_last
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError
from tests.frontend.operators.one_node import check, node_model

WINDOWS = [((3, 3), (2, 2)), ((2, 2), (1, 1)), ((2, 3), (3, 2))]


def _model(kind: str, x: np.ndarray, **attrs):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 4, *attrs["kernel_shape"]), np.float32)
    constants = {"w": w} if kind == "Conv" else {}
    return node_model(kind, {"x": x}, constants, ["x", *constants], 1, **attrs)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kind", ["Conv", "MaxPool", "AveragePool", "LpPool"])
def test_same_padding_is_that_of_onnx(kind: str, mode: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, 4, 7, 10), np.float32)
    for kernel, strides in WINDOWS:
        model = _model(kind, x, kernel_shape=kernel, strides=strides, auto_pad=mode)
        check(model, {"x": x})
        # none is left to the fallback
        graph = lower(load_onnx(model, simplify=False))
        assert all(op.kind != "relax" for op in graph.operators.values())


@pytest.mark.parametrize("kind", ["Conv", "MaxPool", "AveragePool", "LpPool"])
def test_same_padding_counts_dilations(kind: str) -> None:
    """ONNX Runtime does not: it refuses such a convolution, and pads a pooling too little."""
    x = np.random.default_rng(1).standard_normal((1, 4, 7, 10), np.float32)
    same, written = (
        lower(load_onnx(_model(kind, x, kernel_shape=(3, 3), dilations=(2, 2), **pads)))
        for pads in ({"auto_pad": "SAME_UPPER"}, {"pads": (2, 2, 2, 2)})
    )
    for got, wanted in zip(
        same.evaluate({"x": x}).values(), written.evaluate({"x": x}).values(), strict=True
    ):
        assert got.shape[2:] == (7, 10)
        np.testing.assert_array_equal(got, wanted)


def test_a_window_smaller_than_its_stride_needs_no_padding() -> None:
    x = np.random.default_rng(1).standard_normal((1, 4, 7, 10), np.float32)
    model = _model("MaxPool", x, kernel_shape=(1, 1), strides=(2, 2), auto_pad="SAME_LOWER")
    (y,) = lower(load_onnx(model)).evaluate({"x": x}).values()
    np.testing.assert_array_equal(y, x[:, :, ::2, ::2])


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    "attrs",
    [
        {"strides": (4, 1)},
        {"strides": (2, 1), "pads": (1, 0, 0, 0)},
        {"strides": (3, 2), "pads": (0, 0, 1, 1)},
        {"strides": (4, 1), "auto_pad": "VALID"},
    ],
)
def test_a_pooling_window_larger_than_the_padded_image(kind: str, attrs: dict) -> None:
    """ONNX rounds the number of windows towards 0, so there is one if less than a stride is
    missing. ONNX Runtime counts what lies after the padding until opset 18, and not from 19 on.
    """
    x = np.random.default_rng(2).standard_normal((1, 3, 2, 5), np.float32)
    counts = [{}] if kind != "AveragePool" else [{"count_include_pad": n} for n in (0, 1)]
    for count in counts:
        model = _model(kind, x, kernel_shape=(4, 2), **attrs, **count)
        for opset in (18, 24):
            model.opset_import[0].version = opset
            check(model, {"x": x})


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
def test_a_pooling_window_larger_by_a_stride_makes_no_pixel(kind: str) -> None:
    x = np.ones((1, 3, 2, 5), np.float32)
    graph = lower(load_onnx(_model(kind, x, kernel_shape=(4, 2), strides=(2, 1))))
    (y,) = channels_last(graph).evaluate({"x": x}).values()
    assert y.shape == (1, 3, 0, 4)


def test_a_dilated_window_larger_than_the_padded_image() -> None:
    x = np.random.default_rng(2).standard_normal((1, 3, 4, 5), np.float32)
    for kernel, dilations, strides in [((3, 1), (2, 1), (2, 1)), ((2, 3), (5, 3), (3, 4))]:
        attrs = {"kernel_shape": kernel, "dilations": dilations, "strides": strides}
        check(_model("MaxPool", x, **attrs), {"x": x})


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
def test_windows_beyond_the_padded_image_in_ceil_mode(kind: str, pads: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    for sizes, kernel, strides in [
        ((2, 7), (4, 2), (4, 2)),
        ((6, 8), (3, 3), (2, 3)),
        ((5, 9), (2, 2), (3, 3)),
        ((4, 4), (3, 2), (3, 4)),
    ]:
        x = rng.standard_normal((1, 3, *sizes), np.float32)
        attrs = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": 1}
        check(_model(kind, x, **attrs), {"x": x})


@pytest.mark.parametrize("kind", ["Conv", "ConvInteger"])
@pytest.mark.parametrize(
    "attrs, rule",
    [
        ({}, "its window has 4 elements along axis 2, and the input 2: "),
        ({"strides": (4, 1)}, "its window has 4 elements along axis 2, and the input 2: "),
        ({"strides": (2, 1), "pads": (1, 0, 0, 0)}, "and the input 2 and 1 of padding: "),
        ({"pads": (1, 0, 1, 0), "dilations": (2, 1)}, "has 7 elements along axis 2, and the "),
    ],
)
def test_a_convolution_larger_than_the_padded_image_is_refused(
    kind: str, attrs: dict, rule: str
) -> None:
    """As by ONNX Runtime, also where ONNX's inference finds one pixel or none."""
    dtype = np.float32 if kind == "Conv" else np.uint8
    x, w = np.ones((1, 2, 2, 3), dtype), np.ones((3, 2, 4, 1), dtype)
    model = node_model(kind, {"x": x}, {"w": w}, ["x", "w"], 1, **attrs)
    with pytest.raises(ModelError) as error:
        load_onnx(model, simplify=False)
    assert rule in str(error.value) and "the input is too small for it" in str(error.value)
    assert f"({kind})" in str(error.value)
