"""Attention as one stage or as its parts: the values are equal, and the fusion search takes the
cheaper form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from gtco.graph.fusion.stages import fuse
from gtco.graph.fusion.take_apart import kinds_of_attention, taken_apart
from gtco.graph.graph import Graph
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.operators import is_anchor
from gtco.tensor.stage import Stage, TensorType


def attention(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    bias: np.ndarray | None = None,
    dtype: str = "float32",
    **attrs: object,
) -> Graph:
    """y = attention(q, k, v, bias); the bias is a constant."""
    types = {name: TensorType(s, dtype) for name, s in zip("qkv", (q, k, v), strict=True)}
    graph = Graph(("q", "k", "v"), (), types)
    inputs = ["q", "k", "v"]
    if bias is not None:
        inputs.append(graph.add_constant(bias, "bias"))
    graph.outputs = (graph.add("attention", inputs, output="y", **{"scale": 0.3, **attrs}),)
    return graph.prune().check()


def values(graph: Graph) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    types = {name: graph.types[name] for name in graph.inputs}
    return {
        name: random.standard_normal(tuple(map(int, t.shape))).astype(
            ml_dtypes.bfloat16 if t.dtype == "bfloat16" else t.dtype
        )
        for name, t in types.items()
    }


BIAS = np.random.default_rng(1).standard_normal((5, 6)).astype("float32")
HIDDEN = np.where(np.arange(30).reshape(5, 6) % 7 < 3, np.float32(-1e9), BIAS)
ALL_HIDDEN = np.where(np.arange(5)[:, None] == 2, np.float32(-1e9), HIDDEN)
MINUS_INFINITY = np.where(np.arange(5)[:, None] == 2, np.float32(-np.inf), BIAS)


@pytest.mark.parametrize(
    ("bias", "attrs"),
    [
        (None, {}),
        (None, {"scale": 1.0}),
        (BIAS, {}),
        (HIDDEN, {"hidden": -1e9}),
        (ALL_HIDDEN, {"hidden": -1e9}),
        (MINUS_INFINITY, {"hidden": -np.inf}),
        (MINUS_INFINITY, {"hidden": -np.inf, "guarded": True}),
    ],
)
@pytest.mark.parametrize("width", [4, 9])
def test_the_parts_compute_the_same(
    bias: np.ndarray | None, attrs: dict[str, object], width: int
) -> None:
    graph = attention((2, 5, width), (2, 6, width), (2, 6, 3), bias, **attrs)
    apart = taken_apart(graph, ["y"]).check()
    assert [op.kind for op in apart.operators.values()].count("matmul") == 2
    assert "attention" not in apart.histogram()
    inputs = values(graph)
    with np.errstate(invalid="ignore"):
        want, got = (g.evaluate(inputs, dtype="float64")["y"] for g in (graph, apart))
    # the scale is a float32 constant in one form and an attribute in the other
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_the_parts_of_bfloat16_round_its_weights_alone() -> None:
    """The weights are rounded to eight bits after the division instead of before it."""
    graph = attention((2, 5, 4), (2, 6, 4), (2, 6, 3), dtype="bfloat16")
    apart = taken_apart(graph, ["y"]).check()
    scaled = [op for op in apart.operators.values() if op.kind == "multiply"]
    assert [op.type.dtype for op in scaled] == ["float32"]
    inputs = values(graph)
    want, got = (g.evaluate(inputs)["y"] for g in (graph, apart))
    np.testing.assert_allclose(got, want, atol=2**-7 * np.abs(want).max())


def test_the_others_stay() -> None:
    graph = attention((2, 5, 4), (2, 6, 4), (2, 6, 4))
    graph.outputs = ("y", graph.add("attention", ["y", "k", "v"], output="z", scale=0.3))
    graph.prune().check()
    (_, names), = kinds_of_attention(graph)
    assert names == ("y", "z")
    assert taken_apart(graph, ["y"]).check().histogram()["attention"] == 1


def by_parts(one: float, part: float) -> Callable[[Stage], float]:
    """Seconds of an attention, and of each product and softmax; other operators cost almost
    nothing.
    """

    def cost(stage: Stage) -> float:
        anchors = [op.kind for op in stage.operators if is_anchor(op.kind)]
        if len(anchors) > 1:
            return math.inf
        return {"attention": one, "matmul": part, "softmax": part}.get("".join(anchors), 0.0)

    return cost


@pytest.mark.parametrize(("one", "wanted"), [(5.0, False), (3.5, True)])
def test_the_search_takes_the_cheaper(one: float, wanted: bool) -> None:
    """The parts are three stages of a second each. An attention of 5 s is taken apart, and one of
    3.5 s is not, because it is as likely to be as good. The graph has two different attentions.
    """
    graph = attention((2, 5, 4), (2, 6, 4), (2, 6, 3))
    other = graph.add("attention", ["q", "k", "k"], output="z", scale=0.3)
    graph.outputs = ("y", other)
    found, partition = fuse(graph.prune().check(), by_parts(one, 1.0))
    assert found.histogram().get("attention", 0) == (2 if wanted else 0)
    assert partition.seconds == pytest.approx(2 * (one if wanted else 3.0))
    inside = sorted(o.output for s in partition.stages for o in s.operators)
    assert inside == sorted(found.operators)


def test_one_query_is_taken_apart_and_many_are_not() -> None:
    """The attention would pack K and V for a single row; the products read them in place."""
    policy = AnalyticPolicy(target("znver4"))
    for queries, wanted in ((1, False), (576, True)):
        graph = attention((48, queries, 64), (48, 576, 64), (48, 576, 64))
        found, _ = fuse(graph, policy.predict, policy.floor, policy.possible)
        assert ("attention" in found.histogram()) is wanted
