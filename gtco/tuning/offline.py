"""Times the candidates that ``gtco candidates`` put into one library. The machine with the GPU
needs only a driver: no compiler and no TVM. The results are records.

A round runs every candidate once. Candidates are compared within a round, as on a CPU
(:mod:`gtco.tuning.verdict`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.runtime.driver import gpu_name
from gtco.runtime.elf import BUNDLE
from gtco.runtime.library import read_metadata
from gtco.runtime.module import Model
from gtco.runtime.tensors import aligned_empty
from gtco.search.records.records import Record, gpu_circumstances, now
from gtco.support.errors import ArtifactError
from gtco.tuning.runner import Budget, Readings
from gtco.tuning.timing import agree
from gtco.tuning.verdict import first_seconds, judge, outcome

WARM = 3  # rounds before those that count
OTHER = "its result is not that of most candidates of the stage"


def measure(path: str | PathLike[str], rounds: int, device: int = 0) -> list[Record]:
    """A record for each candidate, timed in so many rounds on the GPU with this number. Raises
    :class:`ArtifactError` if the file holds no candidates or cannot be run here.
    """
    path = Path(path)
    metadata = read_metadata(path, BUNDLE)
    if "candidates" not in metadata:
        raise ArtifactError(
            f"{path} is a model, and no candidates: gtco run times a model, gtco candidates makes "
            "what is measured"
        )
    runner = DeviceRunner(device)
    read = runner.read([path], Budget(rounds))
    steps = runner.steps
    known = gpu_circumstances(metadata, gpu_name(device))
    wrong = {
        key: frozenset(n for n, step in enumerate(numbers) if step in read.wrong)
        for key, numbers in by_rival(steps).items()
    }
    return records(steps, read.seconds[0], known, wrong)


class DeviceRunner:
    """A :class:`~gtco.tuning.runner.Runner` of the GPU with this number, in this process. A failure
    of the device is an :class:`ArtifactError`: nothing else could be read of it afterwards.
    ``steps`` are those of the library that was read last.
    """

    machines = 1

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.steps: list[dict[str, Any]] = []

    def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
        found: list[np.ndarray] = []
        wrong: frozenset[int] = frozenset()
        begin = time.monotonic()
        for number, library in enumerate(libraries):
            with Model(library, device=self.device, candidates=True) as model:
                self.steps = model.stages
                results = [aligned_empty(spec) for spec in model.outputs]
                readings: list[list[float]] = []
                while len(readings) < WARM + budget.rounds or (
                    time.monotonic() - begin < budget.seconds
                ):
                    if len(readings) > WARM and time.monotonic() - begin > budget.limit:
                        break
                    readings.append(model.timed((), results))
                if not number:
                    compared = read_metadata(library, BUNDLE)["candidates"]["compared"]
                    bad = disagreeing(compared, results)
                    wrong = frozenset(
                        steps[n]
                        for key, steps in by_rival(self.steps).items()
                        for n in bad.get(key, ())
                    )
            found.append(np.array(readings)[WARM:])
        return Readings(tuple(found), wrong)


def by_rival(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The numbers of the steps of each stage's candidates; the last is the first one again."""
    found: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        if step["rival"] is not None:
            found.setdefault(step["key"], []).append(number)
    return found


def disagreeing(
    compared: Sequence[Mapping[str, Any]], results: Sequence[np.ndarray]
) -> dict[str, frozenset[int]]:
    """For each stage, the candidates whose results differ from those of more than half of its
    candidates. If there are two candidates and they differ, both are given, because nobody knows
    which one is right.
    """
    found = {}
    for stage in compared:
        own = [_numbers(results[stage["first"] + n]) for n in range(stage["count"])]
        every = frozenset(range(len(own)))
        found[stage["key"]] = every
        for one in own:
            others = frozenset(n for n in every if not agree(one, own[n], stage["tolerance"]))
            if 2 * len(others) < len(own):
                found[stage["key"]] = others
                break
    return found


def _numbers(result: np.ndarray) -> np.ndarray:
    """The numbers of a result; bfloat16 arrives as its bits."""
    if result.dtype != np.uint16:
        return result
    return (result.astype(np.uint32) << 16).view(np.float32)


def records(
    steps: Sequence[Mapping[str, Any]],
    readings: np.ndarray,
    circumstances: str,
    wrong: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> list[Record]:
    """A record for each candidate. ``readings`` are seconds [rounds, steps]; ``wrong`` has, by
    stage, the numbers of the candidates that computed something else than most.
    """
    found = []
    for numbers in by_rival(steps).values():
        rounds = readings[:, numbers]
        out = wrong.get(steps[numbers[0]]["key"], frozenset())
        verdict = judge(rounds, out)
        first = first_seconds(rounds)
        right = [n for n in range(len(numbers) - 1) if n not in out]
        if 0 in out and right:  # another has to stand, however close they are
            best = min(right, key=lambda n: float(np.median(rounds[:, n] / first)))
            verdict = replace(verdict, best=best, ranked=True)
        for n, number in enumerate(numbers[:-1]):
            times = rounds[:, n] if n else first
            step = steps[number]
            found.append(
                Record(
                    step["key"],
                    step["label"],
                    circumstances,
                    json.dumps(step["schedule"]),
                    "wrong" if n in out else outcome(verdict, n),
                    step["predicted_seconds"],
                    float(np.median(times)),
                    float(np.median(times / first)),
                    verdict.noise,
                    reason=OTHER if n in out else "",
                    time=now(),
                )
            )
    return found
