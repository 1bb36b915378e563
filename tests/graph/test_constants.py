"""Constants that are computed when they are read."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.constants import Constants
from gtco.graph.graph import Graph
from gtco.graph.rewrites.convolutions.conv_scale import conv_scale
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.support.later import Later
from gtco.tensor.stage import TensorType

SHAPE = (256, 512)


class Counted:
    """int8 weights that count how often they are read."""

    def __init__(self) -> None:
        self.readings = 0
        self.steps = np.random.default_rng(3).integers(-127, 128, SHAPE, np.int8)
        self.later = Later(SHAPE, np.dtype(np.int8), self.read)

    def read(self) -> np.ndarray:
        self.readings += 1
        return self.steps


def dequantized(weights: np.ndarray | Later) -> tuple[Graph, str]:
    """The output is the dequantized weights, turned, times an input."""
    graph = Graph(("x",), (), {"x": TensorType((4, SHAPE[1]))})
    q = graph.add_constant(weights, "q")
    scale = graph.add_constant(np.linspace(0.5, 2, SHAPE[1], dtype=np.float32), "scale")
    wide = graph.add("cast", (q,), TensorType(SHAPE, "float32"))
    turned = graph.add("permute", (graph.add("multiply", (wide, scale)),), axes=(1, 0))
    graph.outputs = (graph.add("matmul", ("x", turned), output="y"),)
    return graph, "y"


def weights_of(graph: Graph) -> str:
    return graph.operators["y"].inputs[1]


def test_folding_reads_nothing() -> None:
    given = Counted()
    graph, _ = dequantized(given.later)
    graph = fold_constants(fold_constants(graph)).check()
    name = weights_of(graph)
    assert graph.dump() and graph.key and set(graph.constants) == {name}
    assert given.readings == 0
    assert graph.constants.is_later(name) and graph.constants.nbytes(name) == 4 * np.prod(SHAPE)
    scale = np.linspace(0.5, 2, SHAPE[1], dtype=np.float32)
    for reading in (1, 2):
        np.testing.assert_array_equal(graph.constants[name], (given.steps * scale).T)
        assert given.readings == reading


def test_settled_constants_are_computed_once() -> None:
    given = Counted()
    graph = fold_constants(dequantized(given.later)[0])
    twin = graph.copy()
    graph.constants.settle()
    name = weights_of(graph)
    assert graph.constants[name] is graph.constants[name] and given.readings == 1
    assert twin.constants.is_later(name)  # what one graph computes is not the other's


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_what_is_no_wider_is_computed_at_once(dtype: str) -> None:
    """A view of a float32 array takes no memory, and neither does that of an array of int8."""
    constants = Constants({"w": np.ones(SHAPE, dtype)})
    graph = Graph(("x",), (), {"x": TensorType((4,))}, constants)
    graph.types["w"] = constants.type("w")
    turned = graph.add_result("permute", ("w",), axes=(1, 0))
    assert not graph.constants.is_later(turned)
    assert np.shares_memory(graph.constants[turned], constants["w"])
    assert graph.types[turned] == TensorType(SHAPE[::-1], dtype)


def test_a_scale_behind_a_convolution_is_left_for_later_too() -> None:
    given = Counted()
    graph = Graph(("x",), (), {"x": TensorType((1, 4, 4, 512))})
    narrow = graph.add_constant(given.later, "q")
    kernel = graph.add_result("reshape", (narrow,), TensorType((*SHAPE, 1, 1), "int8"))
    wide = graph.add_result("cast", (kernel,), TensorType((*SHAPE, 1, 1)))
    attrs = {"strides": (1, 1), "padding": (0,) * 4, "dilation": (1, 1), "groups": 1}
    y = graph.add("conv2d", ("x", wide), layout="NHWC", **attrs)
    scale = np.linspace(0.5, 2, SHAPE[0], dtype=np.float32)
    factor = graph.add_constant(scale, "scale")
    graph.outputs = (graph.add("multiply", (y, factor), output="y"),)
    graph = conv_scale(graph)
    (op,) = (op for op in graph.operators.values() if op.kind == "conv2d")
    assert given.readings == 0 and "multiply" not in graph.histogram()
    folded = graph.constants[op.inputs[1]].reshape(SHAPE)
    np.testing.assert_array_equal(folded, given.steps * scale[:, None])


def test_small_and_dear_results_are_computed_at_once() -> None:
    graph = Graph(("x",), (), {"x": TensorType((4,))})
    small = graph.add_constant(np.ones((8, 8), np.int8), "small")
    large = graph.add_constant(np.ones(SHAPE, np.int8), "large")
    wide = graph.add_result("cast", (small,), TensorType((8, 8)))
    later = graph.add_result("cast", (large,), TensorType(SHAPE))
    root = graph.add_result("sqrt", (later,))
    assert [graph.constants.is_later(x) for x in (wide, later, root)] == [False, True, False]
