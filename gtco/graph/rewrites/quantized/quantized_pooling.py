"""A maximum over dequantized values is dequantized after it is found.

before: y = max_pool2d(relu(dequantize(q, s, z)))
after:  y = relu(dequantize(max_pool2d(cast(q) {float32}), s, z))

Dequantizing by a positive scale and relu never fall, and roundings keep the order of two values. So
the maximum is that of the same element, and all values are the same. The pooling reads 8 bits, and
the rest is computed for its output alone.

before: y = max_pool2d(q) {uint8}
after:  y = cast(max_pool2d(cast(q) {float32})) {uint8}

Files of the QOperator format have these, and kernels pool floats. A window that lies in the padding
alone would have no whole number.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.stage import Operator, TensorType

_BYTES = ("int8", "uint8")


def quantized_pooling(graph: Graph) -> Graph:
    return apply_rule(graph, {"max_pool2d"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if op.type.dtype in _BYTES:
        return _of_bytes(graph, op)
    tensor, bounded = op.inputs[0], False
    relu = made_by(graph, tensor, "relu")
    if relu is not None and graph.only_user(tensor) is not None:
        tensor, bounded = relu.inputs[0], True
    steps = made_by(graph, tensor, "dequantize")
    if steps is None or graph.only_user(tensor) is None:
        return None
    q, *numbers = steps.inputs
    factor = scalar(graph, numbers[0])
    if factor is None or factor <= 0 or any(graph.types[x].size != 1 for x in numbers):
        return None
    wide = graph.add("cast", (q,), steps.type, name=steps.name)
    y = graph.add("max_pool2d", (wide,), op.type, name=op.name, **dict(op.attrs))
    last = None if bounded else op.output
    y = graph.add("dequantize", (y, *numbers), op.type, name=steps.name, output=last)
    return graph.add("relu", (y,), op.type, name=op.name, output=op.output) if bounded else y


def _of_bytes(graph: Graph, op: Operator) -> str | None:
    (q,) = op.inputs
    first = 2 if op["layout"] == "NCHW" else 1  # the axis of the rows
    for axis in (0, 1):
        size, outputs = graph.types[q].shape[first + axis], op.type.shape[first + axis]
        before, window = op["padding"][axis], (op["kernel"][axis] - 1) * op["dilation"][axis] + 1
        last = (int(outputs) - 1) * op["strides"][axis] - before
        if before >= window or last >= int(size):
            return None
    wide = graph.add("cast", (q,), TensorType(graph.types[q].shape), name=op.name)
    y = graph.add("max_pool2d", (wide,), TensorType(op.type.shape), name=op.name, **dict(op.attrs))
    return graph.add("cast", (y,), op.type, name=op.name, output=op.output)
