"""The type of an operator's output, for the kinds whose inputs and attributes determine it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtco.support.errors import ShapeError
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Dim, TensorType

_SAME = frozenset("identity softmax log_softmax cumsum layer_norm rms_norm group_norm roll".split())


def broadcast_shapes(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape by numpy's broadcasting. A symbolic size matches itself and 1. Raises
    ShapeError.
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = []
    for axis in range(rank):
        dims = {
            shape[axis - rank + len(shape)] for shape in shapes if axis - rank + len(shape) >= 0
        } - {1}
        if len(dims) > 1:
            raise ShapeError(
                f"shapes {[tuple(s) for s in shapes]} do not broadcast: "
                f"axis {axis} has sizes {sorted(map(str, dims))}"
            )
        result.append(dims.pop() if dims else 1)
    return tuple(result)


def infer_type(
    kind: str,
    inputs: Sequence[TensorType],
    attrs: Mapping[str, Any],
    declared: TensorType | None = None,
) -> TensorType:
    """The type of ``kind(*inputs, **attrs)``. For some kinds the inputs do not determine the
    output's type (reshape, cast, slice, broadcast, pooling, ...); for these it is ``declared``, and
    None raises a ``ValueError``.
    """
    row = ELEMENTWISE_OPERATORS.get(kind)
    if row is not None and row.tests:
        return TensorType(broadcast_shapes(*(i.shape for i in inputs)), "bool")
    if kind == "where":
        return TensorType(broadcast_shapes(*(i.shape for i in inputs)), inputs[1].dtype)
    if kind in ("cast", "quantize", "byte_function"):
        pass
    elif kind == "dequantize":
        return TensorType(broadcast_shapes(*(i.shape for i in inputs)), inputs[1].dtype)
    elif row is not None:
        return TensorType(broadcast_shapes(*(i.shape for i in inputs)), inputs[0].dtype)
    elif kind in _SAME:
        return inputs[0]
    elif kind == "permute":
        return TensorType(tuple(inputs[0].shape[axis] for axis in attrs["axes"]), inputs[0].dtype)
    elif kind == "concat":
        axis, first = attrs["axis"], inputs[0].shape
        return TensorType(
            (*first[:axis], sum(int(i.shape[axis]) for i in inputs), *first[axis + 1 :]),
            inputs[0].dtype,
        )
    elif kind == "gather":
        axis, data = attrs["axis"], inputs[0].shape
        return TensorType((*data[:axis], *inputs[1].shape, *data[axis + 1 :]), inputs[0].dtype)
    elif kind == "scatter":
        return inputs[0]
    elif kind == "topk":
        return TensorType((*inputs[0].shape[:-1], attrs["k"]), "int64")
    elif kind in ("sum", "mean", "max", "min", "prod"):
        axes, keep = attrs["axes"], attrs["keepdims"]
        shape = tuple(
            1 if i in axes else d for i, d in enumerate(inputs[0].shape) if keep or i not in axes
        )
        return TensorType(shape, inputs[0].dtype)
    elif kind in ("argmax", "argmin"):
        axis, keep = attrs["axis"] % len(inputs[0].shape), attrs["keepdims"]
        before, behind = inputs[0].shape[:axis], inputs[0].shape[axis + 1 :]
        return TensorType((*before, *((1,) if keep else ()), *behind), "int64")
    elif kind == "moments":
        shape = inputs[0].shape
        return TensorType((*shape[:-2], 2, shape[-1]), inputs[0].dtype)
    elif kind == "merged_moments":
        batch, _, two, channels = inputs[0].shape
        return TensorType((batch, two, channels), inputs[0].dtype)
    elif kind == "matmul":
        a, b = inputs[0].shape, inputs[1].shape
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            raise ShapeError(f"matmul of shapes {a} and {b}")
        shape = (*broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
        return TensorType(shape, _product(inputs[0].dtype, inputs[1].dtype, declared))
    elif kind == "attention":
        q, k, v = (i.shape for i in inputs[:3])
        if q[-1] != k[-1] or k[-2] != v[-2]:
            raise ShapeError(f"attention of q {q}, k {k}, v {v}")
        shape = (*broadcast_shapes(q[:-2], k[:-2], v[:-2]), q[-2], v[-1])
        return TensorType(shape, _product(inputs[0].dtype, inputs[1].dtype, declared))
    elif kind == "grid_sample":
        x, (h, w) = inputs[0].shape, inputs[1].shape[1:3]
        shape = (*x[:2], h, w) if attrs["layout"] == "NCHW" else (x[0], h, w, x[3])
        return TensorType(shape, inputs[0].dtype)
    elif kind == "pad":
        shape = tuple(
            int(d) + b + a
            for d, b, a in zip(inputs[0].shape, attrs["before"], attrs["after"], strict=True)
        )
        return TensorType(shape, inputs[0].dtype)
    elif kind == "conv2d":
        return _conv2d(inputs[0], inputs[1], attrs, declared)
    elif kind == "conv_transpose2d":
        return _conv_transpose2d(inputs[0], inputs[1], attrs, declared)
    if declared is None:
        raise ValueError(f"the output type of '{kind}' does not follow from its inputs: give it")
    return declared


def _product(dtype: str, b: str, declared: TensorType | None) -> str:
    """The dtype of a contraction's output, by the dtypes of its operands. Float16 operands give
    float16, as in float16 models, unless float32 is declared, as the precision pass does. uint8 by
    int8 gives int32, and int8 by int8 if int32 is declared.
    """
    if dtype == b == "int8" and declared is not None and declared.dtype == "int32":
        return "int32"
    if (dtype, b) == ("uint8", "int8"):
        return "int32"
    if dtype == "float16" and declared is not None and declared.dtype == "float32":
        return "float32"
    return "float32" if dtype == "bfloat16" else dtype


def _conv2d(
    x: TensorType, weight: TensorType, attrs: Mapping[str, Any], declared: TensorType | None
) -> TensorType:
    nchw = attrs["layout"] == "NCHW"
    top, left, bottom, right = attrs["padding"]
    sizes = x.shape[2:] if nchw else x.shape[1:3]
    space: list[Dim] = []
    for size, kernel, stride, dilation, pad in zip(
        sizes,
        weight.shape[2:],
        attrs["strides"],
        attrs["dilation"],
        (top + bottom, left + right),
        strict=True,
    ):
        space.append((int(size) + pad - (int(kernel) - 1) * dilation - 1) // stride + 1)
    channels = weight.shape[0]
    return TensorType(
        (x.shape[0], channels, *space) if nchw else (x.shape[0], *space, channels),
        _product(x.dtype, weight.dtype, declared),
    )


def _conv_transpose2d(
    x: TensorType, weight: TensorType, attrs: Mapping[str, Any], declared: TensorType | None
) -> TensorType:
    nchw = attrs["layout"] == "NCHW"
    top, left, bottom, right = attrs["padding"]
    space: list[Dim] = [
        (int(size) - 1) * stride + int(kernel) - pad + extra
        for size, kernel, stride, pad, extra in zip(
            x.shape[2:] if nchw else x.shape[1:3],
            weight.shape[2:],
            attrs["strides"],
            (top + bottom, left + right),
            attrs["output_padding"],
            strict=True,
        )
    ]
    channels = int(weight.shape[1]) * attrs["groups"]
    return TensorType(
        (x.shape[0], channels, *space) if nchw else (x.shape[0], *space, channels),
        _product(x.dtype, weight.dtype, declared),
    )
