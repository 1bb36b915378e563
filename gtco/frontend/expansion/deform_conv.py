"""DeformConv (Dai et al. 2017; with masks Zhu et al. 2018) as a GridSample and a product.

For an output at (h, w), tap k of the kernel reads x at the place of an ordinary convolution plus
an offset::

    column[c, k, h, w] = mask[k, h, w] * sample(x[c], h * stride + k * dilation - pad + offset)
    y = W [O, C * taps] @ column [C * taps, oH * oW] + bias

All taps of a group of offsets are sampled at once: one grid holds them below each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer


def deform_conv(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    x, weight, offset, bias, mask = (*node.input, "", "")[:5]
    if len(w.shape(x)) != 4:
        raise Unsuitable(f"an input of {len(w.shape(x))} axes is not supported: it has to have 4")
    batch, channels, height, width = w.shape(x)
    outputs, _, *kernel = w.shape(weight)
    taps = kernel[0] * kernel[1]
    high, wide = w.shape(offset)[2:]
    group, parts = (int(attrs.get(name, 1)) for name in ("group", "offset_group"))

    grid = _grid(w, attrs, offset, kernel, (height, width), parts)
    apart = w.reshape(x, (batch * parts, channels // parts, height, width))
    # GridSample's defaults: zeros outside, halves of pixels at the border
    mode = "linear" if w.opset >= 20 else "bilinear"
    columns = w.add("GridSample", apart, grid, mode=mode)
    columns = w.reshape(columns, (batch, parts, channels // parts, taps, high * wide))
    if mask:
        shown = w.reshape(mask, (batch, parts, 1, taps, high * wide))
        columns = w.add("Mul", columns, shown)
    rows = channels // group * taps
    columns = w.reshape(columns, (batch, group, rows, high * wide))
    matrix = w.reshape(weight, (1, group, outputs // group, rows))
    y = w.reshape(w.add("MatMul", matrix, columns), (batch, outputs, high, wide))
    return [w.add("Add", y, w.reshape(bias, (outputs, 1, 1))) if bias else y]


def _grid(
    w: Writer,
    attrs: dict[str, Sequence[int]],
    offset: str,
    kernel: Sequence[int],
    size: tuple[int, int],
    parts: int,
) -> str:
    """The grid [N * parts, taps * oH, oW, 2] of the points that the taps read, x before y. The
    range is -1..1, as GridSample has it without ``align_corners``: place p of n is at (2 p + 1) / n
    - 1.
    """
    batch, _, high, wide = w.shape(offset)
    taps = kernel[0] * kernel[1]
    strides, dilations = (attrs.get(name, [1, 1]) for name in ("strides", "dilations"))
    pads = attrs.get("pads", [0, 0, 0, 0])
    # [2, taps, oH, oW], y before x as the offsets have them
    places = numpy.zeros((2, *kernel, high, wide))
    for axis, count in enumerate((high, wide)):
        tap = numpy.arange(kernel[axis]) * dilations[axis] - pads[axis]
        out = numpy.arange(count) * strides[axis]
        both = tap[:, None] + out[None, :]
        places[axis] = both[:, None, :, None] if axis == 0 else both[None, :, None, :]
    scale = numpy.array([2 / n for n in size]).reshape(2, 1, 1, 1)
    rest = places.reshape(2, taps, high, wide) * scale + scale / 2 - 1
    moved = w.reshape(offset, (batch * parts, taps, 2, high, wide))
    moved = w.transpose(moved, [0, 2, 1, 3, 4])  # [N * parts, 2, taps, oH, oW]
    dtype = w.dtype(offset)
    moved = w.add("Mul", moved, w.constant(scale[None], dtype))
    moved = w.add("Add", moved, w.constant(rest[None], dtype))
    both_axes = w.split(moved, [1, 1], 1)
    turned = w.add("Concat", *reversed(both_axes), axis=1)
    return w.transpose(w.reshape(turned, (batch * parts, 2, taps * high, wide)), [0, 2, 3, 1])
