"""Softmax that was taken apart becomes one operator.

before: e = exp(s - max(s)); e / sum(e)                        after: softmax(s)
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator


def softmax(graph: Graph) -> Graph:
    return apply_rule(graph, {"divide"}, _together)


def _together(graph: Graph, op: Operator) -> str | None:
    exponent, total = made_by(graph, op.inputs[0], "exp"), made_by(graph, op.inputs[1], "sum")
    if exponent is None or total is None or total.inputs[0] != exponent.output:
        return None
    if len(total["axes"]) != 1 or not total["keepdims"]:
        return None
    axis, scores = total["axes"][0], exponent.inputs[0]
    shifted = made_by(graph, scores, "subtract")
    if shifted is not None:
        largest = made_by(graph, shifted.inputs[1], "max")
        if (
            largest is not None
            and largest.inputs[0] == shifted.inputs[0]
            and largest["axes"] == (axis,)
            and largest["keepdims"]
        ):
            scores = shifted.inputs[0]
    return graph.add("softmax", (scores,), name=op.name, axis=axis)
