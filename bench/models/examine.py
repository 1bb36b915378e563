"""Verifies a compiled library and measures where its time goes, in a process of its own, so that a
library that crashes costs only its own result.

``python -m bench.models.examine JOB.json`` is that process. ``gtco.verification`` compares with
ONNX Runtime on the model's ONNX; the time of a stage is the median of a few profiled runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gtco.verification import Difference

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
    - ``judged``: where ONNX Runtime differs or is unstable, and float64 found the library right
    - ``unsettled``: where ONNX Runtime is unstable, and float64 did not find the library right:
      neither a disagreement nor an agreement
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
    ``models.family`` from which it was exported. Its float64 run decides if ONNX Runtime and the
    library differ, or if ONNX Runtime's answer is unstable (its optimised norms of images cancel).
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
                [sys.executable, "-m", "gtco.bench.models.examine", str(job)],
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
    from gtco.cli.run_command import make_inputs
    from gtco.runtime.module import load
    from gtco.support.errors import VerificationError
    from gtco.verification import verify

    job = json.loads(Path(argv[0]).read_text())
    with load(job["library"], threads=job["threads"]) as model:
        difference, disagrees, judged, unsettled = None, None, None, None
        exact: Callable[[], dict[tuple[str, str], Difference]] = dict
        if job["member"]:
            exact = partial(in_float64, model, job["member"])
        try:
            report = verify(model, job["model"], check=False)
            seen = [d for d in report.differences if d.case == "random" or not job["only_random"]]
            # What differs no more than ONNX Runtime's own answer would move is no test of either.
            doubted = [d for d in seen if d.failure or d.unstable]
            by_float64 = exact() if doubted else {}
            right = _right(by_float64)
            settled = {id(d): right[key] for d in doubted if (key := (d.case, d.output)) in right}
            difference = max((settled.get(id(d), d.relative) for d in seen), default=0.0)
            judged = _told(d for d in doubted if id(d) in settled)
            left = [d for d in doubted if id(d) not in settled]
            disagrees = _told(d for d in left if d.failure)
            unsettled = _told((d for d in left if not d.failure), by_float64)
        except VerificationError as error:  # ONNX Runtime cannot run it, or outputs are missing
            right = _right(exact())
            if right.keys() >= {("random", output.name) for output in model.outputs}:
                judged, difference = str(error), max(right.values(), default=0.0)
            else:
                disagrees = str(error)
        seconds = model.profile(*make_inputs(model.inputs, {}, seed=0).values(), repeat=REPEAT)
        fallbacks = by_operator(model.stages, seconds)
    Path(job["answer"]).write_text(
        json.dumps(
            {
                "difference": difference,
                "disagrees": disagrees,
                "judged": judged,
                "unsettled": unsettled,
                "fallbacks": fallbacks,
            }
        )
    )
    return 0


def in_float64(model: Any, name: str) -> dict[tuple[str, str], Difference]:
    """The difference from PyTorch's float64 run of the family's ``name`` for every (case, output);
    empty if the module cannot run in float64.
    """
    import torch

    from gtco.models.family import find
    from gtco.support.errors import VerificationError
    from gtco.support.nested import tensors
    from gtco.verification import verify

    module = find(name).create().double()

    def run(inputs: Mapping[str, Any]) -> list[Any]:
        given = [torch.from_numpy(value) for value in inputs.values()]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        with torch.inference_mode():
            found = list(tensors(module(*wide)))
        return [(x.float() if x.is_floating_point() else x).numpy() for x in found]

    try:
        report = verify(model, run, check=False)
    except VerificationError:  # parts of it make float32 of their own
        return {}
    return {(d.case, d.output): d for d in report.differences}


def _right(found: Mapping[tuple[str, str], Difference]) -> dict[tuple[str, str], float]:
    """The relative differences of outputs that agree, without those that float64 itself finds
    unstable.
    """
    return {key: d.relative for key, d in found.items() if not (d.failure or d.unstable)}


def _told(
    differences: Iterable[Difference],
    by_float64: Mapping[tuple[str, str], Difference] | None = None,
) -> str | None:
    """One sentence for each difference; with ``by_float64``, also why that does not settle it."""

    def said(d: Difference) -> str:
        text = d.failure or f"differs by {d.relative:.0e}, and so does the reference itself"
        if by_float64 is None:
            return text
        wide = by_float64.get((d.case, d.output))
        if wide is None:
            return f"{text}; there is no float64 run of it"
        return f"{text}; float64: {wide.failure or f'{wide.relative:.0e}, and it moves as well'}"

    return "; ".join(f"{d.output} on {d.case} inputs: {said(d)}" for d in differences) or None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
