"""LayerNorm that an exporter took apart becomes one operator again (Ba et al. 2016).

before: d = x - mean(x); y = d / sqrt(mean(d * d) + eps) * gamma + beta, over the last axis
after:  y = layer_norm(x, gamma, beta)
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, last_axis_vector, made_by, scalar, with_constant
from gtco.tensor.stage import Operator


def layer_norm(graph: Graph) -> Graph:
    """First the core (gamma 1, beta 0), then the scale and the shift behind it."""
    graph = apply_rule(graph, {"divide", "multiply"}, _core)
    graph = apply_rule(graph, {"multiply"}, _scale)
    return apply_rule(graph, {"add"}, _shift)


def _last_axis_mean(graph: Graph, tensor: str) -> Operator | None:
    op = made_by(graph, tensor, "mean")
    if op is None or not op["keepdims"]:
        return None
    return op if op["axes"] == (len(graph.types[op.inputs[0]].shape) - 1,) else None


def _core(graph: Graph, op: Operator) -> str | None:
    candidates = (
        [(op.inputs[0], op.inputs[1], "sqrt")]
        if op.kind == "divide"
        else [(op.inputs[0], op.inputs[1], "rsqrt"), (op.inputs[1], op.inputs[0], "rsqrt")]
    )
    for centred, deviation, root_kind in candidates:
        root, centre = made_by(graph, deviation, root_kind), made_by(graph, centred, "subtract")
        total = made_by(graph, root.inputs[0], "add") if root is not None else None
        pair = with_constant(graph, total) if total is not None else None
        if centre is None or pair is None:
            continue
        variance, epsilon = _last_axis_mean(graph, pair[0]), scalar(graph, pair[1])
        square = made_by(graph, variance.inputs[0], "multiply") if variance is not None else None
        mean = _last_axis_mean(graph, centre.inputs[1])
        if square is None or mean is None or epsilon is None or mean.inputs[0] != centre.inputs[0]:
            continue
        if square.inputs == (centred, centred):
            size = int(op.type.shape[-1])
            ones = graph.add_constant(numpy.ones(size, op.type.dtype), "gamma")
            zeros = graph.add_constant(numpy.zeros(size, op.type.dtype), "beta")
            return graph.add(
                "layer_norm", (centre.inputs[0], ones, zeros), name=op.name, epsilon=epsilon
            )
    return None


def _affine(graph: Graph, op: Operator) -> tuple[Operator, numpy.ndarray] | None:
    """The layer_norm under ``op`` that only it reads, and the vector that ``op`` applies."""
    pair = with_constant(graph, op)
    norm = made_by(graph, pair[0], "layer_norm") if pair is not None else None
    if pair is None or norm is None or graph.only_user(norm.output) is None or norm.type != op.type:
        return None
    vector = last_axis_vector(graph, pair[1], int(op.type.shape[-1]))
    if vector is None or not all(graph.is_constant(t) for t in norm.inputs[1:]):
        return None
    return norm, vector


def _scale(graph: Graph, op: Operator) -> str | None:
    found = _affine(graph, op)
    if found is None:
        return None
    norm, vector = found
    gamma, beta = (graph.add_constant(graph.constants[t] * vector, t) for t in norm.inputs[1:])
    return graph.add(
        "layer_norm", (norm.inputs[0], gamma, beta), name=norm.name, epsilon=norm["epsilon"]
    )


def _shift(graph: Graph, op: Operator) -> str | None:
    found = _affine(graph, op)
    if found is None:
        return None
    norm, vector = found
    beta = graph.add_constant(graph.constants[norm.inputs[2]] + vector, norm.inputs[2])
    return graph.add(
        "layer_norm",
        (norm.inputs[0], norm.inputs[1], beta),
        name=norm.name,
        epsilon=norm["epsilon"],
    )
