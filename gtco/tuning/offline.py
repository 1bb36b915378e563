"""Times the candidates that ``gtco candidates`` put into one library, on the GPU or the CPU that
they are for. The machine needs no compiler and no TVM. The results are records.

A round runs every candidate once. Candidates are compared within a round, as on a CPU
(:mod:`gtco.tuning.verdict`).
"""

from __future__ import annotations

import json
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
from gtco.search.records.records import Record, cpu_known, gpu_circumstances, now
from gtco.support.errors import ArtifactError
from gtco.tuning.timing import agree, array
from gtco.tuning.verdict import first_seconds, judge, outcome

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
            f"{path} is a model, and no candidates: gtco run times a model, gtco candidates makes "
            "what is measured"
        )
    gpu = "images" in metadata
    with Model(path, device=device if gpu else None, candidates=True) as model:
        known = gpu_circumstances(metadata, gpu_name(device)) if gpu else cpu_known(metadata)
        return timed(model, metadata, rounds, known)


def timed(model: Any, metadata: Mapping[str, Any], rounds: int, known: str) -> list[Record]:
    """A record for each candidate of an open bundle, under the circumstances ``known``."""
    random, numbers = np.random.default_rng(0), metadata.get("numbers", ())
    inputs = [array(random, spec, n in numbers) for n, spec in enumerate(model.inputs)]
    results = [aligned_empty(spec) for spec in model.outputs]
    readings = np.array([model.timed(inputs, results) for _ in range(WARM + rounds)])[WARM:]
    wrong = disagreeing(metadata["candidates"]["compared"], results)
    return records(model.stages, readings, known, wrong)


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
    columns: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        if step["rival"] is not None:
            columns.setdefault(step["key"], []).append(number)
    found = []
    for numbers in columns.values():
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
