"""Compares one output with its reference: how large the error of each element is, and on which
scale.

fp32 sums in another order differ by about 1e-7 of the magnitudes that go into them. These are about
the magnitudes around the element, and not the largest in the tensor: a single huge element must not
hide errors elsewhere. So every element has its own scale (:func:`scales`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import is_float
from gtco.verification.report import Difference

Array = NDArray[Any]

ROW = 16  # a row has at least so many elements: short last axes are joined
QUANTILE = 0.75  # of a row: above the zeros of ReLU and padding, below a few huge elements
# The least scale, for rows that are nearly zero, as a share of the output's median magnitude.
FLOOR = 1e-2
NOISE = 16  # an error within so many times the reference's own change counts as unstable
MANY = 4  # of more than NOISE integers, so many times those that rounding moves may differ
QUANTIZED = 2  # bytes of integers that are steps of a scale, not indices
ROUNDINGS = 16  # half-precision outputs may differ by so many of their roundings


def compare(
    case: str,
    output: str,
    actual: Array,
    expected: Array,
    tolerance: float,
    noise: Array | None = None,
    floor: float = FLOOR,
    exact: Array | None = None,
    least: float = 0.0,
) -> Difference:
    """Compares one output with its reference.

    Another shape or dtype is a failure, and so are infinities and NaNs in other places. Integers
    and booleans must be equal. Floats may differ by ``tolerance`` times their scale, or by
    ``least`` if that is larger.

    - ``exact`` is the result of float64. An element that differs from the reference but agrees with
      float64 is right.
    - ``noise`` is how far rounding moves each element (:func:`spread`). The error is also compared
      with it; this excuses errors that no arithmetic of this precision can avoid.
    """

    def wrong(reason: str) -> Difference:
        return Difference(case, output, np.inf, np.inf, reason)

    if actual.shape != expected.shape:
        return wrong(f"shape {actual.shape}, the reference's is {expected.shape}")
    if actual.dtype != expected.dtype:
        return wrong(f"dtype {actual.dtype}, the reference's is {expected.dtype}")
    if not is_float(expected.dtype):
        return _equal(case, output, actual, expected, noise, exact)
    limit = max(tolerance, _rounding(expected.dtype))
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    off = _Off.between(a, e, expected.dtype, tolerance, floor, least)
    judged, peer = False, 0.0
    if exact is not None:
        # beyond the output's range the exact value becomes infinite too
        with np.errstate(over="ignore"):
            x = np.asarray(np.asarray(exact).astype(expected.dtype), np.float64)
        judged = bool((off.relative > limit).any())
        peer = float(
            _Off.between(e, x, expected.dtype, tolerance, floor, least).finite().max(initial=0)
        )
        off = off.nearer(_Off.between(a, x, expected.dtype, tolerance, floor, least))
    beyond = off.relative > limit
    unstable, failure = False, None
    if noise is not None and beyond.any():
        moved = NOISE * _over_rows(np.where(np.isfinite(noise), noise, np.inf), np.max)
        # an element that is infinite in only one is excused if rounding decides whether it is
        within = np.where(
            np.isinf(off.absolute), np.isinf(noise), off.absolute <= off.scale * limit + moved
        )
        unstable, beyond = True, beyond & ~within
    relative = off.finite(off.relative)
    if beyond.any():
        failure, unstable = _failure(off, beyond, tolerance, a, e, exact), False
    return Difference(
        case,
        output,
        float(off.finite().max(initial=0)),
        float(relative.max(initial=0)),
        failure,
        int(np.isfinite(off.absolute).sum() - off.same_nonfinite),
        unstable,
        judged,
        peer,
    )


@dataclass(frozen=True)
class _Off:
    """The error of each element.

    - ``absolute`` is infinite if only one of the two is infinite or NaN;
    - ``relative``, to the scale, is then infinite too;
    - ``same_nonfinite``: how many elements are the same infinity or NaN in both.
    """

    absolute: Array
    relative: Array
    scale: Array
    same_nonfinite: int

    @staticmethod
    def between(
        a: Array, e: Array, dtype: Any, tolerance: float, floor: float, least: float
    ) -> _Off:
        absolute = spread(a, e)
        scale = np.maximum(scales(e, tolerance, dtype, floor), least / max(tolerance, 1e-12))
        same = int((~np.isfinite(e) & (absolute == 0)).sum())
        return _Off(absolute, absolute / scale, scale, same)

    def nearer(self, other: _Off) -> _Off:
        """For each element the smaller of the two errors."""
        first = self.relative <= other.relative
        return _Off(
            np.where(first, self.absolute, other.absolute),
            np.where(first, self.relative, other.relative),
            np.where(first, self.scale, other.scale),
            max(self.same_nonfinite, other.same_nonfinite),
        )

    def finite(self, values: Array | None = None) -> Array:
        values = self.absolute if values is None else values
        return np.where(np.isfinite(values), values, 0.0)


def _failure(
    off: _Off, beyond: Array, tolerance: float, a: Array, e: Array, exact: Array | None
) -> str:
    """What is wrong, with the three values at the largest error."""
    nonfinite = beyond & np.isinf(off.absolute)
    if nonfinite.any():
        return f"{int(nonfinite.sum())} elements are infinite or NaN where the reference's are not"
    at = np.unravel_index(int(np.where(beyond, off.relative, -1).argmax()), beyond.shape)
    answers = f"it gives {a[at]:.6g}, the reference {e[at]:.6g}"
    if exact is not None:
        answers += f", float64 {float(exact[at]):.6g}"
    return (
        f"off by {off.absolute[at]:.3g} at {[int(i) for i in at]}, {off.relative[at]:.3g} of the "
        f"magnitude around it (tolerance {tolerance:g}): {answers}; {int(beyond.sum())} of "
        f"{beyond.size} elements are"
    )


def scales(expected: Array, tolerance: float, dtype: Any, floor: float = FLOOR) -> Array:
    """The scale of the error of each element, in the shape of ``expected`` (float64).

    It is the largest of: its own magnitude; the upper quartile of the magnitudes in its row;
    ``floor`` times the median magnitude of all elements that are not zero; the smallest normal
    number over the tolerance. It is 1 if the whole output is zero.
    """
    magnitude = np.where(np.isfinite(expected), np.abs(expected), 0)
    present = magnitude[magnitude > 0]
    if not present.size:
        return np.ones_like(magnitude)
    tiny = float(np.finfo(np.float32 if dtype.kind != "f" else dtype).tiny)
    median = float(np.partition(present, (present.size - 1) // 2)[(present.size - 1) // 2])
    least = max(floor * median, tiny / max(tolerance, 1e-12))
    around = _over_rows(magnitude, _upper_quartile)
    return np.maximum(np.maximum(magnitude, around), least)


def spread(one: Array, other: Array) -> Array:
    """|one - other|; 0 if both are the same infinity or NaN; infinite if only one is."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        moved = np.abs(a - b)
    return np.where(same, 0.0, np.where(np.isfinite(moved), moved, np.inf))


def _equal(
    case: str,
    output: str,
    actual: Array,
    expected: Array,
    noise: Array | None,
    exact: Array | None,
) -> Difference:
    """Compares integers and booleans. As many may differ as ``noise`` makes likely. Steps of a
    scale may differ by as much too, while an index may be any other where two candidates are equal.
    """
    differ = actual != expected
    judged, peer = False, 0.0
    if exact is not None:
        judged = bool(differ.any())
        peer = float(np.abs(expected.astype(np.float64) - exact.astype(np.float64)).max(initial=0))
        differ = differ & (actual != exact)
    count = int(differ.sum())
    distance = np.abs(actual.astype(np.float64) - expected.astype(np.float64)) * differ
    absolute = float(distance.max(initial=0))
    relative = float((distance / np.maximum(1, np.abs(expected.astype(np.float64)))).max(initial=0))
    excused = False
    if noise is not None:
        moved = int((noise != 0).sum())
        excused = count <= min(NOISE * moved, max(NOISE, MANY * moved))
        if expected.dtype != bool and expected.dtype.itemsize <= QUANTIZED:
            excused = excused and absolute <= NOISE * float(noise.max(initial=0))
    failure = None
    if count and not excused:
        failure = f"{count} of {differ.size} elements differ, by up to {absolute:g}"
    unstable = bool(count) and excused
    return Difference(
        case, output, absolute, relative, failure, expected.size, unstable, judged, peer
    )


def _rounding(dtype: Any) -> float:
    """The error of several roundings to the dtype. It matters only in half precision."""
    if dtype.itemsize > 2:
        return 0.0
    return ROUNDINGS * (float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7)


def _over_rows(values: Array, reduce: Any) -> Array:
    """``reduce(rows, axis=1)`` at every element of the row. A row is as many last axes as make
    :data:`ROW` elements.
    """
    length, axes = 1, 0
    while length < ROW and axes < values.ndim:
        axes += 1
        length *= values.shape[-axes]
    rows = values.reshape(-1, length)
    reduced = reduce(rows, axis=1)[:, None]
    return np.broadcast_to(reduced, rows.shape).reshape(values.shape)


def _upper_quartile(rows: Array, axis: int) -> Array:
    """The element with three quarters of the elements below it; of two, the smaller."""
    place = int(QUANTILE * (rows.shape[axis] - 1))
    result: Array = np.partition(rows, place, axis=axis).take(place, axis=axis)
    return result
