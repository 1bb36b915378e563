"""Collects the stages of workloads, each workload once, without building any kernel.

A workload's stages are a file of their own in ``FOLDER/stages``, so collecting can be stopped at
any moment and goes on where it was. The fusion search sees many more stages than its partition
keeps. Some of them, always the same, are kept to be trained on; and those that records name, which
name stages by key alone.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, cast

from gtco.driver.compilation import Compilation
from gtco.machine.target import Machine, target
from gtco.search.policy import Policy
from gtco.support.errors import GtcoError
from gtco.support.options import CompileOptions
from gtco.tensor.stage import Stage

from .workloads import TARGETS, Workload

THREADS = 2  # that workloads are cut into stages for
CONSIDERED = 64  # stages of each workload that its partition does not keep


class _Noting:
    """A policy that notes the stages it is asked about, if ``wanted`` has their keys, or if their
    keys begin low, which is as good as drawing them.
    """

    def __init__(self, policy: Policy, wanted: Collection[str], found: dict[str, Stage]) -> None:
        self._policy, self._wanted, self._found = policy, wanted, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def predict(self, stage: Stage) -> float:
        seconds = self._policy.predict(stage)
        if stage.key in self._wanted or (stage.key < "1" and seconds < inf):
            self._found[stage.key] = stage.canonical
        return seconds


class _Watched(Compilation):
    wanted: Collection[str] = ()

    def predicting(self, machine: Machine) -> Policy:
        self.seen: dict[str, Stage] = {}
        return cast(Policy, _Noting(super().predicting(machine), self.wanted, self.seen))


@dataclass(frozen=True)
class Collected:
    """The stages of a workload, each once, with how often each occurs; and others that its fusion
    search considered. ``failed`` says why a workload has none.
    """

    workload: Workload
    stages: tuple[tuple[Stage, int], ...] = ()
    considered: tuple[Stage, ...] = ()
    failed: str = ""


def collect(workload: Workload, wanted: Collection[str]) -> Collected:
    """Cuts the workload into stages. A workload that gtco refuses gives a reason."""
    try:
        module, inputs = workload.built()
        options = CompileOptions(
            target=TARGETS[workload.machine], precision=workload.precision, threads=THREADS
        )
        run = _Watched(module, Path("model.so"), inputs, options, lambda *_: None)
        run.wanted = wanted
        found = run.to_stages(target(options.target)).partition
    except (GtcoError, RuntimeError, ValueError, MemoryError) as error:  # also torch's own
        return Collected(workload, failed=f"{type(error).__name__}: {error}"[:500])
    stages = {s.key: s.canonical for s in found.stages}
    counts = Counter(s.key for s in found.stages)
    others = sorted(set(run.seen) - set(stages))
    kept = {*others[:CONSIDERED], *(key for key in others if key in wanted)}
    return Collected(
        workload,
        tuple((stage, counts[key]) for key, stage in stages.items()),
        tuple(run.seen[key] for key in sorted(kept)),
    )


def path_of(workload: Workload, folder: Path) -> Path:
    return folder / "stages" / f"{workload.name}.json.gz"


def write(collected: Collected, folder: Path) -> None:
    path = path_of(collected.workload, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "stages": [[stage.to_json(), count] for stage, count in collected.stages],
        "considered": [stage.to_json() for stage in collected.considered],
        "failed": collected.failed,
    }
    new = path.with_suffix(".new")
    with gzip.open(new, "wt") as file:
        json.dump(data, file, separators=(",", ":"))
    new.replace(path)


def read(workload: Workload, folder: Path) -> Collected | None:
    """The workload's collected stages; None if there are none yet, or if the file is damaged."""
    try:
        with gzip.open(path_of(workload, folder), "rt") as file:
            data = json.load(file)
        return Collected(
            workload,
            tuple((Stage.from_json(stage), int(count)) for stage, count in data["stages"]),
            tuple(map(Stage.from_json, data["considered"])),
            data["failed"],
        )
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        return None


def collect_all(
    every: Iterable[Workload],
    folder: Path,
    wanted: Collection[str],
    seconds: float,
    say: Callable[[str], None],
) -> list[Collected]:
    """Everything collected so far, after collecting for at most so many ``seconds``."""
    end = time.monotonic() + seconds
    found = []
    for workload in every:
        known = read(workload, folder)
        if known is None and time.monotonic() < end:
            begin = time.monotonic()
            known = collect(workload, wanted)
            write(known, folder)
            took = f"{len(known.stages)} stages in {time.monotonic() - begin:.0f} s"
            say(f"{workload.name}: {known.failed or took}")
        if known is not None:
            found.append(known)
    return found
