"""The quantization of a constant is computed at once, so that products read whole numbers.

before: q = cast(clip(round(divide(W, s)) + z)) {int8}; w = dequantize(q)     after: q is a constant

Files of ONNX Runtime's quantizer with AddQDQPairToWeight, of TensorRT's tools and exports of
quantization-aware training keep the weights in float32. A clip of the steps may follow.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import COMPUTED, apply_rule, constant_value
from gtco.tensor.stage import Operator

_BYTES = ("int8", "uint8")
_KINDS = (*COMPUTED, "add", "clip", "divide", "maximum", "minimum", "multiply", "round")


def quantized_constants(graph: Graph) -> Graph:
    return apply_rule(graph, {"cast", "clip", "maximum", "minimum"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if op.type.dtype not in _BYTES or op.output in graph.outputs:
        return None
    value = constant_value(graph, op.output, _KINDS)
    return None if value is None else graph.add_constant(value, op.output)
