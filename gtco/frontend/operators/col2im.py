"""ONNX's Col2Im (torch's ``fold``): blocks of columns laid back onto the image, overlaps added.

    x [N, C * prod(block), L] -> y [N, C, *image]

Blocks that tile the image (stride = block) are a permutation. Otherwise each position inside the
block gives its own image, with columns ``stride`` apart; these images are shifted and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
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
    rank = len(block)
    total = None
    for inside in product(*(range(k) for k in block)):
        ends = [i + 1 for i in inside]
        part = builder.emit(
            relax.op.strided_slice(columns, list(range(2, 2 + rank)), list(inside), ends)
        )
        # zeros between the columns, so that they are ``stride`` apart
        apart = [extent for c in counts for extent in (c, 1)]
        part = builder.emit(relax.op.reshape(part, (n, channels, *apart)))
        gaps = [extent for s in strides for extent in (0, s - 1)]
        part = _pad(builder, part, [0] * (2 * rank), gaps)
        spread = [c * s for c, s in zip(counts, strides, strict=True)]
        part = builder.emit(relax.op.reshape(part, (n, channels, *spread)))
        # after the last column there are only zeros, so it may be cut off or lengthened
        shift = [i * d for i, d in zip(inside, dilations, strict=True)]
        room = [w - s for w, s in zip(whole, shift, strict=True)]
        kept = [min(s, r) for s, r in zip(spread, room, strict=True)]
        if kept != spread:
            zeros = [0] * rank
            part = builder.emit(relax.op.strided_slice(part, list(range(2, 2 + rank)), zeros, kept))
        part = _pad(builder, part, shift, [r - k for r, k in zip(room, kept, strict=True)])
        total = part if total is None else builder.emit(relax.op.add(total, part))
    return total


def _pad(builder: Any, x: Any, before: Sequence[int], after: Sequence[int]) -> Any:
    """Pads the axes after the first two with zeros."""
    if not any(before) and not any(after):
        return x
    widths = [0, 0, 0, 0, *(w for pair in zip(before, after, strict=True) for w in pair)]
    return builder.emit(relax.op.nn.pad(x, widths))
