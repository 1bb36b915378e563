"""Kernels that read or write where indices say, and orders: TopK, gathers, scatters; and numbers
that are quantized and back.
"""

from __future__ import annotations

import numpy as np

from tests.random.builder import Builder, Tensor


def topk(b: Builder, x: Tensor) -> Tensor:
    """Values, or places as floats, of the best along an axis."""
    x = b.shaped(x, b.random.randint(1, 4))
    axis = b.random.randrange(x.rank)
    n = x.shape[axis]
    k = b.pick([1, n, b.random.randint(1, n)])
    b.smooth = b.special = False
    shape = [k if a == axis else m for a, m in enumerate(x.shape)]
    attrs = {"axis": b.pick([axis, axis - x.rank]), "largest": b.pick([0, 1])}
    values, places = b.several("TopK", [x, b.ints([k])], [shape, shape], **attrs)
    return values if b.chance(0.7) else b.add("Cast", [places], shape, to=1)


def gather(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(1, 4))
    if b.chance(0.5):
        axis = b.random.randrange(x.rank)
        shape = [b.random.randint(1, n) for n in x.shape]
        shape[axis] = b.random.randint(1, 12)
        places = b.constant(b.numpy.integers(-x.shape[axis], x.shape[axis], shape), "int64")
        return b.add("GatherElements", [x, places], shape, axis=axis)
    depth, count = b.random.randint(1, x.rank), b.random.randint(1, 12)
    shape = [count, *x.shape[depth:]]
    return b.add("GatherND", [x, _nd(b, x, depth, count)], shape)


def _nd(b: Builder, x: Tensor, depth: int, count: int) -> Tensor:
    extents = np.array(x.shape[:depth])
    return b.constant(b.numpy.integers(-extents, extents, (count, depth)), "int64")


def scatter(b: Builder, x: Tensor) -> Tensor:
    """No two updates of one place, unless they are added: which of them wins is an engine's own."""
    x = b.shaped(x, b.random.randint(1, 4))
    how = b.pick(["none", "add", "add"])
    if b.chance(0.5):
        axis = b.random.randrange(x.rank)
        shape = [b.random.randint(1, n) if b.chance(0.3) else n for n in x.shape]
        shape[axis] = b.random.randint(1, x.shape[axis])
        lines = b.numpy.random([n if a != axis else x.shape[axis] for a, n in enumerate(shape)])
        order = np.take(lines.argsort(axis), range(shape[axis]), axis)
        if how == "add":
            order = b.numpy.integers(-x.shape[axis], x.shape[axis], shape)
        inputs = [x, b.constant(order, "int64"), b.input(shape)]
        return b.add("ScatterElements", inputs, x.shape, axis=axis, reduction=how)
    depth = b.random.randint(1, x.rank)
    rows = int(np.prod(x.shape[:depth]))
    count = b.random.randint(1, min(rows, 12))
    flat = b.numpy.permutation(rows)[:count]
    places = np.stack(np.unravel_index(flat, x.shape[:depth]), -1)
    inputs = [x, b.constant(places, "int64"), b.input([count, *x.shape[depth:]])]
    if how == "add":
        inputs[1] = _nd(b, x, depth, count)
    return b.add("ScatterND", inputs, x.shape, reduction=how)


def quantized(b: Builder, x: Tensor) -> Tensor:
    """Quantized and back, with one scale or one a channel."""
    x = b.shaped(x, b.random.randint(1, 4))
    b.smooth = b.special = False
    axis, kind = b.random.randrange(x.rank), b.pick(["int8", "uint8"])
    shape = [x.shape[axis]] if b.chance(0.5) else []
    scale = b.constant(np.exp2(b.numpy.integers(-6, 0, shape)))
    zero = b.constant(b.numpy.integers(0, 100, shape), kind)
    small = b.add("QuantizeLinear", [x, scale, zero], x.shape, kind, axis=axis)
    return b.add("DequantizeLinear", [small, scale, zero], x.shape, axis=axis)


INDEXING = (topk, gather, scatter, quantized)
