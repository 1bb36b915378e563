"""Operators that compute the same become one.

before: a = mean(x); b = mean(x)        after: a, and a in b's place
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.operators import OPERATORS
from gtco.tensor.stage import Operator


def common_subexpressions(graph: Graph) -> Graph:
    """Merges operators of equal kind, inputs, attributes and type. Outputs keep their own
    operators.
    """
    known: dict[tuple[object, ...], str] = {}

    def merge(graph: Graph, op: Operator) -> str | None:
        first = known.setdefault((op.kind, op.inputs, op.attrs, op.type), op.output)
        return first if first != op.output and op.output not in graph.outputs else None

    return apply_rule(graph, OPERATORS, merge)
