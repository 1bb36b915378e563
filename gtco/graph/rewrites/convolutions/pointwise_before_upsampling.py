"""A 1x1 convolution moves before the upsampling that it reads, because there are fewer positions.

before: conv2d(resize2d(x), W)
after:  resize2d(conv2d(x, W))

before: conv2d(concat(resize2d(x), y, ...), [Wx Wy ...])
after:  resize2d(conv2d(x, Wx)) + conv2d(concat(y, ...), [Wy ...])

Interpolation mixes positions, and the convolution mixes channels. Both are linear, so they commute.
Heads that fuse the maps of several scales (SegFormer's, DPT's, necks of detectors) then need only a
part of the multiplications: SegFormer-B0's head at 512 x 512 needs a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Dim, Operator, TensorType

# The least number of multiply-adds in the time to interpolate, store and read again one more
# element. The element waits for memory; multiply-adds do not.
ELEMENT = 64


def pointwise_before_upsampling(graph: Graph) -> Graph:
    """A convolution also moves if other operators read its concatenation too, as long as resizing
    twice pays.
    """
    return apply_rule(graph, {"conv2d"}, _rule)


def is_pointwise(graph: Graph, op: Operator) -> bool:
    """True for a convolution that mixes only the channels of each position, by constant weights."""
    weight = op.inputs[1]
    return (
        graph.is_constant(weight)
        and graph.types[weight].shape[2:] == (1, 1)
        and op["groups"] == 1
        and op["strides"] == (1, 1)
        and not any(op["padding"])
    )


def _rule(graph: Graph, op: Operator) -> str | None:
    if not is_pointwise(graph, op):
        return None
    axis = 1 if op["layout"] == "NCHW" else 3
    concat = made_by(graph, op.inputs[0], "concat")
    if concat is not None and concat["axis"] != axis:
        return None
    parts = op.inputs[:1] if concat is None else concat.inputs
    if not all(isinstance(d, int) for part in parts for d in graph.types[part].shape[1:]):
        return None
    ends = numpy.cumsum([int(graph.types[part].shape[axis]) for part in parts])
    weights = numpy.split(graph.constants[op.inputs[1]], ends[:-1], axis=1)
    alone = concat is None or graph.only_user(concat.output) is not None
    stay: list[tuple[str, numpy.ndarray]] = []
    move: list[tuple[str, numpy.ndarray]] = []
    for part, weight in zip(parts, weights, strict=True):
        (move if _pays(graph, op, part, weight, alone) else stay).append((part, weight))
    if not move:
        return None
    terms = []
    if stay:
        sources = [part for part, _ in stay]
        x = sources[0] if len(stay) == 1 else graph.add("concat", sources, axis=axis)
        terms.append(_convolution(graph, op, x, [weight for _, weight in stay]))
    for part, weight in move:
        resize = graph.operators[part]
        y = _convolution(graph, op, resize.inputs[0], [weight])
        made = TensorType(op.type.shape, resize.type.dtype)
        terms.append(graph.add("resize2d", (y,), made, name=resize.name, **dict(resize.attrs)))
    total = terms[0]
    for term in terms[1:]:
        total = graph.add("add", (total, term), name=op.name)
    return total


def _pays(graph: Graph, op: Operator, part: str, weight: numpy.ndarray, alone: bool) -> bool:
    """True if this part is resized, and the convolution before that saves more multiply-adds than
    it costs to resize its outputs instead of its inputs. ``alone``: nobody else reads the
    concatenation.
    """
    resize = made_by(graph, part, "resize2d")
    if resize is None or resize["layout"] != op["layout"] or resize.type.dtype != "float32":
        return False
    outputs, channels = weight.shape[:2]
    before = _positions(graph.types[resize.inputs[0]].shape, op)
    after = _positions(resize.type.shape, op)
    goes = alone and graph.only_user(part) is not None  # then nothing needs the resized inputs
    more = outputs - channels if goes else outputs
    return (after - before) * outputs * channels > ELEMENT * after * max(more, 0)


def _positions(shape: Sequence[Dim], op: Operator) -> int:
    sizes = shape[2:] if op["layout"] == "NCHW" else shape[1:3]
    return prod(int(d) for d in sizes)


def _convolution(graph: Graph, op: Operator, x: str, weights: Sequence[numpy.ndarray]) -> str:
    weight = numpy.ascontiguousarray(numpy.concatenate(weights, axis=1))
    known = graph.add_constant(weight, op.inputs[1])
    return graph.add("conv2d", (x, known), name=op.name, **dict(op.attrs))
