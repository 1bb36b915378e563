"""Products of two inputs whose M, N and K are all open, at drawn sizes beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gtco.compiler import compile_model
from gtco.driver.compiled import CompiledModel
from gtco.support.errors import GtcoError

M, N, K = (1, 7, 33), (1, 40), (1, 9, 64)


def model(inputs: Mapping[str, Sequence[Any]], nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    """Of float32 inputs of these shapes. Every node's output is one of the model's."""
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT, None) for n in nodes],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def every_product() -> onnx.ModelProto:
    return model(
        {
            "a": ["m", "k"],
            "b": ["k", "n"],
            "at": ["k", "m"],
            "bt": ["n", "k"],
            "c": ["n"],
            "many": [2, 3, "m", "k"],
            "few": [3, "k", "n"],
        },
        [
            helper.make_node("MatMul", ["a", "b"], ["plain"]),
            helper.make_node(
                "Gemm", ["at", "bt", "c"], ["turned"], transA=1, transB=1, alpha=0.5, beta=2.0
            ),
            helper.make_node("Gemm", ["a", "bt"], ["half_turned"], transB=1),
            helper.make_node("MatMul", ["many", "few"], ["batched"]),
        ],
    )


def compare(compiled: CompiledModel, source: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    rng = np.random.default_rng([*sizes.values()])
    feeds = {}
    for value in source.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        # numbers that bfloat16 has, so that products differ in the order of their sums alone
        feeds[value.name] = (rng.integers(-64, 65, shape) / 16).astype(np.float32)
    session = onnxruntime.InferenceSession(source.SerializeToString())
    for name, want in zip(
        (v.name for v in source.graph.output), session.run(None, feeds), strict=True
    ):
        got = compiled.run(feeds)[name]
        assert got.shape == want.shape
        scale = 1e-6 * sizes["k"] * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=scale, err_msg=f"{name} at {sizes}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lists_of_all_three(precision: str) -> None:
    source, dims = every_product(), {"m": M, "n": N, "k": K}
    with compile_model(
        source, dims=dims, precision=precision, threads=2, simplify=False, cache=False
    ) as compiled:
        every = [dict(zip("mnk", one, strict=True)) for one in product(M, N, K)]
        for number in np.random.default_rng(0).permutation(len(every)):
            compare(compiled, source, every[number])


def test_a_range_of_rows_beside_lists() -> None:
    """Each row of the product is computed by itself, and b has no rows of it."""
    inputs = {"a": ["m", "k"], "b": ["k", "n"]}
    source = model(inputs, [helper.make_node("MatMul", ["a", "b"], ["y"])])
    dims = {"k": "16..64:24", "m": "1..50", "n": [5, 24]}
    with compile_model(source, dims=dims, threads=2, simplify=False, cache=False) as compiled:
        assert str(compiled.dims["m"]) == "1..50" and compiled.dims["n"] == [5, 24]
        for m, n, k in [(1, 5, 16), (50, 24, 64), (7, 5, 40), (33, 24, 16)]:
            compare(compiled, source, {"m": m, "n": n, "k": k})
        with pytest.raises(GtcoError, match=r"'k' .axis 0. is 17.* 16 to 64 in steps of 24"):
            compiled(np.ones((3, 16), np.float32), np.ones((17, 24), np.float32))


def test_a_range_of_batches_of_open_products() -> None:
    inputs = {"a": ["batch", 2, "m", "k"], "b": ["batch", 2, "k", "n"]}
    source = model(inputs, [helper.make_node("MatMul", ["a", "b"], ["y"])])
    dims = {"batch": "1..9", "m": [1, 17], "n": [8, 33], "k": [16, 50]}
    with compile_model(source, dims=dims, threads=2, simplify=False, cache=False) as compiled:
        for batch, m, n, k in [(1, 1, 8, 50), (9, 17, 33, 16), (3, 17, 8, 50), (6, 1, 33, 16)]:
            compare(compiled, source, {"batch": batch, "m": m, "n": n, "k": k})
