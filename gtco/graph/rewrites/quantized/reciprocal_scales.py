"""Quantizing multiplies by the reciprocal of its scale, where that gives the same integers.

before: n = clip(round(divide(x, s)) + z, low, high)
after:  n = clip(round(multiply_pair(x, h, l)) + z, low, high), h + l = 1 / s

A division takes the time of some ten other instructions, the pair takes two. Both functions of x
rise, so their roundings are the same if they are the same around each step up to the clip's bounds.
This is tried for every scale; a division whose scale fails stays.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, scalar
from gtco.tensor.stage import Operator

_AROUND = 4  # float32 values that are tried on each side of a step
_RANGE = 2.0**-60, 2.0**60  # range of scales: no product of the pair is denormal or infinite
_MOST_STEPS = 2**17


def reciprocal_scales(graph: Graph) -> Graph:
    return apply_rule(graph, {"round"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    division = made_by(graph, op.inputs[0], "divide")
    if division is None or op.type.dtype != "float32":
        return None
    x, s = division.inputs
    scale, bounds = scalar(graph, s), _bounds(graph, op)
    if scale is None or bounds is None or graph.types[x] != op.type:
        return None
    if graph.types[s].dtype != "float32" or not _RANGE[0] <= scale <= _RANGE[1]:
        return None
    high, low = reciprocal(scale)
    if not same_steps(scale, high, low, *bounds):
        return None
    # scalars, also where each channel has the same scale
    pair = [graph.add_constant(part, s) for part in (high, low)]
    steps = graph.add("multiply_pair", (x, *pair), op.type, name=division.name)
    return graph.add("round", (steps,), op.type, name=op.name)


def _bounds(graph: Graph, op: Operator) -> tuple[int, int] | None:
    """The least and the largest step that clips leave of the rounding; None if one has no bounds,
    or if something else reads the rounding.
    """
    found = []
    for user in graph.consumers(op.output):
        shift: float | None = 0.0
        if user.kind == "add":
            others = [x for x in user.inputs if x != op.output]  # none of r + r
            only = graph.only_user(user.output)
            if only is None or not others:
                return None
            shift = scalar(graph, others[0])
            user = only
        if user.kind != "clip" or shift is None:
            return None
        low, high = user["min"] - shift, user["max"] - shift
        if not -_MOST_STEPS <= low <= high <= _MOST_STEPS:
            return None
        found.append((int(numpy.floor(low)), int(numpy.ceil(high))))
    if not found or op.output in graph.outputs:
        return None
    return min(low for low, _ in found), max(high for _, high in found)


def reciprocal(scale: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """1 / scale in two parts: a float32 that is not larger, and the rest. The rest is not 0 for any
    scale, so that an infinite x gives no NaN.
    """
    whole = numpy.float64(1.0) / numpy.float64(scale)
    high = numpy.float32(whole)
    if high >= whole:
        high = numpy.nextafter(high, numpy.float32(0))
    return numpy.array(high), numpy.array(whole - numpy.float64(high), numpy.float32)


def same_steps(
    scale: float, high: numpy.ndarray, low: numpy.ndarray, least: int, most: int
) -> bool:
    """True if rounding gives the same integers from ``least`` to ``most``, and the same beyond."""
    s = numpy.float32(scale)
    middles = (numpy.arange(least - 1, most + 1) + 0.5) * numpy.float64(scale)
    near = middles.astype(numpy.float32).view(numpy.int32)
    around = near[:, None] + numpy.arange(-_AROUND, _AROUND + 1, dtype=numpy.int32)
    x = around.view(numpy.float32)
    # The product x * high and its sum with the other fit long doubles, as in a fused instruction.
    rest = (x * low).astype(numpy.longdouble)
    pair = (x.astype(numpy.longdouble) * high + rest).astype(numpy.float32)
    return bool((numpy.rint(pair) == numpy.rint(x / s)).all())
