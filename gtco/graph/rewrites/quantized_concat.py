"""The parts of a concatenation are quantized before they are laid together.

before: q = quantize(concat(a, b), h, l, z)
after:  q = concat(quantize(a, h, l, z), quantize(b, h, l, z))

The values are the same. The stages that make the parts store 8 bits instead of floats.
"""

from __future__ import annotations

from dataclasses import replace

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator


def quantized_concat(graph: Graph) -> Graph:
    return apply_rule(graph, {"quantize"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    whole, *steps = op.inputs
    concat = made_by(graph, whole, "concat")
    if concat is None or graph.only_user(whole) is None:
        return None
    if any(graph.types[x].size != 1 for x in steps):
        return None
    parts = [
        graph.add(
            "quantize",
            (part, *steps),
            replace(graph.types[part], dtype=op.type.dtype),
            name=op.name,
            **dict(op.attrs),
        )
        for part in concat.inputs
    ]
    made = dict(concat.attrs)
    return graph.add("concat", parts, op.type, name=concat.name, output=op.output, **made)
