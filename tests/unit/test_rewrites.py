"""Each rewrite on the smallest graph that shows it: the form it gives, and that the values stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.tensor.stage import Operator, TensorType

RNG = np.random.default_rng(0)


def build(body: Callable[[Graph, str], str], shape: tuple[int, ...] = (2, 5, 8)) -> Graph:
    """A graph of one input 'x' and one output 'y'."""
    graph = Graph(("x",), (), {"x": TensorType(shape)})
    result = body(graph, "x")
    graph.add("identity", (result,), graph.types[result], output="y")
    graph.outputs = ("y",)
    return graph.prune().check()


def weights(graph: Graph, *shape: int, scale: float = 0.3) -> str:
    return graph.add_constant((RNG.standard_normal(shape) * scale).astype(np.float32), "weight")


def number(graph: Graph, value: float) -> str:
    return graph.add_constant(np.float32(value), "number")


def same(graph: Graph, wanted: dict[str, int], tolerance: float = 1e-6) -> Graph:
    """Canonicalize; the kinds must be ``wanted`` and the values (in float64) those of before."""
    after = canonicalize(graph)
    assert after.histogram() == wanted
    for name in graph.inputs:
        assert name in after.inputs
    inputs = {n: RNG.standard_normal(graph.types[n].shape).astype(np.float32) for n in graph.inputs}
    before = graph.evaluate(inputs, dtype="float64")
    for name, value in after.evaluate(inputs, dtype="float64").items():
        np.testing.assert_allclose(value, before[name], rtol=tolerance, atol=tolerance)
    return after


def decomposed_layer_norm(g: Graph, x: str, power: bool, reciprocal: bool) -> str:
    axis = len(g.types[x].shape) - 1
    centred = g.add("subtract", (x, g.add("mean", (x,), axes=(axis,), keepdims=True)))
    square = g.add("power", (centred, number(g, 2))) if power else g.add("multiply", (centred,) * 2)
    variance = g.add("mean", (square,), axes=(axis,), keepdims=True)
    root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))
    if reciprocal:
        y = g.add("multiply", (centred, g.add("divide", (number(g, 1), root))))
    else:
        y = g.add("divide", (centred, root))
    y = g.add("multiply", (y, weights(g, int(g.types[x].shape[-1]))))
    return g.add("add", (y, weights(g, int(g.types[x].shape[-1]))))


@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_layer_norm(power: bool, reciprocal: bool) -> None:
    graph = build(lambda g, x: decomposed_layer_norm(g, x, power, reciprocal))
    after = same(graph, {"layer_norm": 1})
    assert after.operators["y"]["epsilon"] == pytest.approx(1e-5)


def centred_over(g: Graph, x: str, axes: tuple[int, ...]) -> str:
    centred = g.add("subtract", (x, g.add("mean", (x,), axes=axes, keepdims=True)))
    variance = g.add("mean", (g.add("multiply", (centred,) * 2),), axes=axes, keepdims=True)
    return g.add("divide", (centred, g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))))


def affine(g: Graph, y: str, *shape: int) -> str:
    return g.add("add", (g.add("multiply", (y, weights(g, *shape))), weights(g, *shape)))


def root_mean_square(g: Graph, x: str, axis: int, reciprocal: bool) -> str:
    squares = g.add("power", (x, number(g, 2)))
    variance = g.add("mean", (squares,), axes=(axis,), keepdims=True)
    root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-6))),))
    if reciprocal:
        return g.add("multiply", (x, g.add("divide", (number(g, 1), root))))
    return g.add("divide", (x, root))


@pytest.mark.parametrize("reciprocal", [True, False])
def test_rms_norm(reciprocal: bool) -> None:
    """As Hugging Face writes it; an addition behind it is no part of it."""

    def body(g: Graph, x: str) -> str:
        size = int(g.types[x].shape[-1])
        y = root_mean_square(g, x, len(g.types[x].shape) - 1, reciprocal)
        return g.add("add", (g.add("multiply", (weights(g, size), y)), weights(g, size)))

    after = same(build(body), {"rms_norm": 1, "add": 1})
    norm = next(op for op in after.operators.values() if op.kind == "rms_norm")
    assert norm["epsilon"] == pytest.approx(1e-6) and after.constants[norm.inputs[1]].std() > 0


def test_rms_norm_over_another_axis_stays() -> None:
    graph = build(lambda g, x: root_mean_square(g, x, 0, False), (4, 6))
    assert "rms_norm" not in canonicalize(graph).histogram()


def test_normalisation_over_another_axis() -> None:
    """SAM's LayerNorm2d, scale and shift folded through the permutation."""
    graph = build(lambda g, x: affine(g, centred_over(g, x, (1,)), 5, 1, 1), (2, 5, 4, 3))
    after = same(graph, {"permute": 2, "layer_norm": 1}, 2e-6)
    norm = next(op for op in after.operators.values() if op.kind == "layer_norm")
    assert after.types[norm.inputs[1]].shape == (5,)


@pytest.mark.parametrize(("axes", "groups"), [((1, 2, 3), 1), ((2, 3), 6)])
def test_normalisation_over_the_image(axes: tuple[int, ...], groups: int) -> None:
    graph = build(lambda g, x: affine(g, centred_over(g, x, axes), 6, 1, 1), (2, 6, 4, 3))
    after = same(graph, {"group_norm": 1}, 2e-6)
    (norm,) = after.operators.values()
    assert norm["groups"] == groups and norm["axis"] == 1


def test_variances_over_other_axes_than_the_mean_are_no_normalisation() -> None:
    def body(g: Graph, x: str) -> str:
        centred = g.add("subtract", (x, g.add("mean", (x,), axes=(1,), keepdims=True)))
        variance = g.add("mean", (g.add("multiply", (centred,) * 2),), axes=(2,), keepdims=True)
        root = g.add("sqrt", (g.add("add", (variance, number(g, 1e-5))),))
        return g.add("divide", (centred, root))

    kinds = canonicalize(build(body)).histogram()
    assert "layer_norm" not in kinds and "group_norm" not in kinds


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_laid_flat(groups: int) -> None:
    """As PyTorch's exporters write it: reshape, InstanceNormalization, reshape, scale, shift."""

    def body(g: Graph, x: str) -> str:
        flat = g.add("reshape", (x,), TensorType((2, groups, 72 // groups)))
        y = g.add("reshape", (centred_over(g, flat, (2,)),), TensorType((2, 6, 4, 3)))
        return affine(g, y, 6, 1, 1)

    after = same(build(body, (2, 6, 4, 3)), {"group_norm": 1}, 2e-6)
    (norm,) = after.operators.values()
    assert norm["groups"] == groups


def test_rows_of_tokens_are_no_groups() -> None:
    def body(g: Graph, x: str) -> str:
        flat = g.add("reshape", (x,), TensorType((10, 8)))
        return g.add("reshape", (centred_over(g, flat, (1,)),), TensorType((2, 5, 8)))

    assert "group_norm" not in canonicalize(build(body)).histogram()


def _erf_gate(g: Graph, x: str, divide: bool) -> str:
    inner = (
        g.add("divide", (x, number(g, 2**0.5)))
        if divide
        else g.add("multiply", (x, number(g, 0.70710677)))
    )
    return g.add("add", (g.add("erf", (inner,)), number(g, 1)))


GELUS: dict[str, Callable[[Graph, str], str]] = {
    "(x * gate) * 0.5": lambda g, x: g.add(
        "multiply", (g.add("multiply", (x, _erf_gate(g, x, True))), number(g, 0.5))
    ),
    "(0.5 * x) * gate": lambda g, x: g.add(
        "multiply", (g.add("multiply", (number(g, 0.5), x)), _erf_gate(g, x, False))
    ),
    "x * (gate * 0.5)": lambda g, x: g.add(
        "multiply", (x, g.add("multiply", (_erf_gate(g, x, False), number(g, 0.5))))
    ),
    "x * gate / 2": lambda g, x: g.add(
        "divide", (g.add("multiply", (_erf_gate(g, x, True), x)), number(g, 2))
    ),
}


@pytest.mark.parametrize("order", GELUS)
def test_gelu(order: str) -> None:
    same(build(GELUS[order]), {"gelu": 1}, 1e-5)


@pytest.mark.parametrize("factored", [True, False])
def test_gelu_tanh(factored: bool) -> None:
    def body(g: Graph, x: str) -> str:
        c = number(g, (2 / np.pi) ** 0.5)
        if factored:  # (c x) (1 + 0.044715 x x)
            square = g.add("multiply", (g.add("multiply", (x, number(g, 0.044715))), x))
            inner = g.add(
                "multiply", (g.add("multiply", (x, c)), g.add("add", (square, number(g, 1))))
            )
        else:  # c (x + 0.044715 x^3)
            cube = g.add("multiply", (g.add("power", (x, number(g, 3))), number(g, 0.044715)))
            inner = g.add("multiply", (g.add("add", (x, cube)), c))
        gate = g.add("add", (g.add("tanh", (inner,)), number(g, 1)))
        return g.add("multiply", (g.add("multiply", (x, number(g, 0.5))), gate))

    same(build(body), {"gelu_tanh": 1}, 1e-5)


def test_silu_and_what_only_looks_like_gelu() -> None:
    same(build(lambda g, x: g.add("multiply", (x, g.add("sigmoid", (x,))))), {"silu": 1})
    half = build(
        lambda g, x: g.add(
            "multiply", (g.add("multiply", (x, _erf_gate(g, x, True))), number(g, 0.4))
        )
    )
    assert "gelu" not in canonicalize(half).histogram()


@pytest.mark.parametrize("shifted", [True, False])
def test_softmax(shifted: bool) -> None:
    def body(g: Graph, x: str) -> str:
        if shifted:
            x = g.add("subtract", (x, g.add("max", (x,), axes=(2,), keepdims=True)))
        e = g.add("exp", (x,))
        return g.add("divide", (e, g.add("sum", (e,), axes=(2,), keepdims=True)))

    same(build(body), {"softmax": 1})


def attention_parts(g: Graph, x: str, mask: np.ndarray | None, guard: bool, scale_q: bool) -> str:
    """[batch, 5, 8] -> two heads of 4, scores scaled on q and k or afterwards, masked, guarded."""
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
    """Whatever hides rows whole, and whatever non-finite score it hides."""
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


@pytest.mark.parametrize("batch", [1, 2])
def test_swin_mask_through_reshapes(batch: int) -> None:
    """Scores [batch * 3 windows, 2 heads, 4, 4] plus a mask per window, as Swin adds it."""

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


def test_frozen_batch_norm_goes_into_the_convolution() -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add(
            "conv2d",
            (x, weights(g, 6, 3, 3, 3)),
            strides=(1, 1),
            padding=(1, 1, 1, 1),
            dilation=(1, 1),
            groups=1,
            layout="NCHW",
        )
        y = g.add("add", (y, weights(g, 1, 6, 1, 1)))
        y = g.add("multiply", (y, weights(g, 1, 6, 1, 1)))
        return g.add("relu", (g.add("add", (y, weights(g, 1, 6, 1, 1))),))

    same(build(body, (1, 3, 8, 8)), {"add": 1, "conv2d": 1, "relu": 1}, 1e-5)


def test_scale_of_another_axis_stays_outside_the_convolution() -> None:
    def body(g: Graph, x: str) -> str:
        y = g.add(
            "conv2d",
            (x, weights(g, 8, 3, 3, 3)),
            strides=(1, 1),
            padding=(1, 1, 1, 1),
            dilation=(1, 1),
            groups=1,
            layout="NCHW",
        )
        return g.add("multiply", (y, weights(g, 1, 1, 1, 8)))

    same(build(body, (1, 3, 8, 8)), {"conv2d": 1, "multiply": 1})


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


def test_a_stack_that_is_flattened_at_once_is_a_concatenation() -> None:
    """As deformable attention puts its levels together; behind the next axis it is none."""

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


def test_constants_fold_and_unused_ones_go() -> None:
    def body(g: Graph, x: str) -> str:
        weights(g, 3, 3)
        w = g.add("permute", (weights(g, 4, 8),), axes=(1, 0))
        big = g.add("broadcast", (number(g, 1.5),), TensorType((2, 5, 4)))
        return g.add("add", (g.add("matmul", (x, w)), big))

    after = same(build(body), {"add": 1, "matmul": 1})
    assert sorted(c.size for c in after.constants.values()) == [1, 32]


@pytest.mark.parametrize(
    ("kind", "a", "b", "value"),
    [
        ("divide", [1, -1, 0], [0, 0, 0], [np.inf, -np.inf, np.nan]),
        ("divide", [np.inf, 1, np.nan], [np.inf, np.inf, 1], [np.nan, 0, np.nan]),
        ("subtract", [np.inf, 1, 3e38], [np.inf, np.inf, -3e38], [np.nan, -np.inf, np.inf]),
        ("multiply", [0, np.inf, 1e30], [np.inf, -1, 1e30], [np.nan, -np.inf, np.inf]),
        ("maximum", [np.nan, 1, -np.inf], [1, np.nan, 0], [np.nan, np.nan, 0]),
        ("mod", [1, np.inf, 5], [0, 2, np.inf], [np.nan, np.nan, 5]),
    ],
)
def test_constants_fold_as_ieee_says(
    kind: str, a: list[float], b: list[float], value: list[float]
) -> None:
    def body(g: Graph, x: str) -> str:
        left, right = (g.add_constant(np.array(c, np.float32)) for c in (a, b))
        return g.add("where", (g.add("isnan", (x,)), x, g.add(kind, (left, right))))

    (folded,) = (c for c in canonicalize(build(body, (2, 3))).constants.values())
    np.testing.assert_array_equal(folded, np.array(value, np.float32))


@pytest.mark.parametrize("kind", ["divide", "floor_divide", "mod", "floor_mod", "power"])
def test_integers_without_a_value_stay_unfolded(kind: str) -> None:
    divisor = [-1, -2, 3] if kind == "power" else [1, 0, 3]
    vector = TensorType((3,), "int32")
    graph = Graph(("x",), ("y",), {"x": vector})
    a, b = (graph.add_constant(np.array(c, np.int32)) for c in ([4, 5, 6], divisor))
    fine = graph.add("multiply", (b, a), vector)
    graph.add("add", ("x", graph.add("add", (fine, graph.add(kind, (a, b), vector)))), output="y")
    assert canonicalize(graph.prune().check()).histogram() == {"add": 2, kind: 1}


@pytest.mark.parametrize(
    ("kind", "a", "b", "x"),
    [
        ("multiply", 1e30, 1e30, 1e-30),
        ("multiply", 1e-30, 1e-30, 1e30),
        ("add", -3e38, -3e38, 3e38),
    ],
)
def test_constants_that_leave_the_range_together_stay_apart(
    kind: str, a: float, b: float, x: float
) -> None:
    graph = build(lambda g, x: g.add(kind, (g.add(kind, (x, number(g, a))), number(g, b))), (3,))
    inputs = {"x": np.full(3, x, np.float32)}
    wanted = graph.evaluate(inputs)["y"]
    assert np.isfinite(wanted).all() and wanted.all()
    np.testing.assert_array_equal(canonicalize(graph).evaluate(inputs)["y"], wanted)


def test_an_output_that_is_an_input_keeps_an_identity() -> None:
    same(build(lambda g, x: g.add("multiply", (x, number(g, 1)))), {"identity": 1})


def test_dump_is_given_every_step() -> None:
    seen: dict[str, str] = {}
    canonicalize(build(lambda g, x: g.add("relu", (x,))), dump=seen.__setitem__)
    assert next(iter(seen)) == "00_lowered" and "relu(%x)" in list(seen.values())[-1]
