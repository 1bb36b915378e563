"""ONNX's Col2Im (torch's ``fold``): blocks of columns laid back onto the image, overlaps added.

    x [N, C * prod(block), L] -> y [N, C, *image]

Blocks that tile the image (stride = block) are a permutation. Otherwise the axes of the image are
made one after the other, each as ``stride`` sums of shifted columns that are interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import relax


def col2im(
    builder: Any,
    x: Any,
    image: Sequence[int],
    block: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Any:
    """Col2Im for any number of image axes. ``pads`` are in ONNX's order: all beginnings, then all
    ends.
    """
    n, rows, _ = (int(d) for d in x.ty.shape)
    rank, channels = len(image), rows // prod(block)
    before, after = pads[:rank], pads[rank:]
    # the padded image, to which blocks write
    whole = [i + a + b for i, a, b in zip(image, before, after, strict=True)]
    counts = [
        (w - d * (k - 1) - 1) // s + 1
        for w, d, k, s in zip(whole, dilations, block, strides, strict=True)
    ]
    columns = builder.emit(relax.op.reshape(x, (n, channels, *block, *counts)))
    if all(s == k and d == 1 for s, k, d in zip(strides, block, dilations, strict=True)):
        padded = _tiled(builder, columns, n, channels, block, counts, whole)
    else:
        padded = _added(builder, columns, n, channels, block, counts, whole, strides, dilations)
    if whole == list(image):
        return padded
    ends = [b + i for b, i in zip(before, image, strict=True)]
    return builder.emit(
        relax.op.strided_slice(padded, list(range(2, 2 + rank)), list(before), ends)
    )


def _tiled(
    builder: Any,
    columns: Any,
    n: int,
    channels: int,
    block: Sequence[int],
    counts: Sequence[int],
    whole: Sequence[int],
) -> Any:
    """[N, C, *block, *counts] -> [N, C, count * block, ...], padded with zeros to ``whole``."""
    rank = len(block)
    order = [0, 1, *(axis for i in range(rank) for axis in (2 + rank + i, 2 + i))]
    covered = [c * k for c, k in zip(counts, block, strict=True)]
    y = builder.emit(relax.op.permute_dims(columns, order))
    y = builder.emit(relax.op.reshape(y, (n, channels, *covered)))
    return _pad(builder, y, [0] * rank, [w - c for w, c in zip(whole, covered, strict=True)])


def _added(
    builder: Any,
    columns: Any,
    n: int,
    channels: int,
    block: Sequence[int],
    counts: Sequence[int],
    whole: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Any:
    """[N, C, *block, *counts] -> [N, C, *whole], one axis of the image after the other. Channels
    are last meanwhile, as they mostly are before and after it, so that rows are long.
    """
    rank = len(block)
    columns = builder.emit(relax.op.permute_dims(columns, [0, *range(2, 2 + 2 * rank), 1]))
    for i, (k, count) in enumerate(zip(block, counts, strict=True)):
        # what lies between the two axes: later ones of the block, and images that are made
        middle = prod(block[i + 1 :]) * prod(whole[:i])
        shape = n, k, middle, count, prod(counts[i + 1 :]) * channels
        columns = builder.emit(relax.op.reshape(columns, shape))
        columns = _along(builder, columns, whole[i], strides[i], dilations[i])
    y = builder.emit(relax.op.reshape(columns, (n, *whole, channels)))
    return builder.emit(relax.op.permute_dims(y, [0, 1 + rank, *range(1, 1 + rank)]))


def _along(builder: Any, x: Any, whole: int, stride: int, dilation: int) -> Any:
    """Lays an axis of blocks onto an axis of the image: [A, k, M, c, B] -> [A, M, whole, B].

    Pixel q * stride + r gets what block q - shift has at i, for each i with i * dilation = shift *
    stride + r. So pixels of one r are a sum of few slices, and no zeros are added.
    """
    outer, k, middle, count, inner = (int(d) for d in x.ty.shape)
    each = -(-whole // stride)  # pixels of one r
    images = []
    for r in range(stride):
        total = None
        for i in (i for i in range(k) if i * dilation % stride == r):
            shift = i * dilation // stride
            part = builder.emit(relax.op.strided_slice(x, [1], [i], [i + 1]))
            part = builder.emit(relax.op.reshape(part, (outer, middle, count, inner)))
            part = _pad(builder, part, [shift, 0], [each - shift - count, 0])
            total = part if total is None else builder.emit(relax.op.add(total, part))
        if total is None:  # between the blocks
            total = builder.emit(relax.op.zeros((outer, middle, each, inner), x.ty.dtype))
        images.append(builder.emit(relax.op.reshape(total, (outer, middle, each, 1, inner))))
    if stride > 1:
        images = [builder.emit(relax.op.concat(images, 3))]
    y = builder.emit(relax.op.reshape(images[0], (outer, middle, each * stride, inner)))
    if each * stride == whole:
        return y
    return builder.emit(relax.op.strided_slice(y, [2], [0], [whole]))


def _pad(builder: Any, x: Any, before: Sequence[int], after: Sequence[int]) -> Any:
    """Pads the axes after the first two with zeros."""
    if not any(before) and not any(after):
        return x
    widths = [0, 0, 0, 0, *(w for pair in zip(before, after, strict=True) for w in pair)]
    return builder.emit(relax.op.nn.pad(x, widths))
