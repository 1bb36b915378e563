"""Operators for which torch's ONNX exporter has no translation at all (torch 2.13, onnxscript 0.7),
or one that is a loop.

- ``sort`` with ``stable`` given. TopK takes the earlier of two equal elements, so it is stable;
- ``searchsorted``: a place is a count of elements that are less;
- ``hypot``, ``copysign``, ``signbit``, ``fmax`` and ``fmin``;
- ``floor``, ``ceil``, ``round`` and ``trunc`` of integers, which are these integers;
- ``cdist``, as in codebooks, by differences or by a product, as torch chooses;
- ``prims.prod``, of which ``cumprod`` and ``vander`` are made;
- ``hstack`` of vectors, which it writes as a loop over a sequence;
- ``squeeze`` of axes that are not 1, which PyTorch leaves and ONNX forbids;
- ``adaptive_max_pool``, of any sizes and with the places of the largest elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BY_PRODUCT = 25  # torch computes distances of more rows than these by a product


def missing(torch: Any) -> dict[Any, Any]:
    """Operators -> what onnxscript is to write."""
    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        aten.sort.stable: sort,
        aten.searchsorted.Tensor: searchsorted,
        aten.hypot.default: hypot,
        aten.signbit.default: negative,
        aten.fmax.default: lambda x, y: extreme(_op().Max, x, y),
        aten.fmin.default: lambda x, y: extreme(_op().Min, x, y),
        aten.floor.default: lambda x: rounded(_op().Floor, x),
        aten.ceil.default: lambda x: rounded(_op().Ceil, x),
        aten.round.default: lambda x: rounded(_op().Round, x),
        aten.trunc.default: lambda x: rounded(truncated, x),
        aten.copysign.Tensor: copysign,
        aten._cdist_forward.default: cdist,
        prims.prod.default: product,
        aten.hstack.default: hstack,
        aten.squeeze.dim: lambda x, dim: squeeze(x, [dim]),
        aten.squeeze.dims: squeeze,
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.adaptive_max_pool3d.default: adaptive_max_pool,
    }


def _op() -> Any:
    from onnxscript import opset20

    return opset20


def number(like: Any, value: float) -> Any:
    import onnx_ir

    return _op().Constant(value=onnx_ir.tensor(value, dtype=like.dtype))


def ints(*values: int) -> Any:
    return _op().Constant(value_ints=list(values))


def sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """A tensor -> its elements in order along ``dim``, and the places where they were."""
    op, rank = _op(), len(x.shape)
    if not rank:
        return op.Identity(x), op.Constant(value_int=0)
    axis = dim % rank
    n = op.Shape(x, start=axis, end=axis + 1)
    return op.TopK(x, n, axis=axis, largest=descending, sorted=True)


def searchsorted(
    ordered: Any,
    x: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """[..., n], or [n] for all rows, and [..., m] -> the places [..., m] where x would stand."""
    import onnx_ir

    op = _op()
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter: sort the sequence first")
    kind = onnx_ir.DataType.INT32 if out_int32 else onnx_ir.DataType.INT64
    each = op.Unsqueeze(x, ints(-1))
    if len(ordered.shape) > 1:
        ordered = op.Unsqueeze(ordered, ints(-2))
    before = op.LessOrEqual if right or side == "right" else op.Less
    return op.ReduceSum(op.Cast(before(ordered, each), to=kind), ints(-1), keepdims=0)


def hypot(x: Any, y: Any) -> Any:
    """``sqrt(x^2 + y^2)`` whose squares do not overflow."""
    op = _op()
    x, y = op.Abs(x), op.Abs(y)
    most, least = op.Max(x, y), op.Min(x, y)
    ratio = op.Div(least, op.Where(op.Equal(most, number(x, 0.0)), number(x, 1.0), most))
    grown = op.Mul(most, op.Sqrt(op.Add(op.Mul(ratio, ratio), number(x, 1.0))))
    return op.Where(op.IsInf(most), most, grown)


def negative(x: Any) -> Any:
    """True where the sign is set, also that of zero."""
    op = _op()
    zero = number(x, 0.0)
    below = op.Less(x, zero)
    if not x.dtype.is_floating_point():
        return below
    return op.Or(below, op.Less(op.Div(number(x, 1.0), x), zero))


def extreme(of: Any, x: Any, y: Any) -> Any:
    """The greater or less of two, and the other one where one is NaN."""
    op = _op()
    if not x.dtype.is_floating_point():
        return of(x, y)
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, of(x, y)))


def rounded(by: Any, x: Any) -> Any:
    return by(x) if x.dtype.is_floating_point() else _op().Identity(x)


def truncated(x: Any) -> Any:
    """Rounded towards 0."""
    op = _op()
    return op.Where(op.Less(x, number(x, 0.0)), op.Ceil(x), op.Floor(x))


def copysign(x: Any, y: Any) -> Any:
    op = _op()
    size = op.Abs(x)
    return op.Where(negative(y), op.Neg(size), size)


def cdist(x: Any, y: Any, p: float, compute_mode: int | None = None) -> Any:
    """[..., m, d] and [..., n, d] -> the distances [..., m, n] in the norm p.

    ``compute_mode``: 1 takes a product for Euclidean distances, 2 never, and else their number
    decides. A product loses digits of distances that are small beside the vectors.
    """
    op = _op()
    rows = (x.shape[-2], y.shape[-2])
    many = any(not isinstance(n, int) or n > BY_PRODUCT for n in rows)
    if p == 2.0 and compute_mode != 2 and (many or compute_mode == 1):
        ours, theirs = (op.ReduceSum(op.Mul(t, t), ints(-1), keepdims=1) for t in (x, y))
        axes = [*range(len(y.shape) - 2), len(y.shape) - 1, len(y.shape) - 2]
        both = op.MatMul(op.Mul(x, number(x, -2.0)), op.Transpose(y, perm=axes))
        total = op.Add(op.Add(ours, op.Transpose(theirs, perm=axes)), both)
        return op.Sqrt(op.Max(total, number(x, 0.0)))
    apart = op.Abs(op.Sub(op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3))))
    if p == math.inf:
        return op.ReduceMax(apart, ints(-1), keepdims=0)
    if p == 1.0:
        return op.ReduceSum(apart, ints(-1), keepdims=0)
    if p == 2.0:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), ints(-1), keepdims=0))
    if p == 0.0:
        differ = op.Cast(op.Greater(apart, number(x, 0.0)), to=x.dtype)
        return op.ReduceSum(differ, ints(-1), keepdims=0)
    total = op.ReduceSum(op.Pow(apart, number(x, p)), ints(-1), keepdims=0)
    return op.Pow(total, number(x, 1.0 / p))


def product(x: Any, dims: Sequence[int], output_dtype: int | None = None) -> Any:
    op = _op()
    if output_dtype is not None:
        x = op.Cast(x, to=output_dtype)
    return op.ReduceProd(x, ints(*dims), keepdims=0) if dims else op.Identity(x)


def hstack(tensors: Sequence[Any]) -> Any:
    """Tensors side by side: along axis 1, and vectors and numbers along their only one."""
    op = _op()
    most = max(len(x.shape) for x in tensors)
    if most > 1:
        return op.Concat(*tensors, axis=1)
    return op.Concat(*(op.Reshape(x, ints(-1)) for x in tensors), axis=0)


def squeeze(x: Any, dims: Sequence[int]) -> Any:
    op = _op()
    rank = len(x.shape)
    ones = sorted({d % rank for d in dims if rank and x.shape[d] == 1})
    return op.Squeeze(x, ints(*ones)) if ones else op.Identity(x)


def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> Any:
    """The largest element of each window, and its place in the map. Where the size of an axis is no
    multiple of that of the output, windows overlap, and they are of two lengths.
    """
    import numpy
    import onnx_ir

    op, rank, axes = _op(), len(x.shape), len(output_size)
    first = rank - axes
    sizes = [x.shape[axis] for axis in range(first, rank)]
    if not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError("adaptive_max_pool of a map of an open size: give it a size")
    windows, places = x, numpy.zeros((), numpy.int64)
    for axis, (size, made) in enumerate(zip(sizes, output_size, strict=True)):
        bounds = [(n * size // made, -(-(n + 1) * size // made)) for n in range(made)]
        longest = max(end - begin for begin, end in bounds)
        # a shorter window has its last element twice
        read = [[min(n, end - 1) for n in range(begin, begin + longest)] for begin, end in bounds]
        index = op.Constant(value=onnx_ir.tensor(read, dtype=onnx_ir.DataType.INT64))
        windows = op.Gather(windows, index, axis=first + 2 * axis)
        places = places[..., None, None] * size + numpy.asarray(read)
    inside = [first + 2 * axis + 1 for axis in range(axes)]
    if all(size % made == 0 for size, made in zip(sizes, output_size, strict=True)) and first == 2:
        steps = [size // made for size, made in zip(sizes, output_size, strict=True)]
        best = op.MaxPool(x, kernel_shape=steps, strides=steps)[0]
    else:
        best = op.ReduceMax(windows, ints(*inside), keepdims=0)

    outside = [axis for axis in range(first + 2 * axes) if axis not in inside]
    rows = op.Reshape(
        op.Transpose(windows, perm=[*outside, *inside]), ints(*[0] * first, *output_size, -1)
    )
    known = places.transpose([a - first for a in (*outside[first:], *inside)])
    table = op.Constant(value=onnx_ir.tensor(known.reshape(*output_size, -1)))
    chosen = op.ArgMax(rows, axis=-1, keepdims=1)
    found = op.GatherElements(op.Expand(table, op.Shape(rows)), chosen, axis=-1)
    return best, op.Squeeze(found, ints(-1))
