"""No stage ends between a product of bytes and the quantization that alone reads it."""

from __future__ import annotations

from math import inf

import numpy as np

from gtco.graph.fusion.quantized_stores import before_quantization
from gtco.graph.fusion.stages import partition
from gtco.graph.graph import Graph
from gtco.tensor.stage import Stage, TensorType
from tests.graphs import number


def product(twice: bool = False, rest: bool = False) -> Graph:
    """A product of bytes that is quantized; ``twice`` also read as int32, or with a ``rest`` that
    is computed too.
    """
    graph = Graph(("q", "r"), ("y",), {"q": TensorType((5, 8), "uint8"), "r": TensorType((5, 4))})
    w = graph.add_constant(np.ones((8, 4), np.int8), "w")
    p = graph.add("matmul", ("q", w), TensorType((5, 4), "int32"), output="p")
    x = graph.add("cast", (p,), TensorType((5, 4)), output="x")
    x = graph.add("multiply", (x, number(graph, 0.3)), output="m")
    if rest:
        x = graph.add("add", (x, "r"), output="a")
    steps = [number(graph, v) for v in (9.0, 0.0, 3.0)]
    graph.add("quantize", (x, *steps), TensorType((5, 4), "uint8"), output="y", min=0.0, max=255.0)
    if twice:
        graph.add("add", (p, p), output="z")
        graph.outputs = ("y", "z")
    return graph.check()


def prefers_the_product_alone(stage: Stage) -> float:
    return 1.0 if len(stage.operators) == 1 else 100.0


def test_ends() -> None:
    assert before_quantization(product()) == {"y": ("p", "x", "m")}
    assert before_quantization(product(twice=True)) == {}
    assert before_quantization(product(rest=True)) == {}


def test_stages() -> None:
    found = partition(product(), prefers_the_product_alone)
    assert [s.label for s in found.stages] == ["matmul+cast+multiply+quantize"]
    found = partition(product(twice=True), prefers_the_product_alone)
    assert len(found.stages) == 5


def test_only_if_some_kernel_can_do_it() -> None:
    def cost(stage: Stage) -> float:
        return 1.0 if len(stage.operators) == 1 else inf

    assert len(partition(product(), cost).stages) == 4


def test_a_chain_that_no_kernel_can_do_leaves_the_others_whole() -> None:
    """The product that follows it, and one that it does not read."""
    graph = product()
    steps = graph.operators["y"].inputs[1:]
    graph.outputs = ()
    for source, more in (("y", True), ("q", False)):
        kind = graph.types[source]
        w = graph.add_constant(np.ones((kind.sizes[1], 4), np.int8), "w")
        x = graph.add("matmul", (source, w), TensorType((5, 4), "int32"))
        x = graph.add("cast", (x,), TensorType((5, 4)))
        if more:
            x = graph.add("tanh", (x,))
        y = graph.add("quantize", (x, *steps), TensorType((5, 4), "uint8"), min=0.0, max=255.0)
        graph.outputs = (*graph.outputs, y)

    def cost(stage: Stage) -> float:
        if len(stage.operators) > 1 and any(op.kind == "tanh" for op in stage.operators):
            return inf
        return prefers_the_product_alone(stage)

    found = [s.label for s in partition(graph.check(), cost).stages]
    assert found.count("matmul+cast+multiply+quantize") == 1
    assert found.count("matmul+cast+quantize") == 1
    assert found.count("tanh") == 1 and "cast" in found
