"""The comparisons and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gtco.support.counting import counted
from gtco.support.errors import VerificationError


@dataclass(frozen=True)
class Difference:
    """One output in one case.

    - ``absolute``: max |a - e|;
    - ``relative``: max of |a - e| over the magnitude around the element (``compare.scales``);
    - ``compared``: the number of elements that both count: those that are finite in the reference;
    - ``failure``: why this output is wrong; None if it is right;
    - ``unstable``: the error is over the tolerance but within the error of rounding there;
    - ``judged``: the output differs from the reference by more than the tolerance, and float64
      decided. Then e is float64's value if that is nearer;
    - ``reference_error``: the largest error of the reference itself against float64, if float64
      decided.
    """

    case: str
    output: str
    absolute: float
    relative: float
    failure: str | None = None
    compared: int = 0
    unstable: bool = False
    judged: bool = False
    reference_error: float = 0.0

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if self.failure:
            return "wrong"
        if self.unstable:
            return "unstable"
        return "float64 agrees" if self.judged else "agrees"


@dataclass(frozen=True)
class Top1:
    """The number of ``images`` for which the compiled model and its reference have the same first
    class.

    ``wrong``: the images with another first class, though the reference's first two classes are
    further apart than the tolerance can explain.
    """

    images: int
    agreed: int
    wrong: int

    def __str__(self) -> str:
        text = f"the same class first on {self.agreed} of {self.images} images"
        ties = self.images - self.agreed - self.wrong
        return text + (f"; near ties between two classes on {ties} more" if ties else "")


@dataclass(frozen=True)
class VerificationReport:
    """All outputs in all cases.

    - ``reference``: its name;
    - ``tolerance``: on ``relative``;
    - ``top1``: if the model is a classifier and was compiled in less than fp32;
    - ``judge``: the judge that decided between the two; None if nothing had to be decided, or
      nothing could be;
    - ``unjudged``: why nothing could be decided.
    """

    reference: str
    tolerance: float
    differences: tuple[Difference, ...]
    top1: Top1 | None = None
    judge: str | None = None
    unjudged: str | None = None

    @property
    def failures(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if d.failure)

    @property
    def passed(self) -> bool:
        return not self.failures and not (self.top1 and self.top1.wrong)

    @property
    def worst(self) -> Difference | None:
        """The difference with the largest relative error."""
        return max(self.differences, key=lambda d: d.relative, default=None)

    @property
    def decided(self) -> list[str]:
        """The decisions of float64, and why it could not decide."""
        lines = []
        if judged := [d for d in self.differences if d.judged]:
            off = max(d.reference_error for d in judged)
            lines.append(
                f"{self.judge} decided {len(judged)} of them; {self.reference}'s own error against "
                f"it is up to {off:.1e}"
            )
        if self.unjudged:
            lines.append(f"float64 could not decide: {self.unjudged}")
        return lines

    def check(self) -> None:
        """Raises a ``VerificationError`` that lists every failure."""
        if not self.passed:
            lines = [f"  {d.output} on {d.case} inputs: {d.failure}" for d in self.failures]
            if self.top1 and self.top1.wrong:
                lines.append(f"  {self.top1}")
            tried = len(self.differences) + (self.top1 is not None)
            raise VerificationError(
                f"the compiled model differs from {self.reference} in {len(lines)} of {tried} "
                "comparisons:\n" + "\n".join(lines) + "\n" + self._advice(),
                self,
            )

    def _advice(self) -> str:
        """The meaning of the failure and what to do."""
        if self.judge is not None:
            cause = (
                f"{self.judge} decided where the two differ, so this is a bug of gtco, or "
                "--precision bf16 or fp16, which ends at 65504, is too coarse for the model, or "
                "numbers below 1.2e-38 matter in it, which gtco takes for zero"
            )
        else:
            cause = (
                "This is a bug of gtco, an ill-conditioned model or one that --precision bf16 is "
                "too coarse for, or fp16, which ends at 65504"
            )
            if self.unjudged:
                cause += f" (float64 could not decide: {self.unjudged})"
        return (
            f"{cause}. Compile with --precision fp32, with --no-simplify, and with --dump DIR, to "
            "find the phase that is wrong."
        )

    def __str__(self) -> str:
        verdict = "agrees with" if self.passed else "differs from"
        text = f"{verdict} {self.reference} in {counted(len(self.differences), 'comparison')}"
        if self.worst is None:
            return text
        worst = f"{self.worst.relative:.1e} ({self.worst.output} on {self.worst.case} inputs)"
        text += f", largest relative error {worst}"
        text += "".join(f"; {line}" for line in self.decided)
        if unstable := sum(d.unstable for d in self.differences):
            text += f"; in {unstable} of them rounding alone changes the result as much"
        if self.top1 is not None:
            text += f"; {self.top1}"
        return text

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def nothing_compared(
    differences: Sequence[Difference], sizes: dict[str, int]
) -> tuple[Difference, ...]:
    """A failure for each output of which no element was compared in any case.

    If both are NaN everywhere, this is not agreement. ``sizes``: the number of elements of each
    output.
    """
    seen: dict[str, int] = dict.fromkeys(sizes, 0)
    for d in differences:
        seen[d.output] += d.compared
    failed = {d.output for d in differences if d.failure}
    return tuple(
        Difference(
            "all",
            output,
            float("inf"),
            float("inf"),
            "nothing was compared: the reference gives no finite number in any case",
        )
        for output, compared in seen.items()
        if not compared and sizes[output] and output not in failed
    )
