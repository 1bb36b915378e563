"""The samples of a model of one shape, found from its graph alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gtco.graph.batch import batched
from gtco.graph.graph import Graph
from gtco.graph.samples import Samples, samples_along
from gtco.support.errors import ShapeError
from gtco.tensor.stage import TensorType
from tests.graph.test_samples import (
    Body,
    Drawing,
    columns,
    constant,
    first,
    folded,
    gram,
    graph_of,
    heads_first,
    images,
    last,
    mean,
    picked,
    ranked,
    reshape,
    rolled,
    similarity,
    softmax,
    turned,
    windows,
    windows_out,
    with_token,
)


def in_parts(found: Samples, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    begins = np.cumsum((0, *sizes[:-1]))
    parts = [
        found.at(n).check().evaluate({"x": x[begin : begin + n]}, "float64")["y"]
        for begin, n in zip(begins, sizes, strict=True)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("body", [windows, heads_first, with_token, windows_out])
@pytest.mark.parametrize("size", [2, 4, 8, 12])  # as long as other axes too
def test_models_that_run_in_parts(body: Body, size: int) -> None:
    graph = graph_of(images, body, size)
    found = batched(graph)
    assert found is not None and found.axes == {"x": 0, "y": 0}
    x = np.random.default_rng(size).standard_normal(images(size))
    np.testing.assert_allclose(
        in_parts(found, x, (1, size - 1)),
        graph.evaluate({"x": x}, "float64")["y"],
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    "body",
    [mean, softmax, similarity, gram, turned, first, ranked, last, picked, rolled, columns],
)
@pytest.mark.parametrize("size", [2, 4])
def test_models_that_mix_samples(body: Body, size: int) -> None:
    assert batched(graph_of(images, body, size)) is None


def test_samples_that_are_taken_together() -> None:
    assert batched(graph_of(images, folded, 4)) is None


def test_a_model_without_two_samples() -> None:
    assert batched(graph_of(images, windows, 1)) is None
    scalar = Graph(("x",), ("y",), {"x": TensorType(())})
    scalar.add("identity", ("x",), scalar.types["x"], output="y")
    assert batched(scalar) is None
    assert batched(Graph((), ("y",), {})) is None


def test_a_constant_that_is_read_in_two_ways() -> None:
    """As a repeated sample, and as a table whose rows are picked: one row would be too few."""
    graph = Graph(("x", "i"), ("y",), {"x": TensorType((4, 8)), "i": TensorType((4, 1), "int64")})
    table = graph.add_constant(np.tile(np.arange(8, dtype=np.float32), (4, 1)))
    rows = reshape(graph, graph.add("gather", (table, "i"), axis=0), 4, 8)
    made = graph.add("add", (graph.add("add", ("x", table)), rows))
    graph.add("identity", (made,), graph.types[made], output="y")
    assert batched(graph.check()) is None


def test_an_input_without_samples() -> None:
    """It is read by every part, and its results are the same in each."""
    graph = Graph(("x", "mask"), ("y", "z"), {"x": TensorType((4, 8)), "mask": TensorType((1, 8))})
    graph.add("add", ("x", "mask"), output="y")
    graph.add("exp", ("mask",), output="z")
    found = batched(graph.check())
    assert found is not None and found.axes == {"x": 0, "mask": None, "y": 0, "z": None}


def test_a_table_that_has_a_row_for_each_sample() -> None:
    graph = Graph(("x",), ("y",), {"x": TensorType((4, 8))})
    graph.add("add", ("x", constant(graph, 4, 8)), output="y")
    assert batched(graph.check()) is None


@pytest.mark.parametrize("of_image", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_a_grid_that_has_points_for_each_sample(of_image: bool, same: bool) -> None:
    """Also where the grid is the input and the image is the constant."""
    rng = np.random.default_rng(0)
    shapes = {"image": (4, 3, 5, 5), "grid": (4, 2, 2, 2)}
    given, fixed = ("grid", "image") if of_image else ("image", "grid")
    graph = Graph(("x",), ("y",), {"x": TensorType(shapes[given])})
    drawn = rng.uniform(-1, 1, (1 if same else 4, *shapes[fixed][1:])).astype(np.float32)
    known = graph.add_constant(np.ascontiguousarray(np.broadcast_to(drawn, shapes[fixed])))
    order = (known, "x") if of_image else ("x", known)
    attrs = {"method": "linear", "padding": "zeros", "align_corners": False}
    made = TensorType((4, 3, 2, 2))
    graph.add("grid_sample", order, made, output="y", layout="NCHW", **attrs)
    found = batched(graph.check())
    assert (found is not None) == same
    if found is not None:
        x = rng.uniform(-1, 1, shapes[given])
        whole = graph.evaluate({"x": x}, "float64")["y"]
        np.testing.assert_allclose(in_parts(found, x, (1, 3)), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("same", [False, True])
def test_a_bias_of_each_sample(same: bool) -> None:
    rng = np.random.default_rng(0)
    graph = Graph(("x",), ("y",), {"x": TensorType((4, 2, 5, 8))})
    drawn = rng.standard_normal((1 if same else 4, 2, 5, 5)).astype(np.float32)
    bias = graph.add_constant(np.ascontiguousarray(np.broadcast_to(drawn, (4, 2, 5, 5))))
    kind = graph.types["x"]
    graph.add("attention", ("x", "x", "x", bias), kind, output="y", scale=0.5)
    found = batched(graph.check())
    assert (found is not None) == same


def test_drawn_graphs() -> None:
    """Parts give what the whole gives, and one size finds what two sizes prove."""
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        drawing = Drawing(seed)
        size = 2 + seed % 5
        graph = drawing.at(size)
        try:
            proven = samples_along(drawing.at(2), drawing.at(3), (2, 3), "n").axes["y"] == 0
        except ShapeError:
            proven = False
        found = batched(graph)
        outcomes[f"{proven}, {found is not None}"] += 1
        assert found is not None or not proven, f"seed {seed}: {drawing.steps}"
        if found is None or found.axes["y"] != 0:
            continue
        x = np.random.default_rng(seed).standard_normal(graph.types["x"].sizes)
        np.testing.assert_allclose(
            in_parts(found, x, (1, size - 1)),
            graph.evaluate({"x": x}, "float64")["y"],
            rtol=1e-9,
            atol=1e-9,
            err_msg=f"seed {seed}: {drawing.steps}",
        )
    assert outcomes["True, True"] > 60 and outcomes["False, False"] > 60, outcomes
