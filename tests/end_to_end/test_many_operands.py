"""Operators of hundreds of tensors."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gtco.compiler import compile_model
from gtco.graph.lower.context import MOST_JOINED


@pytest.mark.parametrize("kind", ["Concat", "Sum"])
@pytest.mark.parametrize("number", [MOST_JOINED + 1, 500])
def test_hundreds_of_tensors(kind: str, number: int) -> None:
    """One kernel that chooses among 500 tensors overflows LLVM's stack."""
    names = [f"x{n}" for n in range(number)]
    node = helper.make_node(kind, names, ["y"], **({"axis": 1} if kind == "Concat" else {}))
    graph = helper.make_graph(
        [node],
        "many",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, 5)) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    rng = np.random.default_rng(number)
    feeds = {name: rng.standard_normal((3, 5)).astype(np.float32) for name in names}
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with compile_model(model, threads=2) as compiled:
        np.testing.assert_allclose(compiled.run(feeds)["y"], want, rtol=1e-5, atol=1e-5)
