"""ONNX files of one operator."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper


def save_graph(path, nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs],
        [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s).ravel()) for n, s in weights],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def one(path, op, shapes, out, **attributes):
    names = [f"i{n}" for n in range(len(shapes))]
    return save_graph(
        path,
        [helper.make_node(op, names, ["y"], **attributes)],
        [(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes, strict=True)],
        [("y", out)],
    )
