"""Two products by constants, one after the other, become one if that multiplies less.

before: (x @ V + b) @ W, with V [k, h], W [h, n] and k * n < k * h + h * n
after:  x @ (V W) + b W

The first product may also be a convolution, and the second a 1x1 convolution; between them may be a
reshape that keeps the channels. Segmentation heads have this form: a product projects each scale to
a common width, and a product of their sum follows directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, axis_vector, with_constant
from gtco.graph.rewrites.convolutions.pointwise_before_upsampling import is_pointwise
from gtco.tensor.stage import Operator, TensorType


def compose_products(graph: Graph) -> Graph:
    return apply_rule(graph, {"matmul", "conv2d"}, _rule)


@dataclass(frozen=True)
class _Product:
    """A product by constants: ``op``, the axis of its channels, and the sizes [k, n] of its
    weights.
    """

    op: Operator
    axis: int
    sizes: tuple[int, int]

    def weight(self, graph: Graph) -> numpy.ndarray:
        """The weights [k, n]."""
        given = graph.constants[self.op.inputs[1]]
        return given if self.op.kind == "matmul" else given.reshape(len(given), -1).T


def _product(graph: Graph, op: Operator) -> _Product | None:
    if not graph.is_constant(op.inputs[1]):
        return None
    known = graph.types[op.inputs[1]]
    if known.dtype not in ("float16", "float32", "float64"):
        return None
    if op.kind == "matmul":
        if len(known.sizes) != 2:
            return None
        k, n = known.sizes
        return _Product(op, len(op.type.shape) - 1, (k, n))
    if op["groups"] != 1:
        return None
    outputs, *window = known.sizes
    return _Product(op, 1 if op["layout"] == "NCHW" else 3, (prod(window), outputs))


def _rule(graph: Graph, op: Operator) -> str | None:
    second = _product(graph, op)
    if second is None or (op.kind == "conv2d" and not is_pointwise(graph, op)):
        return None
    last = second.axis == len(op.type.shape) - 1  # channels last
    between: list[Operator] = []  # the operators between the products, the last first
    bias: numpy.ndarray | None = None
    maker = _only(graph, op.inputs[0])
    while maker is not None and maker.kind in ("reshape", "add"):
        shape, source = maker.type.shape, maker.inputs[0]
        if maker.kind == "add":
            pair = with_constant(graph, maker)
            if pair is None or bias is not None or graph.types[pair[0]].shape != shape:
                return None
            source = pair[0]
            bias = axis_vector(graph, pair[1], len(shape) - 1 if last else second.axis, shape)
            if bias is None:
                return None
        elif not last or graph.types[source].shape[-1:] != shape[-1:]:
            return None
        between.append(maker)
        maker = _only(graph, source)
    first = _product(graph, maker) if maker and maker.kind in ("matmul", "conv2d") else None
    if first is None or first.axis != (len(first.op.type.shape) - 1 if last else second.axis):
        return None
    (k, h), n = first.sizes, second.sizes[1]
    return _composed(graph, first, second, between, bias) if k * n < k * h + h * n else None


def _only(graph: Graph, tensor: str) -> Operator | None:
    """The operator that makes ``tensor``, if only one operator reads it."""
    return graph.producer(tensor) if graph.only_user(tensor) is not None else None


def _composed(
    graph: Graph,
    first: _Product,
    second: _Product,
    between: list[Operator],
    bias: numpy.ndarray | None,
) -> str:
    """The single product, followed by the operators that were between the two."""
    op, behind = first.op, second.weight(graph).astype(numpy.float64)
    # In double precision, so that composing costs one rounding.
    weight = first.weight(graph)
    dtype = weight.dtype
    weight = (weight.astype(numpy.float64) @ behind).astype(dtype)
    if op.kind == "conv2d":
        taps = graph.constants[op.inputs[1]].shape[1:]
        weight = numpy.ascontiguousarray(weight.T).reshape(-1, *taps)
    spread = (1,) * (len(second.op.type.shape) - 1 - second.axis)  # axes after the channels
    known = graph.add_constant(weight, op.inputs[1])
    y = graph.add(op.kind, (op.inputs[0], known), name=op.name, **dict(op.attrs))
    for step in reversed(between):
        if bias is not None and step.kind == "add":
            vector = (bias.astype(numpy.float64) @ behind).astype(dtype)
            moved = graph.add_constant(vector.reshape(-1, *spread), "bias")
            y = graph.add("add", (y, moved), name=step.name)
        else:
            made = TensorType((*step.type.shape[:-1], second.sizes[1]), step.type.dtype)
            y = graph.add("reshape", (y,), made, name=step.name)
    return y
