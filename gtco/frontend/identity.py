"""The identity of the model in a file. A library remembers it."""

from __future__ import annotations

import hashlib

import onnx


def identity(model: onnx.ModelProto) -> str:
    """16 hex digits of the model's operators, inputs and outputs. Weights do not count, so a model
    keeps its identity if it is trained further or exported for another batch or image size.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    lines = [f"{node.domain} {node.op_type} {len(node.input)}" for node in graph.node]
    lines += [f"in {value.name}" for value in graph.input if value.name not in weights]
    lines += [f"out {value.name}" for value in graph.output]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
