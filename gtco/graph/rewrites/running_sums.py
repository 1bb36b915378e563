"""Running sums from the end, and those of one element.

before: flip(cumsum(flip(x)))            after: cumsum(x), reversed
before: cumsum(x) along an axis of 1     after: x, or zeros if it is exclusive

A flip is a slice with steps of -1 along the axis of the sums. Exporters spell the sums from the end
so (``torch.flip(torch.cumsum(torch.flip(x)))``, CumSum's ``reverse``).
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator


def running_sums(graph: Graph) -> Graph:
    """Finds both forms."""
    return apply_rule(apply_rule(graph, {"slice"}, _turned), {"cumsum"}, _single)


def _turned(graph: Graph, op: Operator) -> str | None:
    sums = made_by(graph, op.inputs[0], "cumsum")
    given = sums and made_by(graph, sums.inputs[0], "slice")
    if not sums or not given:
        return None
    if not all(_flips(graph, x, sums["axis"]) for x in (op, given)):
        return None
    attrs = dict(sums.attrs) | {"reverse": not sums["reverse"]}
    return graph.add("cumsum", given.inputs, name=sums.name, **attrs)


def _flips(graph: Graph, op: Operator, axis: int) -> bool:
    """True if the slice takes all of an axis from its end on, and everything else as it is."""
    if op.type.shape != graph.types[op.inputs[0]].shape:
        return False
    wanted = [(int(d) - 1, -1) if a == axis else (0, 1) for a, d in enumerate(op.type.shape)]
    return list(zip(op["begin"], op["strides"], strict=True)) == wanted


def _single(graph: Graph, op: Operator) -> str | None:
    if op.type.shape[op["axis"]] != 1:
        return None
    if not op["exclusive"]:
        return op.inputs[0]
    zero = graph.add_constant(numpy.zeros((), op.type.dtype))
    return graph.add("broadcast", (zero,), op.type, name=op.name)
