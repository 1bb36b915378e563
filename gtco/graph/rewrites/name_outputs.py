"""The operator that makes an output gets the output's name; the identity between them is removed.

before: t = add(a, b); logits = identity(t)        after: logits = add(a, b)
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.tensor.stage import Operator


def name_outputs(graph: Graph) -> Graph:
    """The identity stays if the tensor is an input, a constant or another output."""
    graph = graph.copy()
    for name in graph.outputs:
        op = graph.operators[name]
        source = graph.producer(op.inputs[0]) if op.kind == "identity" else None
        if source is None or source.output in graph.outputs:
            continue
        old = source.output
        graph.put(
            Operator(
                source.kind, source.inputs, name, source.type, source.attrs, source.name or op.name
            )
        )
        graph.replace_uses(old, name)
        graph.remove(old)
    return graph.prune()
