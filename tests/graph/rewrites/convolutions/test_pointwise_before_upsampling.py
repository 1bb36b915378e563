"""A 1x1 convolution comes before the upsampling of its inputs, unless that would add work."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import TensorType
from tests.graph.rewrites.products import PLAIN, convolution, products, resized
from tests.graphs import RNG, build, same, weights


def test_a_pointwise_convolution_comes_before_the_upsampling() -> None:
    graph = build(lambda g, x: convolution(g, resized(g, x, 9, 10), 6), (2, 8, 3, 4))
    after = same(graph, {"conv2d": 1, "resize2d": 1})
    assert products(after) * 90 == products(graph) * 12


def test_a_head_of_several_scales() -> None:
    """The head of SegFormer. Parts that are upsampled leave the concatenation, and the others stay
    in it. Projections to a common width are composed with the convolution that takes their sum.
    """

    def body(g: Graph, x: str) -> str:
        def tokens(height: int, width: int, channels: int) -> str:
            y = g.add(
                "slice",
                (x,),
                TensorType((1, height * width, channels), "float32"),
                begin=(0, 0, 0),
                strides=(1, 1, 1),
            )
            y = g.add("add", (g.add("matmul", (y, weights(g, channels, 64))), weights(g, 64)))
            y = g.add("permute", (y,), axes=(0, 2, 1))
            return g.add("reshape", (y,), TensorType((1, 64, height, width), "float32"))

        small = [resized(g, tokens(h, w, c), 12, 8) for h, w, c in ((3, 2, 24), (6, 4, 16))]
        fused = convolution(g, g.add("concat", (*small, tokens(12, 8, 8)), axis=1), 64)
        return g.add("relu", (g.add("add", (fused, weights(g, 64, 1, 1))),))

    graph = build(body, (1, 96, 24))
    after = canonicalize(channels_last(canonicalize(graph)))
    kinds = after.histogram()
    assert (kinds.get("conv2d", 0), kinds["matmul"], kinds["resize2d"]) == (0, 3, 2)
    assert "concat" not in kinds
    assert products(after) == 64 * (6 * 24 + 24 * 16 + 96 * 8)
    x = {"x": RNG.standard_normal((1, 96, 24)).astype(np.float32)}
    (before,), (now,) = (g.evaluate(x, dtype="float64").values() for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=1e-5, atol=1e-5)  # composed weights are float32


@pytest.mark.parametrize("seed", range(40))
def test_drawn_heads(seed: int) -> None:
    """Any layout and method, sizes up and down, and parts that are upsampled or not. One part may
    come twice, and the concatenation or a part may have a second reader.
    """
    rng = np.random.default_rng(seed)
    layout, axis = [("NCHW", 1), ("NHWC", 3)][seed % 2]
    height, width, count = int(rng.integers(4, 9)), int(rng.integers(4, 9)), int(rng.integers(1, 5))

    def body(g: Graph, x: str) -> str:
        parts = []
        for _ in range(count):
            size = [int(rng.integers(1, 12)), int(rng.integers(1, 12))]
            channels = int(rng.integers(1, 90))
            inner = [size[0], size[1]] if rng.random() < 0.7 else [height, width]
            shape = [1, channels, *inner] if layout == "NCHW" else [1, *inner, channels]
            part = g.add(
                "slice", (x,), TensorType((prod(shape),), "float32"), begin=(0,), strides=(1,)
            )
            part = g.add("reshape", (part,), TensorType(tuple(shape), "float32"))
            if inner != [height, width]:
                method = str(rng.choice(["nearest", "linear", "cubic"]))
                how = str(rng.choice(["half_pixel", "align_corners", "asymmetric"]))
                part = resized(g, part, height, width, layout, method=method, coordinates=how)
            parts.append(part)
        if rng.random() < 0.2:
            parts.append(parts[0])
        joined = g.add("concat", parts, axis=axis) if len(parts) > 1 else parts[0]
        y = convolution(g, joined, int(rng.integers(1, 40)), layout)
        if rng.random() < 0.3:
            again = str(rng.choice([joined, *parts]))
            last = g.add("mean", (g.add("sigmoid", (again,)),), axes=(0, 1, 2, 3), keepdims=True)
            y = g.add("add", (y, last))
        return y

    graph = build(body, (90 * 12 * 12,))
    after = canonicalize(graph)
    assert products(after) <= products(graph)
    x = {"x": rng.standard_normal(graph.types["x"].shape).astype(np.float32)}
    (before,), (now,) = (g.evaluate(x, dtype="float64").values() for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case", ["down", "wider", "3x3", "strides", "groups", "axis", "read", "joined"]
)
def test_convolutions_that_stay_behind_the_resizing(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        y = resized(g, x, *((2, 2) if case == "down" else (9, 8)))
        match case:
            case "3x3":
                return convolution(g, y, 6, size=3)
            case "strides":
                return convolution(g, y, 6, strides=(2, 2))
            case "groups":
                known = weights(g, 4, 4, 1, 1)
                return g.add("conv2d", (y, known), **PLAIN | {"groups": 2}, layout="NCHW")
            case "axis":
                return convolution(g, g.add("concat", (y, y), axis=2), 6)
            case "read":  # 8 channels of 9 x 8 would be resized twice
                return g.add("add", (convolution(g, y, 8), g.add("relu", (y,))))
            case "joined":
                y = g.add("concat", (y, resized(g, x, 9, 8, method="nearest")), axis=1)
                z = g.add("mean", (g.add("relu", (y,)),), axes=(1,), keepdims=True)
                return g.add("add", (convolution(g, y, 8), z))
        return convolution(g, y, 99 if case == "wider" else 6)

    graph = build(body, (2, 8, 4, 4))
    after = canonicalize(graph)
    assert next(op.kind for op in after.operators.values()) == "resize2d"
    assert products(after) == products(graph)
