"""Decides for outputs that differ from the reference by more than the plain tolerance: which of the
two is right, and whether the error is more than rounding costs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import is_float
from gtco.verification.cases import nudged
from gtco.verification.compare import FLOOR, compare, scales, spread
from gtco.verification.judge import Unjudged
from gtco.verification.reference import Reference
from gtco.verification.report import Difference

Array = NDArray[Any]
Pair = tuple[str, Array, Array]  # the output's name, the compiled model's, the reference's


@dataclass(frozen=True)
class Bound:
    """The bounds of one precision.

    - ``tolerance``: the allowed error as a share of the magnitude around an element;
    - ``floor``: that magnitude is at least so many times the output's median;
    - ``nudge``: how far inputs are moved, relative to their own magnitude, to test the reference's
      stability.
    """

    tolerance: float
    nudge: float
    floor: float = FLOOR


# By the precision of the compiled model. fp32 against fp32: sums in another order, and a few
# roundings of 2^-24, which the sums of a deep model lose in any order. bf16: every operand of every
# product is off by up to 2^-8, on average by less than half of that, so a sum that nearly cancels
# has the error of its terms. fp16: an eighth of that; beyond 65504 values are infinite, which is a
# failure like any other.
BOUNDS = {
    "fp32": Bound(1e-3, 2.0**-20),
    "bf16": Bound(0.1, 2.0**-9, 1.0),
    "fp16": Bound(0.0125, 2.0**-12, 1.0),
}
TOLERANCE = BOUNDS["fp32"].tolerance
GROSS = 0.1  # share of the magnitude around an element: more than any rounding
ALONE = 0.01  # share of the elements of an output


@dataclass
class Settling:
    """How outputs are compared. ``unjudged`` says why float64 could not decide; None while it
    could.
    """

    bound: Bound
    tolerance: float
    precision: str
    unjudged: str | None = None


def held(
    source: Reference,
    case: str,
    inputs: Mapping[str, Array],
    pairs: Sequence[Pair],
    masks: Sequence[str],
    how: Settling,
) -> list[Difference]:
    """The comparison of each of ``pairs``, which :func:`settle` decides where one fails. ``masks``
    are the inputs that are moved by no roundings.
    """
    found = [compare(case, *pair, how.tolerance, floor=how.bound.floor) for pair in pairs]
    if any(d.failure for d in found):
        found = settle(source, case, inputs, pairs, found, masks, how)
    return found


def settle(
    source: Reference,
    case: str,
    inputs: Mapping[str, Array],
    pairs: Sequence[Pair],
    found: Sequence[Difference],
    masks: Sequence[str],
    how: Settling,
) -> list[Difference]:
    """The plain comparisons ``found`` of ``pairs``, in which failures are compared again: with
    float64, and, if they still fail, with the error of rounding there.
    """
    exact = _exact(source, case, inputs, pairs, how)
    least = (0.0,) * len(pairs) if exact is not None or not source.floors else source.floors
    truths = exact if exact is not None else [None] * len(pairs)

    def again(noise: Sequence[Array | None]) -> list[Difference]:
        return [
            compare(case, *pair, how.tolerance, moved, how.bound.floor, truth, low)
            if d.failure
            else d
            for d, pair, moved, truth, low in zip(found, pairs, noise, truths, least, strict=True)
        ]

    judged = again([None] * len(pairs))
    if not any(d.failure for d in judged):
        return judged
    near = _neighbours(inputs, masks, how.bound.nudge)
    if exact is None:
        runs = [(source.run, x) for x in near]
        if source.otherwise is not None:
            runs.append((source.otherwise, dict(inputs)))
        noise = _moved(runs, [e for _, _, e in pairs])
    else:  # nothing from the reference: if its kernels are coarse, so are its changes
        assert source.judge is not None
        judge = source.judge
        runs = [(judge.exact, x) for x in near]
        rounded = (dict(inputs), *near) if judge.selects else (dict(inputs),)
        runs += [(lambda x: judge.rounded(x, how.precision), x) for x in rounded]
        noise = _moved(runs, exact)
    return again(noise) if noise is not None else judged


def _exact(
    source: Reference, case: str, inputs: Mapping[str, Array], pairs: Sequence[Pair], how: Settling
) -> list[Array] | None:
    if source.judge is None:
        return None
    try:
        exact = [np.asarray(x) for x in source.judge.exact(inputs)]
        shapes = [x.shape for x in exact]
        if shapes != [e.shape for _, _, e in pairs]:
            raise Unjudged(f"its outputs have the shapes {shapes}")
        apart = [_alone(*pair[1:], truth, how) for pair, truth in zip(pairs, exact, strict=True)]
        if max(apart, default=0) > ALONE:
            moved = [0.0] * len(exact)
            if source.judge.selects:  # rounding may change as many
                rounded = map(np.asarray, source.judge.rounded(inputs, how.precision))
                moved = [_alone(x, x, truth, how) for x, truth in zip(rounded, exact, strict=True)]
            if any(far > max(ALONE, least) for far, least in zip(apart, moved, strict=True)):
                raise Unjudged(
                    f"on {case} inputs it differs from both in {max(apart):.0%} of the elements on "
                    f"which {source.name} and the compiled model agree"
                )
        return exact
    except Unjudged as why:
        how.unjudged = str(why)
        return None


def _alone(actual: Array, expected: Array, truth: Array, how: Settling) -> float:
    """The share of elements on which only float64 is grossly off. If it is large, and larger than
    that of roundings, float64 computes another model.
    """
    if actual.shape != expected.shape or not is_float(expected.dtype) or not expected.size:
        return 0.0
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = np.maximum(*(scales(x, how.tolerance, expected.dtype) for x in (e, truth)))
    gross = max(GROSS, 2 * how.tolerance)
    alone = (spread(a, e) <= how.tolerance * scale) & (spread(truth, e) > gross * scale)
    return float(alone.mean())


def _neighbours(
    inputs: Mapping[str, Array], masks: Sequence[str], nudge: float
) -> list[dict[str, Array]]:
    """Two inputs that differ from these by roundings; none if nothing can be moved."""
    rng = np.random.default_rng(0)
    near = [nudged(inputs, masks, rng, nudge) for _ in range(2)]
    return [
        x
        for x in near
        if any(not np.array_equal(x[k], inputs[k], equal_nan=True) for k in _floats(inputs))
    ]


def _moved(
    runs: Sequence[tuple[Callable[[Mapping[str, Array]], Sequence[Array]], dict[str, Array]]],
    unmoved: Sequence[Array],
) -> list[Array] | None:
    """How far each element of each output moves at most in these runs; None if no run ends."""
    noise: list[Array] | None = None
    for run, inputs in runs:
        try:
            outputs = run(inputs)
        except Exception:
            continue  # if the neighbour of an input is refused, this tells nothing about the input
        if [np.shape(o) for o in outputs] != [e.shape for e in unmoved]:
            continue
        found = [spread(o, e) for o, e in zip(outputs, unmoved, strict=True)]
        noise = found if noise is None else list(map(np.maximum, noise, found))
    return noise


def _floats(inputs: Mapping[str, Array]) -> list[str]:
    return [name for name, value in inputs.items() if is_float(value.dtype)]
