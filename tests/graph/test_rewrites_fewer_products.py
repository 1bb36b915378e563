"""The rewrites that leave multiplications out: their results on the smallest graphs, equal values
on drawn ones, and that they do nothing where they would add work.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last
from gtco.graph.rewrites import canonicalize
from gtco.support.later import Later
from gtco.tensor.stage import TensorType
from tests.graphs import RNG, build, number, same, weights
from tests.kernels import fresh_seed

PLAIN = {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}


def products(graph: Graph) -> int:
    """The multiply-adds of all contractions by constants."""
    total = 0
    for op in graph.operators.values():
        if op.kind in ("matmul", "conv2d"):
            taps = graph.types[op.inputs[1]].shape
            depth = taps[-2] if op.kind == "matmul" else prod(int(d) for d in taps[1:])
            total += prod(int(d) for d in op.type.shape) * int(depth)
    return total


def convolution(g: Graph, x: str, outputs: int, layout: str = "NCHW", **other: Any) -> str:
    channels = int(g.types[x].shape[1 if layout == "NCHW" else 3])
    attrs = PLAIN | {"layout": layout} | other
    size = attrs.pop("size", 1)
    return g.add("conv2d", (x, weights(g, outputs, channels, size, size)), **attrs)


def resized(g: Graph, x: str, height: int, width: int, layout: str = "NCHW", **other: Any) -> str:
    n, c = (g.types[x].shape[i] for i in (0, 1 if layout == "NCHW" else 3))
    shape = (n, c, height, width) if layout == "NCHW" else (n, height, width, c)
    attrs = {
        "method": "linear",
        "coordinates": "half_pixel",
        "rounding": "round_prefer_floor",
        "cubic_alpha": -0.75,
        "layout": layout,
    }
    return g.add("resize2d", (x,), TensorType(shape, "float32"), **(attrs | other))


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", ["matmul", "conv2d"])
@pytest.mark.parametrize("second", ["matmul", "conv2d"])
def test_products_in_a_row(first: str, second: str, bias: bool) -> None:
    """Through a bias and, if channels are last, a reshape."""

    def body(g: Graph, x: str) -> str:
        if first == "matmul":
            y = g.add("matmul", (x, weights(g, 5, 40)))
        else:
            y = convolution(g, x, 40, "NHWC", size=3, padding=(1, 1, 1, 1))
        y = g.add("add", (y, weights(g, 1, 40))) if bias else y
        y = g.add("reshape", (y,), TensorType((3, 8, 2, 40), "float32"))
        if second == "matmul":
            return g.add("matmul", (y, weights(g, 40, 6)))
        return convolution(g, y, 6, "NHWC")

    shape = (3, 16, 5) if first == "matmul" else (3, 4, 4, 5)
    after = same(build(body, shape), {first: 1, "reshape": 1} | ({"add": 1} if bias else {}), 1e-5)
    assert products(after) == 48 * 6 * (5 if first == "matmul" else 45)


def test_convolutions_in_a_row_with_channels_first() -> None:
    def body(g: Graph, x: str) -> str:
        y = convolution(g, x, 40, size=3, strides=(2, 2))
        return convolution(g, g.add("add", (y, weights(g, 40, 1, 1))), 7)

    same(build(body, (2, 5, 9, 9)), {"conv2d": 1, "add": 1}, 1e-5)


def test_biases_on_both_sides_of_a_reshape() -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("add", (g.add("matmul", (x, weights(g, 8, 40))), weights(g, 40)))
        y = g.add("reshape", (y,), TensorType((10, 40), "float32"))
        return g.add("matmul", (g.add("add", (y, weights(g, 40))), weights(g, 40, 6)))

    same(build(body), canonicalize(build(body)).histogram(), 1e-5)


@pytest.mark.parametrize("case", ["groups", "3x3"])
def test_convolutions_in_a_row_that_stay_two(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        if case == "groups":
            known = weights(g, 40, 3, 1, 1)
            y = g.add("conv2d", (x, known), **PLAIN | {"groups": 2}, layout="NHWC")
            return convolution(g, y, 2, "NHWC")
        y = g.add("matmul", (x, weights(g, 6, 40)))
        return convolution(g, y, 2, "NHWC", size=3)

    graph = build(body, (2, 5, 5, 6))
    kinds = {"conv2d": 2} if case == "groups" else {"matmul": 1, "conv2d": 1}
    assert products(same(graph, kinds, 1e-5)) == products(graph)


@pytest.mark.parametrize("case", ["narrow", "relu", "read", "output", "map", "axis"])
def test_products_that_stay_two(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("matmul", (x, weights(g, 8, 3 if case == "narrow" else 40)))
        match case:
            case "relu":
                y = g.add("relu", (y,))
            case "map":  # a bias of each position
                y = g.add("add", (y, weights(g, 5, 40)))
            case "axis":
                y = g.add("reshape", (y,), TensorType((2, 10, 20), "float32"))
        z = g.add("matmul", (y, weights(g, int(g.types[y].shape[-1]), 6)))
        again = g.add("mean", (y,), axes=(2,), keepdims=True)
        return g.add("add", (z, again)) if case == "read" else z

    graph = build(body)
    if case == "output":
        graph.outputs = ("y", graph.operators["y"].inputs[0])
        inner = next(op for op in graph.operators.values() if op.kind == "matmul")
        graph.outputs = ("y", inner.output)
    assert products(canonicalize(graph)) == products(graph)


def block(g: Graph, x: str, merged: bool, heads: int = 2) -> str:
    """A transformer's block; its projections are merged or separate."""
    n, tokens, width = (int(d) for d in g.types[x].shape)
    y = g.add("layer_norm", (x, weights(g, width), weights(g, width)), epsilon=1e-5)
    if merged:
        y = g.add("matmul", (y, weights(g, width, 3 * width)))
        y = g.add("add", (y, weights(g, 3 * width)))
    split = []
    for i in range(3):
        if merged:
            part = g.add(
                "slice",
                (y,),
                TensorType((n, tokens, width), "float32"),
                begin=(0, 0, i * width),
                strides=(1, 1, 1),
            )
        else:
            part = g.add("add", (g.add("matmul", (y, weights(g, width, width))), weights(g, width)))
        shape = TensorType((n, tokens, heads, width // heads), "float32")
        split.append(g.add("permute", (g.add("reshape", (part,), shape),), axes=(0, 2, 1, 3)))
    z = g.add("attention", split, scale=0.3)
    z = g.add("reshape", (g.add("permute", (z,), axes=(0, 2, 1, 3)),), g.types[x])
    x = g.add("add", (x, g.add("matmul", (z, weights(g, width, width)))))
    y = g.add("layer_norm", (x, weights(g, width), weights(g, width)), epsilon=1e-5)
    y = g.add("gelu", (g.add("matmul", (y, weights(g, width, 4 * width))),))
    return g.add("add", (x, g.add("matmul", (y, weights(g, 4 * width, width)))))


def taken(g: Graph, x: str, rows: int, first: int = 0, stride: int = 1) -> str:
    n, _, width = (int(d) for d in g.types[x].shape)
    return g.add(
        "slice",
        (x,),
        TensorType((n, rows, width), "float32"),
        begin=(0, first, 0),
        strides=(1, stride, 1),
    )


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rows, first, stride", [(1, 0, 1), (2, 3, 1), (3, 1, 3)])
def test_rows_that_are_unread(merged: bool, rows: int, first: int, stride: int) -> None:
    """In the last block, only the keys and values are computed for all tokens."""

    def body(g: Graph, x: str) -> str:
        y = block(g, block(g, x, merged), merged)
        y = g.add("layer_norm", (y, weights(g, 8), weights(g, 8)), epsilon=1e-5)
        return g.add("matmul", (taken(g, y, rows, first, stride), weights(g, 8, 3)))

    graph = build(body, (2, 9, 8))
    after = canonicalize(graph)
    whole = 8 * 8 * (4 + 8)  # multiply-adds of a row through a block
    assert products(after) == 2 * (9 * whole + 9 * 2 * 64 + rows * (whole - 2 * 64) + rows * 24)
    x = {"x": RNG.standard_normal((2, 9, 8)).astype(np.float32)}
    (before,), (now,) = (g.evaluate(x, dtype="float64").values() for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=1e-9, atol=1e-9)


def test_images_of_a_batch_that_are_unread() -> None:
    """Every operand of an attention is cut along the batch."""

    def body(g: Graph, x: str) -> str:
        q, k, v = (g.add("matmul", (x, weights(g, 8, 8))) for _ in range(3))
        y = g.add("attention", (q, k, v, weights(g, 4, 1, 5)), scale=0.3)
        made = TensorType((1, 5, 8), "float32")
        return g.add("slice", (y,), made, begin=(2, 0, 0), strides=(1, 1, 1))

    graph = build(body, (4, 5, 8))
    assert products(same(graph, canonicalize(graph).histogram())) * 4 == products(graph)


@pytest.mark.parametrize("case", ["whole", "overlap", "read"])
def test_products_that_stay_merged(case: str) -> None:
    """They stay merged if all parts are read for all rows, if two share columns, or if one operator
    reads everything.
    """

    def body(g: Graph, x: str) -> str:
        y = g.add("add", (g.add("matmul", (x, weights(g, 8, 24))), weights(g, 24)))

        def columns(first: int, rows: int = 9) -> str:
            made = TensorType((2, rows, 8), "float32")
            return g.add("slice", (y,), made, begin=(0, 0, first), strides=(1, 1, 1))

        few = columns(0, 9 if case == "whole" else 1)
        others = [columns(4 if case == "overlap" else 8), columns(16)]
        z = g.add("multiply", (g.add("multiply", (few, others[0])), others[1]))
        if case == "read":
            z = g.add("add", (z, g.add("mean", (y,), axes=(2,), keepdims=True)))
        return z

    graph = build(body, (2, 9, 8))
    after = canonicalize(graph)
    assert (products(after), after.histogram()["matmul"]) == (products(graph), 1)


@pytest.mark.parametrize("case", ["most", "read", "output", "along"])
def test_rows_that_stay(case: str) -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("gelu", (g.add("matmul", (x, weights(g, 8, 8))),))
        if case == "along":
            y = g.add("softmax", (y,), axis=1)
        one = taken(g, y, 5 if case == "most" else 1)
        if case == "read":
            return g.add("add", (one, g.add("relu", (y,))))
        return g.add("multiply", (one, number(g, 2)))

    graph = build(body, (2, 9, 8))
    if case == "output":
        inner = next(op.output for op in graph.operators.values() if op.kind == "gelu")
        graph.outputs = ("y", inner)
    assert products(canonicalize(graph)) == products(graph)


@pytest.mark.parametrize("seed", range(300))
def test_drawn_slices(seed: int) -> None:
    """Slices of any axes, also backwards, after operators that broadcast, normalise or multiply."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(rng.integers(1, 7)) for _ in range(int(rng.integers(2, 5))))

    def operand(g: Graph) -> str:
        dims = [d if rng.random() < 0.6 else 1 for d in shape][int(rng.integers(0, len(shape))) :]
        return weights(g, *dims)

    def body(g: Graph, x: str) -> str:
        values = [x]
        for _ in range(int(rng.integers(2, 9))):
            y, last = str(rng.choice(values)), len(shape) - 1
            match int(rng.integers(0, 7)):
                case 0:
                    y = g.add("gelu", (y,))
                case 1:
                    y = g.add("add", (y, str(rng.choice(values))))
                case 2:
                    y = g.add("multiply", (operand(g), y))
                case 3:
                    y = g.add(
                        "layer_norm",
                        (y, weights(g, shape[-1]), weights(g, shape[-1])),
                        epsilon=1e-5,
                    )
                case 4:
                    y = g.add("softmax", (y,), axis=int(rng.integers(0, last + 1)))
                case 5:
                    y = g.add("matmul", (y, weights(g, shape[-1], shape[-1])))
                case 6:
                    q, k, v = (str(rng.choice(values)) for _ in range(3))
                    y = g.add("attention", (q, k, v), scale=0.5)
            values.append(y)
        taken = []
        for d in shape:
            stride = int(rng.choice([1, 1, 1, -1, -1, 2, -2]))
            most = (d - 1) // abs(stride) + 1
            count = most if rng.random() < 0.5 else int(rng.integers(1, most + 1))
            lowest = int(rng.integers(0, d - (count - 1) * abs(stride)))
            taken.append((lowest if stride > 0 else lowest - stride * (count - 1), stride, count))
        begin, strides, sizes = zip(*taken, strict=True)
        made = TensorType(sizes, "float32")
        y = g.add("slice", (values[-1],), made, begin=begin, strides=strides)
        return g.add("sigmoid", (y,))

    graph = build(body, shape)
    after = canonicalize(graph)
    assert products(after) <= products(graph)
    x = {"x": rng.standard_normal(shape).astype(np.float32)}
    (before,), (now,) = (g.evaluate(x, dtype="float64").values() for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=1e-7, atol=1e-7)


def sized(g: Graph, x: str, outputs: int, size: tuple[int, int], **other: Any) -> str:
    """A convolution of any window, whose weights have the channels of its groups."""
    attrs = PLAIN | {"layout": "NCHW"} | other
    channels = int(g.types[x].shape[1]) // attrs["groups"]
    return g.add("conv2d", (x, weights(g, outputs, channels, *size)), **attrs)


def test_branches_of_one_tensor_become_one_convolution() -> None:
    """A block of RepVGG as it is trained, and one of RepViT, whose normalisation stands behind the
    sum.
    """

    def vgg(g: Graph, x: str) -> str:
        wide = g.add("add", (sized(g, x, 6, (3, 3), padding=(1, 1, 1, 1)), weights(g, 6, 1, 1)))
        narrow = g.add("add", (sized(g, x, 6, (1, 1)), weights(g, 6, 1, 1)))
        return g.add("relu", (g.add("add", (narrow, wide)),))

    def vit(g: Graph, x: str) -> str:
        wide = sized(g, x, 6, (3, 3), padding=(1, 1, 1, 1), groups=6)
        wide = g.add("add", (wide, weights(g, 6, 1, 1)))
        total = g.add("add", (g.add("add", (wide, sized(g, x, 6, (1, 1), groups=6))), x))
        scaled = g.add("multiply", (total, weights(g, 6, 1, 1)))
        return g.add("add", (scaled, weights(g, 6, 1, 1)))

    same(build(vgg, (2, 6, 7, 5)), {"conv2d": 1, "add": 1, "relu": 1})
    same(build(vit, (2, 6, 7, 5)), {"conv2d": 1, "add": 1})


@pytest.mark.parametrize(
    "branch",
    [
        lambda g, x: sized(g, g.add("relu", (x,)), 6, (1, 1)),  # of another tensor
        lambda g, x: sized(g, x, 6, (1, 1), groups=2),
        lambda g, x: sized(g, x, 6, (1, 5), padding=(0, 2, 0, 2)),  # a window that sticks out
        lambda g, x: sized(g, x, 6, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
        lambda g, x: x,  # no filter of one channel that could take it
    ],
)
def test_other_branches_stay(branch: Any) -> None:
    def body(g: Graph, x: str) -> str:
        wide = sized(g, x, 6, (3, 3), padding=(1, 1, 1, 1))
        return g.add("add", (wide, branch(g, x)))

    graph = build(body, (1, 6, 7, 8))
    same(graph, {kind: n for kind, n in graph.histogram().items() if kind != "identity"})


def test_a_branch_whose_weights_are_stored_narrower_stays() -> None:
    def body(g: Graph, x: str) -> str:
        wide = sized(g, x, 6, (3, 3), padding=(1, 1, 1, 1))
        weight = g.operators[wide].inputs[1]
        array = g.constants[weight]
        g.constants[weight] = Later(array.shape, array.dtype, lambda: array)
        return g.add("add", (wide, sized(g, x, 6, (1, 1))))

    same(build(body, (1, 6, 7, 8)), {"conv2d": 2, "add": 1})


def test_a_branch_that_is_read_elsewhere_stays() -> None:
    def body(g: Graph, x: str) -> str:
        wide = sized(g, x, 6, (3, 3), padding=(1, 1, 1, 1))
        narrow = sized(g, x, 6, (1, 1))
        return g.add("multiply", (g.add("add", (wide, narrow)), narrow))

    same(build(body, (1, 6, 7, 8)), {"conv2d": 2, "add": 1, "multiply": 1})


def test_drawn_branches() -> None:
    """Any windows, places, strides, dilations and groups in a sum of up to five terms."""
    print(f"seed {(seed := fresh_seed())}")
    rng, merged = np.random.default_rng(seed), 0
    for _ in range(40):

        def body(g: Graph, x: str) -> str:
            groups, terms = int(rng.choice((1, 2, 6))), []
            stride, spread = (int(n) for n in rng.integers(1, 3, 2))
            for _ in range(int(rng.integers(1, 5))):
                size = tuple(int(n) for n in rng.choice((1, 3, 5), 2))
                before = [int(rng.integers(0, (n - 1) * spread + 1)) for n in size]
                after = [(n - 1) * spread - b for n, b in zip(size, before, strict=True)]
                attrs = dict(strides=(stride,) * 2, dilation=(spread,) * 2, groups=groups)
                terms.append(sized(g, x, 6, size, padding=(*before, *after), **attrs))
            terms += [weights(g, 6, 1, 1)] * int(rng.integers(0, 2))
            terms += [x] * int(rng.integers(0, 2) * (stride == 1))
            total = terms[0]
            for place in rng.permutation(len(terms) - 1):
                total = g.add("add", (total, terms[1 + place]))
            return total

        graph = build(body, (2, 6, 7, 8))
        inputs = {"x": RNG.standard_normal((2, 6, 7, 8)).astype(np.float32)}
        after = canonicalize(graph)
        np.testing.assert_allclose(
            *(next(iter(g.evaluate(inputs, dtype="float64").values())) for g in (after, graph)),
            rtol=1e-6,
            atol=1e-6,
        )
        assert products(after) <= products(graph)
        merged += products(after) < products(graph)
    assert merged
