"""Products of two dequantized tensors in bfloat16: which they are, and that nothing is lost."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from gtco.graph.exact_bfloat16 import exact_bfloat16
from gtco.graph.graph import Graph
from gtco.machine.aarch64 import ARM_TARGETS
from gtco.machine.target import TARGETS, Machine, target
from gtco.tensor.stage import Stage, TensorType
from tests.graphs import number
from tests.kernels import fresh_seed

MULTIPLIES = TARGETS["znver4"]


def attention(scale: float = 0.05, zero: float = 131, dtype: str = "int8") -> Graph:
    """q k^T of (q - zero) * scale and of k, whose zero point is -3."""
    q, k = TensorType((2, 9, 3, 8), "uint8"), TensorType((2, 3, 11, 8), dtype)
    graph = Graph(("q", "k"), ("y",), {"q": q, "k": k})
    parameters = number(graph, scale), number(graph, zero)
    a = graph.add("dequantize", ("q", *parameters), TensorType(q.shape))
    a = graph.add("permute", (a,), axes=(0, 2, 1, 3))
    b = graph.add("dequantize", ("k", number(graph, 0.02), number(graph, -3)), TensorType(k.shape))
    b = graph.add("permute", (b,), axes=(0, 1, 3, 2))
    graph.add("matmul", (a, b), output="y")
    return graph.check()


@pytest.mark.parametrize("machine", [MULTIPLIES, TARGETS["graniterapids"]])
def test_taken(machine: Machine) -> None:
    before = attention()
    after = exact_bfloat16(before, machine).check()
    (product,) = (op for op in after.operators.values() if op.kind == "matmul")
    assert {after.types[x].dtype for x in product.inputs} == {"bfloat16"}
    rng = np.random.default_rng(fresh_seed())
    given = {
        "q": rng.integers(0, 256, (2, 9, 3, 8)).astype(np.uint8),
        "k": rng.integers(-128, 128, (2, 3, 11, 8)).astype(np.int8),
    }
    wanted = before.evaluate(given, dtype="float64")["y"]
    found = after.evaluate(given)["y"]
    assert np.abs(found - wanted).max() <= 3e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("bits", [8, 9])
def test_integer_operators(bits: int, constant: bool) -> None:
    """Whole numbers that a rewrite of ONNX's integer operators left in float32."""
    a, b = (TensorType(shape, "float32") for shape in ((9, 100), (100, 11)))
    rng = np.random.default_rng(fresh_seed())
    most = 2**bits - 1
    given = {
        "a": rng.integers(-most, most, a.shape, endpoint=True).astype(np.float32),
        "b": rng.integers(-most, most, b.shape, endpoint=True).astype(np.float32),
    }
    types = {"a": a} if constant else {"a": a, "b": b}
    graph = Graph(tuple(types), ("y",), types)
    right = graph.add_constant(given.pop("b"), "b") if constant else "b"
    graph.add("matmul", ("a", right), output="y", exact=bits)
    after = exact_bfloat16(graph.check(), MULTIPLIES).check()
    (product,) = (op for op in after.operators.values() if op.kind == "matmul")
    dtype = "bfloat16" if bits == 8 else "float32"
    assert {after.types[x].dtype for x in product.inputs} == {dtype} and product["exact"] == bits
    np.testing.assert_array_equal(
        after.evaluate(given)["y"], graph.evaluate(given, dtype="float64")["y"]
    )


@pytest.mark.parametrize(
    "graph",
    [attention(zero=257), attention(zero=0.5), attention(scale=1e-38), attention(scale=0)],
    ids=["far zero", "half a step", "denormal", "nothing"],
)
def test_left(graph: Graph) -> None:
    assert exact_bfloat16(graph, MULTIPLIES).operators == graph.operators


@pytest.mark.parametrize(
    "machine", [TARGETS["x86-64-v4"], TARGETS["cascadelake"], target("cuda:sm_90a")]
)
def test_only_where_bfloat16_is_multiplied(machine: Machine) -> None:
    graph = attention()
    assert exact_bfloat16(graph, machine).operators == graph.operators


def test_arm() -> None:
    graph = attention()
    without = ARM_TARGETS["cortex-a76"]
    assert exact_bfloat16(graph, without).operators == graph.operators
    with_bf16 = ARM_TARGETS["neoverse-v1"]
    assert exact_bfloat16(graph, with_bf16).operators != graph.operators


def test_only_if_it_is_no_slower() -> None:
    def cost(stage: Stage) -> float:
        return 2.0 if "bfloat16" in {t.dtype for t in stage.types.values()} else 1.0

    def unable(stage: Stage) -> float:
        return inf if "bfloat16" in {t.dtype for t in stage.types.values()} else 1.0

    graph = attention()
    for price in (cost, unable):
        assert exact_bfloat16(graph, MULTIPLIES, price).operators == graph.operators
