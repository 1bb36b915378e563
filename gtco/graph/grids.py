"""Finds float32 weights that are whole steps of a scale: those that a file keeps in 8 or 4 bits.

A file dequantizes its weights, and rewrites merge, turn, cut and fold what comes out. This module
reads the steps from the values at the end, so it does not depend on how they came there.

    [[ 0.5, 30],          [[ 1,  3],
     [-1.5, 10]]    ->     [-3,  1]]   times [0.5, 10]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

# A value may differ from its step times the scale by float32's rounding, and once more by that of a
# factor that a rewrite folded into the weights.
TOLERANCE = 2.0**-22
_MOST = 127  # int8
_FARTHEST = 255  # steps from a zero point
_FIRST = 4  # columns that are looked at before all
_FEW = 8  # rows that are looked at before all
# Weights that are taken at once, so that what is computed of them stays in the cache, and the
# columns of these.
_AT_ONCE = 1 << 16
_WIDTH = 256
# Two different fractions of denominators up to 255 are 2**-16 apart or more. So of a number near
# one, this many equal parts of 0 to 1 tell which.
_PARTS = 1 << 18


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
    steps = np.empty(weights.shape, np.int16)
    scale = np.empty(weights.shape[1:], np.float32)
    width = max(_WIDTH, _AT_ONCE // len(weights))
    for start in range(0, weights.shape[1], width):
        columns = slice(start, start + width)
        found = _scales(np.ascontiguousarray(weights[:, columns]), steps[:, columns])
        if found is None:
            return None
        scale[columns] = found
    return Grid(steps, scale)


def _scales(weights: np.ndarray, steps: np.ndarray) -> np.ndarray | None:
    """The scales of some columns; writes their steps."""
    largest = np.maximum(weights.max(axis=0), -weights.min(axis=0)).astype(np.float64)
    if not np.isfinite(largest).all():  # a NaN or an infinity
        return None
    levels = _levels(weights, largest)
    if not levels.all():
        return None
    return _rounded(weights, np.where(largest == 0, 1.0, largest / levels), steps)


def in_bits(found: Grid, bits: int) -> Grid | None:
    """The grid with steps of int8, or of int4 for 4 bits. It has zero points if some column needs
    one; None if the steps of some column lie further apart.
    """
    most = 2 ** (bits - 1) - 1
    steps, scale = found.steps, found.scale
    low, high = steps.min(axis=0), steps.max(axis=0)
    # 128 steps are -128 with the opposite scale, as ONNX Runtime's quantizer makes them
    turned = (high == most + 1) & (low >= -most)
    low, high = np.where(turned, -high, low), np.where(turned, -low, high)
    zero = None
    if (low < -most - 1).any() or (high > most).any():
        low = np.minimum(low, 120 if bits == 4 else 0)  # so that int8 holds the zero point
        zero = -most - 1 - low  # the least step becomes the least number
        if (high + zero > most).any() or (zero > _MOST).any():
            return None
    if turned.any():
        steps, scale = np.where(turned, -steps, steps), np.where(turned, -scale, scale)
    dtype = np.dtype(np.int8 if bits == 8 else ml_dtypes.int4)
    if zero is None:
        return Grid(steps.astype(dtype), scale)
    return Grid((steps + zero).astype(dtype), scale, zero.astype(np.int8))


def _levels(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """How many steps the largest magnitude of each column is, as few as possible; 0 if its values
    are not whole steps.

    A value divided by the largest one is a fraction. The number of steps is the least common
    multiple of all these fractions' denominators: mostly one of the first few is it already.
    """
    found = _denominators(weights[:: max(1, len(weights) // _FEW)], largest)
    levels = np.where(found.all(axis=0), found.max(axis=0), 0).astype(np.int64)
    left = np.flatnonzero(levels)
    left = left[~_on_grid(weights[:, left], largest[left], levels[left])]
    if left.size:
        found = _denominators(weights[:, left], largest[left])
        whole = np.ones(len(left), np.int64)
        for row in found:
            whole = np.minimum(np.lcm(whole, row), _FARTHEST + 1)
        whole[whole > _FARTHEST] = 0
        levels[left] = 0
        left, whole = left[whole > 0], whole[whole > 0]
        levels[left] = np.where(_on_grid(weights[:, left], largest[left], whole), whole, 0)
    return levels


def _denominators(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """For each weight divided by the largest of its column, the denominator of the fraction that it
    is near; 0 if it is near none.
    """
    parts = np.where(largest == 0, 0.0, _PARTS / np.where(largest == 0, 1.0, largest))
    found: np.ndarray = _fractions()[np.rint(np.abs(weights) * parts).astype(np.int32)]
    return found


@cache
def _fractions() -> np.ndarray:
    """The denominator of the fraction of up to 255 in or beside each part of 0 to 1; 0 if there is
    none.
    """
    table = np.zeros(_PARTS + 2, np.uint8)
    for below in range(_FARTHEST, 0, -1):  # the reduced fraction comes last
        at = np.rint(np.arange(below + 1) * (_PARTS / below)).astype(int)
        for beside in (-1, 0, 1):
            table[at + beside] = below
    return table


def _on_grid(weights: np.ndarray, largest: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """For each column, whether all its values are whole steps, of which the largest has so many."""
    near = np.ones(len(levels), bool)
    scale = np.where(largest == 0, 1.0, largest / levels)
    for rows in _parts(weights):
        exact: np.ndarray = weights[rows] / scale
        steps = np.rint(exact)
        near &= (np.abs(exact - steps) <= TOLERANCE * np.abs(steps)).all(axis=0)
    return near


def _rounded(weights: np.ndarray, scale: np.ndarray, steps: np.ndarray) -> np.ndarray | None:
    """Scales of float32: of three neighbours the one that gives most values to the last bit. Writes
    the steps. None if some value is far from its step times the scale.
    """
    near = scale.astype(np.float32)
    up, down = (np.nextafter(near, np.float32(to)) for to in (np.inf, -np.inf))
    same = np.zeros((3, len(scale)), np.int64)
    for rows in _parts(weights):
        part = weights[rows]
        whole = np.rint(part / scale).astype(np.float32)
        steps[rows] = whole
        for count, one in zip(same, (near, up, down), strict=True):
            count += (whole * one == part).sum(axis=0)
    best = np.choose(same.argmax(axis=0), (near, up, down))
    if (same.max(axis=0) == len(weights)).all():
        return best
    # not near for scales that float32 holds with fewer bits, near its least numbers
    for rows in _parts(weights):
        part = weights[rows]
        if not (np.abs(steps[rows] * best - part) <= 2 * TOLERANCE * np.abs(part)).all():
            return None
    return best


def _parts(weights: np.ndarray) -> Iterator[slice]:
    """Neighbouring rows, as many as are taken at once."""
    count = max(1, _AT_ONCE // max(1, weights.shape[1]))
    for start in range(0, len(weights), count):
        yield slice(start, start + count)
