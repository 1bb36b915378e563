"""ONNX's GridSample (torch's ``grid_sample``) by gathers, for images and two-dimensional grids.

    x [N, C, H, W], grid [N, P, Q, 2] -> y [N, C, P, Q]

Deformable attention is made of it. TVM's own kernel finds each place anew for every channel; here
places and weights are found once, and a place's channels lie side by side::

    rows = x as [N * H * W, C];  y[n, p, q, :] = sum over the corners of weight * rows[place]

Linear and nearest, beyond the border zeros or the border's value.
"""

from __future__ import annotations

from typing import Any

import numpy
from tvm import relax


def grid_sample(builder: Any, x: Any, grid: Any, mode: str, padding: str, aligned: bool) -> Any:
    """``mode`` linear or nearest; ``padding`` zeros or border."""
    n, c, height, width = (int(d) for d in x.ty.shape)
    _, p, q, _ = (int(d) for d in grid.ty.shape)
    dtype = str(x.ty.dtype)

    def const(value: Any, of: str = "float32") -> Any:
        return relax.const(numpy.asarray(value, of), of)

    def emit(call: Any) -> Any:
        return builder.emit(call)

    # [-1, 1] to places on the axes (x first); a NaN becomes a place outside
    sizes = numpy.array([width, height], numpy.float32)
    scale, shift = ((sizes - 1) / 2, (sizes - 1) / 2) if aligned else (sizes / 2, (sizes - 1) / 2)
    at = emit(relax.op.multiply(grid, const(scale)))
    at = emit(relax.op.add(at, const(shift)))
    at = emit(relax.op.where(relax.op.isnan(at), const(-2.0), at))
    if padding == "border":
        at = emit(relax.op.minimum(relax.op.maximum(at, const(0.0)), const(sizes - 1)))
    # [N, P, Q, 2, corners]: the places left and right of it, and their weights
    at = emit(relax.op.reshape(at, (n, p, q, 2, 1)))
    corner = numpy.arange(2 if mode == "linear" else 1, dtype=numpy.float32)
    if mode == "linear":
        first = emit(relax.op.floor(at))
        ahead = emit(relax.op.subtract(at, first))
        weight = emit(relax.op.abs(relax.op.subtract(ahead, const(1 - corner))))
        place = emit(relax.op.add(first, const(corner)))
    else:
        place, weight = emit(relax.op.round(at)), None
    last = (sizes - 1).reshape(2, 1)
    kept = emit(relax.op.minimum(relax.op.maximum(place, const(0.0)), const(last)))
    if padding == "zeros":
        inside = emit(relax.op.equal(kept, place))
        weight = const(1.0) if weight is None else weight
        weight = emit(relax.op.where(inside, weight, const(0.0)))
    # which row of x: (n * H + y) * W + x
    steps = emit(relax.op.astype(kept, "int64"))
    base = numpy.arange(n).reshape(n, 1, 1, 1, 1) * height * width
    across, down = (_part(builder, steps, axis, 3) for axis in (0, 1))
    down = emit(relax.op.multiply(down, const(width, "int64")))
    down = emit(relax.op.add(down, const(base, "int64")))
    weights = None if weight is None else [_part(builder, weight, axis, 3) for axis in (0, 1)]

    rows = emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
    rows = emit(relax.op.reshape(rows, (n * height * width, c)))
    total = None
    for right in range(len(corner)):
        for below in range(len(corner)):
            index = emit(
                relax.op.add(_part(builder, across, right, 4), _part(builder, down, below, 4))
            )
            index = emit(relax.op.reshape(index, (n * p * q,)))
            term = emit(relax.op.take(rows, index, 0))
            if weights is not None:
                factor = emit(
                    relax.op.multiply(
                        _part(builder, weights[0], right, 4), _part(builder, weights[1], below, 4)
                    )
                )
                factor = emit(relax.op.reshape(factor, (n * p * q, 1)))
                if dtype != "float32":
                    factor = emit(relax.op.astype(factor, dtype))
                term = emit(relax.op.multiply(term, factor))
            total = term if total is None else emit(relax.op.add(total, term))
    y = emit(relax.op.reshape(total, (n, p, q, c)))
    return emit(relax.op.permute_dims(y, [0, 3, 1, 2]))


def _part(builder: Any, x: Any, index: int, axis: int) -> Any:
    """One position of an axis, which stays with a size of 1."""
    if int(x.ty.shape[axis]) == 1:
        return x
    return builder.emit(relax.op.strided_slice(x, [axis], [index], [index + 1]))
