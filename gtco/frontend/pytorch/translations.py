"""Operators that torch's ONNX exporter does not translate, or translates wrongly (torch 2.13,
onnxscript 0.7). Those of which it has nothing are in ``missing.py``, and LSTMs with projections in
``recurrent.py``.

- ``scaled_dot_product_attention`` of tensors without four axes: one head without a batch has two or
  three axes, and the windows of Hiera have five. With a negative scale, of which the exporter takes
  the square root. And with a mask that may hide all keys of a row, also of grouped queries: torch
  gives zeros there, and the exporter's form the mean of the values or NaN;
- ``atan2``, which it writes with the wrong half at 0 and a negative number;
- ``logaddexp``, which it writes as a logarithm of exponentials that overflow;
- ``index_put`` where a mask chooses (``x[mask] = token``), which it writes as a scatter to places
  whose number is known only at run time, and behind whole axes (``x[:, mask] = token``) not at all;
  also by its places (``x[torch.where(mask)] = token``, as Mask2Former and OneFormer have it);
- ``softmax``, ``log_softmax`` and ``mean`` in another type (``dtype=``), to which it casts the
  result and not the tensor: means of integers lose their fractions;
- ``cummax`` and ``cummin``, of which ONNX has no operator (the text of GroundingDINO);
- ``conv3d`` without a bias, to which it gives one of two axes;
- sums of booleans, which it writes as sums, and ONNX has none;
- ``_is_all_true`` and ``_is_any_true``, by which transformers looks at masks and anchors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gtco.frontend.pytorch.missing import ints, missing, number
from gtco.frontend.pytorch.recurrent import projected


def translations(torch: Any) -> dict[Any, Any]:
    """What ``torch.onnx.export`` takes as ``custom_translation_table``."""
    aten = torch.ops.aten
    return {
        aten.scaled_dot_product_attention.default: _attention(),
        aten.index_put.default: _index_put(),
        aten.conv3d.default: _conv3d(),
        **functions(torch),
        **casting_first(torch),
        **running(torch),
        **truths(torch),
        **projected(torch),
        **missing(torch),
    }


def _index_put() -> Any:
    import onnx_ir
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_index_put

    def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        """``x[mask] = values`` is a choice if every masked place gets the same values. Axes before
        those of the mask may be whole: ``x[:, mask] = values``. ``x[torch.where(mask)]`` is the
        same choice by the places of the mask.
        """
        if found := _mask_of_places(indices):
            indices = [found]
        given = [index for index in indices if index is not None]
        mask = given[0] if len(given) == 1 else None
        if mask is None or mask.dtype != onnx_ir.DataType.BOOL or accumulate:
            return aten_index_put(x, indices, values, accumulate)
        masked, rank = len(mask.shape), len(values.shape)
        lead = next(axis for axis, index in enumerate(indices) if index is not None)
        rest = len(x.shape) - lead - masked
        # all masked places are one axis of the values
        if rank > rest and values.shape[rank - rest - 1] != 1:
            return aten_index_put(x, indices, values, accumulate)
        if rest:
            mask = op.Unsqueeze(mask, ints(*range(masked, masked + rest)))
        if rank > rest + 1 and masked > 1:
            values = op.Unsqueeze(values, ints(*range(rank - rest, rank - rest + masked - 1)))
        return op.Where(mask, values, x)

    return index_put


def _mask_of_places(indices: Sequence[Any]) -> Any:
    """The mask whose places ``torch.where(mask)`` gave as these indices, one for each of its axes;
    None if they are no such places.
    """
    import onnx_ir

    masks = []
    for axis, index in enumerate(indices):
        # what nonzero and unbind are written as: squeeze(slice(transpose(nonzero(mask))))
        steps, value = [], index
        for kind in ("Squeeze", "Slice", "Transpose", "NonZero"):
            node = value.producer() if value is not None else None
            if node is None or node.op_type != kind:
                return None
            steps.append(node)
            value = node.inputs[0]
        start = onnx_ir.convenience.get_const_tensor(steps[1].inputs[1])
        if start is None or start.numpy().tolist() != [axis]:
            return None
        masks.append(value)
    known = masks and masks[0].dtype == onnx_ir.DataType.BOOL and masks[0].shape is not None
    same = known and len(masks) == len(masks[0].shape) and all(m is masks[0] for m in masks)
    return masks[0] if same else None


def _conv3d() -> Any:
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_conv3d

    def conv3d(x: Any, weight: Any, bias: Any = None, *options: Any) -> Any:
        if bias is None:
            zero = op.CastLike(op.Constant(value_float=0.0), weight)
            bias = op.Expand(zero, op.Shape(weight, start=0, end=1))
        return aten_conv3d(x, weight, bias, *options)

    return conv3d


def functions(torch: Any) -> dict[Any, Any]:
    """The same for functions of two tensors."""
    from onnxscript import opset20 as op

    def atan2(y: Any, x: Any) -> Any:
        """The angle of (x, y) in (-pi, pi], and 0 at the origin."""
        zero, half = number(y, 0.0), number(y, math.pi)
        angle = op.Atan(op.Div(y, x))
        turned = op.Add(angle, op.Where(op.Less(y, zero), op.Neg(half), half))
        origin = op.And(op.Equal(y, zero), op.Equal(x, zero))
        return op.Where(origin, zero, op.Where(op.Less(x, zero), turned, angle))

    def logaddexp(a: Any, b: Any) -> Any:
        most = op.Max(a, b)
        grown = op.Log(op.Add(op.Exp(op.Sub(a, most)), op.Exp(op.Sub(b, most))))
        return op.Where(op.IsInf(most), most, op.Add(most, grown))

    aten = torch.ops.aten
    return {aten.atan2.default: atan2, aten.logaddexp.default: logaddexp}


def casting_first(torch: Any) -> dict[Any, Any]:
    """The same for operators that compute in another type than their tensor's."""
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_mean_dim, aten_softmax
    from onnxscript.function_libs.torch_lib.ops.special import aten_special_log_softmax

    def cast(x: Any, dtype: int | None) -> Any:
        if dtype is None:
            return x
        made = op.Cast(x, to=dtype)
        made.shape = x.shape  # the translations ask for it
        return made

    def softmax(x: Any, dim: int, dtype: int | None = None) -> Any:
        return aten_softmax(cast(x, dtype), dim)

    def log_softmax(x: Any, dim: int, dtype: int | None = None) -> Any:
        return aten_special_log_softmax(cast(x, dtype), dim)

    def mean(
        x: Any, dim: Sequence[int] | None, keepdim: bool = False, dtype: int | None = None
    ) -> Any:
        axes = ints(*(dim or range(len(x.shape))))
        return aten_mean_dim(cast(x, dtype), axes, keepdim)

    aten = torch.ops.aten
    return {
        aten.softmax.int: softmax,
        aten.log_softmax.int: log_softmax,
        aten.mean.dim: mean,
    }


def running(torch: Any) -> dict[Any, Any]:
    """The same for running extremes along an axis of n elements, each by the n x n of its pairs."""
    import numpy
    import onnx_ir
    from onnxscript import opset20 as op

    def extreme(reduced: Any, place: Any, sign: int) -> Any:
        """``sign``: that of the number that is chosen last."""

        def translated(x: Any, dim: int) -> Any:
            """A tensor -> the extremes so far and the places of the latest of them."""
            rank = len(x.shape)
            if not rank:
                return op.Identity(x), op.Constant(value=onnx_ir.tensor(0))
            axis, kind = dim % rank, x.dtype.numpy()
            worst: float = sign * math.inf
            if numpy.issubdtype(kind, numpy.integer):
                worst = numpy.iinfo(kind).min if sign < 0 else numpy.iinfo(kind).max
            n = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
            places = op.Range(op.Constant(value_int=0), n, op.Constant(value_int=1))
            behind = list(range(2, rank + 1 - axis))  # the axes of x behind those of the pairs
            now = op.Unsqueeze(places, ints(1, *behind))
            before = op.Unsqueeze(places, ints(0, *behind))
            pairs = op.Unsqueeze(x, ints(axis))
            unseen = number(x, worst)
            pairs = op.Where(op.GreaterOrEqual(now, before), pairs, unseen)
            along = ints(axis + 1)
            return reduced(pairs, along, keepdims=0), place(
                pairs, axis=axis + 1, keepdims=0, select_last_index=1
            )

        return translated

    aten = torch.ops.aten
    return {
        aten.cummax.default: extreme(op.ReduceMax, op.ArgMax, -1),
        aten.cummin.default: extreme(op.ReduceMin, op.ArgMin, 1),
    }


def truths(torch: Any) -> dict[Any, Any]:
    """The same for booleans."""
    import onnx_ir
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_add

    integer = onnx_ir.DataType.INT32

    def one_of(reduced: Any) -> Any:
        return op.Greater(reduced, op.Constant(value=onnx_ir.tensor(0, dtype=integer)))

    def all_true(values: Any) -> Any:
        """A boolean tensor of any shape -> one boolean. It is true if there are no values."""
        return one_of(op.ReduceProd(op.Cast(values, to=integer), keepdims=0))

    def any_true(values: Any) -> Any:
        """A boolean tensor of any shape -> one boolean. It is false if there are no values."""
        return one_of(op.ReduceSum(op.Cast(values, to=integer), keepdims=0))

    aten = torch.ops.aten
    return {
        aten._is_all_true.default: all_true,
        aten._is_any_true.default: any_true,
        aten.add.Tensor: aten_add,  # torch has one of its own that knows no booleans
    }


def _attention() -> Any:
    import onnx_ir
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    def repeated(x: Any, times: int) -> Any:
        """[b, h, n, d] -> [b, h * times, n, d], in which each head follows itself."""
        _, heads, _, depth = x.shape
        each = op.Unsqueeze(x, ints(2))
        each = op.Expand(each, ints(1, 1, times, 1, 1))
        return op.Reshape(each, ints(0, heads * times, -1, depth))

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """``softmax(scale q k^T + mask) v``; zeros where the mask hides all keys of a row."""
        negative = scale is not None and scale < 0
        ranks, axes = {len(x.shape) for x in (query, key, value)}, len(key.shape)
        width = query.shape[-1]
        if enable_gqa and attn_mask is not None and ranks == {4}:
            heads, groups = query.shape[1], key.shape[1]
            key, value = (repeated(x, heads // groups) for x in (key, value))
            enable_gqa = False
        plain = ranks == {4} and not negative and attn_mask is None
        if plain or enable_gqa or not isinstance(width, int):
            return aten_scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )

        rank = max(ranks)
        # both operands are scaled, so that products of float16 do not overflow
        size = math.sqrt(1 / math.sqrt(width) if scale is None else abs(scale))
        root, first = number(query, size), number(query, -size if negative else size)
        swapped = op.Transpose(key, perm=[*range(axes - 2), axes - 1, axes - 2])
        scores = op.MatMul(op.Mul(query, first), op.Mul(swapped, root))
        if is_causal:
            places = op.Shape(scores, start=rank - 2)
            attn_mask = op.Cast(
                op.Trilu(op.Expand(number(query, 1.0), places), upper=0), to=onnx_ir.DataType.BOOL
            )
        if attn_mask is not None and (is_causal or attn_mask.dtype == onnx_ir.DataType.BOOL):
            attn_mask = op.Where(attn_mask, number(query, 0.0), number(query, -math.inf))
        if attn_mask is not None:
            scores = op.Add(scores, attn_mask)
        weights = op.Softmax(scores, axis=-1)
        if attn_mask is not None and not is_causal:
            weights = op.Where(op.IsNaN(weights), number(query, 0.0), weights)
        return op.MatMul(weights, value)

    return attention
