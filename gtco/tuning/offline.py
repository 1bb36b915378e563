"""Times the candidates that ``gtco candidates`` put into one library, on the GPU or the CPU that
they are for. The machine needs no compiler and no TVM. The results are records.

A round runs every candidate once. Candidates are compared within a round, as on a CPU
(:mod:`gtco.tuning.verdict`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.runtime.elf import BUNDLE
from gtco.runtime.gpu.driver import gpu
from gtco.runtime.library import read_metadata
from gtco.runtime.module import Model
from gtco.runtime.tensors import aligned_empty
from gtco.search.records.records import Record, cpu_known, gpu_circumstances, now
from gtco.support.errors import ArtifactError
from gtco.tuning.runner import Budget, Readings
from gtco.tuning.timing import agree, array
from gtco.tuning.verdict import first_seconds, judge, outcome

Opened = Callable[[Path], AbstractContextManager[Any]]  # a bundle, for the machine that runs it
WARM = 3  # rounds before those that count
OTHER = "its result is not that of most candidates of the stage"


def measure(path: str | PathLike[str], rounds: int, device: int = 0) -> list[Record]:
    """A record for each candidate, timed in so many rounds on this machine, or on the GPU with this
    number. Raises :class:`ArtifactError` if the file holds no candidates or cannot be run here.
    """
    path = Path(path)
    metadata = read_metadata(path, BUNDLE)
    if "candidates" not in metadata:
        raise ArtifactError(
            f"{path} is a compiled model, not a file of candidates. Time it with gtco run; make "
            "candidates with gtco candidates"
        )
    on_gpu = "images" in metadata
    known = gpu_circumstances(metadata, str(gpu(device))) if on_gpu else cpu_known(metadata)
    # as many threads as the records say, whatever GTCO_NUM_THREADS is
    threads = 0 if on_gpu else metadata["target"]["cores"]
    opened = partial(Model, threads=threads, device=device if on_gpu else None, candidates=True)
    return timed(opened, path, metadata, rounds, known)


def timed(
    opened: Opened, path: Path, metadata: Mapping[str, Any], rounds: int, known: str
) -> list[Record]:
    """A record for each candidate of the bundle, under the circumstances ``known``."""
    runner = BundleRunner(opened, metadata)
    read = runner.read([path], Budget(rounds))
    steps = runner.steps
    wrong = {
        key: frozenset(n for n, step in enumerate(numbers) if step in read.wrong)
        for key, numbers in by_rival(steps).items()
    }
    return records(steps, read.seconds[0], known, wrong)


class BundleRunner:
    """A :class:`~gtco.tuning.runner.Runner` of bundles in this process, on the GPU or CPU that
    ``opened`` opens them for. A failure of a device is an :class:`ArtifactError`: nothing else
    could be read of it afterwards. ``steps`` are those of the library that was read last.
    """

    machines = 1

    def __init__(self, opened: Opened, metadata: Mapping[str, Any]) -> None:
        self.opened, self.metadata = opened, metadata
        self.steps: list[dict[str, Any]] = []

    def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
        found: list[np.ndarray] = []
        wrong: frozenset[int] = frozenset()
        random, numbers = np.random.default_rng(0), self.metadata.get("numbers", ())
        begin = time.monotonic()
        for number, library in enumerate(libraries):
            with self.opened(library) as model:
                self.steps = model.stages
                inputs = [array(random, spec, n in numbers) for n, spec in enumerate(model.inputs)]
                results = [aligned_empty(spec) for spec in model.outputs]
                readings: list[list[float]] = []
                while len(readings) < WARM + budget.rounds or (
                    time.monotonic() - begin < budget.seconds
                ):
                    if len(readings) > WARM and time.monotonic() - begin > budget.limit:
                        break
                    readings.append(model.timed(inputs, results))
                if not number:
                    bad = disagreeing(self.metadata["candidates"]["compared"], results)
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
            how = stage["tolerance"], stage.get("steps", 0)
            others = frozenset(n for n in every if not agree(one, own[n], *how))
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
