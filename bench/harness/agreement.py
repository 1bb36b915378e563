"""Compares the outputs of the systems with those of one of them, to see if all compute the same
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gtco.verification.outputs import Verdict

Outputs = Sequence[np.ndarray]
# a system's outputs, the reference's, the reference's name -> whether the former are right
Judge = Callable[[Outputs, Outputs, str], Verdict]


@dataclass(frozen=True)
class Agreement:
    """How far one system's outputs are from the reference's.

    ``difference``: the largest |output - reference| over the reference's largest magnitude; None if
    they cannot be compared, and for the reference itself. ``reason``: why this is not the same
    model; None if it is. ``judged``: why the outputs are right, where they differ from the
    reference's by more than the tolerance.
    """

    difference: float | None
    reason: str | None = None
    judged: str | None = None


def agree(
    outputs: Mapping[str, Outputs],
    reference: str,
    tolerance: float,
    judge: Judge | None = None,
    own: Collection[str] = (),
) -> dict[str, Agreement]:
    """Compares each system's outputs with those of ``reference``, or of the first system that is
    not gtco's own if the reference is absent. Where they differ by more than the tolerance,
    ``judge`` decides. gtco's own are those in ``own``, and ``gtco`` and ``gtco:quick`` by name: a
    fault that two of them share would not be seen.

    No system is compared with itself: the reference has no difference, and neither have gtco's own
    systems if there are no others.
    """
    peers = (name for name in outputs if name not in own and name.partition(":")[0] != "gtco")
    others = [reference, *peers]
    against = next((name for name in others if name in outputs), None)
    return {
        name: Agreement(None)
        if against in (None, name)
        else _compare(actual, outputs[against], against, tolerance, judge)
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
    actual: Outputs, expected: Outputs, against: str, tolerance: float, judge: Judge | None
) -> Agreement:
    largest, reason = largest_difference(actual, expected)
    difference = largest if reason is None else None
    if difference is not None and difference > tolerance:
        reason = f"off by {difference:.1e} of the largest magnitude (tolerance {tolerance:.0e})"
    shapes = [[x.shape for x in made] for made in (actual, expected)]
    if reason is None or judge is None or shapes[0] != shapes[1]:
        return Agreement(difference, reason)
    verdict = judge(actual, expected, against)
    if verdict.right:
        return Agreement(difference, judged=verdict.why)
    return Agreement(difference, f"{reason}; {verdict.why}")


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
