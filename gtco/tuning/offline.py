"""Times the candidates that ``gtco candidates`` put into one library, on a GPU that need not know
anything else of gtco: no compiler, no TVM, a driver alone. What came of them are records.

A round runs every candidate once; rivals are compared within it, as on a CPU
(:mod:`gtco.tuning.verdict`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from gtco.errors import ArtifactError
from gtco.runtime.driver import gpu_name
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.search.records import Record, gpu_circumstances, now
from gtco.tuning.verdict import first_seconds, judge, outcome

WARM = 3  # rounds before those that count


def measure(path: str | PathLike[str], rounds: int, device: int = 0) -> list[Record]:
    """A record for each candidate, timed in so many rounds on the GPU of this number. Raises
    :class:`ArtifactError` where the file holds no candidates, or cannot be run here.
    """
    path = Path(path)
    metadata = read_metadata(path)
    if "candidates" not in metadata:
        raise ArtifactError(
            f"{path} is a model, and no candidates: gtco run times a model, gtco candidates makes "
            "what is measured"
        )
    with load(path, device=device) as model:
        known = gpu_circumstances(metadata, gpu_name(device))
        readings = np.array([model.timed(()) for _ in range(WARM + rounds)])[WARM:]
        return records(model.stages, readings, known)


def records(
    steps: Sequence[Mapping[str, Any]], readings: np.ndarray, circumstances: str
) -> list[Record]:
    """What came of each candidate; ``readings`` are seconds [rounds, steps]."""
    columns: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        if step["rival"] is not None:
            columns.setdefault(step["key"], []).append(number)
    found = []
    for numbers in columns.values():
        rounds = readings[:, numbers]
        verdict = judge(rounds)
        first = first_seconds(rounds)
        for n, number in enumerate(numbers[:-1]):
            times = rounds[:, n] if n else first
            step = steps[number]
            found.append(
                Record(
                    step["key"],
                    step["label"],
                    circumstances,
                    json.dumps(step["schedule"]),
                    outcome(verdict, n),
                    step["predicted_seconds"],
                    float(np.median(times)),
                    float(np.median(times / first)),
                    verdict.noise,
                    time=now(),
                )
            )
    return found
