"""A maximum over dequantized values is dequantized after it is found.

before: y = max_pool2d(relu(dequantize(q, s, z)))
after:  y = relu(dequantize(max_pool2d(q), s, z))

Dequantizing by a positive scale and relu never fall, and roundings keep the order of two values. So
the maximum is that of the same element, and all values are the same. The pooling reads 8 bits, and
the rest is computed for its output alone.

before: y = max_pool2d(q) {uint8}
after:  y = cast(max_pool2d(cast(q) {float32})) {uint8}

Kernels pool floats, which hold all of these numbers. A window that lies in the padding alone has no
whole number.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.graph.windows import meets_pixels
from gtco.tensor.stage import Operator, TensorType

_WHOLE = ("int8", "uint8", "int16", "uint16")


def quantized_pooling(graph: Graph) -> Graph:
    return apply_rule(graph, {"max_pool2d"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if not meets_pixels(graph, op):
        return None
    if op.type.dtype in _WHOLE:
        return _of_floats(graph, op.inputs[0], op, op.output)
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
    if graph.types[q].dtype not in _WHOLE:
        return None
    y = _of_floats(graph, q, op)
    last = None if bounded else op.output
    y = graph.add("dequantize", (y, *numbers), op.type, name=steps.name, output=last)
    return graph.add("relu", (y,), op.type, name=op.name, output=op.output) if bounded else y


def _of_floats(graph: Graph, q: str, op: Operator, output: str | None = None) -> str:
    """The pooled maximum of whole numbers, found in float32."""
    kind, made = graph.types[q], TensorType(op.type.shape)
    wide = graph.add("cast", (q,), TensorType(kind.shape), name=op.name)
    y = graph.add("max_pool2d", (wide,), made, name=op.name, **dict(op.attrs))
    narrow = TensorType(op.type.shape, kind.dtype)
    return graph.add("cast", (y,), narrow, name=op.name, output=output)
