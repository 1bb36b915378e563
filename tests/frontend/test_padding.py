"""``auto_pad`` of convolutions and poolings."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from tests.frontend.one_node import check, node_model

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
