"""One operator where several compute the same.

before: a = mean(x); b = mean(x)        after: a, and a in b's place
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.operators import OPERATORS
from gtco.tensor.stage import Operator


def common_subexpressions(graph: Graph) -> Graph:
    """Operators of equal kind, inputs, attributes and type are merged; outputs keep their own."""
    known: dict[tuple[object, ...], str] = {}

    def merge(graph: Graph, op: Operator) -> str | None:
        first = known.setdefault((op.kind, op.inputs, op.attrs, op.type), op.output)
        return first if first != op.output and op.output not in graph.outputs else None

    return apply_rule(graph, OPERATORS, merge)
