"""Softplus, Mish, ELU and log(sigmoid) become one operator each, from any of their forms.

before: relu(x) + log(1 + exp(-|x|))                                      after: softplus(x)
before: x * tanh(softplus(x)), or x * tanh(log(1 + exp(x)))               after: mish(x)
before: relu(x) - alpha * relu(1 - exp(x))                                after: elu(x, alpha)
before: log(sigmoid(x))                                                   after: -softplus(-x)

TVM's importer writes these forms, and PyTorch's exporter writes the last one. They lose digits: 1 +
exp(x) keeps no digits of an exp(x) near 0, and 1 - exp(x) none of an x near 0. So softplus(-15) had
one correct digit, and a quotient of two softplus values shows the whole error. The sigmoid of 17 is
1, so its logarithm is 0. The sigmoid of -90 is 0.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, close, made_by, scalar, with_constant
from gtco.tensor.stage import Operator


def exponential_activations(graph: Graph) -> Graph:
    """Visits the outermost operators first, because a Mish holds a softplus."""
    return apply_rule(graph, {"add", "subtract", "multiply", "log"}, _rule, backwards=True)


def _rule(graph: Graph, op: Operator) -> str | None:
    if op.kind == "log":
        return _log_sigmoid(graph, op)
    if op.kind == "multiply":
        return _mish(graph, op)
    first, second = op.inputs
    if op.kind == "subtract":
        return _elu(graph, op, first, second, -1.0)
    x = _softplus(graph, op)
    if x is not None:
        return graph.add("softplus", (x,), op.type, name=op.name)
    return _elu(graph, op, first, second, 1.0) or _elu(graph, op, second, first, 1.0)


def _log_sigmoid(graph: Graph, op: Operator) -> str | None:
    gate = made_by(graph, op.inputs[0], "sigmoid")
    if gate is None:
        return None
    grown = graph.add("softplus", (graph.add("negative", gate.inputs),))
    return graph.add("negative", (grown,), op.type, name=op.name)


def _mish(graph: Graph, op: Operator) -> str | None:
    for x, gate in (op.inputs, op.inputs[::-1]):
        tanh = made_by(graph, gate, "tanh")
        inner = made_by(graph, tanh.inputs[0], "softplus", "add", "log") if tanh else None
        if inner is None:
            continue
        grown = inner.inputs[0] if inner.kind == "softplus" else _softplus(graph, inner)
        if x == (_log_of_one_and_exp(graph, inner.output) if grown is None else grown):
            return graph.add("mish", (x,), op.type, name=op.name)
    return None


def _softplus(graph: Graph, op: Operator) -> str | None:
    """x, if the operator computes relu(x) + log(1 + exp(-|x|))."""
    if op.kind != "add":
        return None
    for first, second in (op.inputs, op.inputs[::-1]):
        relu = made_by(graph, first, "relu")
        small = _log_of_one_and_exp(graph, second)
        negative = made_by(graph, small, "negative") if relu and small else None
        size = made_by(graph, negative.inputs[0], "abs") if negative else None
        if relu is not None and size is not None and size.inputs == relu.inputs:
            return relu.inputs[0]
    return None


def _log_of_one_and_exp(graph: Graph, tensor: str) -> str | None:
    """x, if the tensor is log(1 + exp(x))."""
    log = made_by(graph, tensor, "log")
    total = made_by(graph, log.inputs[0], "add") if log else None
    pair = with_constant(graph, total) if total else None
    exp = made_by(graph, pair[0], "exp") if pair else None
    one = pair is not None and close(scalar(graph, pair[1]), 1.0, 1e-7)
    return exp.inputs[0] if exp is not None and one else None


def _elu(graph: Graph, op: Operator, line: str, tail: str, sign: float) -> str | None:
    """The ELU of relu(x) + sign * tail, if the tail is -sign * alpha * relu(1 - exp(x))."""
    relu = made_by(graph, line, "relu")
    scaled = made_by(graph, tail, "multiply", "negative")
    if scaled is not None and scaled.kind == "negative":
        tail, sign = scaled.inputs[0], -sign
    elif scaled is not None and (pair := with_constant(graph, scaled)):
        factor = scalar(graph, pair[1])
        if factor is None:
            return None
        tail, sign = pair[0], sign * factor
    below = made_by(graph, tail, "relu")
    rest = made_by(graph, below.inputs[0], "subtract") if below else None
    exp = made_by(graph, rest.inputs[1], "exp") if rest else None
    if relu is None or rest is None or exp is None or exp.inputs != relu.inputs:
        return None
    if not close(scalar(graph, rest.inputs[0]), 1.0, 1e-7):
        return None
    return graph.add("elu", relu.inputs, op.type, name=op.name, alpha=-sign)
