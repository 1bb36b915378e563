"""Judges outputs that were computed elsewhere: where two engines differ, float64 decides which is
right, as it does for ``--verify``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from gtco.verification.cases import mask_of
from gtco.verification.reference import Reference, onnx_reference
from gtco.verification.settle import BOUNDS, Settling, held

Array = NDArray[Any]


class _Spec(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether outputs are right, and why, as the rest of a sentence."""

    right: bool
    why: str


@dataclass(frozen=True)
class OutputJudge:
    """Judges outputs of the ONNX file ``model`` for ``inputs`` by name, computed in ``precision``.
    The file is read at the first question.
    """

    model: Path
    inputs: Mapping[str, Array]
    precision: str = "fp32"

    @cached_property
    def source(self) -> Reference:
        return onnx_reference(self.model, "the reference")

    def __call__(
        self, actual: Sequence[Array], expected: Sequence[Array], reference: str
    ) -> Verdict:
        """Whether ``actual`` is right, although it differs from ``expected``, which ``reference``
        gives. Both have the model's outputs in order.
        """
        source = replace(self.source, name=reference)
        specs = (_Spec(n, x.dtype.name, x.shape) for n, x in self.inputs.items())
        masks = [spec.name for spec in specs if mask_of(spec, source.roles) is not None]
        bound = BOUNDS[self.precision]
        how = Settling(bound, bound.tolerance, self.precision)
        pairs = [
            (f"output {number}", a, e)
            for number, (a, e) in enumerate(zip(actual, expected, strict=True))
        ]
        found = held(source, "these", self.inputs, pairs, masks, how)
        if failed := next((d for d in found if d.failure), None):
            if how.unjudged:
                return Verdict(False, f"float64 could not decide: {how.unjudged}")
            return Verdict(False, f"by float64 too {failed.output} is wrong: {failed.failure}")
        if any(d.unstable for d in found):
            worst = max(d.relative for d in found)
            return Verdict(True, f"off by {worst:.1e}, no more than rounding costs there")
        worst = max((d.reference_error for d in found if d.judged), default=0.0)
        if worst:
            return Verdict(True, f"float64 agrees with it, and {reference} is off by {worst:.1e}")
        return Verdict(True, "no element is off by more than the tolerance of its magnitude")
