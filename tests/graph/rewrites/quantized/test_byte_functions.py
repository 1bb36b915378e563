"""Functions between a dequantization and a quantization become functions of bytes, and stay the
same functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.quantized.byte_functions import byte_functions
from gtco.machine.target import TARGETS
from gtco.tensor.stage import TensorType
from tests.graphs import number
from tests.kernels import fresh_seed

SHAPE = (2, 64, 72)
LOOKS_UP, COMPUTES = "icelake-server", "x86-64-v4"
Body = Callable[[Graph, str], str]


def between(
    body: Body, again: tuple[float, int] = (0.02, 90), zero: int = 100, dtype: str = "uint8"
) -> Graph:
    """A function of what was dequantized by the scale 0.05, quantized ``again`` by another scale
    and zero point, to ``dtype``.
    """
    graph = Graph(("q",), ("r",), {"q": TensorType(SHAPE, "uint8")})
    given = (number(graph, 0.05), number(graph, zero))
    x = graph.add("dequantize", ("q", *given), TensorType(SHAPE))
    y = body(graph, x)
    scale, zero = again
    high = np.float32(1 / scale)
    steps = [number(graph, v) for v in (high, np.float32(1 / scale - np.float64(high)), zero)]
    kind, low = TensorType(graph.types[y].shape, dtype), -128.0 if dtype == "int8" else 0.0
    graph.add("quantize", (y, *steps), kind, output="r", min=low, max=low + 255)
    return graph.check()


def plain(graph: Graph, x: str) -> str:
    return x


def gelu(graph: Graph, x: str) -> str:
    return graph.add("gelu", (x,))


def relu(graph: Graph, x: str) -> str:
    return graph.add("relu", (x,))


def scaled(graph: Graph, x: str) -> str:
    y = graph.add("multiply", (x, number(graph, 0.125)))
    return graph.add("minimum", (graph.add("add", (y, number(graph, 0.3))), number(graph, 0.4)))


def turned(graph: Graph, x: str) -> str:
    y = graph.add("permute", (graph.add("gelu", (x,)),), axes=(2, 0, 1))
    return graph.add("reshape", (y,), TensorType((144, 64)))


def read_twice(graph: Graph, x: str) -> str:
    y = graph.add("gelu", (x,))
    graph.add("sum", (y,), TensorType((2, 64, 1)), output="s", axes=(2,), keepdims=True)
    graph.outputs = ("r", "s")
    return y


def of_two(graph: Graph, x: str) -> str:
    return graph.add("add", (x, x))


def by_row(graph: Graph, x: str) -> str:
    rows = graph.add_constant(np.arange(64, dtype=np.float32).reshape(64, 1))
    return graph.add("multiply", (x, rows))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("body", [plain, gelu, relu, scaled, turned])
def test_taken(body: Body, dtype: str) -> None:
    before = between(body, dtype=dtype)
    after = byte_functions(before, TARGETS[LOOKS_UP]).check()
    kinds = {op.kind for op in after.operators.values()}
    assert kinds - {"permute", "reshape", "identity"} == {"byte_function"}
    q = np.random.default_rng(fresh_seed()).integers(0, 256, SHAPE).astype(np.uint8)
    got, wanted = (g.evaluate({"q": q})["r"].astype(int) for g in (after, before))
    # reference and rewrite round constants in float32 at other places
    assert np.abs(got - wanted).max() <= 1 and (got != wanted).mean() < 0.02
    assert byte_functions(before, TARGETS[COMPUTES]).operators == before.operators


@pytest.mark.parametrize("body", [read_twice, of_two, by_row])
def test_left(body: Body) -> None:
    before = between(body)
    assert "byte_function" not in byte_functions(before, TARGETS[LOOKS_UP]).histogram()


def test_small_tensors_are_left() -> None:
    graph = Graph(("q",), ("r",), {"q": TensorType((1, 32), "uint8")})
    numbers = [number(graph, v) for v in (0.05, 3)]
    x = graph.add("dequantize", ("q", *numbers), TensorType((1, 32)))
    steps = [number(graph, v) for v in (9.0, 0.0, 3)]
    kind = TensorType((1, 32), "uint8")
    y = graph.add("sigmoid", (x,))
    graph.add("quantize", (y, *steps), kind, output="r", min=0.0, max=255.0)
    assert "byte_function" not in byte_functions(graph, TARGETS[LOOKS_UP]).histogram()


@pytest.mark.parametrize("machine", [LOOKS_UP, COMPUTES])
@pytest.mark.parametrize("body", [plain, relu, turned])
def test_a_function_that_changes_nothing_goes(machine: str, body: Body) -> None:
    """ReLU changes no byte whose zero point is 0."""
    before = between(body, (0.05, 0), zero=0)
    kinds = byte_functions(before, TARGETS[machine]).histogram()
    if body is turned:  # GELU changes some
        assert "gelu" in kinds or "byte_function" in kinds
    else:
        assert not {"quantize", "dequantize", "relu", "byte_function"} & {*kinds}
