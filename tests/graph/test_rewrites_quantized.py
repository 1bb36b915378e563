"""Rewrites around roundings: fewer instructions for quantizing, with the same integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.reciprocal_scales import reciprocal, reciprocal_scales, same_steps
from gtco.graph.rewrites.steps_in_floats import steps_in_floats
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType
from tests.graphs import build, number
from tests.kernels import fresh_seed

SHAPE = (7, 300)


def quantized(
    scale: float,
    zero: int,
    dtype: str,
    *,
    offset: int | None = None,
    more: Callable[[Graph, str], None] = lambda graph, q: None,
) -> Graph:
    """x quantized, and dequantized with the zero point ``offset``; ``more`` may read the 8 bits."""
    kind, bounds = TensorType(SHAPE), np.iinfo(dtype)
    graph = Graph(("x",), ("y",), {"x": kind})
    s = graph.add_constant(np.array(scale, np.float32))
    divided = graph.add("round", (graph.add("divide", ("x", s)),))
    shifted = graph.add("add", (divided, graph.add_constant(np.array(zero, np.float32))))
    low, high = float(bounds.min), float(bounds.max)
    q = graph.add(
        "cast", (graph.add("clip", (shifted,), min=low, max=high),), TensorType(SHAPE, dtype)
    )
    wide = graph.add("cast", (q,), TensorType(SHAPE, "int32"))
    z = graph.add_constant(np.array(zero if offset is None else offset, np.int32))
    steps = graph.add("cast", (graph.add("subtract", (wide, z)),), kind)
    graph.add("multiply", (steps, s), kind, output="y")
    more(graph, q)
    return graph.check()


def drawn(scale: float, seed: int) -> np.ndarray:
    """Values around the middle of two steps, the extremes, and infinities."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    near = (rng.integers(-300, 300, SHAPE) + 0.5) * np.float64(scale)
    x = near.astype(np.float32).view(np.int32) + rng.integers(-3, 4, SHAPE).astype(np.int32)
    x = x.view(np.float32)
    x[0, :6] = np.inf, -np.inf, 3e38, -3e38, 0, np.float32(scale)
    return x


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("offset", [None, 5])
def test_no_casts_between_quantizing_and_dequantizing(dtype: str, offset: int | None) -> None:
    before = quantized(0.037, 17, dtype, offset=offset)
    after = steps_in_floats(before).check()
    assert "cast" not in after.histogram() and before.histogram()["cast"] == 3
    given = {"x": drawn(0.037, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


def test_bytes_that_others_read_stay() -> None:
    def read(graph: Graph, q: str) -> None:
        graph.add("identity", (q,), output="q")
        graph.outputs = ("y", "q")

    before = quantized(0.037, 17, "uint8", more=read)
    assert steps_in_floats(before).dump() == before.dump()


@pytest.mark.parametrize("scale", [0.037, 0.25, 1.0, 3.1e-4, 7.77e5])
def test_scales_become_reciprocals(scale: float) -> None:
    """Every integer is that of the division, also for infinities and at the middle of steps."""
    before = quantized(scale, 100, "uint8")
    after = reciprocal_scales(before).check()
    assert "divide" not in after.histogram() and after.histogram()["multiply_pair"] == 1
    given = {"x": drawn(scale, fresh_seed())}
    np.testing.assert_array_equal(after.evaluate(given)["y"], before.evaluate(given)["y"])


def test_a_reciprocal_is_tried_at_every_step() -> None:
    """Most scales fail with one float32 as their reciprocal, and nearly all pass with a pair; where
    a pair passes, no value of x gives another integer.
    """
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.uniform(-9, 3, 60)).astype(np.float32)
    single, pairs = 0, 0
    for scale in scales:
        high, low = reciprocal(float(scale))
        single += same_steps(float(scale), high, np.zeros_like(low), -255, 255)
        pairs += same_steps(float(scale), high, low, -255, 255)
        x = rng.uniform(-260, 260, 100_000).astype(np.float32) * scale
        multiplied = Operator("multiply_pair", ("x", "h", "l"), "y", TensorType(x.shape))
        got = np.rint(evaluate(multiplied, x, high, low))
        np.testing.assert_array_equal(got, np.rint(x / scale))
    assert single < 20 and pairs > 57


def test_divisions_that_stay() -> None:
    """Those whose results are not bounded, whose scale is computed or extreme, or not rounded."""
    kind = TensorType(SHAPE)
    unbounded = Graph(("x",), ("y",), {"x": kind})
    s = unbounded.add_constant(np.array(0.037, np.float32))
    unbounded.add("round", (unbounded.add("divide", ("x", s)),), kind, output="y")
    computed = quantized(0.037, 3, "uint8")
    computed.inputs, computed.types["s"] = ("x", "s"), TensorType(())
    (division,) = (o for o in computed.operators.values() if o.kind == "divide")
    computed.put(Operator("divide", ("x", "s"), division.output, kind))
    for graph in (unbounded, computed, quantized(1e-30, 3, "uint8"), quantized(0.0, 3, "uint8")):
        assert reciprocal_scales(graph).dump() == graph.dump()


@pytest.mark.parametrize("shows", ["round", "to integers", "comparison"])
def test_what_becomes_whole_keeps_its_last_bit(shows: str) -> None:
    """A division by 255 and a factor after another one, whose result goes on through element-wise
    operators and a move."""

    def steps(g: Graph, x: str) -> str:
        y = g.add("multiply", (g.add("multiply", (x, number(g, 0.3))), number(g, 0.7)))
        y = g.add("divide", (y, number(g, 255)))
        y = g.add("permute", (g.add("relu", (y,)),), TensorType((300, 7)), axes=(1, 0))
        if shows == "round":
            return g.add("round", (y,))
        if shows == "to integers":
            return g.add("cast", (y,), TensorType(g.types[y].shape, "int32"))
        return g.add("less", (y, number(g, 3)), TensorType(g.types[y].shape, "bool"))

    graph = build(steps, (7, 300))
    kinds = canonicalize(graph).histogram()
    assert kinds["divide"] == 1 and kinds["multiply"] == 2
    x = {"x": np.random.default_rng(5).uniform(-9e3, 9e3, (7, 300)).astype(np.float32)}
    (wanted,) = graph.evaluate(x).values()
    np.testing.assert_array_equal(canonicalize(graph).evaluate(x)["y"], wanted)
