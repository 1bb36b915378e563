"""The identity of the model in a file. A library remembers it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import onnx

SOURCE = "gtco.quantized_from"  # of a quantized file: the identity of the float model


def identity(model: onnx.ModelProto, weights: Collection[str] = ()) -> str:
    """16 hex digits of the model's operators, inputs and outputs. Weights do not count, so a model
    keeps its identity if it is trained further or exported for another batch or image size. One
    that gtco quantized has the identity of the model that it was made from. ``weights``: inputs of
    the graph that are weights.
    """
    for entry in model.metadata_props:
        if entry.key == SOURCE:
            return entry.value
    graph = model.graph
    inside = {*weights, *(tensor.name for tensor in graph.initializer)}
    lines = [f"{node.domain} {node.op_type} {len(node.input)}" for node in graph.node]
    lines += [f"in {value.name}" for value in graph.input if value.name not in inside]
    lines += [f"out {value.name}" for value in graph.output]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
