"""Convolutions of one tensor that are added become one, as RepVGG does for inference (Ding et al.
2021, section 3.3).

before: conv2d(x, V) + conv2d(x, W) + rest     the window of V contains that of W
after:  conv2d(x, V + W) + rest                W with zeros around it

before: conv2d(x, V) + x + rest                one filter for each channel, a stride of 1
after:  conv2d(x, V + 1) + rest                1 is added at the tap that reads the output's place
"""

from __future__ import annotations

from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator

_SHARED = ("strides", "dilation", "groups", "layout")


def parallel_convolutions(graph: Graph) -> Graph:
    """Batch normalisations must be part of the weights already (``conv_scale``)."""
    return apply_rule(graph, {"add"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    reader = graph.only_user(op.output)
    if reader is not None and reader.kind == "add" and reader.type == op.type:
        return None  # a part of a longer sum
    terms = _terms(graph, op)
    found = [conv for term in terms if (conv := _convolution(graph, op, term)) is not None]
    found.sort(key=lambda conv: -prod(graph.types[conv.inputs[1]].sizes[2:]))
    for number, wide in enumerate(found):
        inside = [(conv, _place(graph, wide, conv)) for conv in found[number + 1 :]]
        branches = [(conv, place) for conv, place in inside if place is not None]
        tap = _own_tap(graph, wide) if wide.inputs[0] in terms else None
        if not branches and tap is None:
            continue
        weight = graph.constants[wide.inputs[1]].astype(numpy.float64)  # one rounding in all
        for conv, (rows, columns) in branches:
            weight[:, :, rows, columns] += graph.constants[conv.inputs[1]]
        merged = {wide.output, *(conv.output for conv, _ in branches)}
        if tap is not None:
            weight[:, 0, tap[0], tap[1]] += terms.count(wide.inputs[0])
            merged.add(wide.inputs[0])
        taps = graph.add_constant(weight.astype(op.type.dtype), wide.inputs[1])
        total = graph.add("conv2d", (wide.inputs[0], taps), name=wide.name, **dict(wide.attrs))
        rest = [term for term in terms if term not in merged]
        for term in sorted(rest, key=lambda term: not graph.is_constant(term)):  # biases first
            total = graph.add("add", (total, term), name=op.name)
        return total
    return None


def _terms(graph: Graph, root: Operator) -> list[str]:
    """What the adds that end in ``root`` add up. An inner x + x stays a term: sums of such double
    at each level.
    """
    terms: list[str] = []
    left = list(reversed(root.inputs))
    while left:
        tensor = left.pop()
        inner = made_by(graph, tensor, "add")
        if (
            inner is None
            or inner.type != root.type
            or len({*inner.inputs}) == 1
            or graph.only_user(tensor) is None
        ):
            terms.append(tensor)
        else:
            left += reversed(inner.inputs)
    return terms


def _convolution(graph: Graph, root: Operator, term: str) -> Operator | None:
    """The convolution by constants that makes a term, if nothing else reads it. Weights that a file
    keeps in fewer bits stay as they are: their sum would need more.
    """
    conv = made_by(graph, term, "conv2d")
    if conv is None or conv.type != root.type or graph.only_user(term) is None:
        return None
    weight = conv.inputs[1]
    if not graph.is_constant(weight) or graph.constants.is_later(weight):
        return None
    return conv if graph.types[weight].dtype == root.type.dtype else None


def _place(graph: Graph, wide: Operator, narrow: Operator) -> tuple[slice, slice] | None:
    """The taps of ``wide`` that read what those of ``narrow`` read; None if there are none for some
    of them.
    """
    if wide.inputs[0] != narrow.inputs[0] or any(wide[a] != narrow[a] for a in _SHARED):
        return None
    extents = (graph.types[conv.inputs[1]].sizes[2:] for conv in (wide, narrow))
    found = []
    for axis, (most, count) in enumerate(zip(*extents, strict=True)):
        further = wide["padding"][axis] - narrow["padding"][axis]
        first, left = divmod(further, wide["dilation"][axis])
        if left or first < 0 or first + count > most:
            return None
        found.append(slice(first, first + count))
    return found[0], found[1]


def _own_tap(graph: Graph, conv: Operator) -> tuple[int, int] | None:
    """The tap of a depthwise convolution that reads the output's own place."""
    outputs, inputs, *extents = graph.types[conv.inputs[1]].sizes
    if inputs != 1 or outputs != conv["groups"] or conv["strides"] != (1, 1):
        return None
    if graph.types[conv.inputs[0]] != conv.type:
        return None
    taps = [divmod(p, d) for p, d in zip(conv["padding"][:2], conv["dilation"], strict=True)]
    if any(left or tap >= n for (tap, left), n in zip(taps, extents, strict=True)):
        return None
    return taps[0][0], taps[1][0]
