"""Products of quantized tensors by quantized constants become products of integers.

before: x = cast(cast(q) {int32} - z) {float32} * s; y = matmul(x, w * t)
after:  p = matmul(q {uint8}, w {int8}) {int32}; y = cast(p - z * c) * (s * t), c = sums of w over k

before: y = matmul(cast(q) {int32} - z, w {int32}) {int32}
after:  p = matmul(q {uint8}, w {int8}) {int32}; y = p - z * c

q has one scale and one zero point, which may be computed. w has constant ones, of the tensor or of
each column. Kernels multiply only uint8 by int8 on x86-64, and only int8 by int8 on AArch64: a q
of the other kind is shifted, such as an int8 q to q + 128 beside z + 128. w is what remains after
its zero point is subtracted. Convolutions are rewritten in the same way. A padded one is padded
with the zero point.

If int8 does not hold w, as with uint8 weights far from a zero point of 128, a whole number f of
each column is taken from it. The product then needs the sum of each row of q:

    q w = q (w - f) + f r, r = sums of q over k

The sums are exact in int32, where the product before rounds each of its terms to float32. So this
must run before ``fold_constants`` multiplies the weights by their scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import MOVES, apply_rule, constant_value, moved
from gtco.graph.windows import meets_pixels
from gtco.machine.target import Machine, Target
from gtco.tensor.analysis.window import narrow_groups
from gtco.tensor.intrinsics.table import kinds
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType

_BYTES = ("int8", "uint8")
_SHIFT = 128  # from int8 to uint8; back it is -128
_LARGEST = 255 + 255 + _SHIFT  # the largest magnitudes of q and of the shifted z
_FARTHEST = 255  # steps between the least and the largest weight of a column


@dataclass(frozen=True)
class _Quantized:
    """A tensor as (q - zero) * scale, with q in 8 bits, moved by ``moves`` (the last first). The
    names of a scalar zero point and a scalar scale; None for 0 and for 1.
    """

    q: str
    zero: str | None = None
    scale: str | None = None
    moves: tuple[Operator, ...] = ()


@dataclass(frozen=True)
class _Weights:
    """Constant weights as whole numbers, and their scale of the same shape, None for 1."""

    steps: numpy.ndarray
    scale: numpy.ndarray | None = None


def integer_products(graph: Graph, machine: Machine) -> Graph:
    """Rewrites the products, if the machine has micro-kernels for them."""
    if not isinstance(machine, Target) or not kinds(machine, "int8"):
        return graph
    wanted = kinds(machine, "int8")[0].a.dtype
    return apply_rule(graph, ("matmul", "conv2d"), partial(_rule, wanted))


def _rule(wanted: str, graph: Graph, op: Operator) -> str | None:
    if op.type.dtype not in ("float32", "int32"):
        return None
    if narrow_groups(op, graph.types[op.inputs[1]].shape):
        return None
    a = _quantized(graph, op.inputs[0])
    b = _weights(graph, op.inputs[1]) if a is not None else None
    if a is None or b is None:
        return None
    w = b.steps.astype(numpy.int32)
    inner = tuple(range(1, w.ndim)) if op.kind == "conv2d" else (w.ndim - 2,)  # axes of k
    if w.size == 0:
        return None
    far = _far(w, inner)
    # a sum over k must be an int32, and so must its parts
    most = 128 + (0 if far is None else int(numpy.abs(far).max()))
    if w.size // _outer(w, inner) * _LARGEST * most >= 2**31:
        return None
    if far is not None and not _summed(graph, op, w, far):
        return None
    scale = None if b.scale is None else _by_column(b.scale, inner)
    if b.scale is not None and scale is None:
        return None
    if scale is not None and not _normal(graph, a.scale, scale):
        return None
    return _integer(graph, op, a, w, far, inner, scale, wanted)


def _outer(w: numpy.ndarray, inner: tuple[int, ...]) -> int:
    """The number of columns."""
    return int(numpy.prod([d for axis, d in enumerate(w.shape) if axis not in inner], dtype=int))


def _integer(
    graph: Graph,
    op: Operator,
    a: _Quantized,
    w: numpy.ndarray,
    far: numpy.ndarray | None,
    inner: tuple[int, ...],
    scale: numpy.ndarray | None,
    wanted: str,
) -> str | None:
    """The product of integers that replaces ``op``, by a q of dtype ``wanted``; None if it would be
    padded with a zero point that is not constant, or that ``wanted`` does not hold.
    """
    attrs = dict(op.attrs)
    padded = op.kind == "conv2d" and any(op["padding"])  # with zeros, if the zero point is 0
    value = 0 if a.zero is None else _scalar_value(graph, a.zero)
    shift = 0
    if graph.types[a.q].dtype != wanted:
        shift = _SHIFT if wanted == "uint8" else -_SHIFT
    bounds = numpy.iinfo(wanted)
    if padded and (value is None or not bounds.min <= value + shift <= bounds.max):
        return None
    q, zero = moved(graph, a.q, reversed(a.moves)), a.zero
    if shift:
        q = _shifted(graph, q, wanted, shift)
        value = None if value is None else value + shift
        zero = None if value is not None else _sum(graph, a.zero, shift)
    if padded and value:
        q = _padded(graph, op, q, value)
        attrs["padding"] = (0, 0, 0, 0)
    kind = TensorType(op.type.shape, "int32")
    steps = graph.add_constant(_as_int8(w if far is None else w - far), op.inputs[1])
    product = graph.add(op.kind, (q, steps), kind, name=op.name, **attrs)
    if far is not None:
        rest = graph.add_constant(_placed(op, far), "far")
        rest = graph.add("multiply", (_row_sums(graph, op, q, w, attrs), rest), kind, name=op.name)
        product = graph.add("add", (product, rest), kind, name=op.name)
    columns = w.sum(axis=inner, dtype=numpy.int32, keepdims=op.kind == "matmul")
    if value is not None:
        if value:
            correction = graph.add_constant(_placed(op, columns * numpy.int32(-value)), "zero_sums")
            product = graph.add("add", (product, correction), name=op.name)
    else:
        assert zero is not None
        sums = graph.add_constant(_placed(op, columns), "sums")
        sums = graph.add("multiply", (sums, zero), name=op.name)
        product = graph.add("subtract", (product, sums), name=op.name)
    if op.type.dtype == "int32":
        return product
    y = graph.add("cast", (product,), op.type, name=op.name)
    factors = [] if a.scale is None else [a.scale]
    if scale is not None:
        factors.append(graph.add_constant(_placed(op, scale), "scale"))
    if len(factors) == 2:
        factors = [graph.add("multiply", (factors[1], factors[0]), name=op.name)]
    for factor in factors:
        y = graph.add("multiply", (y, factor), op.type, name=op.name)
    return y


def _summed(graph: Graph, op: Operator, w: numpy.ndarray, far: numpy.ndarray) -> bool:
    """True if a product of these weights can have sums of rows beside it."""
    if (w - far).min() < -128:
        return False
    if op.kind == "conv2d":
        return op["groups"] == 1
    return w.ndim == 2 and len(graph.types[op.inputs[0]].shape) >= 2


def _row_sums(
    graph: Graph, op: Operator, q: str, w: numpy.ndarray, attrs: dict[str, Any]
) -> str:
    """The sum of q over k for each row of the product, which is one by a column of ones."""
    if op.kind == "conv2d":
        shape, axis = (1, *w.shape[1:]), 1 if op["layout"] == "NCHW" else -1
    else:
        shape, axis = (w.shape[0], 1), -1
    made = list(op.type.shape)
    made[axis] = 1
    ones = graph.add_constant(numpy.ones(shape, numpy.int8), "ones")
    return graph.add(op.kind, (q, ones), TensorType(tuple(made), "int32"), name=op.name, **attrs)


def _normal(graph: Graph, scale: str | None, columns: numpy.ndarray) -> bool:
    """True if float32 holds the products of both scales, as far as they are known here: they are
    not infinite, and not so small that digits are lost.
    """
    known = numpy.ones(()) if scale is None else constant_value(graph, scale)
    if known is None:
        return True
    both = numpy.abs(columns.astype(numpy.float64) * known.reshape(()))
    bounds = numpy.finfo(numpy.float32)
    return bool(((both == 0) | ((bounds.tiny <= both) & (both <= bounds.max))).all())


# activations --------------------------------------------------------------------------------------
def _quantized(graph: Graph, tensor: str) -> _Quantized | None:
    """The tensor as a quantized one. The operators in question are those of
    :mod:`gtco.graph.lower.quantization`, with movement and maxima of windows between them.
    """
    op = graph.producer(tensor)
    if op is None:
        return None
    if op.kind in MOVES:
        inner = _quantized(graph, op.inputs[0])
        return None if inner is None else replace(inner, moves=(op, *inner.moves))
    if op.kind == "max_pool2d" and meets_pixels(graph, op):
        inner = _quantized(graph, op.inputs[0])
        if inner is None or not _positive(graph, inner.scale):
            return None
        return replace(inner, moves=(op, *inner.moves))  # the maximum is that of the same element
    if op.kind == "cast" and op.type.dtype in ("int32", "float32"):
        if graph.types[op.inputs[0]].dtype in _BYTES:
            return None if graph.is_constant(op.inputs[0]) else _Quantized(op.inputs[0])
        return _quantized(graph, op.inputs[0]) if _whole(graph, op.inputs[0]) else None
    if op.kind == "subtract" and op.type.dtype == "int32" and _single(graph, op.inputs[1]):
        inner = _quantized(graph, op.inputs[0])
        if inner is not None and inner.zero is None and _small(graph, op.inputs[1]):
            return replace(inner, zero=op.inputs[1])
    if op.kind == "multiply" and op.type.dtype == "float32":
        for x, scale in (op.inputs, op.inputs[::-1]):
            if _single(graph, scale) and graph.types[x].shape == op.type.shape:
                inner = _quantized(graph, x)
                if inner is not None and inner.scale is None:
                    return replace(inner, scale=scale)
    return None


def _positive(graph: Graph, scale: str | None) -> bool:
    value = constant_value(graph, scale) if scale is not None else numpy.ones(())
    return value is not None and bool((value > 0).all())


def _whole(graph: Graph, tensor: str) -> bool:
    return graph.types[tensor].dtype == "int32"


def _single(graph: Graph, tensor: str) -> bool:
    """True for a tensor of one element that broadcasts without adding axes."""
    shape = graph.types[tensor].shape
    return all(d == 1 for d in shape) and len(shape) <= 1


def _small(graph: Graph, zero: str) -> bool:
    """True if a zero point is one of 8 bits."""
    value = _scalar_value(graph, zero)
    if value is not None:
        return -128 <= value <= 255
    op = graph.producer(zero)
    while op is not None and op.kind in MOVES:
        op = graph.producer(op.inputs[0])
    return op is not None and op.kind == "cast" and graph.types[op.inputs[0]].dtype in _BYTES


def _scalar_value(graph: Graph, tensor: str) -> int | None:
    value = constant_value(graph, tensor)
    return None if value is None else int(value.reshape(()))


def _shifted(graph: Graph, q: str, wanted: str, shift: int) -> str:
    """q + ``shift`` as the other of int8 and uint8."""
    shape, name = graph.types[q].shape, getattr(graph.producer(q), "name", "")
    wide = graph.add("cast", (q,), TensorType(shape, "int32"), name=name)
    return graph.add("cast", (_sum(graph, wide, shift),), TensorType(shape, wanted), name=name)


def _sum(graph: Graph, tensor: str | None, more: int) -> str:
    assert tensor is not None
    return graph.add("add", (tensor, graph.add_constant(numpy.array(more, "int32"), "shift")))


def _padded(graph: Graph, op: Operator, q: str, zero: int) -> str:
    """q with the convolution's padding around its images."""
    (top, left, bottom, right), shape = op["padding"], graph.types[q].shape
    first = 2 if op["layout"] == "NCHW" else 1  # the axis of the rows
    before, after = [0] * 4, [0] * 4
    before[first : first + 2], after[first : first + 2] = (top, left), (bottom, right)
    made = tuple(int(d) + b + a for d, b, a in zip(shape, before, after, strict=True))
    kind = TensorType(made, graph.types[q].dtype)
    return graph.add("pad", (q,), kind, name=op.name, before=before, after=after, value=zero)


# weights ------------------------------------------------------------------------------------------
def _weights(graph: Graph, tensor: str) -> _Weights | None:
    """The constant tensor as whole numbers times a scale."""
    op = graph.producer(tensor)
    if op is not None and op.kind == "multiply" and op.type.dtype == "float32":
        for x, factor in (op.inputs, op.inputs[::-1]):
            steps, scale = constant_value(graph, x), constant_value(graph, factor)
            if steps is None or scale is None:
                return None
            if steps.shape == op.type.shape and _fits(steps):
                return _Weights(steps, numpy.broadcast_to(scale, steps.shape))
        return None
    if op is not None and op.kind in MOVES:
        inner = _weights(graph, op.inputs[0])
        if inner is None:
            return None
        scale = None if inner.scale is None else evaluate(op, inner.scale)
        return _Weights(evaluate(op, inner.steps), scale)
    value = constant_value(graph, tensor)
    return _Weights(value) if value is not None and _fits(value) else None


def _fits(steps: numpy.ndarray) -> bool:
    """True for whole numbers that are differences of bytes."""
    if not steps.size or steps.dtype.kind not in "fiu":
        return False
    if not -_FARTHEST <= steps.min() <= steps.max() <= _FARTHEST:  # False for a NaN
        return False
    return steps.dtype.kind in "iu" or bool((numpy.rint(steps) == steps).all())


def _far(w: numpy.ndarray, inner: tuple[int, ...]) -> numpy.ndarray | None:
    """The number to subtract from each column so that int8 holds the rest; None if int8 holds all
    columns as they are.
    """
    low, high = w.min(axis=inner, keepdims=True), w.max(axis=inner, keepdims=True)
    far: numpy.ndarray = numpy.maximum(high - 127, 0) + numpy.minimum(low + 128, 0)
    return far if far.any() else None


def _as_int8(steps: numpy.ndarray) -> numpy.ndarray:
    return numpy.ascontiguousarray(steps.astype(numpy.int8))


def _by_column(scale: numpy.ndarray, inner: tuple[int, ...]) -> numpy.ndarray | None:
    """The scale without the axes of k; None if it changes along them. A matmul's axis stays, with
    one element.
    """
    first = tuple(slice(0, 1) if axis in inner else slice(None) for axis in range(scale.ndim))
    if not bool((scale == scale[first]).all()):
        return None
    return numpy.ascontiguousarray(scale[first])


def _placed(op: Operator, columns: numpy.ndarray) -> numpy.ndarray:
    """A value for each column, in the shape in which it broadcasts to the product."""
    if op.kind == "conv2d":
        return columns.reshape(-1, 1, 1) if op["layout"] == "NCHW" else columns.reshape(-1)
    return columns.reshape(-1) if columns.ndim == 2 else columns
