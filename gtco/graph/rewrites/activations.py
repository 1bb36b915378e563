"""GELU in both forms and SiLU become one operator, whatever the order of the products in the
export.

before: 0.5 * x * (1 + erf(x / sqrt(2)))                                  after: gelu(x)
before: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))      after: gelu_tanh(x)
before: x * sigmoid(x)                                                    after: silu(x)

The arguments are compared as polynomials in x (Hendrycks and Gimpel 2016 give both GELUs).
"""

from __future__ import annotations

from math import pi, sqrt

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, close, made_by, scalar, with_constant
from gtco.tensor.stage import Operator

Polynomial = dict[int, float]  # power of x -> coefficient

_HALF_SQRT: Polynomial = {1: sqrt(0.5)}
_TANH_ARGUMENT: Polynomial = {1: sqrt(2 / pi), 3: 0.044715 * sqrt(2 / pi)}
_DEPTH = 8


def activations(graph: Graph) -> Graph:
    """Visits the outermost products first, because they hold whole activations."""
    return apply_rule(graph, {"multiply"}, _rule, backwards=True)


def _rule(graph: Graph, op: Operator) -> str | None:
    factors: list[str] = []
    coefficient = _factors(graph, op.output, factors, _DEPTH)
    for index, factor in enumerate(factors):
        rest = factors[:index] + factors[index + 1 :]
        gate = made_by(graph, factor, "sigmoid")
        if gate is not None and close(coefficient, 1.0) and rest == [gate.inputs[0]]:
            return graph.add("silu", gate.inputs, op.type, name=op.name)
        total = made_by(graph, factor, "add")
        pair = with_constant(graph, total) if total is not None else None
        inner = made_by(graph, pair[0], "erf", "tanh") if pair is not None else None
        if (
            pair is None
            or inner is None
            or not close(scalar(graph, pair[1]), 1.0)
            or len(rest) != 1
        ):
            continue
        x = rest[0]
        wanted = _HALF_SQRT if inner.kind == "erf" else _TANH_ARGUMENT
        if close(coefficient, 0.5) and _equal(
            _polynomial(graph, inner.inputs[0], x, _DEPTH), wanted
        ):
            return graph.add(
                "gelu" if inner.kind == "erf" else "gelu_tanh", (x,), op.type, name=op.name
            )
    return None


def _factors(graph: Graph, tensor: str, factors: list[str], depth: int) -> float:
    """Takes apart the product that makes ``tensor``: it multiplies the scalar constants and appends
    the other factors to ``factors``.
    """
    value = scalar(graph, tensor)
    if value is not None:
        return value
    op = made_by(graph, tensor, "multiply")
    if op is None or depth == 0:
        factors.append(tensor)
        return 1.0
    return _factors(graph, op.inputs[0], factors, depth - 1) * _factors(
        graph, op.inputs[1], factors, depth - 1
    )


def _polynomial(graph: Graph, tensor: str, x: str, depth: int) -> Polynomial | None:
    """``tensor`` as a polynomial in ``x``; None if it is not one."""
    if tensor == x:
        return {1: 1.0}
    value = scalar(graph, tensor)
    if value is not None:
        return {0: value}
    op = made_by(graph, tensor, "multiply", "add")
    if op is None or depth == 0:
        return None
    a, b = (_polynomial(graph, source, x, depth - 1) for source in op.inputs)
    if a is None or b is None:
        return None
    result: Polynomial = {}
    if op.kind == "add":
        for power in a.keys() | b.keys():
            result[power] = a.get(power, 0.0) + b.get(power, 0.0)
        return result
    for p, v in a.items():
        for q, w in b.items():
            result[p + q] = result.get(p + q, 0.0) + v * w
    return result


def _equal(found: Polynomial | None, wanted: Polynomial) -> bool:
    return (
        found is not None
        and found.keys() == wanted.keys()
        and all(close(found[p], wanted[p], 1e-3) for p in wanted)
    )
