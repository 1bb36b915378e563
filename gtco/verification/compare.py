"""One output beside its reference: how far off is it, measured where it is off?

fp32 sums in another order differ by some 1e-7 of the magnitudes that go into them, and those are
about the magnitudes around the element, not the largest in the tensor: a single huge element must
hide no error elsewhere. So every element has a scale of its own (:func:`scales`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import is_float
from gtco.verification.report import Difference

Array = NDArray[Any]

ROW = 16  # a row has that many elements or more: short last axes are taken together
QUANTILE = 0.75  # of a row: above what ReLU and padding set to zero, below a few huge elements
FLOOR = 1e-2  # of the output's median magnitude: what rows that are nearly zero are held to
NOISE = 16  # times what the reference changes by, for an answer to count as unstable
ROUNDINGS = 16  # half-precision outputs may differ by that many of their roundings


def compare(
    case: str,
    output: str,
    actual: Array,
    expected: Array,
    tolerance: float,
    noise: Array | None = None,
    floor: float = FLOOR,
) -> Difference:
    """One output against its reference.

    Another shape or dtype, or infinities and NaNs in other places, are failures; integers and
    booleans must be equal; floats may differ by ``tolerance`` times their scale. ``noise`` is how
    far each element of the reference moves under rounding (:func:`spread`): the error is compared
    with that too, which excuses what no fp32 arithmetic can get right.
    """

    def wrong(reason: str) -> Difference:
        return Difference(case, output, np.inf, np.inf, reason)

    if actual.shape != expected.shape:
        return wrong(f"shape {actual.shape}, the reference's is {expected.shape}")
    if actual.dtype != expected.dtype:
        return wrong(f"dtype {actual.dtype}, the reference's is {expected.dtype}")
    if not is_float(expected.dtype):
        return _equal(case, output, actual, expected, noise)
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(e)
    other = ~finite & ~((a == e) | (np.isnan(a) & np.isnan(e))) | finite & ~np.isfinite(a)
    settled = np.isfinite(noise) if noise is not None else np.True_
    if (other & settled).any():
        return wrong(
            f"{int(other.sum())} elements are infinite or NaN where the reference's are not so"
        )
    compared = finite & ~other
    if not compared.any():
        return Difference(case, output, 0.0, 0.0, unstable=bool(other.any()))
    error = np.where(compared, np.abs(np.where(compared, a, 0) - np.where(compared, e, 0)), 0)
    scale = scales(e, tolerance, expected.dtype, floor)
    absolute, relative = float(error.max()), float((error / scale).max())
    allowed = max(tolerance, _rounding(expected.dtype)) * scale
    beyond, unstable, failure = error > allowed, bool(other.any()), None
    if noise is not None and beyond.any():
        moved = NOISE * _over_rows(np.where(np.isfinite(noise), noise, np.inf), np.max)
        unstable, beyond = True, error > allowed + moved
    if beyond.any():
        at = np.unravel_index(int((beyond * error / scale).argmax()), error.shape)
        failure = (
            f"off by {error[at]:.3g} at {[int(i) for i in at]}, {error[at] / scale[at]:.3g} of the "
            f"magnitude around it (tolerance {tolerance:g}); {int(beyond.sum())} of "
            f"{error.size} elements are"
        )
        unstable = False
    return Difference(case, output, absolute, relative, failure, int(compared.sum()), unstable)


def scales(expected: Array, tolerance: float, dtype: Any, floor: float = FLOOR) -> Array:
    """What the error of each element is measured against, in the shape of ``expected`` (float64).

    The largest of: its own magnitude; the upper quartile of the magnitudes in its row; ``floor``
    times the median magnitude of all that is not zero; the smallest normal number over the
    tolerance. 1 where the whole output is zero.
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
    """|one - other|, 0 where both are the same infinity or NaN, infinite where one alone is."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        moved = np.abs(a - b)
    return np.where(same, 0.0, np.where(np.isfinite(moved), moved, np.inf))


def _equal(
    case: str, output: str, actual: Array, expected: Array, noise: Array | None
) -> Difference:
    """Integers and booleans: as many may differ as ``noise`` makes likely."""
    differ = actual != expected
    count = int(differ.sum())
    distance = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    absolute = float(distance.max()) if distance.size else 0.0
    relative = float((distance / np.maximum(1, np.abs(expected.astype(np.float64)))).max(initial=0))
    excused = noise is not None and count <= NOISE * int((noise != 0).sum())
    failure = None
    if count and not excused:
        failure = f"{count} of {differ.size} elements differ, by up to {absolute:g}"
    return Difference(
        case, output, absolute, relative, failure, expected.size, bool(count) and excused
    )


def _rounding(dtype: Any) -> float:
    """What several roundings to the type cost; nothing that counts but in half precision."""
    if dtype.itemsize > 2:
        return 0.0
    return ROUNDINGS * (float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7)


def _over_rows(values: Array, reduce: Any) -> Array:
    """``reduce(rows, axis=1)`` of the last axes, as many as make :data:`ROW` elements, at every
    element of the row."""
    length, axes = 1, 0
    while length < ROW and axes < values.ndim:
        axes += 1
        length *= values.shape[-axes]
    rows = values.reshape(-1, length)
    reduced = reduce(rows, axis=1)[:, None]
    return np.broadcast_to(reduced, rows.shape).reshape(values.shape)


def _upper_quartile(rows: Array, axis: int) -> Array:
    """The element below which three quarters lie; of two, the smaller."""
    place = int(QUANTILE * (rows.shape[axis] - 1))
    result: Array = np.partition(rows, place, axis=axis).take(place, axis=axis)
    return result
