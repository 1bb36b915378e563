"""Which weights the graph keeps in int8, and that the values stay."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest

from gtco.graph.byte_weights import byte_weights, scaled_product
from gtco.graph.graph import Graph
from gtco.graph.rewrites.simplify_movement import simplify_movement
from gtco.tensor.stage import Stage, TensorType
from tests.graphs import build
from tests.kernels import assert_close


def steps(*shape: int, within: tuple[int, int] = (-127, 127)) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.integers(within[0], within[1] + 1, shape).astype(np.float32)


def scales(count: int) -> np.ndarray:
    return np.random.default_rng(count).uniform(1e-3, 1, count).astype(np.float32)


def by_column(graph: Graph, *shape: int) -> str:
    """A constant whose last axis has scales."""
    return graph.add_constant(steps(*shape) * scales(shape[-1]), "w")


def mlp(g: Graph, x: str) -> str:
    hidden = g.add("relu", (g.add("matmul", (x, by_column(g, 8, 12))),))
    inexact = g.add_constant(np.random.default_rng(5).random((12, 6), np.float32), "inexact")
    return g.add("matmul", (g.add("matmul", (hidden, inexact)), by_column(g, 6, 4)))


def batches(g: Graph, x: str) -> str:
    return g.add("matmul", (x, by_column(g, 2, 8, 9)))


def in_blocks(depth: int, block: int) -> Callable[[Graph, str], str]:
    def add(g: Graph, x: str) -> str:
        wide = g.add("concat", [x] * (depth // 8), axis=2)
        scale = scales(-(-depth // block) * 6).reshape(-1, 6)
        w = steps(depth, 6) * np.repeat(scale, block, axis=0)[:depth]
        return g.add("matmul", (wide, g.add_constant(w, "w")))

    return add


def convolution(layout: str) -> Callable[[Graph, str], str]:
    def add(g: Graph, x: str) -> str:
        shape = (1, 2, 5, 8) if layout == "NHWC" else (2, 5, 8, 1)
        image = g.add("reshape", (x,), TensorType(shape))
        channels = shape[3] if layout == "NHWC" else shape[1]
        w = g.add_constant(steps(7, channels, 1, 1) * scales(7).reshape(7, 1, 1, 1), "w")
        return g.add(
            "conv2d",
            (image, w),
            strides=(1, 1),
            padding=(0,) * 4,
            dilation=(1, 1),
            groups=1,
            layout=layout,
        )

    return add


def values(graph: Graph) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    (value,) = graph.evaluate({graph.inputs[0]: x}, dtype="float64").values()
    return value


def stored(graph: Graph) -> list[tuple[int, ...]]:
    """The shapes of weights in int8."""
    products = [op for op in graph.operators.values() if op.kind in ("matmul", "conv2d")]
    types = (graph.types[op.inputs[1]] for op in products)
    return sorted(t.sizes for t in types if t.dtype == "int8")


@pytest.mark.parametrize(
    ("network", "shapes"),
    [
        (mlp, [(8, 12)]),  # of six steps of k the scales would take as much as is saved
        (batches, [(2, 8, 9)]),
        (in_blocks(64, 16), [(64, 6)]),
        (in_blocks(80, 32), [(80, 6)]),  # the last block is not whole
        (convolution("NHWC"), [(7, 8, 1, 1)]),
        (convolution("NCHW"), []),  # five channels
    ],
)
def test_what_is_on_a_grid_is_kept_in_int8(
    network: Callable[[Graph, str], str], shapes: list[tuple[int, ...]]
) -> None:
    graph = build(network)
    after = byte_weights(graph).check()
    assert stored(after) == shapes
    assert after.outputs == graph.outputs
    assert_close(values(after), values(graph), 1e-6)  # the weights' rounding is left out
    if not shapes:
        assert after is graph


def of_steps(
    within: tuple[int, int], block: int = 0, half: bool = True, image: bool = False
) -> Callable[[Graph, str], str]:
    """A product by steps from this range, with scales of columns or of blocks of k, that float16
    holds if they are ``half``.
    """

    def add(g: Graph, x: str) -> str:
        w, n = steps(64, 6, within=within), block or 64
        w.reshape(-1, n, 6)[:, :2] = np.reshape(within, (2, 1))  # both ends in each block
        factor = scales(64 // n * 6)
        if half:
            factor = factor.astype(np.float16).astype(np.float32)
        w *= np.repeat(factor.reshape(-1, 6), n, axis=0)
        wide = g.add("concat", [x] * 8, axis=2)
        if not image:
            return g.add("matmul", (wide, g.add_constant(w, "w")))
        wide = g.add("reshape", (wide,), TensorType((1, 2, 5, 64)))
        attrs = {"strides": (1, 1), "padding": (0,) * 4, "dilation": (1, 1), "groups": 1}
        kernel = g.add_constant(np.ascontiguousarray(w.T)[..., None, None], "w")
        return g.add("conv2d", (wide, kernel), layout="NHWC", **attrs)

    return add


@pytest.mark.parametrize(
    ("network", "dtypes"),
    [
        (of_steps((-8, 7)), ["int4"]),
        (of_steps((-7, 8)), ["int4"]),  # by the opposite scale
        (of_steps((-8, 8)), ["int8"]),
        (of_steps((-3, 12)), ["int4", "float16", "int8"]),  # all of k is one block
        (of_steps((-3, 12), half=False), ["int4", "float32", "int8"]),
        (of_steps((-3, 12), image=True), ["int8"]),  # a convolution has no zero points
        (of_steps((-8, 7), image=True), ["int4"]),
        (of_steps((-8, 7), block=16), ["int4", "float16"]),
        (of_steps((0, 15), block=32), ["int4", "float16", "int8"]),
        (of_steps((0, 16), block=32), ["int8", "float16"]),
        (of_steps((100, 115), block=32), ["int4", "float16", "int8"]),
        (of_steps((0, 255), block=32), ["int8", "float16", "int8"]),
        (of_steps((-200, 55)), ["int8", "float16", "int8"]),
    ],
)
def test_steps_are_kept_in_4_or_8_bits(
    network: Callable[[Graph, str], str], dtypes: list[str]
) -> None:
    graph = build(network)
    after = byte_weights(graph).check()
    (product,) = (op for op in after.operators.values() if op.kind in ("matmul", "conv2d"))
    assert [after.types[x].dtype for x in product.inputs[1:]] == dtypes
    assert_close(values(after), values(graph), 1e-6)


@pytest.mark.parametrize(
    ("within", "groups", "dtypes"),
    [
        ((-127, 127), 8, ["int8", "float32"]),
        ((-8, 7), 8, ["int8", "float32"]),  # no kernel reads them in 4 bits
        ((0, 255), 8, ["int8", "float32", "int8"]),
        ((-200, 55), 4, ["int8", "float32", "int8"]),
    ],
)
def test_weights_of_narrow_groups_have_their_scales_beside_them(
    within: tuple[int, int], groups: int, dtypes: list[str]
) -> None:
    def network(g: Graph, x: str) -> str:
        w = steps(16, 8 // groups, 3, 3, within=within)
        w.reshape(16, -1)[:, :2] = within  # both ends in each channel
        w *= scales(16).reshape(16, 1, 1, 1)
        image = g.add("reshape", (x,), TensorType((1, 2, 5, 8)))
        attrs = {"strides": (1, 1), "padding": (1,) * 4, "dilation": (1, 1), "groups": groups}
        return g.add("conv2d", (image, g.add_constant(w, "w")), layout="NHWC", **attrs)

    graph = build(network)
    after = byte_weights(graph).check()
    (product,) = (op for op in after.operators.values() if op.kind == "conv2d")
    assert [after.types[x].dtype for x in product.inputs[1:]] == dtypes
    assert after.histogram() == {"reshape": 1, "conv2d": 1, "identity": 1}  # none behind it scales
    assert_close(values(after), values(graph), 1e-6)


@pytest.mark.parametrize("rows", [(10, 32), (1, 10, 32)])
def test_reshapes_move_past_products_with_scales(rows: tuple[int, ...]) -> None:
    """As the fusion search moves them, when the weights are found already."""

    def network(g: Graph, x: str) -> str:
        wide = g.add("concat", [x] * 4, axis=2)
        flat = g.add("reshape", (wide,), TensorType(rows))
        w = steps(32, 6, within=(0, 15)) * np.repeat(scales(12).reshape(2, 6), 16, axis=0)
        y = g.add("relu", (g.add("matmul", (flat, g.add_constant(w, "w"))),))
        return g.add("reshape", (y,), TensorType((2, 5, 6)))

    graph = build(network)
    after = byte_weights(graph)
    moved = simplify_movement(after).check()
    (product,) = (op for op in moved.operators.values() if op.kind == "matmul")
    assert product.type.shape == (2, 5, 6) and len(product.inputs) == 4
    assert_close(values(moved), values(graph), 1e-6)


def test_weights_without_a_kernel_in_int4_are_kept_in_int8() -> None:
    def cost(stage: Stage) -> float:
        return inf if any(i.type.dtype == "int4" for i in stage.inputs) else 1.0

    assert stored(byte_weights(build(of_steps((-8, 7))), cost)) == [(64, 6)]


def test_the_two_operators_are_known_as_one_product() -> None:
    after = byte_weights(build(mlp))
    products = [scaled_product(after, op) for op in after.operators.values()]
    assert products.count("matmul") == 1 and products.count(None) == len(products) - 1


def test_a_product_that_would_be_slower_keeps_its_weights() -> None:
    def cost(stage: Stage) -> float:
        return 2.0 if any(i.type.dtype == "int8" for i in stage.inputs) else 1.0

    def no_kernel(stage: Stage) -> float:
        return inf if any(i.type.dtype == "int8" for i in stage.inputs) else 1.0

    for price in (cost, no_kernel):
        assert not stored(byte_weights(build(mlp), price))
