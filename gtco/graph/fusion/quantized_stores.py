"""The operators after which no stage ends, because their result is only quantized.

A product of bytes makes int32, which becomes 8 bits again by a few element-wise operators::

    p = matmul(q, w) {int32};  y = cast(p) * s + b {float32};  r = quantize(y, ...) {uint8}

A stage that ends before ``quantize`` stores four times as many bytes, and another stage reads them.
The search would take it for as good where the reader has time to do the arithmetic.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Operator

_PRODUCTS = ("matmul", "conv2d")


def before_quantization(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The outputs of these operators, in order: by the quantization that reads the last, those of
    the product and of what follows it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for op in graph.operators.values():
        if op.kind in _PRODUCTS and op.type.dtype == "int32":
            *chain, last = _chain(graph, op) or [""]
            if chain:
                found[last] = tuple(chain)
    return found


def _chain(graph: Graph, op: Operator) -> list[str]:
    """The results of the product and of the operators behind it up to a quantization, each the only
    reader of the one before and a function of it and of constants; none if they do not lead to one.
    """
    found = [op.output]
    while (reader := graph.only_user(found[-1])) is not None:
        if reader.kind == "quantize":
            return [*found, reader.output]
        if reader.kind not in ELEMENTWISE_OPERATORS:
            break
        if any(x != found[-1] and not graph.is_constant(x) for x in reader.inputs):
            break
        found.append(reader.output)
    return []
