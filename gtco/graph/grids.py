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
_HIGHEST, _LOWEST = 127, 128  # magnitudes of the largest and the least int8
_LEAST4, _MOST4 = -8, 7  # the range of int4
_FIRST = 4  # columns that are looked at before all
_FEW = 4  # rows that are looked at before all


@dataclass(frozen=True)
class Grid:
    """Weights as whole numbers, int8 or int4 [k, columns], times the scale of each column, float32.
    If there is a ``zero`` point, int8, for each column, it is subtracted from the steps before.
    """

    steps: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None


def grid(weights: np.ndarray) -> Grid | None:
    """The grid of float32 weights [k, columns]; None if a column has none whose steps int8 holds.
    The scale of a column is the largest possible, and 1 for a column of zeros. It is negative where
    the largest magnitude is a positive value of 128 steps, as ONNX Runtime's quantizer makes them.
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
    made = _rounded(weights, np.where(largest == 0, 1.0, _scale(largest, levels)))
    # not so for scales that float32 holds with fewer bits, near its least numbers
    near = np.abs(made.steps * made.scale - weights) <= 2 * TOLERANCE * np.abs(weights)
    return made if near.all() else None


def four_bits(found: Grid) -> Grid | None:
    """The grid with steps of int4, with zero points if some column needs one; None if its steps in
    some column lie further apart.
    """
    steps, scale = found.steps, found.scale
    least, most = steps.min(axis=0), steps.max(axis=0)
    if (most.astype(int) - least > _MOST4 - _LEAST4).any():
        return None
    # 8 steps are -8 with the opposite scale, as ONNX Runtime's quantizer makes them
    turned = (most == -_LEAST4) & (least >= -_MOST4)
    steps, scale = np.where(turned, -steps, steps), np.where(turned, -scale, scale)
    least, most = steps.min(axis=0), steps.max(axis=0)
    if (least >= _LEAST4).all() and (most <= _MOST4).all():
        return Grid(steps.astype(ml_dtypes.int4), scale)
    zero = _LEAST4 - least.astype(int)  # the least step becomes the least int4
    if (zero < -_LOWEST).any():
        return None
    zero = zero.astype(np.int8)
    return Grid((steps + zero).astype(ml_dtypes.int4), scale, zero)


def _scale(largest: np.ndarray, level: np.ndarray | int) -> np.ndarray:
    """The scale with which the largest value is so many steps: 128 are -128, and fewer have either
    sign.
    """
    return np.where(level == _LOWEST, -largest, np.abs(largest)) / level


def _levels(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """How many steps the largest magnitude of each column is; 0 if its values are no whole steps
    that int8 holds.
    """
    found = np.where(largest == 0, 1, 0)
    few = weights[:: max(1, len(weights) // _FEW)]
    for level in (*range(1, 16), _HIGHEST, _LOWEST, *range(16, _HIGHEST)):
        left = np.flatnonzero(found == 0)
        if not left.size:
            break
        near = left[_on_grid(few[:, left], _scale(largest[left], level))]
        if near.size:
            near = near[_on_grid(weights[:, near], _scale(largest[near], level))]
            found[near] = level
    return found


def _on_grid(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """For each column, whether all its values are whole steps of its scale that int8 holds."""
    exact = weights / scale
    steps = np.rint(exact)
    near = np.abs(exact - steps) <= TOLERANCE * np.abs(steps)
    return (near & (steps >= -128) & (steps <= 127)).all(axis=0)


def _rounded(weights: np.ndarray, scale: np.ndarray) -> Grid:
    """The grid with scales of float32: of three neighbours the one that gives most values to the
    last bit.
    """
    steps = np.rint(weights / scale).astype(np.int8)
    near = scale.astype(np.float32)
    up, down = (np.nextafter(near, np.float32(to)) for to in (np.inf, -np.inf))
    best, most = near, (steps * near == weights).sum(axis=0)
    for other in (up, down):
        same = (steps * other == weights).sum(axis=0)
        best, most = np.where(same > most, other, best), np.maximum(same, most)
    return Grid(steps, best)
