"""Copies of movement, which are kept if they vanish in a kernel and undone if they do not; fusion
by rules.
"""

from __future__ import annotations

import math

import numpy
import pytest

from gtco.graph.fusion.duplicate import duplicate_movement
from gtco.graph.fusion.greedy import fuse_greedy
from gtco.graph.fusion.stages import fuse, partition
from gtco.graph.graph import Graph
from gtco.tensor.operators import COMPLEX, INJECTIVE, OPAQUE, pattern
from gtco.tensor.stage import Stage, TensorType


def attention_graph() -> Graph:
    """x -> matmul -> reshape -> permute -> three slices -> reshape -> attention."""
    random = numpy.random.default_rng(0)
    g = Graph(("x",), (), {"x": TensorType((2, 5, 8))})
    w = g.add_constant(random.standard_normal((8, 24)).astype("float32"), "w")
    y = g.add("reshape", [g.add("matmul", ["x", w])], TensorType((2, 5, 3, 2, 4)))
    y = g.add("permute", [y], axes=(2, 0, 3, 1, 4))
    parts = []
    for n in range(3):
        first, kind = (n, 0, 0, 0, 0), TensorType((1, 2, 2, 5, 4))
        part = g.add("slice", [y], kind, begin=first, strides=(1,) * 5)
        parts.append(g.add("reshape", [part], TensorType((2, 2, 5, 4))))
    g.outputs = (g.add("attention", parts, scale=0.5),)
    return g.prune().check()


def two_readers() -> Graph:
    """x -> matmul -> reshape -> permute, read by two products: no stage can hold the permute."""
    g = Graph(("x",), (), {"x": TensorType((2, 6, 8))})
    w = g.add_constant(numpy.ones((8, 8), "float32"), "w")
    y = g.add("reshape", [g.add("matmul", ["x", w])], TensorType((2, 2, 3, 8)))
    y = g.add("permute", [y], axes=(0, 2, 1, 3))
    g.outputs = (g.add("matmul", [y, w]), g.add("matmul", [g.add("relu", [y]), w]))
    return g.prune().check()


def movement_is_free(stage: Stage) -> float:
    """Movement costs nothing on the way into a kernel, and no kernel moves the result of a
    product.
    """
    kinds = [pattern(op.kind) for op in stage.operators]
    if COMPLEX in kinds and INJECTIVE in kinds[kinds.index(COMPLEX) :]:
        return math.inf
    return stage.output.type.size + 100.0


def movement_never_fuses(stage: Stage) -> float:
    if len(stage.operators) > 1:
        return math.inf
    return 1.0


def test_copies_compute_the_same() -> None:
    graph = attention_graph()
    copied = duplicate_movement(graph).check()
    assert graph.histogram()["permute"] == 1
    assert copied.histogram()["permute"] == copied.histogram()["slice"] == 3
    assert copied.histogram()["matmul"] == 1
    x = {"x": numpy.random.default_rng(1).standard_normal((2, 5, 8)).astype("float32")}
    for name in graph.outputs:
        numpy.testing.assert_array_equal(graph.evaluate(x)[name], copied.evaluate(x)[name])


def test_movement_that_one_stage_reads_needs_no_copies() -> None:
    graph = attention_graph()
    made, found = fuse(graph, movement_is_free)
    assert [s.label.split("+")[-1] for s in found.stages] == ["matmul", "attention"]
    assert made.histogram() == graph.histogram()


def test_copied_movement_vanishes_into_its_readers() -> None:
    graph = two_readers()
    alone = partition(graph, movement_is_free)
    made, found = fuse(graph, movement_is_free)
    assert [s.label for s in alone.stages][:2] == ["matmul", "reshape+permute"]
    assert [s.label for s in found.stages] == [
        "matmul",
        "reshape+permute+matmul",
        "reshape+permute+relu+matmul",
    ]
    assert found.seconds < alone.seconds and made.histogram()["permute"] == 2
    assert not found.notes and found.priced >= alone.priced > 0


def test_copies_that_nobody_takes_in_are_taken_back() -> None:
    graph = two_readers()
    made, found = fuse(graph, movement_never_fuses)
    assert made.histogram() == graph.histogram()
    assert found.seconds == len(graph.operators)


def test_arithmetic_and_outputs_are_not_copied() -> None:
    g = Graph(("x",), (), {"x": TensorType((4, 4))})
    gelu = g.add("gelu", ["x"])
    moved = g.add("permute", [gelu], axes=(1, 0))
    g.outputs = (moved, g.add("matmul", [moved, gelu]), g.add("softmax", [moved], axis=1))
    g.prune().check()
    assert duplicate_movement(g).dump() == g.dump()


def test_greedy_rules() -> None:
    g = Graph(("x",), (), {"x": TensorType((4, 4))})
    w = g.add_constant(numpy.ones((4, 4), "float32"))
    y = g.add("gelu", [g.add("add", [g.add("matmul", [g.add("relu", ["x"]), w]), w])])
    g.outputs = (g.add("softmax", [g.add("multiply", [y, w])], axis=1),)
    g.prune().check()
    found = fuse_greedy(g, lambda stage: 1.0)
    assert [s.label for s in found.stages] == ["relu", "matmul", "add+gelu+multiply+softmax"]
    refused = fuse_greedy(g, lambda s: math.inf if len(s.operators) > 1 else 1.0)
    assert refused.seconds == len(g.operators)


@pytest.mark.parametrize("cost", [movement_is_free, movement_never_fuses])
def test_greedy_is_never_better(cost) -> None:
    graph = attention_graph()
    greedy, best = fuse_greedy(graph, cost), partition(graph, cost)
    assert best.seconds <= greedy.seconds
    assert sorted(op.output for s in greedy.stages for op in s.operators) == sorted(graph.operators)
    assert not any(pattern(op.kind) == OPAQUE for s in best.stages for op in s.operators)
