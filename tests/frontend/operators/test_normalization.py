"""LayerNormalization and SkipLayerNormalization: scales that broadcast, every output."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize
from tests.frontend.operators.one_node import check, node_model

RNG = np.random.default_rng(25)
Shape = tuple[int, ...]


def evaluated(
    node: onnx.NodeProto, x: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> list[np.ndarray]:
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in x.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [numpy_helper.from_array(a, name) for name, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = lower(load_onnx(helper.make_model(graph, opset_imports=opsets), simplify=False))
    found = canonicalize(graph).check().evaluate(x)
    return [found[name] for name in node.output if name]


def reference(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, axis: int, epsilon: float
) -> list[np.ndarray]:
    """The result, the mean and the inverse deviation, in float64."""
    x = x.astype(np.float64)
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + epsilon)
    return [(x - mean) * inverse * scale + bias, mean, inverse]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize(
    ("axis", "scale", "bias"),
    [
        (-1, (7,), (7,)),
        (-1, (1, 1, 7), (1, 1, 7)),
        (-1, (1, 7), None),
        (-1, (), (1, 1, 7)),
        (-1, (1,), (7,)),
        (-1, (3, 1, 7), (5, 7)),
        (1, (5, 7), (1, 5, 7)),
        (1, (5, 1), (7,)),
        (0, (1, 5, 1), None),
    ],
)
def test_scale_and_bias_broadcast(
    axis: int, scale: Shape, bias: Shape | None, outputs: int
) -> None:
    x, g = normal(3, 5, 7), normal(*scale)
    weights = {"g": g} | ({} if bias is None else {"b": normal(*bias)})
    node = helper.make_node(
        "LayerNormalization", ["x", *weights], ["y", "m", "v"][:outputs], axis=axis, epsilon=1e-3
    )
    found = evaluated(node, {"x": x}, weights)
    wanted = reference(x, g, weights.get("b", np.zeros(1)), axis, 1e-3)
    for a, b in zip(found, wanted, strict=False):
        assert a.shape == b.shape and len(found) == outputs
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", ["", "beta", "bias", "beta bias"])
@pytest.mark.parametrize("skip", [(2, 5, 8), (5, 8), (1, 5, 8)])
def test_a_skip_layer_norm_gives_the_sum(given: str, skip: Shape) -> None:
    inputs = {"x": normal(2, 5, 8), "skip": normal(*skip)}
    weights = {"gamma": normal(8)} | {name: normal(8) for name in given.split()}
    names = [*inputs, "gamma", "beta" if "beta" in given else "", "bias" if "bias" in given else ""]
    for outputs in (["y"], ["y", "", "", "s"], ["y", "m", "v", "s"]):
        node = helper.make_node(
            "SkipLayerNormalization", names, outputs, domain="com.microsoft", epsilon=1e-5
        )
        total = inputs["x"].astype(np.float64) + inputs["skip"] + weights.get("bias", 0)
        y, mean, inverse = reference(
            total, weights["gamma"], weights.get("beta", np.zeros(1)), -1, 1e-5
        )
        wanted = {"y": y, "m": mean, "v": inverse, "s": total}
        found = evaluated(node, inputs, weights)
        for name, array in zip(filter(None, outputs), found, strict=True):
            np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_lp_normalization(axis: int, p: int) -> None:
    x = RNG.standard_normal((3, 5, 7), np.float32)
    x[:, :, 2] = x[1] = x[:, 3] = 0  # vectors of zeros along each axis
    check(node_model("LpNormalization", {"x": x}, {}, ["x"], 1, axis=axis, p=p), {"x": x})


def test_a_division_by_the_norm_stays_one() -> None:
    """Token merging and cosine attention divide by a norm; zeros become NaN, as in the model."""
    nodes = [
        helper.make_node("ReduceL2", ["x", "axis"], ["norm"], keepdims=1),
        helper.make_node("Div", ["x", "norm"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, (4, 6))],
        [value("y", TensorProto.FLOAT, (4, 6))],
        [numpy_helper.from_array(np.array([-1]), "axis")],
    )
    x = RNG.standard_normal((4, 6), np.float32)
    x[2] = 0
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (y,) = lower(load_onnx(model)).evaluate({"x": x}).values()
    with np.errstate(invalid="ignore"):
        wanted = x / np.linalg.norm(x, axis=-1, keepdims=True)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
