"""ConvTranspose with any output padding, and Einsum as an operator."""

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
    """ConvTranspose, also with an output padding of the stride or more, which TVM refuses. In that
    case TVM computes the whole product, zeros are added after it, and the padding is cut off.
    """
    if "output_shape" in attrs:
        raise Refused(
            "the attribute output_shape is not supported: export with pads and output_padding"
        )
    x, weight, bias = padded(inputs, 3)
    space = len(shape_of(x)) - 2
    strides = [int(s) for s in attrs.get("strides", [1] * space)]
    more = [int(p) for p in attrs.get("output_padding", [0] * space)]
    if all(p < s for p, s in zip(more, strides, strict=True)) or space not in (1, 2):
        return None
    if text_of(attrs.get("auto_pad", b"NOTSET")) != "NOTSET":
        raise Refused("auto_pad beside an output_padding of a stride or more: write out its pads")
    convolve = relax.op.nn.conv1d_transpose if space == 1 else relax.op.nn.conv2d_transpose
    dilation = [int(d) for d in attrs.get("dilations", [1] * space)]
    groups = attrs.get("group", 1)
    y = builder.emit(convolve(x, weight, strides=strides, dilation=dilation, groups=groups))
    y = builder.emit(relax.op.nn.pad(y, [0, 0, 0, 0, *(n for p in more for n in (0, p))]))
    pads = [int(p) for p in attrs.get("pads", [0] * (2 * space))]
    ends = [n - p for n, p in zip(shape_of(y)[2:], pads[space:], strict=True)]
    y = builder.emit(relax.op.strided_slice(y, list(range(2, 2 + space)), pads[:space], ends))
    if bias is None:
        return y
    return relax.op.add(y, builder.emit(relax.op.reshape(bias, (1, -1, *[1] * space))))


def einsum(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Einsum as an operator. TVM's importer writes loops at once, and later passes cannot see the
    contraction in them.
    """
    equation = text_of(attrs["equation"])
    return builder.emit(relax.op.einsum(relax.Tuple(list(inputs)), equation.replace(" ", "")))
