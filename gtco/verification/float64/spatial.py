"""Convolution, pooling and resizing of ONNX in numpy, over any number of axes. They take one tap of
the filter at a time, so no intermediate is larger than a tensor of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from gtco.verification.float64.operators import operand

Array = NDArray[Any]
Pads = list[tuple[int, int]]


class Conv(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, b=None, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
        pads=None, strides=None,
    ):  # fmt: skip
        y = convolution(operand(x), operand(w), auto_pad, dilations, group, pads, strides)
        return (_biased(y, b),)


def convolution(
    x: Array, w: Array, auto_pad: str, dilations: Any, group: int, pads: Any, strides: Any
) -> Array:
    """The convolution of x [n, c, ...] with w [outputs, c / group, ...] in x's dtype. Attributes
    that are None have ONNX's defaults.
    """
    kernel = w.shape[2:]
    strides, dilations = strides or [1] * len(kernel), dilations or [1] * len(kernel)
    padding = _pads(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    x = np.pad(x, [(0, 0), (0, 0), *padding])
    counts = _counts(x.shape[2:], kernel, strides, dilations)
    n, c, outputs = x.shape[0], x.shape[1], w.shape[0]
    filters = w.reshape(group, outputs // group, c // group, *kernel)
    y = np.zeros((n, group, outputs // group, int(np.prod(counts))), x.dtype)
    for tap, window in _windows(kernel, strides, dilations, counts):
        part = x[(slice(None), slice(None), *window)]
        y += filters[(slice(None),) * 3 + tap] @ part.reshape(n, group, c // group, -1)
    return y.reshape(n, outputs, *counts)


class ConvTranspose(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, b=None, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
        output_padding=None, output_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        kernel, rank = w.shape[2:], w.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        extra = output_padding or [0] * rank
        n, c, sizes = x.shape[0], x.shape[1], x.shape[2:]
        full = [
            (size - 1) * s + (k - 1) * d + 1
            for size, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)
        ]
        padding = [(0, 0)] * rank if not pads else list(zip(pads[:rank], pads[rank:], strict=True))
        if output_shape or auto_pad.startswith("SAME"):
            wanted = output_shape or [a * s for a, s in zip(sizes, strides, strict=True)]
            missing = [o - f - e for f, e, o in zip(full, extra, wanted[-rank:], strict=True)]
            if output_shape:
                extra = [e + max(m, 0) for e, m in zip(extra, missing, strict=True)]
            total = [max(-m, 0) for m in missing]
            ends = [(t // 2, t - t // 2) for t in total]
            padding = ends if auto_pad == "SAME_UPPER" else [(b, a) for a, b in ends]
        per = w.shape[1]
        parts = operand(x).reshape(n, group, c // group, -1)
        filters = operand(w).reshape(group, c // group, per, *kernel)
        room = [
            f + max(e, 0) + max(0, -b) for f, e, (_, b) in zip(full, extra, padding, strict=True)
        ]
        y = np.zeros((n, group * per, *room), x.dtype)
        for tap, window in _windows(kernel, strides, dilations, sizes):
            share = np.swapaxes(filters[(slice(None),) * 3 + tap], 1, 2) @ parts
            y[(slice(None), slice(None), *window)] += share.reshape(n, group * per, *sizes)
        kept = [
            slice(max(a, 0), f + e - b) for (a, b), f, e in zip(padding, full, extra, strict=True)
        ]
        before = [(max(-a, 0), 0) for a, _ in padding]
        y = np.pad(y[(slice(None), slice(None), *kept)], [(0, 0), (0, 0), *before])
        return (_biased(y, b),)


class MaxPool(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape=None, pads=None,
        storage_order=0, strides=None,
    ):  # fmt: skip
        least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        windows = _pooled(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides, least)
        y = None
        for part in windows:
            y = part.copy() if y is None else np.maximum(y, part)
        if len(self.output) > 1 and self.output[1]:
            raise NotImplementedError("MaxPool's places are not computed")
        return (y,)


class AveragePool(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None,
        kernel_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        given = (ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides)
        behind = self.run_params["opsets"][""] < 19 and not ceil_mode
        return (averages(x, auto_pad, *given, behind=behind),)


def averages(
    x: Array, auto_pad: str, ceil_mode: int, count_include_pad: int, dilations: Any,
    kernel_shape: Any, pads: Any, strides: Any, behind: bool,
) -> Array:  # fmt: skip
    """The mean of each window. Attributes that are None have ONNX's defaults. If padding counts,
    taps ``behind`` it may count too: before opset 19, except in ceil mode, and in ONNX Runtime's
    QLinearAveragePool.
    """
    given = (auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    total = sum(_pooled(x, *given, 0))
    ones = np.ones((1, 1, *x.shape[2:]), x.dtype)
    after = 1 if count_include_pad and behind else 0
    count = sum(_pooled(ones, *given, after, fill_inside=1 if count_include_pad else 0))
    mean: Array = np.asarray(total / count)
    return mean


class LpPool(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape=None, p=2, pads=None,
        strides=None,
    ):  # fmt: skip
        given = (auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        return (sum(_pooled(np.abs(x) ** p, *given, 0)) ** (1 / p),)


class GlobalAveragePool(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (x.mean(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalMaxPool(OpRun):
    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


def _biased(y: Array, b: Array | None) -> Array:
    return y if b is None else y + b.reshape(-1, *(1,) * (y.ndim - 2))


def _pads(
    auto: str, pads: Any, sizes: Sequence[int], kernel: Any, strides: Any, dilations: Any
) -> Pads:
    rank = len(sizes)
    if not auto.startswith("SAME"):
        given = pads if pads and auto == "NOTSET" else [0] * 2 * rank
        return list(zip(given[:rank], given[rank:], strict=True))
    result = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (ceil(size / s) - 1) * s + (k - 1) * d + 1 - size)
        less, more = total // 2, total - total // 2
        result.append((more, less) if auto == "SAME_LOWER" else (less, more))
    return result


def _counts(sizes: Any, kernel: Any, strides: Any, dilations: Any) -> list[int]:
    return [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]


def _windows(
    kernel: Any, strides: Any, dilations: Any, counts: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each tap of the filter, with the positions that it meets."""
    for tap in itertools.product(*map(range, kernel)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (count - 1) * s + 1, s)
                for t, d, s, count in zip(tap, dilations, strides, counts, strict=True)
            ),
        )


def _pooled(
    x: Array, auto: str, ceil_mode: int, dilations: Any, kernel: Any, pads: Any, strides: Any,
    fill: float, fill_inside: float | None = None,
) -> Iterator[Array]:  # fmt: skip
    """The elements of the windows, one tap at a time. ``fill`` is the value after the padding,
    where ceil mode reaches. ``fill_inside`` is the value in the padding; by default it is ``fill``
    too.
    """
    rank = len(kernel)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    padding = _pads(auto, pads, x.shape[2:], kernel, strides, dilations)
    counts, beyond = [], []
    for size, k, s, d, (a, b) in zip(x.shape[2:], kernel, strides, dilations, padding, strict=True):
        reach = size + a + b - (k - 1) * d - 1
        count = (ceil(reach / s) if ceil_mode else int(reach / s)) + 1  # towards 0, as ONNX rounds
        if ceil_mode and (count - 1) * s >= size + a:  # a window begins inside
            count -= 1
        counts.append(count)
        beyond.append((0, max(0, (count - 1) * s + (k - 1) * d + 1 - (size + a + b))))
    inside = fill if fill_inside is None else fill_inside
    x = np.pad(x, [(0, 0), (0, 0), *padding], constant_values=inside)
    x = np.pad(x, [(0, 0), (0, 0), *beyond], constant_values=fill)
    for _, window in _windows(kernel, strides, dilations, counts):
        yield x[(slice(None), slice(None), *window)]


SPATIAL: Sequence[type[OpRun]] = (
    Conv, ConvTranspose, MaxPool, AveragePool, LpPool, GlobalAveragePool, GlobalMaxPool,
)  # fmt: skip
