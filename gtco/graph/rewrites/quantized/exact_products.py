"""Products and convolutions of small int32 values are computed in float32, which holds every
integer up to 2^24.

before: y = matmul(a, b) {int32}, |a| <= 255, |b| <= 255
after:  y = cast(matmul(cast(a[:, :k1]), cast(b[:k1])) {float32}) {int32} + (the same of the rest)

The sum of a part's terms stays below 2^24, so it is exact in any order. A part of a convolution is
of some of its input channels. The products are marked ``exact`` with the bits of their operands:
Strassen's algorithm and Winograd's would sum other numbers, and a narrower format may not hold
them. This is for the products that
:mod:`gtco.graph.rewrites.quantized.integer_products` leaves: those of two computed tensors,
depthwise convolutions, and all on machines without instructions for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log2

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, constant_value
from gtco.tensor.stage import Operator, TensorType

EXACT = 2**24
_SMALL = ("int8", "uint8", "int16", "uint16")
_MOVES = ("reshape", "permute", "broadcast", "slice", "identity")


def exact_products(graph: Graph) -> Graph:
    return apply_rule(graph, {"matmul", "conv2d"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    if any(graph.types[x].dtype != "int32" for x in op.inputs):
        return None
    weights = constant_value(graph, op.inputs[1])
    k = int(graph.types[op.inputs[1]].shape[1 if op.kind == "conv2d" else -2])
    magnitudes = [_magnitude(graph, x) for x in op.inputs]
    count = _parts(graph, op, magnitudes, weights, k)
    if count is None:
        return None
    x = _float(graph, op.inputs[0])
    if weights is None:
        y = _float(graph, op.inputs[1])
    else:
        y = graph.add_constant(weights.astype(numpy.float32), op.inputs[1])
    total: str | None = None
    bits = ceil(log2(max(2, *magnitudes)))
    for begin, size in _cuts(k, count):
        if op.kind == "conv2d":
            product = _convolution(graph, op, x, y, begin, size, bits)
        else:
            parts = [_part(graph, t, axis, begin, size) for t, axis in ((x, -1), (y, -2))]
            product = graph.add("matmul", parts, name=op.name, exact=bits)
        share = graph.add("cast", (product,), op.type, name=op.name)
        total = share if total is None else graph.add("add", (total, share), name=op.name)
    return total


def _parts(
    graph: Graph, op: Operator, magnitudes: Sequence[int], weights: numpy.ndarray | None, k: int
) -> int | None:
    """The least number of parts of k whose sums are exact; None if there is none. A known weight
    counts as it is, and any other as the largest that it may be.
    """
    a, b = magnitudes
    shape = [int(d) for d in graph.types[op.inputs[1]].shape]
    taps = shape[2] * shape[3] if op.kind == "conv2d" else 1
    if not k or not a * b or 0 in shape:
        return None
    if a * b * taps <= EXACT:
        most = ceil(k / (EXACT // (a * b * taps)))
    elif weights is not None and a <= EXACT:
        most = k
    else:
        return None
    if weights is None:
        return most
    axes = (2, 3) if op.kind == "conv2d" else ()
    # The most that each step of k adds
    sizes = numpy.abs(weights.astype(numpy.int64)).sum(axis=axes) * a
    sizes = numpy.moveaxis(sizes, 1 if op.kind == "conv2d" else -2, 0).reshape(k, -1)
    for count in range(1, most + 1):
        sums = [sizes[begin : begin + size].sum(0).max() for begin, size in _cuts(k, count)]
        if max(sums) <= EXACT:
            return count
    return None


def _cuts(k: int, count: int) -> Iterator[tuple[int, int]]:
    """The first step and the number of steps of each part, all of one size but the last."""
    step = -(-k // count)
    for begin in range(0, k, step):
        yield begin, min(step, k - begin)


def _convolution(
    graph: Graph, op: Operator, x: str, w: str, begin: int, size: int, bits: int
) -> str:
    """The share of some input channels of each group."""
    groups, layout = int(op["groups"]), op["layout"]
    shape = [int(d) for d in graph.types[x].shape]
    per_group = int(graph.types[w].shape[1])
    if size != per_group:
        first = 1 if layout == "NCHW" else 3
        split = (*shape[:first], groups, per_group, *shape[first + 1 :])
        x = graph.add("reshape", (x,), TensorType(split, "float32"), name=op.name)
        x = _part(graph, x, first + 1, begin, size)
        together = (*shape[:first], groups * size, *shape[first + 1 :])
        x = graph.add("reshape", (x,), TensorType(together, "float32"), name=op.name)
    attrs = {**dict(op.attrs), "exact": bits}
    return graph.add("conv2d", (x, _part(graph, w, 1, begin, size)), name=op.name, **attrs)


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
