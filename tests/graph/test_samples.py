"""The proof that a model computes each sample by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.samples import samples_along
from gtco.support.errors import ShapeError
from gtco.tensor.stage import TensorType

Body = Callable[[Graph, int], str]  # (graph with input x, the size) -> the tensor to return


def graph_of(shape: Callable[[int], tuple[int, ...]], body: Body, n: int) -> Graph:
    graph = Graph(("x",), ("y",), {"x": TensorType(shape(n))})
    made = body(graph, n)
    graph.add("identity", (made,), graph.types[made], output="y")
    return graph.check()


def axis_of(shape: Callable[[int], tuple[int, ...]], body: Body) -> int | None:
    small, large = (graph_of(shape, body, n) for n in (2, 4))
    found = samples_along(small, large, (2, 4), "batch").axes
    assert found["x"] is not None
    return found["y"]


def reshape(graph: Graph, source: str, *shape: int) -> str:
    return graph.add("reshape", (source,), TensorType(shape))


def constant(graph: Graph, *shape: int) -> str:
    return graph.add_constant(np.arange(prod(shape), dtype=np.float32).reshape(shape))


def images(n: int) -> tuple[int, ...]:
    return n, 8, 8, 4


def windows(graph: Graph, n: int) -> str:
    """Swin's: the samples and their windows as one axis, attention of each window, and back."""
    x = reshape(graph, "x", n, 2, 4, 2, 4, 4)
    x = reshape(graph, graph.add("permute", (x,), axes=(0, 1, 3, 2, 4, 5)), n * 4, 16, 4)
    scores = graph.add("matmul", (x, graph.add("permute", (x,), axes=(0, 2, 1))))
    mask = constant(graph, 4, 16, 16)
    scores = graph.add("add", (reshape(graph, scores, n, 4, 16, 16), mask))
    x = graph.add(
        "matmul",
        (graph.add("softmax", (reshape(graph, scores, n * 4, 16, 16),), axis=2), x),
    )
    x = graph.add("permute", (reshape(graph, x, n, 2, 2, 4, 4, 4),), axes=(0, 1, 3, 2, 4, 5))
    return reshape(graph, x, n, 8, 8, 4)


def heads_first(graph: Graph, n: int) -> str:
    """The samples as the middle of an axis, and back."""
    x = graph.add("permute", (reshape(graph, "x", n, 64, 2, 2),), axes=(2, 0, 1, 3))
    x = graph.add("softmax", (reshape(graph, x, 2 * n, 64, 2),), axis=1)
    x = graph.add("permute", (reshape(graph, x, 2, n, 64, 2),), axes=(1, 2, 0, 3))
    return reshape(graph, x, n, 8, 8, 4)


def with_token(graph: Graph, n: int) -> str:
    """A constant that was repeated for each sample, as exporters do with class tokens."""
    token = np.repeat(np.arange(4, dtype=np.float32).reshape(1, 1, 4), n, axis=0)
    tokens = graph.add("concat", (graph.add_constant(token), reshape(graph, "x", n, 64, 4)), axis=1)
    return graph.add("gather", (tokens, graph.add_constant(np.array(0))), axis=1)


def best_token(graph: Graph, n: int) -> str:
    """The rows of a table of all samples' tokens, by numbers that count the samples."""
    tokens = reshape(graph, "x", n, 64, 4)
    best = graph.add("argmax", (tokens,), TensorType((n, 4), "int64"), axis=1, keepdims=False)
    first = graph.add_constant((np.arange(n) * 64).reshape(n, 1) + 1)
    rows = graph.add("add", (best, graph.add("reshape", (first,), TensorType((n, 1), "int64"))))
    rows = graph.add("add", (rows, graph.add_constant(np.array(-1))))
    rows = graph.add("permute", (rows,), axes=(0, 1))
    rows = graph.add("cast", (rows,), TensorType((n, 4), "int32"))
    return graph.add("gather", (reshape(graph, tokens, n * 64, 4), rows), axis=0)


def windows_out(graph: Graph, n: int) -> str:
    return reshape(graph, "x", n * 8, 8, 4)


@pytest.mark.parametrize("body", [windows, heads_first, with_token, best_token, windows_out])
def test_models_that_run_in_parts(body: Body) -> None:
    assert axis_of(images, body) == 0
    whole = graph_of(images, body, 5)
    x = np.random.default_rng(0).standard_normal(images(5))
    parts = [
        graph_of(images, body, n).evaluate({"x": x[first : first + n]}, "float64")["y"]
        for first, n in ((0, 2), (2, 1), (3, 2))
    ]
    # numpy sums products of other sizes in another order
    np.testing.assert_allclose(
        np.concatenate(parts), whole.evaluate({"x": x}, "float64")["y"], rtol=1e-12, atol=1e-12
    )


def mean(graph: Graph, n: int) -> str:
    return graph.add("mean", ("x",), axes=(0,), keepdims=True)


def softmax(graph: Graph, n: int) -> str:
    return graph.add("softmax", ("x",), axis=0)


def similarity(graph: Graph, n: int) -> str:
    flat = reshape(graph, "x", n, 256)
    return graph.add("matmul", (flat, graph.add("permute", (flat,), axes=(1, 0))))


def gram(graph: Graph, n: int) -> str:
    flat = reshape(graph, "x", n, 256)
    return graph.add("matmul", (graph.add("permute", (flat,), axes=(1, 0)), flat))


def folded(graph: Graph, n: int) -> str:
    """The samples' parity and the rest as axes of their own."""
    return reshape(graph, "x", n // 2, 2 * 256)


def turned(graph: Graph, n: int) -> str:
    return graph.add(
        "slice", ("x",), TensorType(images(n)), begin=(n - 1, 0, 0, 0), strides=(-1, 1, 1, 1)
    )


def first(graph: Graph, n: int) -> str:
    return graph.add("slice", ("x",), TensorType((1, 8, 8, 4)), begin=(0,) * 4, strides=(1,) * 4)


def ranked(graph: Graph, n: int) -> str:
    """A constant that is another one for each sample."""
    return graph.add("add", ("x", constant(graph, n, 1, 1, 1)))


def others_rows(graph: Graph, n: int) -> str:
    """Numbers of rows that leave out some of each sample's."""
    first = graph.add_constant(np.arange(n) * 32)
    return graph.add("gather", (reshape(graph, "x", n * 64, 4), first), axis=0)


def number(graph: Graph, n: int) -> str:
    """A sample's number, as a result."""
    return graph.add_constant(np.arange(n, dtype=np.int64) * 3)


def counted(graph: Graph, n: int) -> str:
    return graph.add("multiply", ("x", graph.add_constant(np.float32(1 / n))))


def last(graph: Graph, n: int) -> str:
    return graph.add("permute", ("x",), axes=(1, 0, 2, 3))


def picked(graph: Graph, n: int) -> str:
    return graph.add("gather", ("x", graph.add_constant(np.array([0, 1]))), axis=0)


def rolled(graph: Graph, n: int) -> str:
    return graph.add("roll", ("x",), shifts=(1, 0, 0, 0))


def columns(graph: Graph, n: int) -> str:
    kernel = constant(graph, 4, 4, 1, 1)
    x = graph.add("permute", ("x",), axes=(1, 3, 0, 2))
    return graph.add(
        "conv2d",
        (x, kernel),
        strides=(1, 1),
        padding=(0, 0, 0, 0),
        dilation=(1, 1),
        groups=1,
        layout="NCHW",
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (mean, "operator mean.* takes samples together"),
        (softmax, "operator softmax.* takes samples together"),
        (similarity, "operator matmul.* "),
        (gram, "operator matmul.* adds up samples"),
        (folded, "operator reshape.* whose size is not the dimension times a number"),
        (turned, "operator slice.* attributes that depend on the size"),
        (first, "operator slice.* takes some of the samples"),
        (ranked, "operator add.* a constant that has other values for each sample"),
        (others_rows, "operator gather.* by the indices of other samples"),
        (number, "output 'y' has the numbers of its samples in it"),
        (counted, "operator multiply.* a constant whose values depend on the size"),
        (last, "output 'y' has 'batch' on axis 1, which is not its outermost axis"),
        (picked, "operator gather.* picks samples"),
        (rolled, "operator roll.* moves samples to other places"),
        (columns, "operator conv2d.* as rows, columns or channels of an image"),
    ],
)
def test_models_that_mix_samples(body: Body, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        axis_of(images, body)


def test_a_result_without_samples() -> None:
    """It is the same for all of them."""

    def body(graph: Graph, n: int) -> str:
        return graph.add("add", (constant(graph, 3), constant(graph, 3)))

    assert axis_of(images, body) is None


class Drawing:
    """A chain of operators, drawn once, that can be written down for any size. A size is a number
    and whether it is multiplied by n.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.shape = [(1, True), *((int(s), False) for s in rng.choice([2, 3, 4, 6], 3))]
        self.steps: list[tuple[str, Any]] = []
        shape = list(self.shape)
        for _ in range(int(rng.integers(2, 7))):
            shape = self._step(rng, shape)

    def _step(self, rng: np.random.Generator, shape: list[tuple[int, bool]]) -> list[Any]:
        kind = rng.choice(
            "permute merge split softmax sum scale add matmul self_matmul slice concat roll".split()
        )
        axis = int(rng.integers(len(shape)))
        if kind == "permute":
            axes = tuple(map(int, rng.permutation(len(shape))))
            self.steps.append(("permute", axes))
            return [shape[a] for a in axes]
        if (
            kind == "merge"
            and axis + 1 < len(shape)
            and not (shape[axis][1] and shape[axis + 1][1])
        ):
            (a, x), (b, y) = shape[axis : axis + 2]
            shape = [*shape[:axis], (a * b, x or y), *shape[axis + 2 :]]
            self.steps.append(("reshape", shape))
        elif kind == "split" and shape[axis][0] in (4, 6, 8, 12) and len(shape) < 6:
            size, grows = shape[axis]
            parts = [(2, False), (size // 2, grows)]
            shape = [
                *shape[:axis],
                *(parts if rng.random() < 0.5 else parts[::-1]),
                *shape[axis + 1 :],
            ]
            self.steps.append(("reshape", shape))
        elif kind == "sum" and len(shape) > 2:
            self.steps.append(("sum", axis))
            shape = [*shape[:axis], *shape[axis + 1 :]]
        elif kind in ("softmax", "roll"):
            self.steps.append((kind, axis))
        elif kind == "add" and not shape[axis][1]:
            self.steps.append(("add", (axis, len(shape))))
        elif kind == "matmul" and not shape[-1][1]:
            self.steps.append(("matmul", None))
            shape = [*shape[:-1], (2, False)]
        elif kind == "self_matmul" and len(shape) > 2:
            self.steps.append(("self_matmul", None))
            shape = [*shape[:-1], shape[-2]]
        elif kind == "slice" and shape[axis][0] > 1 and not shape[axis][1]:
            self.steps.append(("slice", axis))
            shape = [*shape[:axis], (1, False), *shape[axis + 1 :]]
        elif kind == "concat":
            self.steps.append(("concat", axis))
            shape = [*shape[:axis], (2 * shape[axis][0], shape[axis][1]), *shape[axis + 1 :]]
        return shape

    def at(self, n: int) -> Graph:
        def sizes(shape: list[tuple[int, bool]]) -> tuple[int, ...]:
            return tuple(size * (n if grows else 1) for size, grows in shape)

        def body(graph: Graph, n: int) -> str:
            x = "x"
            for kind, what in self.steps:
                shape = graph.types[x].sizes
                if kind == "permute":
                    x = graph.add("permute", (x,), axes=what)
                elif kind == "reshape":
                    x = reshape(graph, x, *sizes(what))
                elif kind == "sum":
                    x = graph.add("sum", (x,), axes=(what,), keepdims=False)
                elif kind == "softmax":
                    x = graph.add("softmax", (x,), axis=what)
                elif kind == "roll":
                    x = graph.add(
                        "roll", (x,), shifts=tuple(int(a == what) for a in range(len(shape)))
                    )
                elif kind == "add":
                    axis, rank = what
                    form = [1] * rank
                    form[axis] = shape[axis]
                    x = graph.add("add", (x, constant(graph, *form)))
                elif kind == "matmul":
                    x = graph.add("matmul", (x, constant(graph, shape[-1], 2)))
                elif kind == "self_matmul":
                    axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
                    x = graph.add("matmul", (x, graph.add("permute", (x,), axes=axes)))
                elif kind == "slice":
                    begin = tuple(int(a == what) for a in range(len(shape)))
                    form = tuple(1 if a == what else s for a, s in enumerate(shape))
                    x = graph.add(
                        "slice", (x,), TensorType(form), begin=begin, strides=(1,) * len(shape)
                    )
                elif kind == "concat":
                    x = graph.add("concat", (x, x), axis=what)
            return x

        return graph_of(lambda n: sizes(self.shape), body, n)


def test_drawn_graphs() -> None:
    """What is proven is so, and nothing that could run in parts is refused in a graph whose samples
    stay on the outermost axis."""
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        drawing = Drawing(seed)
        x = np.random.default_rng(seed).standard_normal(drawing.at(5).types["x"].sizes)
        whole = drawing.at(5).evaluate({"x": x}, "float64")["y"]
        parts = [
            drawing.at(n).evaluate({"x": x[first : first + n]}, "float64")["y"]
            for first, n in ((0, 2), (2, 3))
        ]
        try:
            found = samples_along(drawing.at(2), drawing.at(3), (2, 3), "n")
            axis = found.axes["y"]
        except ShapeError as error:
            outcomes["refused, " + str(error).split()[0]] += 1
            continue
        outcomes["proven"] += 1
        assert axis is not None, drawing.steps
        for n in (1, 2, 5):  # the graph that follows is the one that is drawn
            assert found.at(n).check().dump() == drawing.at(n).dump(), f"seed {seed}"
        together = np.concatenate(parts, axis=axis)
        np.testing.assert_allclose(together, whole, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")
    assert outcomes["proven"] > 60 and outcomes["refused, operator"] > 60, outcomes


@pytest.mark.parametrize("body", [with_token, best_token])
def test_a_constant_of_each_sample_is_for_as_many_as_there_are_samples(body: Body) -> None:
    found = samples_along(*(graph_of(images, body, n) for n in (2, 4)), (2, 4), "batch")
    for n in (1, 3, 7):
        made, wanted = found.at(n).check(), graph_of(images, body, n)
        assert made.dump() == wanted.dump()
        x = np.random.default_rng(n).standard_normal(images(n)).astype(np.float32)
        np.testing.assert_array_equal(made.evaluate({"x": x})["y"], wanted.evaluate({"x": x})["y"])


def windows_of(side: int) -> tuple[Callable[[int], tuple[int, ...]], Body]:
    """Images of so many rows, and what :func:`windows` does with their windows of four rows."""

    def body(graph: Graph, n: int) -> str:
        many = side // 4
        x = reshape(graph, "x", n, many, 4, many, 4, 4)
        x = reshape(
            graph, graph.add("permute", (x,), axes=(0, 1, 3, 2, 4, 5)), n * many * many, 16, 4
        )
        bias = np.repeat(np.arange(16, dtype=np.float32).reshape(1, 16, 1), n * many * many, axis=0)
        x = graph.add("softmax", (graph.add("add", (x, graph.add_constant(bias))),), axis=2)
        x = graph.add(
            "permute", (reshape(graph, x, n, many, many, 4, 4, 4),), axes=(0, 1, 3, 2, 4, 5)
        )
        return reshape(graph, x, n, side, side, 4)

    return lambda n: (n, side, side, 4), body


def test_the_graphs_of_other_sizes_follow_from_a_proof_and_one_graph() -> None:
    """An axis has as many windows of each sample as the other sizes say."""
    shape, body = windows_of(8)
    known = samples_along(*(graph_of(shape, body, n) for n in (2, 4)), (2, 4), "batch")
    shape, body = windows_of(12)
    one = graph_of(shape, body, 2)
    twin = known.like(one, 4)
    assert twin is not None and twin.check().dump() == graph_of(shape, body, 4).dump()
    found = samples_along(one, twin, (2, 4), "batch")
    assert found.axes == known.axes
    for n in (1, 5):
        made, wanted = found.at(n).check(), graph_of(shape, body, n)
        assert made.dump() == wanted.dump()
        x = np.random.default_rng(n).standard_normal(shape(n)).astype(np.float32)
        np.testing.assert_array_equal(made.evaluate({"x": x})["y"], wanted.evaluate({"x": x})["y"])


def test_a_graph_of_other_operators_is_not_like_one_that_was_proven() -> None:
    known = samples_along(*(graph_of(images, windows, n) for n in (2, 4)), (2, 4), "batch")
    assert known.like(graph_of(images, heads_first, 2), 4) is None
    assert known.like(graph_of(images, windows, 2), 4) is not None
