"""Run the compiled model and its reference on every case, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import is_float, numpy_dtype
from gtco.support.errors import VerificationError
from gtco.verification.cases import (
    Range,
    Spec,
    cases,
    mask_of,
    nudged,
    ranges_to_try,
    usual,
)
from gtco.verification.compare import FLOOR, compare, spread
from gtco.verification.reference import Reference, open_reference
from gtco.verification.report import Difference, Top1, VerificationReport, nothing_compared
from gtco.verification.roles import Role
from gtco.verification.top1 import is_classifier, same_class_first

Array = NDArray[Any]

@dataclass(frozen=True)
class Bound:
    """``tolerance``: what an error may be of the magnitude around an element, which is ``floor``
    times the output's median at least. ``nudge``: by how much inputs are moved, of their own
    magnitude, to see how stable the reference is.
    """

    tolerance: float
    nudge: float
    floor: float = FLOOR


# By the precision that a model was compiled with. fp32 against fp32: sums in another order, and a
# few roundings of 2^-24, which the sums of a deep model lose in any order. bf16: every operand of
# every product is off by up to 2^-9, so what nearly cancels is as far off as its neighbours are.
# fp16: an eighth of that, and infinite beyond 65504, which is a failure like any other.
BOUNDS = {
    "fp32": Bound(1e-3, 2.0**-20),
    "bf16": Bound(0.1, 2.0**-9, 1.0),
    "fp16": Bound(0.0125, 2.0**-12, 1.0),
}
TOLERANCE = BOUNDS["fp32"].tolerance


def verify(
    compiled: Any,
    reference: Any,
    *,
    example_inputs: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
    check: bool = True,
) -> VerificationReport:
    """Compare a compiled model with its reference on every case of :func:`cases`.

    ``compiled`` is a ``CompiledModel`` or a loaded ``Model`` (``inputs``, ``outputs``, ``run(dict)
    -> dict``). ``reference`` is an ONNX path, bytes or ``ModelProto`` (run by ONNX Runtime), an
    ``nn.Module`` or ``ExportedProgram`` (run by PyTorch in evaluation mode; ``example_inputs`` as
    it was compiled with), or a function from inputs by name to outputs in order. Raises
    ``VerificationError`` when an output is wrong (unless ``check`` is false) or the reference
    cannot be run.

    ``tolerance`` is by default that of :data:`BOUNDS` for the precision that the model was compiled
    with. A classifier of less than fp32 is also held to put the same class first
    (:mod:`gtco.verification.top1`).

    Where an output is over the tolerance, the reference is run again on inputs that differ by
    roundings, and by other kernels where it has some: an error within what it changes by itself is
    no failure, and the report counts it as unstable.
    """
    model = getattr(compiled, "model", compiled)
    precision = getattr(model, "metadata", {}).get("precision", "fp32")
    bound = BOUNDS[precision]
    tolerance = bound.tolerance if tolerance is None else tolerance
    top1: Top1 | None = None
    differences: list[Difference] = []
    sizes = {spec.name: int(np.prod(spec.shape)) for spec in model.outputs}
    with ExitStack() as stack:
        source = open_reference(
            reference, stack, [spec.name for spec in model.inputs], example_inputs
        )
        ranges = accepted_ranges(model.inputs, source, seed)
        masks = [s.name for s in model.inputs if mask_of(s, source.roles) is not None]
        tried = cases(model.inputs, seed, source.roles, ranges)
        if source.examples is not None and _fit(model.inputs, source.examples):
            tried = {"example": dict(source.examples), **tried}
        for case, inputs in tried.items():
            expected = _answer(source, case, inputs)
            actual = model.run(inputs)
            if len(expected) != len(model.outputs):
                raise VerificationError(
                    f"{source.name} gives {len(expected)} outputs, the compiled model has "
                    f"{len(model.outputs)}: not the same model"
                )
            pairs = [
                (spec.name, actual[spec.name], e)
                for spec, e in zip(model.outputs, expected, strict=True)
            ]
            found = [compare(case, *pair, tolerance, floor=bound.floor) for pair in pairs]
            if any(d.failure for d in found) and (
                noise := _noise(source, inputs, masks, expected, bound.nudge)
            ):
                found = [
                    compare(case, *pair, tolerance, moved, bound.floor) if d.failure else d
                    for d, pair, moved in zip(found, pairs, noise, strict=True)
                ]
            differences += found
        if precision != "fp32" and is_classifier(model.inputs, model.outputs):
            top1 = same_class_first(model, source.run, seed, source.roles, ranges, tolerance)
    differences += nothing_compared(differences, sizes)
    report = VerificationReport(source.name, tolerance, tuple(differences), top1)
    if check:
        report.check()
    return report


def accepted_ranges(inputs: Sequence[Spec], source: Reference, seed: int) -> dict[str, Range]:
    """For each integer input that is no mask, the widest of :func:`ranges_to_try` that the
    reference takes; refused by all, the widest, so that the reference's own message is shown."""
    roles = source.roles
    open_ = {
        s.name: ranges_to_try(s, None if roles is None else roles.get(s.name, Role()))
        for s in inputs
        if numpy_dtype(s.dtype).kind in "iu" and mask_of(s, roles) is None
    }
    widest = {name: ranges[0] for name, ranges in open_.items()}
    narrowest = {name: ranges[-1] for name, ranges in open_.items()}

    def accepted(ranges: Mapping[str, Range]) -> bool:
        try:
            source.run(usual(inputs, np.random.default_rng(seed), roles, ranges))
        except Exception:
            return False
        return True

    if not open_ or accepted(widest) or not accepted(narrowest):
        return widest
    alone = {
        name: next(r for r in ranges if accepted(narrowest | {name: r}))
        for name, ranges in open_.items()
    }
    return alone if accepted(alone) else narrowest


def _fit(inputs: Sequence[Spec], arrays: Mapping[str, Array]) -> bool:
    """Are they of the compiled shapes? Those of a program with dynamic dimensions may not be."""
    return all(
        arrays[s.name].shape == s.shape and arrays[s.name].dtype == numpy_dtype(s.dtype)
        for s in inputs
    )


def _answer(source: Reference, case: str, inputs: Mapping[str, Array]) -> Sequence[Array]:
    try:
        return source.run(inputs)
    except Exception as error:
        raise VerificationError(
            f"{source.name} cannot run the model on {case} inputs: {error}"
        ) from error


def _noise(
    source: Reference,
    inputs: Mapping[str, Array],
    masks: Sequence[str],
    expected: Sequence[Array],
    nudge: float,
) -> list[Array] | None:
    """How far each element of each output moves when the reference rounds otherwise; None where
    there is no other way to run it."""
    rng = np.random.default_rng(0)
    others = []
    for _ in range(2):
        moved = nudged(inputs, masks, rng, nudge)
        if any(not np.array_equal(moved[k], inputs[k], equal_nan=True) for k in _floats(inputs)):
            others.append((source.run, moved))
    if source.otherwise is not None:
        others.append((source.otherwise, dict(inputs)))
    noise: list[Array] | None = None
    for run, moved in others:
        try:
            outputs = run(moved)
        except Exception:
            continue  # a reference that refuses the neighbour of an input says nothing of it
        found = [spread(o, e) for o, e in zip(outputs, expected, strict=True)]
        noise = found if noise is None else list(map(np.maximum, noise, found))
    return noise


def _floats(inputs: Mapping[str, Array]) -> list[str]:
    return [name for name, value in inputs.items() if is_float(value.dtype)]
