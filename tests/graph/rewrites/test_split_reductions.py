"""Reductions that are cut into two steps: equal values, and enough tasks."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.split_reductions import PART, part_rows, split_reductions
from gtco.tensor.stage import TensorType

RNG = np.random.default_rng(0)


def graph_of(kind: str, shape: tuple[int, ...], channels: int = 0, **attrs: object) -> Graph:
    graph = Graph(("x",), (), {"x": TensorType(shape)})
    affine = []
    if channels:
        values = RNG.standard_normal((2, channels)).astype(np.float32)
        values[:, -1] = 1, 0  # that one element changes nothing says nothing of the others
        affine = [graph.add_constant(value) for value in values]
    result = graph.add(kind, ("x", *affine), **attrs)
    graph.add("identity", (result,), graph.types[result], output="y")
    graph.outputs = ("y",)
    return graph.prune().check()


def split(graph: Graph, tolerance: float = 1e-9) -> Graph:
    """The graph, split for 8 cores. Its values in float64 must stay the same."""
    after = split_reductions(graph, 8).check()
    x = RNG.standard_normal(graph.types["x"].shape).astype(np.float32) + np.float32(3)
    before = graph.evaluate({"x": x}, dtype="float64")["y"]
    after_y = after.evaluate({"x": x}, dtype="float64")["y"]
    np.testing.assert_allclose(after_y, before, rtol=tolerance, atol=tolerance)
    return after


@pytest.mark.parametrize("groups", [1, 4, 12])
@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("size", [(7, 5), (96, 80)])
def test_group_norm(size: tuple[int, int], axis: int, groups: int) -> None:
    shape = (2, 12, *size) if axis == 1 else (2, *size, 12)
    kinds = split(
        graph_of("group_norm", shape, 12, groups=groups, epsilon=1e-5, axis=axis)
    ).histogram()
    assert "group_norm" not in kinds
    long = axis == 3 or (groups < 16 and size == (96, 80))
    assert ("moments" in kinds) == long and ("layer_norm" in kinds) == (not long)


def test_group_norm_with_channels_in_the_middle() -> None:
    kinds = split(
        graph_of("group_norm", (1, 40, 6, 30), 6, groups=3, epsilon=1e-5, axis=2)
    ).histogram()
    assert "group_norm" not in kinds


def test_layer_norm_over_channels_has_its_pixels_as_one_axis() -> None:
    graph = Graph(("x",), (), {"x": TensorType((2, 12, 6, 5))})
    g, b = (graph.add_constant(RNG.standard_normal(12).astype(np.float32)) for _ in range(2))
    last = graph.add("permute", ("x",), axes=(0, 2, 3, 1))
    norm = graph.add("layer_norm", (last, g, b), epsilon=1e-6)
    graph.outputs = (graph.add("permute", (norm,), output="y", axes=(0, 3, 1, 2)),)
    after = split(graph.prune().check())
    permutes = [op for op in after.operators.values() if op.kind == "permute"]
    assert [op["axes"] for op in permutes] == [(0, 2, 1)] * 2
    assert after.types[permutes[0].output].shape == (2, 30, 12)


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(
    ("shape", "axes", "steps"),
    [((1, 200000), (1,), 2), ((400, 512, 1), (0,), 2), ((1, 512, 400), (1, 2), 2),
     ((64, 4000), (1,), 1), ((1, 100003), (1,), 1), ((4, 50, 600), (0, 2), 1)],
)  # fmt: skip
def test_reductions(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], steps: int) -> None:
    graph = graph_of(kind, shape, axes=axes, keepdims=True)
    assert split(graph, 1e-7).histogram()[kind] == steps


@pytest.mark.parametrize("shape", [(1, 200704), (2, 1, 98304), (3, 150000)])
def test_few_long_rows_of_layer_norm(shape: tuple[int, ...]) -> None:
    kinds = split(graph_of("layer_norm", shape, shape[-1], epsilon=1e-5)).histogram()
    assert kinds["moments"] == 1 and "layer_norm" not in kinds


@pytest.mark.parametrize("shape", [(1, 200704), (2, 1, 98304), (3, 150000)])
def test_few_long_rows_of_softmax(shape: tuple[int, ...]) -> None:
    kinds = split(graph_of("softmax", shape, axis=len(shape) - 1)).histogram()
    assert kinds["max"] == 2 and kinds["sum"] == 2 and "softmax" not in kinds


@pytest.mark.parametrize("shape", [(1, 50176), (8, 200704), (1, 150001), (16, 100000)])
def test_rows_that_busy_the_cores_or_have_no_parts_stay_whole(shape: tuple[int, ...]) -> None:
    assert split(graph_of("softmax", shape, axis=1)).histogram()["softmax"] == 1
    assert split(graph_of("softmax", (3, 200_000), axis=0)).histogram()["softmax"] == 1
    assert split(graph_of("layer_norm", shape, shape[-1], epsilon=1e-5)).histogram()["layer_norm"]


@pytest.mark.parametrize("rows", [1, 7, 97, 3136, 4096, 9973, 36864, 1 << 20])
@pytest.mark.parametrize("width", [1, 3, 64, 320, 20000])
def test_parts_are_of_one_size(rows: int, width: int) -> None:
    part = part_rows(rows, width)
    assert 1 <= part <= rows and rows % part == 0
    assert part == rows or rows // part <= 4 * 256
    assert part * width <= 4 * PART or part == rows or rows // part >= 64 or part == 1
