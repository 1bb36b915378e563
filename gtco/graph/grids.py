"""Finds float32 weights that are whole steps of a scale: those that a file keeps in 8 or 4 bits.

A file dequantizes its weights, and rewrites merge, turn, cut and fold what comes out. This module
reads the steps from the values at the end, so it does not depend on how they came there.

    [[ 0.5, 30],          [[ 1,  3],
     [-1.5, 10]]    ->     [-3,  1]]   times [0.5, 10]
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

# A value may differ from its step times the scale by float32's rounding, and once more by that of a
# factor that a rewrite folded into the weights.
TOLERANCE = 2.0**-22
_MOST = 127  # int8
_FARTHEST = 255  # steps from a zero point
_FIRST = 4  # columns that are looked at before all
_FEW = 4  # rows that are looked at before all


@dataclass(frozen=True)
class Grid:
    """Weights as whole numbers [k, columns] times the scale of each column, float32. If there is a
    ``zero`` point, int8, for each column, it is subtracted from the steps before.
    """

    steps: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None


def grid(weights: np.ndarray) -> Grid | None:
    """The grid of float32 weights [k, columns], with steps of int16 and no zero points; None if a
    column has no grid of up to 255 steps. The scale of a column is 1 for a column of zeros.
    """
    few = weights[:, :_FIRST]  # weights of no grid are to cost nothing
    if not weights.size or (few.shape != weights.shape and grid(few) is None):
        return None
    largest = np.take_along_axis(weights, np.abs(weights).argmax(axis=0)[None], axis=0)[0]
    largest = largest.astype(np.float64)  # by magnitude, with its sign
    if not np.isfinite(largest).all():  # a NaN or an infinity
        return None
    levels = _levels(weights, largest)
    if not levels.all():
        return None
    made = _rounded(weights, np.where(largest == 0, 1.0, np.abs(largest) / levels))
    # not so for scales that float32 holds with fewer bits, near its least numbers
    near = np.abs(made.steps * made.scale - weights) <= 2 * TOLERANCE * np.abs(weights)
    return made if near.all() else None


def in_bits(found: Grid, bits: int) -> Grid | None:
    """The grid with steps of int8, or of int4 for 4 bits. It has zero points if some column needs
    one; None if the steps of some column lie further apart.
    """
    most = 2 ** (bits - 1) - 1
    steps, scale = found.steps, found.scale
    low, high = steps.min(axis=0), steps.max(axis=0)
    # 128 steps are -128 with the opposite scale, as ONNX Runtime's quantizer makes them
    turned = (high == most + 1) & (low >= -most)
    steps, scale = np.where(turned, -steps, steps), np.where(turned, -scale, scale)
    low, high = np.where(turned, -high, low), np.where(turned, -low, high)
    dtype = np.dtype(np.int8 if bits == 8 else ml_dtypes.int4)
    if (low >= -most - 1).all() and (high <= most).all():
        return Grid(steps.astype(dtype), scale)
    low = np.minimum(low, 120 if bits == 4 else 0)  # so that int8 holds the zero point
    zero = -most - 1 - low  # the least step becomes the least number
    if (high + zero > most).any() or (zero > _MOST).any():
        return None
    return Grid((steps + zero).astype(dtype), scale, zero.astype(np.int8))


def _levels(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """How many steps the largest magnitude of each column is; 0 if its values are no whole
    steps.
    """
    found = np.where(largest == 0, 1, 0)
    few = weights[:: max(1, len(weights) // _FEW)]
    for level in (*range(1, 16), _MOST, _MOST + 1, *range(16, _MOST), *range(129, _FARTHEST + 1)):
        left = np.flatnonzero(found == 0)
        if not left.size:
            break
        near = left[_on_grid(few[:, left], np.abs(largest[left]) / level)]
        if near.size:
            near = near[_on_grid(weights[:, near], np.abs(largest[near]) / level)]
            found[near] = level
    return found


def _on_grid(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """For each column, whether all its values are whole steps of its scale."""
    exact = weights / scale
    steps = np.rint(exact)
    near: np.ndarray = (np.abs(exact - steps) <= TOLERANCE * np.abs(steps)).all(axis=0)
    return near


def _rounded(weights: np.ndarray, scale: np.ndarray) -> Grid:
    """The grid with scales of float32: of three neighbours the one that gives most values to the
    last bit.
    """
    steps = np.rint(weights / scale).astype(np.int16)
    near = scale.astype(np.float32)
    up, down = (np.nextafter(near, np.float32(to)) for to in (np.inf, -np.inf))
    best, most = near, (steps * near == weights).sum(axis=0)
    for other in (up, down):
        same = (steps * other == weights).sum(axis=0)
        best, most = np.where(same > most, other, best), np.maximum(same, most)
    return Grid(steps, best)
