"""Slices, gathers, concatenations, reshapes and permutes that undo or repeat each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.tensor.stage import TensorType
from tests.graphs import build, same


def test_roll_of_slices_and_gathers() -> None:
    def body(g: Graph, x: str) -> str:
        head = g.add("slice", (x,), TensorType((2, 2, 8)), begin=(0, 0, 0), strides=(1, 1, 1))
        tail = g.add("slice", (x,), TensorType((2, 3, 8)), begin=(0, 2, 0), strides=(1, 1, 1))
        y = g.add("concat", (tail, head), axis=1)
        index = g.add_constant((np.arange(8) + 3) % 8, "index")
        return g.add("gather", (y, index), axis=2)

    after = same(build(body), {"roll": 1})
    assert after.operators["y"]["shifts"] == (0, 3, 5)


def test_gather_of_a_range_is_a_slice_and_of_anything_else_stays() -> None:
    def take(indices: list[int]) -> Callable[[Graph, str], str]:
        return lambda g, x: g.add("gather", (x, g.add_constant(np.array(indices), "i")), axis=1)

    same(build(take([1, 2, 3])), {"slice": 1})
    same(build(take([4, 2, 0])), {"slice": 1})
    same(build(take([-1, 0, 2])), {"gather": 1})


@pytest.mark.parametrize("axis, above", [(0, True), (1, False)])
def test_every_second_slice_of_a_reshape(axis: int, above: bool) -> None:
    """The slice moves above the reshape along an axis that the reshape keeps, and not along one
    that it takes apart.
    """

    def body(g: Graph, x: str) -> str:
        y = g.add("reshape", (x,), TensorType((2, 4, 3)))
        shape = tuple(d - d // 2 if i == axis else d for i, d in enumerate((2, 4, 3)))
        strides = tuple(1 + (i == axis) for i in range(3))
        return g.add("slice", (y,), TensorType(shape), begin=(0, 0, 0), strides=strides)

    after = same(build(body, (2, 12)), {"reshape": 1, "slice": 1})
    assert (next(iter(after.operators.values())).kind == "slice") is above


def test_a_stack_that_is_flattened_at_once_is_a_concatenation() -> None:
    """Deformable attention puts its levels together in this way. A stack behind the next axis is
    not a concatenation.
    """

    def stacked(one: tuple[int, ...], axis: int) -> Callable[[Graph, str], str]:
        def body(g: Graph, x: str) -> str:
            made = (g.add(kind, (x,)) for kind in ("tanh", "exp", "sin"))
            parts = [g.add("reshape", (y,), TensorType(one)) for y in made]
            y = g.add("concat", parts, axis=axis)
            y = g.add("reshape", (y,), TensorType((2, 5, 24)))
            return g.add("sum", (y,), axes=(2,), keepdims=False)

        return body

    each = {"tanh": 1, "exp": 1, "sin": 1, "concat": 1, "sum": 1}
    same(build(stacked((2, 5, 1, 8), 2)), each)
    same(build(stacked((2, 1, 5, 1, 1, 8), 4)), each)
    same(build(stacked((2, 5, 8, 1), 3)), {**each, "reshape": 4})


@pytest.mark.parametrize("shape", [(2, 8), (1, 8), (3, 2, 4)])
def test_steps_that_are_stacked_in_front_need_one_reshape(shape: tuple[int, ...]) -> None:
    """An LSTM puts the states of its steps together in this way. Steps behind the batch have no
    axis in front, and stay.
    """

    def stacked(one: tuple[int, ...], axis: int) -> Callable[[Graph, str], str]:
        def body(g: Graph, x: str) -> str:
            made = (g.add(kind, (x,)) for kind in ("tanh", "exp", "sin"))
            parts = [g.add("reshape", (y,), TensorType(one)) for y in made]
            y = g.add("concat", parts, axis=axis)
            return g.add("sum", (y,), axes=(axis,), keepdims=False)

        return body

    each = {"tanh": 1, "exp": 1, "sin": 1, "concat": 1, "sum": 1}
    same(build(stacked((1, *shape), 0), shape), {**each, "reshape": 1})
    same(build(stacked((1, 1, *shape), 1), shape), {**each, "reshape": 1})
    if shape[0] > 1:
        same(build(stacked((shape[0], 1, *shape[1:]), 1), shape), {**each, "reshape": 3})


def test_movement_that_undoes_itself_goes() -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("permute", (x,), axes=(2, 0, 1))
        y = g.add("permute", (y,), axes=(1, 2, 0))
        y = g.add("reshape", (y,), TensorType((10, 8)))
        y = g.add("relu", (y,))
        y = g.add("reshape", (y,), TensorType((2, 5, 8)))
        parts = [
            g.add("slice", (y,), TensorType((2, n, 8)), begin=(0, b, 0), strides=(1, 1, 1))
            for b, n in ((0, 2), (2, 3))
        ]
        return g.add("concat", parts, axis=1)

    same(build(body), {"relu": 1})


def test_what_is_broadcast_for_an_operator_that_broadcasts_stays_narrow() -> None:
    """A mask that a file expands to all heads and rows is one row for each sample."""

    def masked(g: Graph, x: str) -> str:
        mask = g.add("slice", (x,), TensorType((2, 1, 8)), begin=(0, 0, 0), strides=(1, 1, 1))
        return g.add("add", (x, g.add("broadcast", (mask,), TensorType((2, 5, 8)))))

    def both(g: Graph, x: str) -> str:
        row = g.add("slice", (x,), TensorType((1, 1, 8)), begin=(0, 0, 0), strides=(1, 1, 1))
        one = g.add("slice", (x,), TensorType((2, 1, 1)), begin=(0, 0, 0), strides=(1, 1, 1))
        wide = [g.add("broadcast", (y,), TensorType((2, 5, 8))) for y in (row, one)]
        return g.add("multiply", wide)

    same(build(masked), {"slice": 1, "add": 1})
    same(build(both), {"slice": 2, "multiply": 1, "broadcast": 1})


def test_nothing_is_joined_and_nothing_is_rolled() -> None:
    """Tensors without elements: no part of the concatenation has any, and no shift counts."""

    def body(graph: Graph, x: str) -> str:
        shape = TensorType((0, 6))
        rolled = graph.add("roll", (x,), shape, shifts=(3, 2))
        rolled = graph.add("roll", (rolled,), shape, shifts=(1, 1))
        joined = graph.add("concat", (rolled, x), TensorType((0, 6)), axis=0)
        return graph.add("exp", (joined,))

    same(build(body, (0, 6)), {"roll": 1, "exp": 1})
