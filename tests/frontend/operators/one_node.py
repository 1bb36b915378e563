"""A model of one node, and its comparison with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from tests.few_nodes import by_onnxruntime

Arrays = dict[str, np.ndarray]


def node_model(
    op: str, inputs: Arrays, constants: Arrays, order: list[str], outputs: int, **attrs: Any
) -> onnx.ModelProto:
    """A model of one node; ``order`` names its inputs, and "" stands for one that is left out."""
    made = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, order, made, **attrs)],
        "test",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11, producer_name="test"
    )


def check(model: onnx.ModelProto, inputs: Arrays, tolerance: float = 2e-5) -> list[np.ndarray]:
    """The outputs of the lowered graph, evaluated with numpy. They must agree with those of ONNX
    Runtime, up to ``tolerance`` times the largest finite value of an output.
    """
    wanted = by_onnxruntime(model, inputs)
    for value, array in zip(model.graph.output, wanted, strict=True):
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        value.CopyFrom(helper.make_tensor_value_info(value.name, dtype, array.shape))
    got = list(lower(load_onnx(model, simplify=False)).evaluate(inputs).values())
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        if ours.dtype == np.float32:  # ONNX Runtime hides scores with the least finite number
            theirs = np.where(theirs < -1e30, -np.inf, theirs)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        finite = theirs[np.isfinite(theirs)]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(finite).max())
    return got
