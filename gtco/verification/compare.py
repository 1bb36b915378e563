"""One output beside its reference: how far off is it, measured where it is off?

fp32 sums in another order differ by some 1e-7 of the magnitudes that go into them, and those are
about the magnitudes around the element, not the largest in the tensor: a single huge element must
hide no error elsewhere. So every element has a scale of its own (:func:`scales`).
"""

from __future__ import annotations

from dataclasses import dataclass
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
    exact: Array | None = None,
    least: float = 0.0,
) -> Difference:
    """One output against its reference.

    Another shape or dtype, or infinities and NaNs in other places, are failures; integers and
    booleans must be equal; floats may differ by ``tolerance`` times their scale, and by ``least``.
    ``exact`` is what float64 gives: an element that differs from the reference and not from it is
    right. ``noise`` is how far each element moves under rounding (:func:`spread`): the error is
    compared with that too, which excuses what no arithmetic of this precision can get right.
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
        with np.errstate(over="ignore"):  # beyond the output's range it is infinite there too
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
        # what is infinite in one of them is excused where rounding decides over that
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
    """How far each element is off. ``absolute`` is infinite where one alone is infinite or NaN, and
    ``relative``, of ``scale``, too. ``same_nonfinite``: how many are the same infinity or NaN.
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
        """By element the one that is less off."""
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
    """What is wrong, and the three answers where it is worst."""
    nonfinite = beyond & np.isinf(off.absolute)
    if nonfinite.any():
        return (
            f"{int(nonfinite.sum())} elements are infinite or NaN where the reference's are not so"
        )
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
    case: str,
    output: str,
    actual: Array,
    expected: Array,
    noise: Array | None,
    exact: Array | None,
) -> Difference:
    """Integers and booleans: as many may differ as ``noise`` makes likely."""
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
    excused = noise is not None and count <= NOISE * int((noise != 0).sum())
    failure = None
    if count and not excused:
        failure = f"{count} of {differ.size} elements differ, by up to {absolute:g}"
    unstable = bool(count) and excused
    return Difference(
        case, output, absolute, relative, failure, expected.size, unstable, judged, peer
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
