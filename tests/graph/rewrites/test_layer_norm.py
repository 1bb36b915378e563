"""Normalisations are found as exporters write them, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import TensorType
from tests.graphs import build, number, same, weights


def decomposed_layer_norm(g: Graph, x: str, power: bool, reciprocal: bool) -> str:
    axis = len(g.types[x].shape) - 1
    centred = g.add("subtract", (x, g.add("mean", (x,), axes=(axis,), keepdims=True)))
    square = g.add("power", (centred, number(g, 2))) if power else g.add("multiply", (centred,) * 2)
    variance = g.add("mean", (square,), axes=(axis,), keepdims=True)
    root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))
    if reciprocal:
        y = g.add("multiply", (centred, g.add("divide", (number(g, 1), root))))
    else:
        y = g.add("divide", (centred, root))
    y = g.add("multiply", (y, weights(g, int(g.types[x].shape[-1]))))
    return g.add("add", (y, weights(g, int(g.types[x].shape[-1]))))


@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_layer_norm(power: bool, reciprocal: bool) -> None:
    graph = build(lambda g, x: decomposed_layer_norm(g, x, power, reciprocal))
    after = same(graph, {"layer_norm": 1})
    assert after.operators["y"]["epsilon"] == pytest.approx(1e-5)


def centred_over(g: Graph, x: str, axes: tuple[int, ...]) -> str:
    centred = g.add("subtract", (x, g.add("mean", (x,), axes=axes, keepdims=True)))
    variance = g.add("mean", (g.add("multiply", (centred,) * 2),), axes=axes, keepdims=True)
    return g.add("divide", (centred, g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))))


def affine(g: Graph, y: str, *shape: int) -> str:
    return g.add("add", (g.add("multiply", (y, weights(g, *shape))), weights(g, *shape)))


def root_mean_square(g: Graph, x: str, axis: int, reciprocal: bool) -> str:
    squares = g.add("power", (x, number(g, 2)))
    variance = g.add("mean", (squares,), axes=(axis,), keepdims=True)
    root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-6))),))
    if reciprocal:
        return g.add("multiply", (x, g.add("divide", (number(g, 1), root))))
    return g.add("divide", (x, root))


@pytest.mark.parametrize("reciprocal", [True, False])
def test_rms_norm(reciprocal: bool) -> None:
    """As Hugging Face writes it; an addition after it is not a part of it."""

    def body(g: Graph, x: str) -> str:
        size = int(g.types[x].shape[-1])
        y = root_mean_square(g, x, len(g.types[x].shape) - 1, reciprocal)
        return g.add("add", (g.add("multiply", (weights(g, size), y)), weights(g, size)))

    after = same(build(body), {"rms_norm": 1, "add": 1})
    norm = next(op for op in after.operators.values() if op.kind == "rms_norm")
    assert norm["epsilon"] == pytest.approx(1e-6) and after.constants[norm.inputs[1]].std() > 0


def rms_of_centred(graph: Graph, x: str, axis: int, order: tuple[int, ...]) -> str:
    mean = graph.add("mean", (x,), axes=(axis,), keepdims=True)
    centred = graph.add("subtract", (x, mean))
    if order != tuple(range(len(order))):
        centred = graph.add("permute", (centred,), axes=order)
    size = int(graph.types[centred].shape[-1])
    return graph.add("rms_norm", (centred, weights(graph, size)), epsilon=1e-3)


@pytest.mark.parametrize(("axis", "order"), [(2, (0, 1, 2)), (1, (0, 2, 1))])
def test_rms_norm_of_what_has_no_mean_is_layer_norm(axis: int, order: tuple[int, ...]) -> None:
    """ONNX Runtime's optimizer moves a transposition between the mean and the other operators."""
    graph = build(lambda graph, x: rms_of_centred(graph, x, axis, order))
    moved = {"permute": 1} if axis == 1 else {}
    same(graph, {"layer_norm": 1} | moved)


def test_rms_norm_behind_a_mean_of_another_axis_stays() -> None:
    graph = build(lambda graph, x: rms_of_centred(graph, x, 1, (0, 1, 2)))
    assert canonicalize(graph).histogram()["rms_norm"] == 1


def test_rms_norm_over_another_axis_stays() -> None:
    graph = build(lambda g, x: root_mean_square(g, x, 0, False), (4, 6))
    assert "rms_norm" not in canonicalize(graph).histogram()


def test_normalisation_over_another_axis() -> None:
    """SAM's LayerNorm2d; its scale and shift are folded through the permutation."""
    graph = build(lambda g, x: affine(g, centred_over(g, x, (1,)), 5, 1, 1), (2, 5, 4, 3))
    after = same(graph, {"permute": 2, "layer_norm": 1}, 2e-6)
    norm = next(op for op in after.operators.values() if op.kind == "layer_norm")
    assert after.types[norm.inputs[1]].shape == (5,)


@pytest.mark.parametrize(("axes", "groups"), [((1, 2, 3), 1), ((2, 3), 6)])
def test_normalisation_over_the_image(axes: tuple[int, ...], groups: int) -> None:
    graph = build(lambda g, x: affine(g, centred_over(g, x, axes), 6, 1, 1), (2, 6, 4, 3))
    after = same(graph, {"group_norm": 1}, 2e-6)
    (norm,) = after.operators.values()
    assert norm["groups"] == groups and norm["axis"] == 1


def test_variances_over_other_axes_than_the_mean_are_no_normalisation() -> None:
    def body(g: Graph, x: str) -> str:
        centred = g.add("subtract", (x, g.add("mean", (x,), axes=(1,), keepdims=True)))
        variance = g.add("mean", (g.add("multiply", (centred,) * 2),), axes=(2,), keepdims=True)
        root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))
        return g.add("divide", (centred, root))

    kinds = canonicalize(build(body)).histogram()
    assert "layer_norm" not in kinds and "group_norm" not in kinds


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_laid_flat(groups: int) -> None:
    """As PyTorch's exporters write it: reshape, InstanceNormalization, reshape, scale, shift."""

    def body(g: Graph, x: str) -> str:
        flat = g.add("reshape", (x,), TensorType((2, groups, 72 // groups)))
        y = g.add("reshape", (centred_over(g, flat, (2,)),), TensorType((2, 6, 4, 3)))
        return affine(g, y, 6, 1, 1)

    after = same(build(body, (2, 6, 4, 3)), {"group_norm": 1}, 2e-6)
    (norm,) = after.operators.values()
    assert norm["groups"] == groups


def test_rows_of_tokens_are_no_groups() -> None:
    def body(g: Graph, x: str) -> str:
        flat = g.add("reshape", (x,), TensorType((10, 8)))
        return g.add("reshape", (centred_over(g, flat, (1,)),), TensorType((2, 5, 8)))

    assert "group_norm" not in canonicalize(build(body)).histogram()
