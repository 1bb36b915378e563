"""Arithmetic with constants in one form, so that later rewrites need few patterns.

before: power(x, 2); power(x, 0.5)              after: multiply(x, x); sqrt(x)
before: divide(x, c); subtract(x, c)            after: multiply(x, 1/c); add(x, -c), floats alone
before: multiply(x, 1); add(x, 0); where(true)  after: x
before: add(add(x, a), b)                       after: add(x, a + b), likewise multiply

A rewrite that changes the last bit of a result leaves alone what is rounded to an integer or
compared later: a quantized value would change by a whole step.
"""

from __future__ import annotations

import math

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar, with_constant
from gtco.tensor.operators import ELEMENTWISE, INJECTIVE, pattern
from gtco.tensor.stage import Operator

_ROUNDING = frozenset(
    ["round", "floor", "ceil", "trunc", "sign", "mod", "floor_mod", "floor_divide"]
)


def simplify_arithmetic(graph: Graph) -> Graph:
    """``divide(x, c)`` is exact for a power of two and otherwise off by at most one rounding (1
    ulp). Reassociation of constants changes a result by the same order."""
    return apply_rule(
        graph, _RULES, lambda g, op: None if op.output in g.outputs else _RULES[op.kind](g, op)
    )


def _same(graph: Graph, op: Operator, tensor: str) -> str | None:
    return tensor if graph.types[tensor] == op.type else None


def _becomes_whole(graph: Graph, tensor: str) -> bool:
    """True if element-wise operators and moves bring ``tensor`` to one that shows a change of its
    last bit: a rounding, a cast to integers or a comparison."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        for user in graph.consumers(waiting.pop()):
            if user.kind in _ROUNDING or not user.type.dtype.startswith(("float", "bfloat")):
                return True
            if pattern(user.kind) in (ELEMENTWISE, INJECTIVE) and user.output not in seen:
                seen.add(user.output)
                waiting.append(user.output)
    return False


def _power(graph: Graph, op: Operator) -> str | None:
    exponent, x = scalar(graph, op.inputs[1]), op.inputs[0]
    if op.type.dtype not in ("float32", "float64", "float16") or graph.types[x] != op.type:
        return None
    if exponent == 2.0:
        return graph.add("multiply", (x, x), op.type, name=op.name)
    if exponent == 3.0:
        return graph.add(
            "multiply",
            (graph.add("multiply", (x, x), op.type, name=op.name), x),
            op.type,
            name=op.name,
        )
    if exponent == 0.5:
        return graph.add("sqrt", (x,), op.type, name=op.name)
    if exponent == -0.5:
        return graph.add("rsqrt", (x,), op.type, name=op.name)
    return x if exponent == 1.0 else None


def _divide(graph: Graph, op: Operator) -> str | None:
    a, b = op.inputs
    if not op.type.dtype.startswith("float"):
        return _same(graph, op, a) if scalar(graph, b) == 1.0 else None
    root = made_by(graph, b, "sqrt")
    if scalar(graph, a) == 1.0 and root is not None and graph.types[b] == op.type:
        return graph.add("rsqrt", root.inputs, op.type, name=op.name)
    value = graph.constants.get(b)
    if value is None or graph.is_constant(a) or bool((value == 0).any()):
        return None
    if _becomes_whole(graph, op.output):
        return None
    with numpy.errstate(all="ignore"):
        inverse = (1.0 / value.astype(numpy.float64)).astype(value.dtype)
    # a denormal has lost digits, or counts as 0
    if not bool((numpy.isfinite(inverse) & (abs(inverse) >= numpy.finfo(value.dtype).tiny)).all()):
        return None
    return graph.add("multiply", (a, graph.add_constant(inverse, b)), op.type, name=op.name)


def _subtract(graph: Graph, op: Operator) -> str | None:
    a, b = op.inputs
    if not op.type.dtype.startswith("float") or not graph.is_constant(b) or graph.is_constant(a):
        return None
    return graph.add("add", (a, graph.add_constant(-graph.constants[b], b)), op.type, name=op.name)


def _add(graph: Graph, op: Operator) -> str | None:
    return _with_neutral(graph, op, 0.0, numpy.add)


def _multiply(graph: Graph, op: Operator) -> str | None:
    # multiply(x, divide(1, sqrt(y))) is met as multiply(x, rsqrt(y)) by _divide
    for index in (0, 1):
        if scalar(graph, op.inputs[index]) == -1.0 and graph.types[op.inputs[1 - index]] == op.type:
            return graph.add("negative", (op.inputs[1 - index],), op.type, name=op.name)
    return _with_neutral(graph, op, 1.0, numpy.multiply)


def _with_neutral(graph: Graph, op: Operator, neutral: float, function: numpy.ufunc) -> str | None:
    """x op neutral -> x; constants to the right; (x op a) op b -> x op (a op b)."""
    pair = with_constant(graph, op)
    if pair is None:
        return None
    x, c = pair
    if scalar(graph, c) == neutral and graph.types[x] == op.type:
        return x
    inner = made_by(graph, x, op.kind)
    if (
        inner is not None
        and op.type.dtype.startswith("float")
        and graph.only_user(x)
        and not _becomes_whole(graph, op.output)
    ):
        deeper = with_constant(graph, inner)
        if deeper is not None:
            a, b = graph.constants[deeper[1]], graph.constants[c]
            if numpy.broadcast_shapes(a.shape, b.shape) in (a.shape, b.shape):
                with numpy.errstate(all="ignore"):
                    value = numpy.asarray(function(a, b))
                if not _out_of_range(value, a, b, op.kind == "multiply"):
                    merged = graph.add_constant(value, c)
                    return graph.add(op.kind, (deeper[0], merged), op.type, name=inner.name)
    return None if (x, c) == op.inputs else graph.add(op.kind, (x, c), op.type, name=op.name)


def _out_of_range(value: numpy.ndarray, a: numpy.ndarray, b: numpy.ndarray, product: bool) -> bool:
    """True if two finite constants make an infinite one, or two factors other than 0 make 0 or a
    denormal. One after the other they may still give an ordinary number. So may two terms that
    cancel each other and are so large that a float has no fractions there: they round.
    """
    large = 2.0 ** (numpy.finfo(value.dtype).nmant - 1)
    if not product and ((abs(a) >= large) & (abs(value) < abs(a))).any():
        return True
    least = numpy.finfo(value.dtype).tiny
    over = ~numpy.isfinite(value) & numpy.isfinite(a) & numpy.isfinite(b)
    under = (abs(value) < least) & (abs(a) >= least) & (abs(b) >= least)
    return bool(over.any() or (product and under.any()))


def _bounded(graph: Graph, op: Operator) -> tuple[str, float] | None:
    """The operand, and the constant that bounds it. None for a NaN, for integers (a float bound may
    not hold their bound) and for constants of several values.
    """
    pair = with_constant(graph, op)
    bound = scalar(graph, pair[1]) if pair is not None else None
    if pair is None or bound is None or math.isnan(bound) or graph.types[pair[0]] != op.type:
        return None
    return (pair[0], bound) if op.type.dtype in ("float32", "float64") else None


def _maximum(graph: Graph, op: Operator) -> str | None:
    found = _bounded(graph, op)
    if found is None:
        return None
    x, low = found
    if low == 0.0:
        return graph.add("relu", (x,), op.type, name=op.name)
    return graph.add("clip", (x,), op.type, name=op.name, min=low, max=math.inf)


def _minimum(graph: Graph, op: Operator) -> str | None:
    """A minimum after a lower bound: both become one clip."""
    found = _bounded(graph, op)
    if found is None:
        return None
    x, high = found
    maker = graph.producer(x)
    low = -math.inf
    if maker is not None and maker.kind == "relu":
        (x,), low = maker.inputs, 0.0
    elif maker is not None and maker.kind == "clip" and maker["max"] == math.inf:
        (x,), low = maker.inputs, maker["min"]
    return graph.add("clip", (x,), op.type, name=op.name, min=low, max=high)


def _clip(graph: Graph, op: Operator) -> str | None:
    low, high = op["min"], op["max"]
    if low == 0.0 and high == math.inf:
        return graph.add("relu", op.inputs, op.type, name=op.name)
    return op.inputs[0] if low == -math.inf and high == math.inf else None


def _where(graph: Graph, op: Operator) -> str | None:
    condition = graph.constants.get(op.inputs[0])
    if condition is None:
        return None
    if bool(condition.all()):
        return _same(graph, op, op.inputs[1])
    return _same(graph, op, op.inputs[2]) if not bool(condition.any()) else None


_RULES = {
    "power": _power,
    "divide": _divide,
    "subtract": _subtract,
    "add": _add,
    "multiply": _multiply,
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": _clip,
    "where": _where,
}
