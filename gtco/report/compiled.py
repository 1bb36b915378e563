"""What a compile knows and its library does not: how its outputs compare with the reference, what
its layers lose, and what tuning tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from gtco.driver.compiled import CompileReport
from gtco.report.facts import Facts, StageFacts
from gtco.support.counting import counted
from gtco.support.sizes import sizes_text

if TYPE_CHECKING:
    from gtco.driver.linking.layers import StageLosses
    from gtco.quantization.report import QuantizationReport


def with_report(facts: Facts, report: CompileReport) -> Facts:
    """The facts of a library with the compile report of the same library."""
    reports = report.variants or {"": report}
    models = []
    for model in facts.models:
        one = reports[sizes_text(model.sizes) if report.variants else ""]
        tuning = tuning_facts(report, one)
        models.append(
            replace(
                model,
                verification=verification_facts(one.verification),
                losses=losses_facts(one.losses, report.quantization, model.stages),
                tuning=tuning if tuning["summary"] or tuning["stages"] else None,
            )
        )
    # a note of the compile after linking is in its report alone
    notes = dict.fromkeys([*facts.notes, *report.notes])
    return replace(facts, notes=tuple(notes), models=tuple(models))


def verification_facts(found: Any) -> dict[str, Any] | None:
    """A ``VerificationReport`` as JSON. An error that is not a number is None."""
    if found is None:
        return None

    def number(value: float) -> float | None:
        return float(value) if isfinite(value) else None

    return {
        "passed": found.passed,
        "reference": found.reference,
        "tolerance": found.tolerance,
        "summary": str(found),
        "differences": [
            {
                "output": d.output,
                "case": d.case,
                "absolute": number(d.absolute),
                "relative": number(d.relative),
                "verdict": d.verdict,
            }
            for d in sorted(found.differences, key=lambda d: d.output)
        ],
    }


def losses_facts(
    stages: StageLosses | None,
    quantized: QuantizationReport | None,
    known: Sequence[StageFacts],
) -> dict[str, Any] | None:
    """What layers lose: the stages of a library, or the products of a model that was quantized on
    the way. None if neither was looked at. An error that is not a number is None.
    """
    if stages is not None:
        return {
            "reference": stages.reference,
            "inputs": stages.inputs,
            "measures": [
                {"name": "by itself", "text": "by the stage alone, on the inputs that it had"},
                {"name": "with all before", "text": "of its output in the run"},
            ],
            "layers": [
                {
                    "name": known[loss.stage].name,
                    "stage": loss.stage,
                    "errors": [loss.own, loss.accumulated],
                }
                for loss in stages.stages
            ],
            "left_out": list(stages.left_out),
        }
    if quantized is None:
        return None
    of = {op.node: stage.number for stage in known for op in stage.operators if op.node}
    floats = sum(bool(layer.float_because) for layer in quantized.layers)
    asked = [layer for layer in quantized.layers if layer.sensitivity is not None]
    return {
        "reference": "the float model",
        "inputs": "samples of the data",
        "measures": [
            {"name": "by itself", "text": "of the outputs, if this product alone is in int8"},
            {"name": "what it reads", "text": "of the tensor that it reads, all of them in int8"},
        ],
        "layers": [
            {
                "name": layer.label,
                "stage": of.get(layer.node),
                "errors": [_finite(layer.sensitivity), _finite(layer.input_error)],
            }
            for layer in asked
        ],
        "left_out": [f"{counted(floats, 'product')} left in float"] if floats else [],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def tuning_facts(report: CompileReport, one: CompileReport) -> dict[str, Any]:
    """What tuning tried: sentences; each stage that was measured, heaviest first; and how many
    configs gave no program, by reason. ``report`` is that of the library, ``one`` its variant's.
    """
    summary: list[str] = []
    if report.tuned is not None:
        summary += [f"{report.tuned.elapsed:.1f} s: {report.tuned}"]
    summary += [line for line in (one.fusion, str(one.settled) if one.settled else "") if line]
    rows: Sequence[dict[str, Any]] = one.tuning or report.tuning
    names = "stage key occurrences candidates first last first_seconds seconds".split()
    return {
        "summary": summary,
        "stages": [{name: row[name] for name in names} for row in rows],
        "rejections": dict(one.rejections),
    }
