"""Images of few channels on a GPU: each pixel becomes a whole piece of 16 bytes."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.convolutions.whole_pixels import whole_pixels
from gtco.tensor.stage import TensorType
from tests.kernels import fresh_seed


def convolution(
    channels: int, kernel: int, stride: int, dtype: str = "float32", layout: str = "NHWC"
) -> Graph:
    sides = (1, 8 * stride + kernel, 7 * stride + kernel)
    shape = (*sides, channels) if layout == "NHWC" else (1, channels, *sides[1:])
    graph = Graph(("x",), ("y",), {"x": TensorType(shape, dtype)})
    drawn = np.random.default_rng(1).standard_normal((4, channels, kernel, kernel))
    w = graph.add_constant(drawn.astype(dtype), "w")
    window = dict(strides=(stride, stride), padding=(0,) * 4, dilation=(1, 1), groups=1)
    made = (1, 9, 8, 4) if layout == "NHWC" else (1, 4, 9, 8)
    graph.add("conv2d", ("x", w), TensorType(made, dtype), output="y", layout=layout, **window)
    return graph


@pytest.mark.parametrize(
    ("dtype", "narrow", "pixel"),
    [("float32", "float16", 8), ("float32", "float32", 4), ("float16", "float16", 8)],
)
def test_pixels_become_whole_pieces(dtype: str, narrow: str, pixel: int) -> None:
    before = convolution(3, 3, 2, dtype)
    after = whole_pixels(before, narrow).check()
    assert after.histogram() == {"pad": 1, "conv2d": 1}
    (pad,) = (op for op in after.operators.values() if op.kind == "pad")
    assert pad.type == TensorType((*before.types["x"].sizes[:3], pixel), dtype)
    drawn = np.random.default_rng(fresh_seed()).standard_normal(before.types["x"].sizes)
    given = {"x": drawn.astype(dtype)}
    wanted, found = (graph.evaluate(given)["y"] for graph in (before, after))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "stays",
    [
        convolution(3, 1, 1),
        convolution(3, 4, 4),  # patches
        convolution(8, 3, 1),
        convolution(9, 3, 1),
        convolution(3, 3, 1, layout="NCHW"),
    ],
)
def test_other_convolutions_stay(stays: Graph) -> None:
    assert whole_pixels(stays, "float16").dump() == stays.dump()
