"""Which operands the precision pass rounds to a narrow dtype, where it puts the casts, and that the
values stay near those of the float32 graph.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gtco.graph.fusion.duplicate import duplicate_movement
from gtco.graph.fusion.take_apart import taken_apart
from gtco.graph.graph import Graph
from gtco.graph.precision import narrow_operands
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.tensor.stage import Stage, TensorType
from tests.graphs import build, weights

CONVOLUTION = {"strides": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "layout": "NHWC"}
DENSE = {"groups": 1, **CONVOLUTION}

ROUNDINGS = {"bfloat16": 2.0**-6, "float16": 2.0**-9}  # a few roundings of 2^-9 or 2^-12 each


def halved(graph: Graph, dtype: str = "bfloat16") -> Graph:
    """The graph after the pass, with its constants folded. Outputs keep their types, and nearly
    their values.
    """
    after = fold_constants(narrow_operands(graph, dtype)).check()
    assert [after.types[o] for o in after.outputs] == [graph.types[o] for o in graph.outputs]
    rng = np.random.default_rng(5)
    inputs = {
        n: rng.standard_normal(tuple(map(int, graph.types[n].shape))).astype(graph.types[n].dtype)
        for n in graph.inputs
    }
    before = graph.evaluate(inputs, dtype="float64")
    # a cast to float16 rounds where no dtype stands for all floats
    errors = []
    for name, value in after.evaluate(
        inputs, dtype="float64" if dtype == "bfloat16" else None
    ).items():
        errors.append(np.abs(value - before[name]).max() / np.abs(before[name]).max())
    assert max(errors) <= ROUNDINGS[dtype]
    if dtype == "bfloat16":
        assert (max(errors) > 0) == (dtype in {t.dtype for t in after.types.values()})
    return after


def of_dtype(graph: Graph, dtype: str) -> Counter[str]:
    """The kinds of the operators that give this dtype."""
    return Counter(op.kind for op in graph.operators.values() if op.type.dtype == dtype)


def attention_block(g: Graph, x: str) -> str:
    """x + projection(attention(layer_norm(x))); q, k and v are slices of one product."""
    n, c, heads = 5, 8, 2
    normal = g.add("layer_norm", (x, weights(g, c), weights(g, c)), epsilon=1e-5)
    qkv = g.add("add", (g.add("matmul", (normal, weights(g, c, 3 * c))), weights(g, 3 * c)))
    parts = []
    for i in range(3):
        part = g.add(
            "slice", (qkv,), TensorType((2, n, c)), begin=(0, 0, i * c), strides=(1, 1, 1)
        )
        split = g.add("reshape", (part,), TensorType((2, n, heads, c // heads)))
        parts.append(g.add("permute", (split,), axes=(0, 2, 1, 3)))
    seen = g.add("attention", parts, scale=0.5)
    flat = g.add("reshape", (g.add("permute", (seen,), axes=(0, 2, 1, 3)),), TensorType((2, n, c)))
    return g.add("add", (x, g.add("matmul", (flat, weights(g, c, c)))))


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_a_block_of_a_transformer(dtype: str) -> None:
    after = halved(build(attention_block), dtype)
    half = of_dtype(after, dtype)
    # one cast each after the norm, after the biased q, k and v together, and after the attention
    assert half == {"cast": 3, "slice": 3, "reshape": 4, "permute": 4}
    assert of_dtype(after, "float32") == {
        "layer_norm": 1,
        "matmul": 2,
        "add": 2,
        "attention": 1,
        "identity": 1,
    }
    casts = [op for op in after.operators.values() if op.kind == "cast"]
    sources = [after.producer(op.inputs[0]) for op in casts]
    assert sorted(op.kind for op in sources if op) == ["add", "attention", "layer_norm"]
    matrices = [v for v in after.constants.values() if v.ndim == 2]
    assert {v.dtype.name for v in matrices} == {dtype}
    vectors = [v for v in after.constants.values() if v.ndim == 1]
    assert {v.dtype.name for v in vectors} == {"float32"}


def test_casts_to_bfloat16_are_not_copied_for_their_readers() -> None:
    """A tensor that several products read is rounded and stored once."""

    def body(g: Graph, x: str) -> str:
        n = g.add("relu", (x,))
        return g.add(
            "add", (g.add("matmul", (n, weights(g, 8, 4))), g.add("matmul", (n, weights(g, 8, 4))))
        )

    after = halved(build(body))
    assert after.histogram()["cast"] == 1
    assert duplicate_movement(after).histogram()["cast"] == 1


def test_what_others_read_too_stays_float32() -> None:
    def body(g: Graph, x: str) -> str:
        turned = g.add("permute", (x,), axes=(0, 2, 1))
        return g.add("add", (turned, g.add("matmul", (turned, weights(g, 5, 5)))))

    after = halved(build(body))
    assert of_dtype(after, "bfloat16") == {"cast": 1}
    assert of_dtype(after, "float32")["permute"] == 1


def test_an_output_that_a_product_reads_stays_float32() -> None:
    graph = Graph(("x",), (), {"x": TensorType((4, 8))})
    middle = graph.add("reshape", ("x",), TensorType((8, 4)))
    graph.add("matmul", (middle, weights(graph, 4, 3)), output="y")
    graph.outputs = (middle, "y")
    after = halved(graph.prune().check())
    assert of_dtype(after, "bfloat16") == {"cast": 1}


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_convolutions(dtype: str) -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add("conv2d", (x, weights(g, 16, 8, 3, 3)), groups=1, **CONVOLUTION)
        y = g.add("relu", (y,))
        y = g.add("conv2d", (y, weights(g, 16, 1, 3, 3)), groups=16, **CONVOLUTION)  # depthwise
        y = g.add("conv2d", (y, weights(g, 16, 4, 3, 3)), groups=4, **CONVOLUTION)  # as narrow
        padded = g.add("pad", (y,), before=(0, 1, 1, 0), after=(0, 0, 0, 0), value=0.0)
        wide = g.add("concat", (padded, padded), axis=3)
        return g.add("conv2d", (wide, weights(g, 18, 16, 1, 1)), groups=2, **CONVOLUTION)

    after = halved(build(body, (1, 6, 5, 8)), dtype)
    assert of_dtype(after, dtype) == {"cast": 2, "pad": 1, "concat": 1}
    used = {
        op["groups"]: after.types[op.inputs[1]].dtype
        for op in after.operators.values()
        if op.kind == "conv2d"
    }
    assert used == {1: dtype, 16: "float32", 4: "float32", 2: dtype}


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_an_image_is_stored_narrow_for_all_its_readers(dtype: str) -> None:
    def body(g: Graph, x: str) -> str:
        first = g.add("relu", (g.add("conv2d", (x, weights(g, 8, 8, 3, 3)), **DENSE),))
        second = g.add("conv2d", (first, weights(g, 8, 8, 3, 3)), **DENSE)
        total = g.add("add", (g.add("relu", (second,)), first))
        return g.add("conv2d", (total, weights(g, 4, 8, 3, 3)), **DENSE)

    after = halved(build(body, (1, 6, 5, 8)), dtype)
    assert of_dtype(after, dtype) == {"cast": 3}
    (wide,) = (o for o in after.operators.values() if o.kind == "cast" and o.type.dtype != dtype)
    assert after.types[wide.inputs[0]].dtype == dtype
    (total,) = (o for o in after.operators.values() if o.kind == "add")
    assert wide.output in total.inputs


def test_an_image_that_is_an_output_stays_float32() -> None:
    graph = Graph(("x",), (), {"x": TensorType((1, 6, 5, 8))})
    first = graph.add("conv2d", ("x", weights(graph, 8, 8, 3, 3)), **DENSE)
    second = graph.add("conv2d", (first, weights(graph, 8, 8, 3, 3)), **DENSE)
    graph.add("add", (first, second), output="y")
    graph.outputs = (first, "y")
    after = halved(graph.prune().check())
    assert of_dtype(after, "bfloat16") == {"cast": 2}
    assert of_dtype(after, "float32") == {"conv2d": 2, "add": 1}


def test_a_maximum_that_is_an_output_stays_float32() -> None:
    graph = Graph(("x",), (), {"x": TensorType((1, 6, 5, 8))})
    image = graph.add("conv2d", ("x", weights(graph, 8, 8, 3, 3)), **DENSE)
    shape = TensorType((1, 6, 5, 8))
    pooled = graph.add("max_pool2d", (image,), shape, kernel=(3, 3), **CONVOLUTION)
    graph.add("conv2d", (pooled, weights(graph, 4, 8, 3, 3)), output="y", **DENSE)
    graph.outputs = (pooled, "y")
    after = halved(graph.prune().check())
    (pool,) = (o for o in after.operators.values() if o.kind == "max_pool2d")
    read = after.producer(pool.inputs[0])
    assert read is not None and read.kind == "conv2d"


def test_a_sum_that_is_an_output_stays_float32() -> None:
    graph = Graph(("x",), (), {"x": TensorType((1, 6, 5, 8))})
    a, b = (graph.add("conv2d", ("x", weights(graph, 8, 8, 3, 3)), **DENSE) for _ in range(2))
    total = graph.add("add", (a, b))
    graph.add("conv2d", (total, weights(graph, 4, 8, 3, 3)), output="y", **DENSE)
    graph.outputs = (total, "y")
    after = halved(graph.prune().check())
    (add,) = (o for o in after.operators.values() if o.kind == "add")
    assert all(after.producer(x).kind == "conv2d" for x in add.inputs)


def test_a_maximum_of_a_rounded_image_loses_nothing() -> None:
    """Only the rounded maximum is read. Rounding keeps the order of numbers, so the maximum of the
    rounded image is the same, and the image is stored rounded.
    """

    def body(g: Graph, x: str) -> str:
        image = g.add("conv2d", (x, weights(g, 8, 8, 3, 3)), **DENSE)
        shape = TensorType((1, 6, 5, 8))
        pooled = g.add("max_pool2d", (image,), shape, kernel=(3, 3), **CONVOLUTION)
        a, b = (g.add("conv2d", (pooled, weights(g, 4, 8, 3, 3)), **DENSE) for _ in range(2))
        return g.add("add", (a, b))

    after = halved(build(body, (1, 6, 5, 8)))
    assert of_dtype(after, "bfloat16") == {"cast": 3}
    (pool,) = (o for o in after.operators.values() if o.kind == "max_pool2d")
    wide = after.producer(pool.inputs[0])
    assert wide is not None and wide.kind == "cast"
    assert after.types[wide.inputs[0]].dtype == "bfloat16"


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_one_of_two_convolutions_of_a_rounded_sum_is_stored_narrow(read_elsewhere: bool) -> None:
    """The other one shares a stage with the sum. If the sum itself is an output, none is."""

    def body(g: Graph, x: str) -> str:
        bias = g.add_constant(np.ones(8, np.float32))
        a, b = (g.add("conv2d", (x, weights(g, 8, 8, 3, 3)), **DENSE) for _ in range(2))
        total = g.add("add", (g.add("add", (a, bias)), g.add("add", (b, bias))))
        read = g.add("conv2d", (g.add("relu", (total,)), weights(g, 8, 8, 3, 3)), **DENSE)
        return g.add("add", (read, total)) if read_elsewhere else read

    after = halved(build(body, (1, 6, 5, 8)))
    wide = [o for o in after.operators.values() if o.kind == "cast" and o.type.dtype == "float32"]
    assert len(wide) == (0 if read_elsewhere else 1)
    for cast in wide:
        half = after.producer(cast.inputs[0])
        assert half is not None and half.kind == "cast"
        biased = after.producer(half.inputs[0])
        assert biased is not None and biased.kind == "add"
        assert [o.kind for o in after.consumers(cast.output)] == ["add"]


def test_indices_of_a_gather_are_not_rounded() -> None:
    def body(g: Graph, x: str) -> str:
        rows = g.add_constant(np.array([4, 0, 2], np.int64))
        return g.add("matmul", (g.add("gather", (x, rows), axis=1), weights(g, 8, 3)))

    after = halved(build(body))
    (gather,) = [op for op in after.operators.values() if op.kind == "gather"]
    assert [after.types[i].dtype for i in gather.inputs] == ["bfloat16", "int64"]


@pytest.mark.parametrize("dtype", ["float64", "int32", "float16"])
def test_other_dtypes_are_left_alone(dtype: str) -> None:
    graph = Graph(("x",), (), {"x": TensorType((4, 8), dtype)})
    w = graph.add_constant(np.ones((8, 3), dtype))
    graph.add("matmul", ("x", w), output="y")
    graph.outputs = ("y",)
    assert narrow_operands(graph.check(), "bfloat16").dump() == graph.dump()


def test_a_graph_without_contractions_is_left_alone() -> None:
    graph = build(lambda g, x: g.add("softmax", (g.add("gelu", (x,)),), axis=2))
    assert halved(graph).dump() == graph.dump()


def test_what_would_be_slower_stays_float32() -> None:
    """The cost is asked once for each different product, with and without rounded operands."""

    def body(g: Graph, x: str) -> str:
        first = g.add("matmul", (x, weights(g, 8, 8)))
        second = g.add("matmul", (first, weights(g, 8, 8)))  # equal to the first
        return g.add("matmul", (second, weights(g, 8, 3)))

    graph = build(body)
    asked: list[Stage] = []

    def cost(stage: Stage) -> float:
        asked.append(stage)
        assert [i.constant for i in stage.inputs] == [False, True]
        assert stage.output.type.dtype == "float32"
        half = {i.type.dtype for i in stage.inputs} == {"bfloat16"}
        return {8: 0.7, 3: 1.2}[int(stage.output.type.shape[-1])] if half else 1.0

    after = narrow_operands(graph, "bfloat16", cost).check()
    assert len(asked) == 4
    dtypes = [
        {after.types[x].dtype for x in op.inputs}
        for op in after.operators.values()
        if op.kind == "matmul"
    ]
    assert dtypes == [{"bfloat16"}, {"bfloat16"}, {"float32"}]
    for worst in (float("inf"), float("nan")):
        alone = narrow_operands(graph, "bfloat16", lambda stage, worst=worst: worst)
        assert alone.dump() == graph.dump()


def test_what_is_slower_at_best_is_not_priced() -> None:
    """The floor of a contraction may already show that narrow operands pay. Its price would need a
    search.
    """

    def body(g: Graph, x: str) -> str:
        w = g.add_constant(np.full((8, 3), 0.5, np.float32))
        return g.add("matmul", (x, w))

    graph = build(body)
    for least, priced in ((1.0, 1), (0.5, 2)):
        asked: list[Stage] = []

        def cost(stage: Stage, asked: list[Stage] = asked) -> float:
            asked.append(stage)
            return 0.9 if {i.type.dtype for i in stage.inputs} == {"bfloat16"} else 1.0

        after = narrow_operands(graph, "bfloat16", cost, lambda op, types, least=least: least)
        assert len(asked) == priced
        (product,) = (op for op in after.operators.values() if op.kind == "matmul")
        assert {after.types[x].dtype for x in product.inputs} == {"bfloat16"}


@pytest.mark.parametrize(
    ("largest", "dtype", "narrow"),
    [
        (65504.0, "float16", True),
        (65600.0, "float16", False),
        (-7e4, "float16", False),
        (float("inf"), "float16", True),  # it is infinite in any format
        (7e4, "bfloat16", True),
    ],
)
def test_weights_beyond_the_format_stay_float32(largest: float, dtype: str, narrow: bool) -> None:
    def body(g: Graph, x: str) -> str:
        w = np.full((8, 3), 0.5, np.float32)
        w[3, 1] = largest
        return g.add("matmul", (x, g.add_constant(w)))

    after = fold_constants(narrow_operands(build(body), dtype)).check()
    (product,) = [op for op in after.operators.values() if op.kind == "matmul"]
    wanted = dtype if narrow else "float32"
    assert [after.types[x].dtype for x in product.inputs] == [wanted, wanted]


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_masks_stay_float32(dtype: str) -> None:
    """The least float32 marks hidden elements; float16 has no such number."""

    def body(g: Graph, x: str) -> str:
        q = g.add("reshape", (x,), TensorType((2, 1, 5, 8)))
        mask = g.add_constant(np.triu(np.full((5, 5), np.finfo(np.float32).min, np.float32), 1))
        seen = g.add("attention", (q, q, q, mask), scale=0.5, hidden=float(np.finfo("f4").min))
        return g.add("reshape", (seen,), TensorType((2, 5, 8)))

    after = halved(build(body), dtype)
    (attention,) = [op for op in after.operators.values() if op.kind == "attention"]
    assert [after.types[x].dtype for x in attention.inputs] == [dtype] * 3 + ["float32"]


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_attention_taken_apart_sums_in_float32(dtype: str) -> None:
    graph = narrow_operands(build(attention_block), dtype)
    (name,) = [op.output for op in graph.operators.values() if op.kind == "attention"]
    parts = taken_apart(graph, [name]).check()
    made = {op.type.dtype for op in parts.operators.values() if op.kind in ("matmul", "softmax")}
    assert made == {"float32"} and len(of_dtype(parts, dtype)) > 2
