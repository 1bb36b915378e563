"""Rows and columns that nobody reads are not computed."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.rows_unread import rows_unread
from gtco.tensor.stage import TensorType
from tests.graph.rewrites.products import products
from tests.graphs import RNG, build, number, same, weights


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


def test_a_slice_goes_through_a_long_graph_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round copies the graph some times, so rounds that grow with it take quadratic time."""
    copies = []
    copy = Graph.copy
    monkeypatch.setattr(Graph, "copy", lambda graph: copies.append(1) or copy(graph))

    def body(g: Graph, x: str, steps: int) -> str:
        for _ in range(steps):
            x = g.add("permute", (g.add("tanh", (x,)),), axes=(0, 2, 1))
            x = g.add("reshape", (x,), TensorType((2, 9, 8)))
            x = g.add("add", (x, weights(g, 8)))
        made = TensorType((1, 9, 8))  # one image of two
        return g.add("slice", (x,), made, begin=(1, 0, 0), strides=(1, 1, 1))

    def rounds(steps: int) -> int:
        copies.clear()
        graph = build(lambda g, x: body(g, x, steps), (2, 9, 8))
        after = rows_unread(graph)
        (cut,) = (op for op in after.operators.values() if op.kind == "slice")
        assert cut.inputs == ("x",)
        return len(copies)

    assert rounds(60) == rounds(3)


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
