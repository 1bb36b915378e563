"""Convolutions of one tensor whose results are added become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.convolutions.parallel_convolutions import parallel_convolutions
from gtco.support.later import Later
from gtco.tensor.stage import TensorType
from tests.graph.rewrites.products import PLAIN, products
from tests.graphs import RNG, build, same, weights
from tests.kernels import fresh_seed


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


def test_sums_of_any_length() -> None:
    """More terms than Python's stack holds, and sums that double at each level."""

    def long(g: Graph, x: str) -> str:
        total = sized(g, x, 6, (1, 1))
        for _ in range(1200):
            total = g.add("add", (total, g.add("tanh", (x,))))
        return g.add("add", (total, sized(g, x, 6, (1, 1))))

    def doubled(g: Graph, x: str) -> str:
        total = g.add("add", (sized(g, x, 6, (1, 1)), x))
        for _ in range(40):
            total = g.add("add", (total, total))
        return total

    made = Graph(("x",), (), {"x": TensorType((1, 6, 4, 4))})
    made.outputs = (long(made, "x"),)
    assert parallel_convolutions(made.check()).histogram()["conv2d"] == 1
    made = Graph(("x",), (), {"x": TensorType((1, 6, 4, 4))})
    made.outputs = (doubled(made, "x"),)
    parallel_convolutions(made.check()).check()


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
