"""ConvTranspose with any output padding, Gemm without its C, and Einsum as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from gtco.frontend.operators.arguments import (
    Attributes,
    Refused,
    padded,
    shape_of,
    text_of,
)


def conv_transpose(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """ConvTranspose with what TVM does not take: ``output_shape``, and an output padding of the
    stride or more. In that case TVM computes the whole product, zeros are added after it, and the
    padding is cut off.
    """
    x, weight, bias = padded(inputs, 3)
    space = len(shape_of(x)) - 2
    strides = [int(s) for s in attrs.get("strides", [1] * space)]
    pads = [int(p) for p in attrs.get("pads", [0] * (2 * space))]
    more = [int(p) for p in attrs.get("output_padding", [0] * space)]
    dilation = [int(d) for d in attrs.get("dilations", [1] * space)]
    auto = text_of(attrs.get("auto_pad", b"NOTSET"))
    small = all(p < s for p, s in zip(more, strides, strict=True))
    if small and "output_shape" not in attrs:
        return None
    if "output_shape" in attrs:
        whole = _whole(shape_of(x), shape_of(weight), strides, dilation)
        sizes = [int(n) for n in attrs["output_shape"]][-space:]
        pads, more = _padding(whole, more, sizes, lower=auto != "SAME_UPPER")
        small = all(p < s for p, s in zip(more, strides, strict=True))
    elif auto != "NOTSET":
        raise Refused("auto_pad beside an output_padding of a stride or more: write out its pads")
    convolve = getattr(relax.op.nn, f"conv{space}d_transpose")
    given = {"strides": strides, "dilation": dilation, "groups": attrs.get("group", 1)}
    if small:
        y = builder.emit(convolve(x, weight, padding=pads, output_padding=more, **given))
    else:
        y = builder.emit(convolve(x, weight, **given))
        y = builder.emit(relax.op.nn.pad(y, [0, 0, 0, 0, *(n for p in more for n in (0, p))]))
        ends = [n - p for n, p in zip(shape_of(y)[2:], pads[space:], strict=True)]
        y = builder.emit(relax.op.strided_slice(y, list(range(2, 2 + space)), pads[:space], ends))
    if bias is None:
        return y
    return relax.op.add(y, builder.emit(relax.op.reshape(bias, (1, -1, *[1] * space))))


def gemm(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Gemm with a beta of 0, which reads no C (in PyTorch, BLAS and ONNX Runtime): NaN times 0 is
    NaN.
    """
    a, b, c = padded(inputs, 3)
    if c is None or attrs.get("beta", 1.0) != 0:
        return None
    if attrs.get("transA", 0):
        a = builder.emit(relax.op.permute_dims(a))
    if attrs.get("transB", 0):
        b = builder.emit(relax.op.permute_dims(b))
    y = builder.emit(relax.op.matmul(a, b))
    return relax.op.multiply(y, relax.const(attrs.get("alpha", 1.0), str(a.ty.dtype)))


def _whole(
    x: Sequence[int], weight: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """The sizes of a transposed convolution without padding."""
    sizes = zip(x[2:], weight[2:], strides, dilation, strict=True)
    return [s * (n - 1) + d * (k - 1) + 1 for n, k, s, d in sizes]


def _padding(
    whole: Sequence[int], more: Sequence[int], sizes: Sequence[int], lower: bool
) -> tuple[list[int], list[int]]:
    """The pads and the output padding with which the result has these ``sizes``, by ONNX's
    equations. ``lower``: of an odd number of pads, the beginning gets one more. Zeros that are
    missing are added at the end.
    """
    total = [max(0, n + p - size) for n, p, size in zip(whole, more, sizes, strict=True)]
    first = [t - t // 2 if lower else t // 2 for t in total]
    last = [t - f for t, f in zip(total, first, strict=True)]
    return [*first, *last], [size + t - n for n, t, size in zip(whole, total, sizes, strict=True)]


def einsum(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Einsum as an operator. TVM's importer writes loops at once, and later passes cannot see the
    contraction in them.
    """
    equation = text_of(attrs["equation"])
    return builder.emit(relax.op.einsum(relax.Tuple(list(inputs)), equation.replace(" ", "")))
