"""Runs the compiled model and its reference on every case, and compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import VerificationError
from gtco.verification.cases import (
    Range,
    Spec,
    cases,
    mask_of,
    ranges_to_try,
    table_of,
    usual,
)
from gtco.verification.reference import Reference, open_reference
from gtco.verification.report import Difference, Top1, VerificationReport, nothing_compared
from gtco.verification.roles import Role
from gtco.verification.settle import BOUNDS, TOLERANCE, Settling, held
from gtco.verification.top1 import is_classifier, same_class_first

Array = NDArray[Any]

__all__ = ["BOUNDS", "TOLERANCE", "verify"]


def verify(
    compiled: Any,
    reference: Any,
    *,
    example_inputs: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
    check: bool = True,
) -> VerificationReport:
    """Compares a compiled model with its reference on every case of :func:`cases`.

    - ``compiled`` is a ``CompiledModel`` or a loaded ``Model`` (``inputs``, ``outputs``,
      ``run(dict) -> dict``).
    - ``reference`` is an ONNX path, bytes or ``ModelProto`` (run by ONNX Runtime), an ``nn.Module``
      or ``ExportedProgram`` (run by PyTorch in evaluation mode), or a function from inputs by name
      to outputs in order.
    - ``example_inputs`` are those with which a PyTorch module was compiled.
    - ``tolerance`` is by default that of :data:`BOUNDS` for the precision of the compiled model.

    Raises ``VerificationError`` if an output is wrong (unless ``check`` is false) or if the
    reference cannot be run. A classifier of less than fp32 must also have the same first class
    (:mod:`gtco.verification.top1`).

    If an output is over the tolerance, float64 decides (:mod:`gtco.verification.judge`): an output
    that agrees with it is right. A remaining error is compared with the error of rounding there.
    This is the distance of the model's precision from float64, and the change of the reference on
    inputs that differ by roundings, and with other kernels if it has some. An error within that is
    no failure, and the report counts it as unstable. If float64 is not available, the report says
    why, and bounded outputs are held to their operator's absolute accuracy
    (:mod:`gtco.verification.floors`).
    """
    for spec in (*compiled.inputs, *compiled.outputs):
        if several := [size for size in spec.shape if isinstance(size, str)]:
            raise VerificationError(
                f"the library has several sizes of {several[0]!r}: verify one at a time, as "
                "gtco.load(path, dims=...) opens it"
            )
    precision = getattr(compiled, "metadata", {}).get("precision", "fp32")
    bound = BOUNDS[precision]
    tolerance = bound.tolerance if tolerance is None else tolerance
    top1: Top1 | None = None
    settled = Settling(bound, tolerance, precision)
    differences: list[Difference] = []
    sizes = {spec.name: int(np.prod(spec.shape)) for spec in compiled.outputs}
    with ExitStack() as stack:
        source = open_reference(
            reference, stack, [spec.name for spec in compiled.inputs], example_inputs
        )
        ranges = accepted_ranges(compiled.inputs, source, seed)
        known = source.roles or {}
        # a small step changes what these choose
        fixed = [
            s.name
            for s in compiled.inputs
            if mask_of(s, source.roles) is not None or table_of(known.get(s.name))
        ]
        tried = cases(compiled.inputs, seed, source.roles, ranges)
        if source.examples is not None and _fit(compiled.inputs, source.examples):
            tried = {"example": dict(source.examples), **tried}
        for case, inputs in tried.items():
            expected = _answer(source, case, inputs)
            actual = compiled.run(inputs)
            if len(expected) != len(compiled.outputs):
                raise VerificationError(
                    f"{source.name} gives {len(expected)} outputs, the compiled model has "
                    f"{len(compiled.outputs)}: not the same model"
                )
            pairs = [
                (spec.name, actual[spec.name], e)
                for spec, e in zip(compiled.outputs, expected, strict=True)
            ]
            differences += held(source, case, inputs, pairs, fixed, settled)
        if precision != "fp32" and is_classifier(compiled.inputs, compiled.outputs):
            answer = partial(_answer, source, "more random")
            top1 = same_class_first(compiled, answer, seed, source.roles, ranges, tolerance)
    differences += nothing_compared(differences, sizes)
    judge = source.judge.name if source.judge and any(d.judged for d in differences) else None
    report = VerificationReport(
        source.name, tolerance, tuple(differences), top1, judge, settled.unjudged
    )
    if check:
        report.check()
    return report


def accepted_ranges(inputs: Sequence[Spec], source: Reference, seed: int) -> dict[str, Range]:
    """For each integer input that is not a mask, the widest of :func:`ranges_to_try` that the
    reference accepts. If it refuses all, the widest, so that the user sees the reference's own
    message.
    """
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
    """True if they have the compiled shapes. Examples of a program with dynamic dimensions may have
    others.
    """
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
