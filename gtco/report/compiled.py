"""What a compile knows and its library does not: how its outputs compare with the reference, and
what tuning tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from gtco.driver.compiled import CompileReport
from gtco.report.facts import Facts
from gtco.support.sizes import said


def with_report(facts: Facts, report: CompileReport) -> Facts:
    """The facts of a library with the compile report of the same library."""
    reports = report.variants or {"": report}
    models = []
    for model in facts.models:
        one = reports[said(model.sizes) if report.variants else ""]
        tuning = tuning_facts(report, one)
        models.append(
            replace(
                model,
                verification=verification_facts(one.verification),
                tuning=tuning if tuning["summary"] or tuning["stages"] else None,
            )
        )
    # a note of the compile after linking is in its report alone
    notes = dict.fromkeys([*facts.notes, *report.notes])
    return replace(facts, notes=tuple(notes), models=tuple(models))


def verification_facts(found: Any) -> dict[str, Any] | None:
    """A ``VerificationReport`` as JSON. An error that is no number is None."""
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
