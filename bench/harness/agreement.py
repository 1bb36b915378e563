"""Compares the outputs of the systems with those of one of them, to see if all compute the same
model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """How far one system's outputs are from the reference's.

    ``difference``: the largest |output - reference| over the reference's largest magnitude; None if
    they cannot be compared, and for the reference itself. ``reason``: why this is not the same
    model; None if it is.
    """

    difference: float | None
    reason: str | None = None


def agree(
    outputs: Mapping[str, Sequence[np.ndarray]], reference: str, tolerance: float
) -> dict[str, Agreement]:
    """Compares each system's outputs with those of ``reference``, or of the first system that is
    not gtco if the reference is absent.

    No system is compared with itself: the reference has no difference, and neither has gtco if it
    is the only system.
    """
    others = [reference, *(name for name in outputs if name != "gtco")]
    against = next((name for name in others if name in outputs), None)
    return {
        name: Agreement(None)
        if against in (None, name)
        else _compare(actual, outputs[against], tolerance)
        for name, actual in outputs.items()
    }


def losses(outputs: Mapping[str, Sequence[np.ndarray]], truth: str) -> dict[str, float]:
    """By system: the root mean square of the difference from the outputs of ``truth``, over that of
    these outputs; all outputs as one vector. Systems without such outputs are left out.
    """
    if truth not in outputs:
        return {}
    wanted = [x.shape for x in outputs[truth]]
    exact = _vector(outputs[truth])
    size = float(np.linalg.norm(exact)) or 1.0
    return {
        name: float(np.linalg.norm(_vector(made) - exact)) / size
        for name, made in outputs.items()
        if name != truth and [x.shape for x in made] == wanted
    }


def _vector(outputs: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.astype(np.float64).ravel() for x in outputs] or [np.zeros(0)])


def _compare(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float
) -> Agreement:
    difference, reason = largest_difference(actual, expected)
    if reason is not None:
        return Agreement(None, reason)
    if difference > tolerance:
        reason = f"off by {difference:.1e} of the largest magnitude (tolerance {tolerance:.0e})"
    return Agreement(difference, reason)


def largest_difference(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> tuple[float, str | None]:
    """The largest |a - e| over max |e| of each output. If the two cannot be compared it is
    infinite, and the reason is given.
    """
    if len(actual) != len(expected):
        return math.inf, f"{len(actual)} outputs, the reference has {len(expected)}"
    worst, compared = 0.0, False
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != e.shape:
            return math.inf, f"output {number} has shape {a.shape}, the reference's has {e.shape}"
        a64, e64 = a.astype(np.float64), e.astype(np.float64)
        if not np.array_equal(np.isfinite(a64), np.isfinite(e64)):
            return (
                math.inf,
                f"output {number} is not finite where the reference's is, or the other way round",
            )
        finite = np.isfinite(e64)
        compared |= bool(finite.any()) or not a.size
        if finite.any():
            scale = float(np.abs(e64[finite]).max()) or 1.0
            worst = max(worst, float(np.abs(a64[finite] - e64[finite]).max()) / scale)
    if not compared:
        return math.inf, "no output has a finite number: nothing to compare"
    return worst, None
