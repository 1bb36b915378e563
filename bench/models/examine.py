"""Verifies a compiled library and measures where its time goes, in a process of its own, so that a
library that crashes costs only its own result.

``python -m bench.models.examine JOB.json`` is that process. ``gtco.verification`` compares with
ONNX Runtime on the model's ONNX, and with float64 where the two differ. The time of a stage is the
median of a few profiled runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtco.codegen.processes import die_with_parent, python
from gtco.verification import Difference, VerificationReport

from ..harness.process import child_environment

REPEAT = 5  # profiled runs that a stage's time is the median of


@dataclass(frozen=True)
class Examination:
    """The results for one library.

    - ``difference``: the largest relative difference, from float64 if that had to decide; None if
      nothing could be compared
    - ``disagrees``: why the outputs are wrong; None if they are right
    - ``fallbacks``: by operator the share of the time in stages that the fallback compiled, the
      largest first
    - ``judged``: where ONNX Runtime differs or cannot run the model, and the library is right:
      float64 or PyTorch decided
    - ``unsettled``: where the library is off by more than the tolerance, but not by more than
      rounding costs there: neither a disagreement nor an agreement
    - ``error``: why there is no result at all
    """

    difference: float | None = None
    disagrees: str | None = None
    fallbacks: tuple[tuple[str, float], ...] = ()
    judged: str | None = None
    unsettled: str | None = None
    error: str | None = None

    @property
    def fallback_share(self) -> float:
        return sum(share for _, share in self.fallbacks)


def examine(
    model: Path,
    library: Path,
    threads: int,
    only_random: bool = False,
    member: str | None = None,
    timeout: float = 600.0,
) -> Examination:
    """Verifies and profiles ``library``, compiled from ``model`` (.onnx). Never raises for a
    library that fails: ``error`` or ``disagrees`` say why.

    ``only_random``: use only the random inputs, not the adversarial ones. ``member``: the model of
    ``models.family`` from which it was exported. The library is held to it if ONNX Runtime cannot
    run the model.
    """
    with tempfile.TemporaryDirectory(prefix="gtco-examine-") as folder:
        job, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        job.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "library": str(library),
                    "threads": threads,
                    "only_random": only_random,
                    "member": member,
                    "answer": str(answer),
                }
            )
        )
        try:
            done = subprocess.run(
                [*python("gtco.bench.models.examine"), str(job)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Examination(error=f"verifying and profiling took over {timeout:.0f} s")
        if done.returncode == 0 and answer.exists():
            seen = json.loads(answer.read_text())
            seen["fallbacks"] = tuple((name, share) for name, share in seen["fallbacks"])
            return Examination(**seen)
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Examination(error=": ".join([f"exit code {done.returncode}", *tail]))


def by_operator(
    stages: Sequence[Mapping[str, Any]], seconds: Sequence[float]
) -> list[tuple[str, float]]:
    """The share of the whole time of every operator in a fallback stage, the largest first."""
    total = sum(seconds) or 1.0
    shares: dict[str, float] = {}
    for stage, measured in zip(stages, seconds, strict=True):
        if stage["schedule"]["sketch"] == "fallback":
            label = "+".join(stage["operators"])
            shares[label] = shares.get(label, 0.0) + measured / total
    return sorted(shares.items(), key=lambda item: -item[1])


def main(argv: list[str]) -> int:
    from gtco.runtime.module import load
    from gtco.runtime.tensors import random_inputs
    from gtco.support.errors import VerificationError
    from gtco.verification import verify

    die_with_parent()
    job = json.loads(Path(argv[0]).read_text())
    report: VerificationReport | None
    refused = None
    with load(job["library"], threads=job["threads"]) as model:
        try:
            report = verify(model, job["model"], check=False)
        except VerificationError as error:  # ONNX Runtime cannot run it, or outputs are missing
            refused, report = str(error), in_pytorch(model, job["member"])
        differences = report.differences if report else ()
        seen = [d for d in differences if d.case == "random" or not job["only_random"]]
        disagrees = told(d for d in seen if d.failure)
        judged = told(d for d in seen if d.judged and not (d.failure or d.unstable))
        if report is None:
            disagrees = refused
        elif not disagrees:
            judged = refused or judged
        seconds = model.profile(*random_inputs(model.inputs).values(), repeat=REPEAT)
        fallbacks = by_operator(model.stages, seconds)
    Path(job["answer"]).write_text(
        json.dumps(
            {
                "difference": max((d.relative for d in seen), default=None if refused else 0.0),
                "disagrees": disagrees,
                "judged": judged,
                "unsettled": told(d for d in seen if d.unstable),
                "fallbacks": fallbacks,
            }
        )
    )
    return 0


def in_pytorch(model: Any, member: str | None) -> VerificationReport | None:
    """The model held to the module from which it was exported, where ONNX Runtime cannot run it;
    None if there is no such module or PyTorch cannot run it either.
    """
    from gtco.models.family import find
    from gtco.support.errors import VerificationError
    from gtco.verification import verify

    if member is None:
        return None
    try:
        return verify(model, find(member).create(), check=False)
    except VerificationError:
        return None


def told(differences: Iterable[Difference]) -> str | None:
    """One sentence for each difference."""

    def said(d: Difference) -> str:
        if d.failure:
            return d.failure
        if d.unstable:
            return f"differs by {d.relative:.0e}, which is within the error of rounding there"
        return f"ONNX Runtime is off by {d.reference_error:.0e}"

    return "; ".join(f"{d.output} on {d.case} inputs: {said(d)}" for d in differences) or None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
