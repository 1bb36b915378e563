"""Rewrites that find attention: scores, masks in every form, guards, and the products before it."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import Operator, TensorType
from tests.graphs import RNG, build, number, same, weights


def attention_parts(g: Graph, x: str, mask: np.ndarray | None, guard: bool, scale_q: bool) -> str:
    """[batch, 5, 8] -> two heads of 4; the scores are scaled on q and k or afterwards, masked, and
    guarded.
    """
    batch = int(g.types[x].shape[0])
    parts = []
    for _ in range(3):
        y = g.add("add", (g.add("matmul", (x, weights(g, 8, 8))), weights(g, 8)))
        y = g.add("reshape", (y,), TensorType((batch, 5, 2, 4)))
        parts.append(g.add("permute", (y,), axes=(0, 2, 1, 3)))
    q, k, v = parts
    k = g.add("permute", (k,), axes=(0, 1, 3, 2))
    if scale_q:
        q, k = (g.add("multiply", (t, number(g, 4**-0.25))) for t in (q, k))
    scores = g.add("matmul", (q, k))
    if not scale_q:
        scores = g.add("divide", (scores, number(g, 2)))
    if mask is not None:
        scores = g.add("add", (scores, g.add_constant(mask, "mask")))
    p = g.add("softmax", (scores,), axis=3)
    if guard:
        p = g.add("where", (g.add("isnan", (p,)), number(g, 0), p))
    y = g.add("permute", (g.add("matmul", (p, v)),), axes=(0, 2, 1, 3))
    return g.add("reshape", (y,), TensorType((batch, 5, 8)))


QKV = {"permute": 4, "reshape": 4, "slice": 3, "matmul": 1, "add": 1, "attention": 1}


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("scale_q", [True, False])
def test_attention(guard: bool, scale_q: bool) -> None:
    after = same(
        build(lambda g, x: attention_parts(g, x, None, guard, scale_q)),
        dict(sorted(QKV.items(), key=lambda i: (-i[1], i[0]))),
    )
    op = next(op for op in after.operators.values() if op.kind == "attention")
    assert op["scale"] == pytest.approx(0.5) and len(op.inputs) == 3


def test_attention_masks() -> None:
    zeros = np.zeros((5, 5), np.float32)
    after = canonicalize(build(lambda g, x: attention_parts(g, x, zeros, False, False)))
    assert [len(op.inputs) for op in after.operators.values() if op.kind == "attention"] == [3]
    causal = np.where(np.tri(5, dtype=bool), 0, -np.inf).astype(np.float32)
    graph = build(lambda g, x: attention_parts(g, x, causal, True, False))
    after = canonicalize(graph)
    assert [len(op.inputs) for op in after.operators.values() if op.kind == "attention"] == [4]
    x = {"x": RNG.standard_normal((2, 5, 8)).astype(np.float32)}
    np.testing.assert_allclose(after.evaluate(x)["y"], graph.evaluate(x)["y"], rtol=1e-5, atol=1e-6)


def attention_of(graph: Graph) -> Operator:
    (op,) = (op for op in graph.operators.values() if op.kind == "attention")
    return op


@pytest.mark.parametrize("reshaped", [False, True])
def test_guard_makes_a_row_zero_that_is_masked_whole(reshaped: bool) -> None:
    mask = np.zeros((5, 5), np.float32)
    mask[2] = -np.inf

    def body(g: Graph, x: str) -> str:
        scores = g.add("matmul", (x, g.add("permute", (x,), axes=(0, 2, 1))))
        p = g.add("softmax", (g.add("add", (scores, g.add_constant(mask, "mask"))),), axis=2)
        p = g.add("where", (g.add("isnan", (p,)), number(g, 0), p))
        if reshaped:
            p = g.add("reshape", (p,), TensorType((1, 2, 5, 5)))
            x = g.add("reshape", (x,), TensorType((1, 2, 5, 8)))
        return g.add("matmul", (p, x))

    graph = build(body)
    after = canonicalize(graph)
    assert attention_of(after)["guarded"] and "where" not in after.histogram()
    x = {"x": RNG.standard_normal((2, 5, 8)).astype(np.float32)}
    y = after.evaluate(x)["y"]
    assert (y.reshape(2, 5, 8)[:, 2] == 0).all()
    np.testing.assert_allclose(y, graph.evaluate(x)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1, 1), (3, 2, 1, 1), (1,), ()])
@pytest.mark.parametrize("inside", ["nothing", "a scale", "a bias"])
def test_a_temperature_of_each_head(shape: tuple[int, ...], inside: str) -> None:
    """As in Swin V2: (q k^T) * t + b with t at run time. A bias that is also multiplied by t
    stays.
    """
    types = {"q": TensorType((3, 2, 5, 4)), "k": TensorType((3, 2, 7, 4)), "t": TensorType(shape)}
    graph = Graph(("q", "k", "t"), (), types)
    scores = graph.add("matmul", ("q", graph.add("permute", ("k",), axes=(0, 1, 3, 2))))
    if inside == "a scale":
        scores = graph.add("multiply", (number(graph, 0.5), scores))
    elif inside == "a bias":
        scores = graph.add("add", (scores, weights(graph, 2, 5, 7)))
    scores = graph.add("multiply", (scores, "t"))
    scores = graph.add("add", (scores, weights(graph, 2, 5, 7)))
    p = graph.add("softmax", (scores,), axis=3)
    graph.add("matmul", (p, "k"), output="y")
    graph.outputs = ("y",)
    after = canonicalize(graph.check())
    assert ("attention" in after.histogram()) == (inside != "a bias")
    x = {
        name: RNG.standard_normal(kind.shape).astype(np.float32) * 3 for name, kind in types.items()
    }
    # in float64: large scores lose digits, and are multiplied in another order
    wanted, got = (g.evaluate(x, "float64")["y"] for g in (graph, after))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)


def test_probabilities_that_someone_else_reads_stay() -> None:
    def body(g: Graph, x: str) -> str:
        p = g.add(
            "softmax", (g.add("matmul", (x, g.add("permute", (x,), axes=(0, 2, 1)))),), axis=2
        )
        guarded = g.add("where", (g.add("isnan", (p,)), number(g, 0), p))
        return g.add("add", (g.add("matmul", (guarded, x)), g.add("matmul", (p, x))))

    assert "attention" not in canonicalize(build(body)).histogram()


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("low", [-np.inf, LOWEST, -1e30, -1e9, -1e4])
@pytest.mark.parametrize(
    "place", ["bare", "bias inside", "scale outside", "bias outside", "swapped"]
)
def test_mask_at_run_time(low: float, place: str) -> None:
    """This includes masks that hide whole rows, and hidden scores that are not finite."""
    graph = Graph(("x", "m"), (), {"x": TensorType((2, 5, 8)), "m": TensorType((2, 5, 5), "bool")})
    scores = graph.add("matmul", ("x", graph.add("permute", ("x",), axes=(0, 2, 1))))
    bias = weights(graph, 5, 5)
    if place == "bias inside":
        scores = graph.add("add", (scores, bias))
    order = (
        ("m", number(graph, low), scores)
        if place == "swapped"
        else ("m", scores, number(graph, low))
    )
    scores = graph.add("where", order)
    if place == "bias outside":
        scores = graph.add("add", (scores, bias))
    elif place == "scale outside":
        scores = graph.add("multiply", (scores, number(graph, 0.5)))
    p = graph.add("softmax", (scores,), axis=2)
    graph.add("matmul", (p, "x"), output="y")
    graph.outputs = ("y",)
    after = canonicalize(graph.check())
    assert ("attention" in after.histogram()) == (place != "bias outside" or low <= -1e30)
    x = RNG.standard_normal((2, 5, 8)).astype(np.float32)
    mask = RNG.integers(0, 2, (2, 5, 5)).astype(bool)
    mask[0, 1], mask[1, 2] = False, True
    wild = x.copy()
    wild[0, 3, 0], wild[1, 4, 1] = np.nan, np.inf
    for value in (x, wild):
        inputs = {"x": value, "m": mask}
        wanted, got = (g.evaluate(inputs)["y"] for g in (graph, after))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("low", [-np.inf, LOWEST, -1e9, -1e4])
@pytest.mark.parametrize("lower", [False, True])
def test_a_constant_mask_with_a_bias_behind_it(low: float, lower: bool) -> None:
    """A hidden score stays hidden, even an infinite one, whatever is added to it. A score that is
    low only because of the bias is not hidden.
    """
    graph = Graph(("x",), (), {"x": TensorType((2, 5, 8))})
    scores = graph.add("matmul", ("x", graph.add("permute", ("x",), axes=(0, 2, 1))))
    mask = np.ones((5, 5), bool)
    mask[:, 3], mask[0, 1] = False, False
    bias = RNG.standard_normal((5, 5)).astype(np.float32)
    if lower:  # for the keys that the first row keeps
        bias[0, [0, 2, 4]] = low
        bias[0, 3] = low  # for a hidden key: the sum may be lower than the mask's value
    condition = graph.add_constant(mask, "m")
    scores = graph.add("where", (condition, scores, number(graph, low)))
    scores = graph.add("add", (scores, graph.add_constant(bias, "b")))
    p = graph.add("softmax", (scores,), axis=2)
    graph.add("matmul", (p, "x"), output="y")
    graph.outputs = ("y",)
    after = canonicalize(graph.check())
    assert ("attention" in after.histogram()) == (not lower or low < -1e10)
    x = RNG.standard_normal((2, 5, 8)).astype(np.float32)
    wild = x.copy()
    wild[0, 3, 0] = np.inf
    for value in (x, wild):
        with np.errstate(invalid="ignore"):
            wanted, got = (g.evaluate({"x": value})["y"] for g in (graph, after))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("low", [-np.inf, LOWEST, -1e30, -1e9, -1e4])
@pytest.mark.parametrize("constant", [True, False])
def test_a_bias_as_low_as_the_mask_hides_nothing_itself(low: float, constant: bool) -> None:
    """Scores that a bias makes as low still differ, if their sums can show it."""
    graph = Graph(("x", "m"), (), {"x": TensorType((2, 5, 8)), "m": TensorType((2, 5, 1), "bool")})
    values = RNG.choice(np.float32([0, 0.5, low]), (2, 5, 5)).astype(np.float32)
    values[0, 1], values[1, 2] = low, 0.0
    if constant:
        bias = graph.add_constant(values, "bias")
    else:
        graph.inputs, bias = (*graph.inputs, "b"), "b"
        graph.types["b"] = TensorType((2, 5, 5))
    scores = graph.add("matmul", ("x", graph.add("permute", ("x",), axes=(0, 2, 1))))
    masked = graph.add("where", ("m", graph.add("add", (scores, bias)), number(graph, low)))
    graph.add("matmul", (graph.add("softmax", (masked,), axis=2), "x"), output="y")
    graph.outputs = ("y",)
    after = canonicalize(graph.check())
    assert ("attention" in after.histogram()) == (low <= -1e30)
    inputs = {
        "x": RNG.standard_normal((2, 5, 8)).astype(np.float32),
        "m": np.arange(10).reshape(2, 5, 1) % 4 != 0,
        "b": values,
    }
    wanted, got = (g.evaluate({n: inputs[n] for n in g.inputs})["y"] for g in (graph, after))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(300))
def test_masks_and_biases_in_any_order(seed: int) -> None:
    """One mask and up to two biases, constant or not, with scales between them. Some biases hold
    the mask's value or -inf. Hidden scores stay hidden, and rows that have no other scores keep
    their values.
    """
    rng = np.random.default_rng(seed)
    low = float(rng.choice([-np.inf, LOWEST, -1e30, -1e9, -1e4]))
    graph, feeds = Graph(("x",), (), {"x": TensorType((2, 5, 8))}), {}
    feeds["x"] = rng.standard_normal((2, 5, 8)).astype(np.float32)

    def operand(value: np.ndarray) -> str:
        name = f"t{len(graph.types)}"
        if rng.integers(2):
            return graph.add_constant(value, name)
        graph.inputs, feeds[name] = (*graph.inputs, name), value
        graph.types[name] = TensorType(value.shape, str(value.dtype))
        return name

    deep = True  # two sums that overflow may end with different infinities
    t = graph.add("matmul", ("x", graph.add("permute", ("x",), axes=(0, 2, 1))))
    for kind in rng.permutation(["mask", *["bias"] * rng.integers(1, 3), "scale"]):
        if kind == "scale":
            t = graph.add("multiply", (t, number(graph, 0.5)))
        elif kind == "mask":
            condition = operand(rng.integers(0, 3, (2, 5, 5)) > 0)
            t = graph.add("where", (condition, t, number(graph, low)))
        else:
            odds = rng.choice([0.0, 0.3, 0.9])
            bias = rng.standard_normal((5, 5)).astype(np.float32)
            bias[rng.random((5, 5)) < odds] = rng.choice([low, -np.inf]) if deep else 0
            deep = False
            t = graph.add("add", (t, operand(bias)))
    p = graph.add("softmax", (t,), axis=2)
    graph.add("matmul", (p, "x"), output="y")
    graph.outputs = ("y",)
    after = canonicalize(graph.check())
    with np.errstate(invalid="ignore", over="ignore"):
        wanted, got = (g.evaluate({n: feeds[n] for n in g.inputs})["y"] for g in (graph, after))
    atol = 2e-3 if low == -1e4 else 1e-5  # sums with -1e4 are rounded to 1e-3
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("batch", [1, 2])
def test_swin_mask_through_reshapes(batch: int) -> None:
    """Scores [batch * 3 windows, 2 heads, 4, 4] plus one mask for each window, as Swin adds it."""

    def body(g: Graph, x: str) -> str:
        k = g.add("permute", (x,), axes=(0, 1, 3, 2))
        scores = g.add("add", (g.add("matmul", (x, k)), weights(g, 2, 4, 4)))
        apart = g.add("reshape", (scores,), TensorType((batch, 3, 2, 4, 4)))
        masked = g.add("add", (apart, weights(g, 1, 3, 1, 4, 4)))
        together = g.add("reshape", (masked,), TensorType((batch * 3, 2, 4, 4)))
        return g.add("matmul", (g.add("softmax", (together,), axis=3), x))

    same(build(body, (batch * 3, 2, 4, 5)), {"attention": 1})


@pytest.mark.parametrize("low", [-np.inf, -1e9])
def test_boolean_mask_becomes_bias(low: float) -> None:
    def body(g: Graph, x: str) -> str:
        scores = g.add("matmul", (x, g.add("permute", (x,), axes=(0, 2, 1))))
        allowed = g.add_constant(np.tri(5, dtype=bool), "allowed")
        masked = g.add("where", (allowed, scores, number(g, low)))
        return g.add("matmul", (g.add("softmax", (masked,), axis=2), x))

    same(build(body), {"attention": 1})


def test_fused_qkv_takes_the_form_of_three_projections() -> None:
    """reshape [.., 3, heads, depth] -> permute -> index, as timm writes it."""

    def body(g: Graph, x: str) -> str:
        y = g.add("add", (g.add("matmul", (x, weights(g, 8, 24))), weights(g, 24)))
        y = g.add("reshape", (y,), TensorType((2, 5, 3, 2, 4)))
        y = g.add("permute", (y,), axes=(2, 0, 3, 1, 4))
        q, k, v = (
            g.add(
                "reshape",
                (
                    g.add(
                        "slice",
                        (y,),
                        TensorType((1, 2, 2, 5, 4)),
                        begin=(i, 0, 0, 0, 0),
                        strides=(1,) * 5,
                    ),
                ),
                TensorType((2, 2, 5, 4)),
            )
            for i in range(3)
        )
        s = g.add(
            "softmax", (g.add("matmul", (q, g.add("permute", (k,), axes=(0, 1, 3, 2)))),), axis=3
        )
        y = g.add("permute", (g.add("matmul", (s, v)),), axes=(0, 2, 1, 3))
        return g.add("reshape", (y,), TensorType((2, 5, 8)))

    same(build(body), dict(sorted(QKV.items(), key=lambda i: (-i[1], i[0]))))
