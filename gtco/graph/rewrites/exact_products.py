"""Products of small int32 values are computed in float32, which holds every integer up to 2^24.

before: y = matmul(a, b) {int32}, |a| <= 255, |b| <= 255
after:  y = cast(matmul(cast(a[:, :k1]), cast(b[:k1])) {float32}) {int32} + (the same of the rest)

The sum of a part's terms stays below 2^24, so it is exact in any order. This is for the products
that :mod:`gtco.graph.rewrites.integer_products` leaves: MatMulInteger of two computed tensors, of
weights that int8 does not hold, and on machines without instructions for bytes.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.stage import Operator, TensorType

EXACT = 2**24
_SMALL = ("int8", "uint8", "int16", "uint16")
_MOVES = ("reshape", "permute", "broadcast", "slice", "identity")


def exact_products(graph: Graph) -> Graph:
    return apply_rule(graph, {"matmul"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if any(graph.types[x].dtype != "int32" for x in op.inputs):
        return None
    most = _magnitude(graph, op.inputs[0]) * _magnitude(graph, op.inputs[1])
    k = int(graph.types[op.inputs[0]].shape[-1])
    if not 0 < most <= EXACT or not k:
        return None
    x, y = (_float(graph, t) for t in op.inputs)
    total: str | None = None
    step = -(-k // -(-k // (EXACT // most)))  # parts of one size
    for begin in range(0, k, step):
        count = min(step, k - begin)
        parts = [_part(graph, t, axis, begin, count) for t, axis in ((x, -1), (y, -2))]
        product = graph.add("matmul", parts, name=op.name)
        share = graph.add("cast", (product,), op.type, name=op.name)
        total = share if total is None else graph.add("add", (total, share), name=op.name)
    return total


def _float(graph: Graph, tensor: str) -> str:
    if graph.is_constant(tensor):
        return graph.add_constant(graph.constants[tensor].astype(numpy.float32), tensor)
    return graph.add("cast", (tensor,), TensorType(graph.types[tensor].shape, "float32"))


def _part(graph: Graph, tensor: str, axis: int, begin: int, count: int) -> str:
    """``count`` steps of k from ``begin`` on."""
    known = graph.types[tensor]
    shape = [int(d) for d in known.shape]
    if shape[axis] == count:
        return tensor
    if graph.is_constant(tensor):
        where = [slice(None)] * len(shape)
        where[axis] = slice(begin, begin + count)
        return graph.add_constant(graph.constants[tensor][tuple(where)], tensor)
    first = [0] * len(shape)
    first[axis], shape[axis] = begin, count
    kept = TensorType(tuple(shape), known.dtype)
    return graph.add("slice", (tensor,), kept, begin=first, strides=[1] * len(shape))


def _magnitude(graph: Graph, tensor: str) -> int:
    """The largest magnitude that an integer tensor may have, found through casts, differences and
    movement; more than ``EXACT`` if no bound is known.
    """
    low, high = _range(graph, tensor)
    return max(abs(low), abs(high))


def _range(graph: Graph, tensor: str) -> tuple[int, int]:
    value, dtype = graph.constants.get(tensor), graph.types[tensor].dtype
    if value is not None and value.size and value.dtype.kind in "iu":
        return int(value.min()), int(value.max())
    if dtype in _SMALL:
        return int(numpy.iinfo(dtype).min), int(numpy.iinfo(dtype).max)
    op = graph.producer(tensor)
    if op is not None and op.kind in ("cast", *_MOVES):
        source = op.inputs[0]
        if graph.types[source].dtype in (*_SMALL, dtype):
            return _range(graph, source)
    if op is not None and op.kind == "subtract":
        (a, b), (c, d) = (_range(graph, x) for x in op.inputs)
        return a - d, b - c
    return -(2**31), 2**31
