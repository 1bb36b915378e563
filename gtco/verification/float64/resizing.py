"""ONNX's Resize, Upsample and GridSample in numpy.

They follow ONNX's text. They share nothing with the importer (``frontend/operators/resize.py``),
because they judge its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from gtco.tensor.reference_spatial import grid_sample

Array = NDArray[Any]


class Resize(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, *rest, antialias=0, axes=None, coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0,
        keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
    ):  # fmt: skip
        if self.run_params["opsets"][""] < 11:  # X, scales; asymmetric, rounded down
            rest = (None, *rest)
            coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
        roi, scales, sizes = (*rest, None, None, None)[:3]
        chosen = [a % x.ndim for a in (range(x.ndim) if axes is None else axes)]
        lengths = [x.shape[a] for a in chosen]
        if scales is not None and scales.size:
            factors = [float(s) for s in scales]
            outs = [floor(n * s) for n, s in zip(lengths, factors, strict=True)]
        else:
            outs = [int(s) for s in sizes]
            factors = [out / n for out, n in zip(outs, lengths, strict=True)]
            if keep_aspect_ratio_policy != "stretch":
                pick = min if keep_aspect_ratio_policy == "not_larger" else max
                factors = [pick(factors)] * len(factors)
                outs = [floor(n * factors[0] + 0.5) for n in lengths]
        outside = np.zeros((1,) * x.ndim, bool)
        for i, axis in enumerate(chosen):
            ends = (0.0, 1.0)
            if coordinate_transformation_mode == "tf_crop_and_resize":
                ends = float(roi[i]), float(roi[i + len(chosen)])
            at = positions(lengths[i], outs[i], factors[i], coordinate_transformation_mode, ends)
            along = [-1 if a == axis else 1 for a in range(x.ndim)]
            if coordinate_transformation_mode == "tf_crop_and_resize":
                outside = outside | ((at < 0) | (at > lengths[i] - 1)).reshape(along)
            if outs[i] == lengths[i] and np.array_equal(at, np.arange(outs[i])):
                continue
            if mode == "nearest":
                index = np.clip(_rounded(at, nearest_mode), 0, lengths[i] - 1)
                x = np.take(x, index.astype(np.int64), axis=axis)
                continue
            shrink = min(factors[i], 1.0) if antialias else 1.0
            kernel = (lambda d: np.maximum(1 - d, 0)) if mode == "linear" else _keys(cubic_coeff_a)
            reach = ceil((1 if mode == "linear" else 2) / shrink)
            x = _summed(x, axis, at, reach, shrink, kernel, bool(exclude_outside))
        return (np.where(outside, x.dtype.type(extrapolation_value), x) if outside.any() else x,)


def positions(
    size: int, out: int, scale: float, mode: str, ends: tuple[float, float]
) -> NDArray[np.float64]:
    """The place of each of ``out`` positions on an axis of ``size``
    (coordinate_transformation_mode). ``ends`` is the part of it that tf_crop_and_resize keeps, as
    fractions.
    """
    o, width = np.arange(out, dtype=np.float64), scale * size
    if mode == "asymmetric":
        return o / scale
    if mode == "align_corners":
        return o * ((size - 1) / (width - 1)) if width != 1 else o * 0
    if mode == "tf_crop_and_resize":
        begin, end = (e * (size - 1) for e in ends)
        return begin + o * ((end - begin) / (width - 1)) if width > 1 else o * 0 + (begin + end) / 2
    if mode == "pytorch_half_pixel" and width <= 1:
        return o * 0  # ONNX's text; its reference in Python has -0.5
    half = (o + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        return half + size / 2 * (1 - out / width)
    return half


def _rounded(at: NDArray[np.float64], mode: str) -> NDArray[np.float64]:
    """``at`` rounded by ``mode``. A half may be off by a rounding error, so values near a half
    become the half first.
    """
    near = np.round(2 * at) / 2
    at = np.where(np.abs(at - near) < 1e-9, near, at)
    if mode in ("floor", "round_prefer_ceil"):
        return np.floor(at if mode == "floor" else at + 0.5)
    return np.ceil(at if mode == "ceil" else at - 0.5)


def _keys(a: float) -> Any:
    """The cubic kernel of Keys (1981)."""

    def kernel(d: Array) -> Array:
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, a * (((d - 5) * d + 8) * d - 4)
        return np.where(d <= 1, near, np.where(d < 2, far, 0))

    return kernel


def _summed(
    x: Array, axis: int, at: Array, reach: int, shrink: float, kernel: Any, exclude: bool
) -> Array:
    """Each position as the weighted sum of its neighbours, one neighbour at a time."""
    size, base = x.shape[axis], np.floor(at).astype(np.int64)
    places = [base + k for k in range(1 - reach, reach + 1)]
    weights = [kernel(np.abs(p - at) * shrink) for p in places]
    if exclude:
        weights = [w * ((p >= 0) & (p < size)) for w, p in zip(weights, places, strict=True)]
    total = sum(weights)
    along = [-1 if a == axis else 1 for a in range(x.ndim)]
    y: Any = 0
    for place, weight in zip(places, weights, strict=True):
        if (weight != 0).any():
            part = np.take(x, np.clip(place, 0, size - 1), axis=axis)
            y = y + part * (weight / total).astype(x.dtype).reshape(along)
    return np.asarray(y, x.dtype)


class Upsample(OpRun):
    op_domain = ""

    def _run(self, x, scales=None, mode="nearest"):  # type: ignore[no-untyped-def]
        given = np.asarray(self.scales if scales is None else scales, np.float64)
        for axis, scale in enumerate(given):
            at = np.arange(floor(x.shape[axis] * scale)) / scale
            if mode == "nearest":
                x = np.take(x, np.floor(at + 1e-9).astype(np.int64), axis=axis)
            elif scale != 1:
                x = _summed(x, axis, at, 1, 1.0, lambda d: np.maximum(1 - d, 0), False)
        return (x,)


class GridSample(OpRun):
    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, grid, align_corners=0, mode="linear", padding_mode="zeros"
    ):
        if x.ndim != 4 or mode in ("cubic", "bicubic"):
            raise NotImplementedError("GridSample of volumes or by cubics is not computed")
        y = grid_sample(
            x, grid, method="nearest" if mode == "nearest" else "linear", padding=padding_mode,
            align_corners=bool(align_corners), layout="NCHW",
        )  # fmt: skip
        return (y.astype(x.dtype),)


RESIZING: Sequence[type[OpRun]] = (Resize, Upsample, GridSample)
