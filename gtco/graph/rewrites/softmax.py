"""Softmax that was taken apart becomes one operator; guards against NaN behind it go where none can
arise.

before: e = exp(s - max(s)); e / sum(e)                        after: softmax(s)
before: where(isnan(p), 0, p), p = softmax(s), s finite        after: softmax(s)
before: reshape(softmax(s)) that keeps the last axis           after: softmax(reshape(s))
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.operators import ELEMENTWISE, INJECTIVE, OPERATORS
from gtco.tensor.stage import Operator


def softmax(graph: Graph) -> Graph:
    """Take together, then remove guards."""
    graph = apply_rule(graph, {"divide", "multiply"}, _together)
    return apply_rule(graph, {"where"}, _guard)


def _together(graph: Graph, op: Operator) -> str | None:
    if op.kind != "divide":
        return None
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
        ):
            scores = shifted.inputs[0]
    return graph.add("softmax", (scores,), name=op.name, axis=axis)


def _guard(graph: Graph, op: Operator) -> str | None:
    condition, instead, probabilities = op.inputs
    test, soft = made_by(graph, condition, "isnan"), made_by(graph, probabilities, "softmax")
    if (
        test is None
        or soft is None
        or test.inputs[0] != soft.output
        or scalar(graph, instead) != 0.0
    ):
        return None
    return soft.output if _has_finite_entry(graph, soft.inputs[0], soft["axis"]) else None


def _has_finite_entry(graph: Graph, scores: str, axis: int) -> bool:
    """Whether no row can be -inf throughout: softmax of such a row alone is NaN.

    What comes out of products, norms and the like is taken to be finite (a model whose activations
    overflow has lost already). A mask that reaches the scores at run time may hide a whole row, so
    its guard stays.
    """
    op = graph.producer(scores)
    if op is None:
        value = graph.constants.get(scores)
        return value is not None and bool(numpy.isfinite(value).all())
    if op.kind == "add":
        for index, other in ((0, 1), (1, 0)):
            mask = graph.constants.get(op.inputs[other])
            if mask is not None:
                rows = axis == len(op.type.shape) - 1 and _row_left(mask > -numpy.inf)
                return (
                    _has_finite_entry(graph, op.inputs[index], axis)
                    and rows
                    and not bool(numpy.isnan(mask).any())
                )
        return all(_has_finite_entry(graph, source, axis) for source in op.inputs)
    if op.kind == "where":
        mask = graph.constants.get(op.inputs[0])
        if mask is None or axis != len(op.type.shape) - 1:
            return False
        kept = op.inputs[1] if _row_left(mask) else op.inputs[2] if _row_left(~mask) else None
        return kept is not None and _has_finite_entry(graph, kept, axis)
    if OPERATORS[op.kind].pattern in (ELEMENTWISE, INJECTIVE):
        return all(
            (graph.is_constant(s) and bool(numpy.isfinite(graph.constants[s]).all()))
            or _has_finite_entry(graph, s, axis)
            for s in op.inputs
            if graph.types[s].dtype.startswith("float")
        )
    return True


def _row_left(allowed: numpy.ndarray) -> bool:
    """Whether every row along the last axis allows something."""
    return bool(allowed.any(axis=-1).all()) if allowed.ndim else bool(allowed)
