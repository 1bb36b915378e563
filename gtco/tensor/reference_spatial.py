"""The numpy meaning of the image operators: convolution, pooling and resizing, in NCHW or NHWC."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtco.tensor.analysis.resizing import nearest, places

Array = np.ndarray


def _to_nchw(x: Array, layout: str) -> Array:
    return x if layout == "NCHW" else x.transpose(0, 3, 1, 2)


def _from_nchw(x: Array, layout: str) -> Array:
    return x if layout == "NCHW" else x.transpose(0, 2, 3, 1)


def _windows(
    x: Array,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    counts: Sequence[int],
) -> Array:
    """View [N, C, OH, OW, KH, KW] of a padded NCHW tensor."""
    n, c, h, w = x.strides
    shape = (*x.shape[:2], *counts, *kernel)
    steps = (n, c, h * strides[0], w * strides[1], h * dilation[0], w * dilation[1])
    return np.lib.stride_tricks.as_strided(x, shape, steps, writeable=False)


def conv2d(
    x: Array,
    weight: Array,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    layout: str,
    exact: bool = False,
) -> Array:
    """Convolution by im2col and one matrix product for each group; ``weight`` is OIHW. ``exact``
    changes nothing here.
    """
    x = _to_nchw(x, layout)
    top, left, bottom, right = padding
    x = np.ascontiguousarray(np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right))))
    out, per_group, *kernel = weight.shape
    counts = [
        (x.shape[2 + i] - (kernel[i] - 1) * dilation[i] - 1) // strides[i] + 1 for i in (0, 1)
    ]
    windows = _windows(x, kernel, strides, dilation, counts)
    taps = per_group * kernel[0] * kernel[1]
    results = []
    for g in range(groups):
        part = windows[:, g * per_group : (g + 1) * per_group].transpose(0, 2, 3, 1, 4, 5)
        columns = part.reshape(x.shape[0], counts[0] * counts[1], taps)
        rows = weight[g * (out // groups) : (g + 1) * (out // groups)].reshape(out // groups, taps)
        results.append((columns @ rows.T).transpose(0, 2, 1))
    y = np.concatenate(results, axis=1).reshape(x.shape[0], out, *counts)
    return _from_nchw(y, layout)


def conv_transpose2d(
    x: Array,
    weight: Array,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    layout: str,
) -> Array:
    """Transposed convolution: every input pixel adds its product with the filters to a window of
    the output. ``weight`` is [channels, outputs of a group, KH, KW].
    """
    x = _to_nchw(x, layout)
    n, c, h, w = x.shape
    _, per_group, *kernel = weight.shape
    full = [(size - 1) * s + k for size, s, k in zip((h, w), strides, kernel, strict=True)]
    extended = [max(f, f + e) for f, e in zip(full, output_padding, strict=True)]
    y = np.zeros((n, groups * per_group, *extended), np.result_type(x, weight))
    parts = x.reshape(n, groups, c // groups, h, w)
    filters = weight.reshape(groups, c // groups, per_group, *kernel)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            share = np.einsum("ngchw,gco->ngohw", parts, filters[..., i, j])
            rows = slice(i, i + (h - 1) * strides[0] + 1, strides[0])
            columns = slice(j, j + (w - 1) * strides[1] + 1, strides[1])
            if share.size:
                y[:, :, rows, columns] += share.reshape(n, groups * per_group, h, w)
    top, left, bottom, right = padding
    ends = [
        f + e - after for f, e, after in zip(full, output_padding, (bottom, right), strict=True)
    ]
    return _from_nchw(y[:, :, top : ends[0], left : ends[1]], layout)


def _pool_windows(
    x: Array,
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    fill: float,
) -> Array:
    """Windows of a padded NCHW tensor. Padding grows at the far end if the output's size (ceil
    mode) needs it.
    """
    top, left = padding[0], padding[1]
    need = [(shape[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilation[i] + 1 for i in (0, 1)]
    after = [max(padding[2 + i], need[i] - x.shape[2 + i] - padding[i]) for i in (0, 1)]
    padded = np.pad(x, ((0, 0), (0, 0), (top, after[0]), (left, after[1])), constant_values=fill)
    return _windows(np.ascontiguousarray(padded), kernel, strides, dilation, shape[2:])


def max_pool2d(
    x: Array,
    shape: tuple[int, ...],
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
) -> Array:
    """Maximum over each window; padding never wins."""
    n, c, h, w = shape if layout == "NCHW" else (shape[0], shape[3], shape[1], shape[2])
    fill = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    windows = _pool_windows(
        _to_nchw(x, layout), (n, c, h, w), kernel, strides, padding, dilation, fill
    )
    return _from_nchw(windows.max(axis=(4, 5)), layout)


def avg_pool2d(
    x: Array,
    shape: tuple[int, ...],
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    layout: str,
) -> Array:
    """Mean over each window. The divisor counts padding if ``count_include_pad``, but never
    positions beyond it.
    """
    n, c, h, w = shape if layout == "NCHW" else (shape[0], shape[3], shape[1], shape[2])
    x = _to_nchw(x, layout)
    ones = np.ones((1, 1, *x.shape[2:]), x.dtype)
    if count_include_pad:
        ones = np.pad(
            ones,
            ((0, 0), (0, 0), (padding[0], padding[2]), (padding[1], padding[3])),
            constant_values=1,
        )
        counts = _pool_windows(ones, (1, 1, h, w), kernel, strides, (0, 0, 0, 0), (1, 1), 0).sum(
            axis=(4, 5)
        )
    else:
        counts = _pool_windows(ones, (1, 1, h, w), kernel, strides, padding, (1, 1), 0).sum(
            axis=(4, 5)
        )
    total = _pool_windows(x, (n, c, h, w), kernel, strides, padding, (1, 1), 0).sum(axis=(4, 5))
    return _from_nchw(total / counts, layout)


def source_coordinates(size: int, out: int, coordinates: str) -> Array:
    """The place of each of ``out`` output positions on an axis of ``size`` input positions."""
    times, plus, over = places(size, out, coordinates)
    return (np.arange(out, dtype=np.float64) * times + plus) / over


def nearest_indices(size: int, out: int, coordinates: str, rounding: str) -> Array:
    """The input index that each output position copies. ``rounding`` has ONNX's names (``round`` is
    ``round_prefer_floor``).
    """
    times, plus, over = nearest(size, out, coordinates, rounding)
    return np.clip((np.arange(out, dtype=np.int64) * times + plus) // over, 0, size - 1)


def interpolation_weights(
    size: int, out: int, method: str, coordinates: str, cubic_alpha: float
) -> tuple[Array, Array]:
    """Indices and weights [out, taps] of a separable linear (2 taps) or cubic (4 taps, Keys 1981)
    interpolation."""
    position = source_coordinates(size, out, coordinates)
    base = np.floor(position)
    fraction = position - base
    if method == "linear":
        weights = np.stack([1 - fraction, fraction], axis=1)
        offsets = np.arange(0, 2)
    else:
        a = cubic_alpha
        offsets = np.arange(-1, 3)
        distance = np.abs(fraction[:, None] - offsets[None, :])
        inner = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weights = np.where(distance <= 1, inner, np.where(distance < 2, outer, 0))
    indices = np.clip(base[:, None] + offsets[None, :], 0, size - 1).astype(np.int64)
    return indices, weights


def resize2d(
    x: Array,
    shape: tuple[int, ...],
    *,
    method: str,
    coordinates: str,
    rounding: str,
    cubic_alpha: float,
    layout: str,
) -> Array:
    """Resizes height and width to the output's shape."""
    x = _to_nchw(x, layout)
    sizes = shape[2:] if layout == "NCHW" else shape[1:3]
    for axis, out in zip((2, 3), sizes, strict=True):
        if method == "nearest":
            x = np.take(x, nearest_indices(x.shape[axis], out, coordinates, rounding), axis=axis)
            continue
        indices, weights = interpolation_weights(
            x.shape[axis], out, method, coordinates, cubic_alpha
        )
        taps = np.moveaxis(np.take(x, indices, axis=axis), axis + 1, -1)
        along = weights.astype(x.dtype).reshape(out, *((1,) if axis == 2 else ()), -1)
        x = (taps * along).sum(axis=-1)
    return _from_nchw(x, layout)


def grid_sample(
    x: Array, grid: Array, *, method: str, padding: str, align_corners: bool, layout: str
) -> Array:
    """The image, read at the points of ``grid`` [N, OH, OW, (x, y)], whose coordinates run from -1
    to 1. Positions are computed in the grid's own dtype.
    """
    x = _to_nchw(x, layout)
    sizes = x.shape[3], x.shape[2]
    columns, rows = (
        _corners(grid[..., k], size, method, padding, align_corners) for k, size in enumerate(sizes)
    )
    image = np.arange(len(x))[:, None, None]
    total = np.zeros((len(x), *grid.shape[1:3], x.shape[1]), x.dtype)
    for row, row_weight in rows:
        for column, column_weight in columns:
            there = (row >= 0) & (column >= 0)
            value = x[image, :, np.maximum(row, 0), np.maximum(column, 0)]
            value = np.where(there[..., None], value, x.dtype.type(0))
            total = total + value * (row_weight * column_weight)[..., None]
    return _from_nchw(total.transpose(0, 3, 1, 2), layout)


def _corners(
    coordinate: Array, size: int, method: str, padding: str, align: bool
) -> list[tuple[Array, Array]]:
    """Indices and weights of the positions around each coordinate; -1 if zero is read."""
    one, two, length = (coordinate.dtype.type(v) for v in (1, 2, size))
    where = (
        (coordinate + 1) / 2 * (length - 1) if align else ((coordinate + 1) * length - one) / two
    )
    where = np.where(np.abs(where) < 2.0**63, where, where.dtype.type(0 if align else -0.5))
    if method == "nearest":
        found = [(np.rint(where), np.ones_like(where))]
    else:
        base = np.floor(where)
        found = [(base, 1 - (where - base)), (base + 1, where - base)]
    return [(_within(at, size, padding, align).astype(np.int64), w) for at, w in found]


def _within(at: Array, size: int, padding: str, align: bool) -> Array:
    if padding == "zeros":
        return np.where((at >= 0) & (at < size), at, -1)
    if padding == "reflection":
        period = 2 * (size - 1) if align else 2 * size
        at = np.mod(at, period) if period else np.zeros_like(at)
        at = np.minimum(at, (period if align else period - 1) - at)
    return np.clip(at, 0, size - 1)
