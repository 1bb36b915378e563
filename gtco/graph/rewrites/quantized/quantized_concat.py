"""Parts are quantized before they are joined.

before: q = quantize(concat(a, b), h, l, z)
after:  q = concat(quantize(a, h, l, z), quantize(b, h, l, z))

All values are the same. The stages that compute the parts store 8 bits, and what reads q reads
8 bits. Before, they stored and it read float32, since a concat starts the stage of its reader. This
is for a concat that only quantizing reads.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator, TensorType


def quantized_concat(graph: Graph) -> Graph:
    return apply_rule(graph, {"quantize"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    x, *numbers = op.inputs
    joined = made_by(graph, x, "concat")
    if joined is None or graph.only_user(x) is None or joined.type.shape != op.type.shape:
        return None
    if any(graph.types[number].size != 1 for number in numbers):
        return None
    parts = [
        graph.add(
            "quantize",
            (part, *numbers),
            TensorType(graph.types[part].shape, op.type.dtype),
            name=op.name,
            **dict(op.attrs),
        )
        for part in joined.inputs
    ]
    attrs = dict(joined.attrs)
    return graph.add("concat", parts, op.type, name=joined.name, output=op.output, **attrs)
