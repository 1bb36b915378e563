"""The phases of a transposed convolution become channels of a convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.convolutions.phases_as_channels import phases_as_channels
from gtco.support.later import Later
from tests.graphs import RNG, build, weights

PLAIN = {"padding": (0, 0, 0, 0), "output_padding": (0, 0), "groups": 1, "layout": "NHWC"}


def transposed(
    shape: tuple[int, ...], kernel: tuple[int, int], strides: Any, outputs: int = 3, **other: Any
) -> Graph:
    """One transposed convolution to so many channels a group, channels last."""

    def body(g: Graph, x: str) -> str:
        attrs = PLAIN | {"strides": strides} | other
        w = weights(g, shape[3], outputs, *kernel)
        return g.add("relu", (g.add("conv_transpose2d", (x, w), **attrs),))

    return build(body, shape)


def unchanged_values(graph: Graph, kinds: set[str]) -> Graph:
    after = phases_as_channels(graph).check()
    assert set(after.histogram()) == kinds | {"relu", "identity"}
    x = {"x": RNG.standard_normal(graph.types["x"].shape).astype(np.float32)}
    wanted, found = (g.evaluate(x, dtype="float64")["y"] for g in (graph, after))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    return after


CONVOLUTION = {"conv2d", "reshape", "permute"}


@pytest.mark.parametrize(
    ("shape", "kernel", "strides", "other"),
    [
        ((2, 5, 4, 6), (2, 2), (2, 2), {}),
        ((1, 4, 5, 6), (4, 3), (4, 3), {}),
        ((1, 5, 4, 6), (4, 2), (2, 2), {}),
        ((2, 5, 4, 6), (3, 3), (2, 2), {"padding": (1, 1, 1, 1), "output_padding": (1, 1)}),
        ((1, 5, 4, 6), (3, 2), (2, 2), {"padding": (1, 0, 1, 0), "output_padding": (1, 0)}),
        ((2, 5, 4, 6), (3, 3), (1, 1), {"padding": (1, 1, 1, 1)}),
        ((2, 5, 4, 6), (5, 3), (1, 1), {}),
        ((1, 1, 7, 6), (1, 2), (1, 2), {}),
        ((2, 1, 1, 6), (4, 4), (1, 1), {}),  # as a generator of images begins
        ((2, 1, 1, 6), (4, 4), (2, 2), {"padding": (1, 1, 1, 1)}),
        ((1, 1, 5, 6), (3, 2), (2, 2), {"padding": (0, 0, 1, 0)}),
        ((1, 1, 1, 6), (2, 2), (2, 2), {"output_padding": (1, 1)}),
    ],
)
def test_phases_that_read_the_same_pixels_become_channels(
    shape: tuple[int, ...], kernel: tuple[int, int], strides: Any, other: dict[str, Any]
) -> None:
    graph = transposed(shape, kernel, strides, **other)
    after = unchanged_values(graph, CONVOLUTION)
    assert after.types[after.outputs[0]] == graph.types["y"]


@pytest.mark.parametrize(
    ("kernel", "strides", "other"),
    [
        # 3 x 3 pixels are read, and 2 x 2 of them by each phase
        ((4, 4), (2, 2), {"padding": (1, 1, 1, 1)}),
        ((2, 2), (2, 2), {"padding": (1, 1, 1, 1)}),  # 2 x 2, and 1 by each phase
        ((2, 2), (2, 2), {"padding": (2, 2, 0, 0)}),  # no output reads the first row
        ((2, 2), (2, 2), {"padding": (0, 0, 1, 1)}),  # no whole steps
        ((2, 2), (2, 2), {"groups": 2}),
        ((2, 2), (2, 2), {"groups": 6}),  # three channels of each
        ((1, 1), (2, 2), {"groups": 6, "outputs": 1, "output_padding": (1, 1)}),  # phases of 0
    ],
)
def test_others_stay(kernel: tuple[int, int], strides: Any, other: dict[str, Any]) -> None:
    unchanged_values(transposed((1, 5, 4, 6), kernel, strides, **other), {"conv_transpose2d"})


@pytest.mark.parametrize(
    ("shape", "kernel", "strides", "other", "phases"),
    [
        ((2, 5, 4, 6), (4, 4), (2, 2), {"padding": (1, 1, 1, 1)}, 4),
        ((2, 5, 4, 6), (2, 2), (2, 2), {}, 4),
        ((1, 5, 4, 6), (3, 2), (2, 1), {"padding": (1, 0, 1, 0), "output_padding": (1, 0)}, 2),
        ((1, 5, 4, 6), (5, 3), (1, 1), {}, 1),
        ((1, 1, 4, 6), (1, 8), (1, 4), {"padding": (0, 2, 0, 2)}, 4),
    ],
)
def test_phases_of_depthwise_ones_become_convolutions(
    shape: tuple[int, ...], kernel: Any, strides: Any, other: dict[str, Any], phases: int
) -> None:
    graph = transposed(shape, kernel, strides, outputs=1, groups=shape[3], **other)
    joined = {"concat"} if phases > 1 else set()
    after = unchanged_values(graph, {"conv2d", "reshape", *joined})
    assert after.histogram()["conv2d"] == phases
    taps = sum(after.types[name].size for name in after.constants)
    assert taps == shape[3] * kernel[0] * kernel[1]  # none of them is a zero


def test_weights_that_are_computed_when_they_are_read_stay_so() -> None:
    graph = transposed((1, 5, 4, 6), (2, 2), (2, 2))
    (name,) = graph.constants
    array = graph.constants[name]
    graph.constants[name] = Later(array.shape, array.dtype, lambda: array)
    after = unchanged_values(graph, CONVOLUTION)
    assert [after.constants.is_later(x) for x in after.constants] == [True]
