"""Models of a few nodes, and the results of gtco's graph of them against ONNX Runtime.

The graphs are evaluated with numpy. Other tests check the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TypeProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.graph import Graph
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError

Arrays = Mapping[str, np.ndarray]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Arrays,
    constants: Arrays | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
) -> onnx.ModelProto:
    """``inputs`` give their names, types and shapes. Outputs get types and shapes only from
    ``typed``.
    """
    graph = helper.make_graph(
        nodes,
        "few_nodes",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [helper.make_value_info(name, TypeProto()) for name in outputs],
        [numpy_helper.from_array(v, k) for k, v in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def typed(proto: onnx.ModelProto, results: Sequence[np.ndarray]) -> onnx.ModelProto:
    """The model, with the types and shapes of these results in its outputs."""
    for value, array in zip(proto.graph.output, results, strict=True):
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        value.CopyFrom(helper.make_tensor_value_info(value.name, dtype, array.shape))
    return proto


def by_onnxruntime(proto: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, dict(inputs)))


def compare(
    proto: onnx.ModelProto,
    inputs: Arrays,
    wanted: Sequence[np.ndarray] | None = None,
    tolerance: float = 1e-5,
) -> Graph:
    """Compares the graph with ``wanted``, by default ONNX Runtime's results: types, shapes, and
    values within ``tolerance`` of each result's largest.
    """
    wanted = by_onnxruntime(proto, inputs) if wanted is None else wanted
    graph = lower(load_onnx(typed(proto, wanted), simplify=False)).check()
    got = list(graph.evaluate(dict(inputs)).values())
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        a, b = (np.asarray(t, np.float64) for t in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-30))
    return graph


def refused(proto: onnx.ModelProto, match: str) -> str:
    """The message of the UnsupportedError, which must match."""
    anything = [np.zeros(1, np.float32)] * len(proto.graph.output)
    with pytest.raises(UnsupportedError, match=match) as caught:
        load_onnx(typed(proto, anything), simplify=False)
    return str(caught.value)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attrs: Any) -> Any:
    """A node of ONNX Runtime's domain; attributes that are None are left out."""
    given = {k: v for k, v in attrs.items() if v is not None}
    return helper.make_node(
        kind, inputs, outputs, domain="com.microsoft", name=f"the {kind}", **given
    )


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(shape) * scale
    return drawn.astype(np.float32)
