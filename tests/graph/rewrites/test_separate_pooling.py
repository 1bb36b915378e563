"""Maxima of large windows, found along one axis after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gtco.graph.graph import Graph
from gtco.graph.rewrites.separate_pooling import separate_pooling
from gtco.tensor.stage import TensorType

Pair = tuple[int, int]


def pooled(
    shape: tuple[int, ...],
    kernel: Pair,
    strides: Pair = (1, 1),
    padding: tuple[int, ...] = (0, 0, 0, 0),
    dilation: Pair = (1, 1),
    layout: str = "NHWC",
    kind: str = "max_pool2d",
) -> Graph:
    """A graph of one pooling; windows have to fit."""
    first = 1 if layout == "NHWC" else 2
    made = list(shape)
    for axis in (0, 1):
        window = (kernel[axis] - 1) * dilation[axis] + 1
        room = shape[first + axis] + padding[axis] + padding[2 + axis] - window
        made[first + axis] = room // strides[axis] + 1
    attrs: dict[str, Any] = {"kernel": kernel, "strides": strides, "padding": padding}
    if kind == "max_pool2d":
        attrs["dilation"] = dilation
    else:
        attrs["count_include_pad"] = True
    graph = Graph(("x",), ("y",), {"x": TensorType(shape)})
    graph.add(kind, ("x",), TensorType(tuple(made)), output="y", layout=layout, **attrs)
    return graph.check()


def kernels(graph: Graph) -> list[Pair]:
    return [op["kernel"] for op in graph.operators.values()]


@given(
    shape=st.tuples(*(st.integers(low, high) for low, high in ((1, 2), (3, 12), (3, 12), (2, 3)))),
    kernel=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 4)] * 4),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    seed=st.integers(0, 99),
)
def test_values_are_the_same(
    shape: tuple[int, ...],
    kernel: Pair,
    strides: Pair,
    padding: tuple[int, ...],
    dilation: Pair,
    seed: int,
) -> None:
    """With NaN and infinities among them."""
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    room = [shape[1 + axis] + padding[axis] + padding[2 + axis] for axis in (0, 1)]
    assume(all(window <= most for window, most in zip(windows, room, strict=True)))
    graph = pooled(shape, kernel, strides, padding, dilation)
    after = separate_pooling(graph)
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape).astype(np.float32)
    x[random.random(shape) < 0.05] = random.choice([np.nan, np.inf, -np.inf])
    wanted, found = graph.evaluate({"x": x}), after.check().evaluate({"x": x})
    np.testing.assert_array_equal(found["y"], wanted["y"])
    if not any(padding):
        assert kernels(after) == [(kernel[0], 1), (1, kernel[1])]


@pytest.mark.parametrize(
    "graph",
    [
        pooled((1, 9, 9, 8), (3, 3)),
        pooled((1, 9, 9, 8), (9, 1)),
        pooled((1, 9, 9, 1), (5, 5)),
        pooled((1, 8, 9, 9), (5, 5), layout="NCHW"),
        pooled((1, 9, 9, 8), (5, 5), kind="avg_pool2d"),
        pooled((1, 9, 9, 8), (5, 5), (1, 1), (7, 0, 0, 0)),  # windows in the padding alone
    ],
    ids=["small", "one axis", "one channel", "channels first", "mean", "no pixel"],
)
def test_others_stay(graph: Graph) -> None:
    assert kernels(separate_pooling(graph)) == kernels(graph)


def test_a_pooling_of_integers_keeps_its_casts() -> None:
    graph = Graph(("q",), ("y",), {"q": TensorType((1, 9, 9, 8), "uint8")})
    x = graph.add("cast", ("q",), TensorType((1, 9, 9, 8)))
    whole = {"strides": (1, 1), "padding": (2, 2, 2, 2), "dilation": (1, 1), "layout": "NHWC"}
    graph.add("max_pool2d", (x,), TensorType((1, 9, 9, 8)), output="y", kernel=(5, 5), **whole)
    assert separate_pooling(graph.check()).histogram() == {"cast": 1, "max_pool2d": 1}
