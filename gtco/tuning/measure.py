"""Candidates of stages, built by the workers and timed together in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.build import Failure, Job, Kernel
from gtco.codegen.processes import environment
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine, cpu_target
from gtco.runtime.artifact import write_artifact
from gtco.runtime.publish import temporary
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from gtco.tuning.timing import LEAST_ROUNDS
from gtco.tuning.trial import REPEATS, Trial, artifact, batches, buffers

GRACE = 60.0  # seconds that timing may take beyond what it was given: opening, a slow first round
BUILD_SECONDS = 0.4  # for one candidate, until some were built
START_SECONDS = 1.0  # of a process that times: linking, opening, ending
BYTES_A_SECOND = 4e8  # of a trial's tensors
SLOWER = 1.5  # how much longer than its stage's pick a candidate is reckoned to run


@dataclass(frozen=True)
class Timed:
    """A trial's readings: seconds [rounds, candidates + 1], the last column the first candidate
    again; ``wrong`` has the candidates that compute something else. ``failed`` says in words how
    timing ended instead: because of the trial's one rival or, where it has none, of the first one,
    or for a reason that is of none of them.
    """

    trial: Trial
    readings: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    wrong: frozenset[int] = frozenset()
    failed: str = ""


class Measurer:
    """Builds and times; reckons beforehand how long that will take. Readings stop at the
    ``deadline`` (of ``time.monotonic()``), however few there are.
    """

    def __init__(
        self, workers: Workers, target: Machine, threads: int, deadline: float = inf
    ) -> None:
        self.workers, self.target, self.threads = workers, cpu_target(target), threads
        self.deadline = deadline
        self._built, self._building = 0, 0.0

    def build_cost(self, candidates: int) -> float:
        """Seconds that building so many takes, by those that were built so far."""
        each = self._building / self._built if self._built else BUILD_SECONDS
        return candidates * each

    def proposed(self, seconds: float) -> None:
        """So long it took to find what is built next, which counts as building."""
        self._building += seconds

    def timing_cost(self, stage: Stage, seconds: float, candidates: int) -> float:
        """Seconds that timing so many candidates of a stage takes at the least, where its pick
        takes ``seconds``: its rounds, and its tensors, which are made, written and compared.
        """
        rounds = LEAST_ROUNDS * seconds * (1 + REPEATS + SLOWER * candidates)
        return rounds + buffers(stage, 1 + candidates) / BYTES_A_SECOND

    def build(
        self, stage: Stage, first: Pick, kernel: Kernel, picks: Sequence[Pick]
    ) -> tuple[Trial | None, list[tuple[Pick, Failure]]]:
        """The trial of ``first``, which ``kernel`` is of, and of those ``picks`` that could be
        built, None where none could; and those that could not.
        """
        begin = time.monotonic()
        # named after what they are: the pick may be what another tuning of this stage has built
        named = {f"gtco_{stage.key}_{pick.config.key}": pick for pick in picks}
        jobs = [Job(name, stage, pick.config, self.target) for name, pick in named.items()]
        answers = list(self.workers.build(jobs))
        self._built += len(jobs)
        self._building += time.monotonic() - begin
        kernels = [answer for answer in answers if isinstance(answer, Kernel)]
        failed = [(named[a.symbol], a) for a in answers if isinstance(a, Failure)]
        if not kernels:
            return None, failed
        kept = (first, *(named[k.symbol] for k in kernels))
        return Trial(stage, kept, (kernel, *kernels)), failed

    def time(self, trials: Sequence[Trial], seconds: float) -> Iterator[Timed]:
        """The readings of each trial, as they come; ``seconds`` for all of them, or as long as the
        least number of rounds takes.
        """
        total = sum(map(_weight, trials)) or 1.0
        for batch in batches(trials):
            yield from self._time(batch, seconds * sum(map(_weight, batch)) / total)

    def _time(self, batch: Sequence[Trial], seconds: float) -> Iterator[Timed]:
        said = self._run(batch, seconds)
        if isinstance(said, str):
            if len(batch) == 1:
                yield from self._apart(batch[0], seconds, said)
                return
            for trial in batch:  # it is one of them: the others are worth another try
                yield from self._time([trial], seconds / len(batch))
            return
        readings, wrong = np.array(said["seconds"]), set(said["wrong"])
        for trial, steps in zip(batch, said["trials"], strict=True):
            columns = steps[1:]  # the first one brought in the activations
            bad = frozenset(n for n, step in enumerate(columns) if step in wrong)
            yield Timed(trial, readings[:, columns], bad)


    def _run(self, batch: Sequence[Trial], seconds: float) -> dict[str, Any] | str:
        with temporary("trials") as folder:
            library = folder / "trials.so"
            write_artifact(artifact(batch, self.target, self.threads), library)
            return run(library, seconds, max(self.deadline - time.monotonic(), 0.0))

    def _apart(self, trial: Trial, seconds: float, said: str) -> Iterator[Timed]:
        """A trial whose timing failed as ``said``: the candidates that fail, each beside the first
        one alone, and the readings of the others. Where it is the first one, or none by itself, or
        there is no time to find out, nothing is said of any rival.
        """
        first = trial.only([])
        rivals = list(range(1, len(trial.picks)))
        if isinstance(self._run([first], 0.0), str):
            yield Timed(first, failed=said)
            return
        guilty = self._guilty(trial, rivals)
        for rival, how in guilty.items():
            yield Timed(trial.only([rival]), failed=how)
        left = trial.only([rival for rival in rivals if rival not in guilty])
        if guilty and len(left.picks) > 1 and time.monotonic() < self.deadline:
            yield from self._time([left], seconds)
        elif not guilty:
            yield Timed(first, failed=said)

    def _guilty(self, trial: Trial, rivals: Sequence[int]) -> dict[int, str]:
        """Those of the ``rivals`` with which timing fails, and how, found by halves."""
        if not rivals or time.monotonic() >= self.deadline:
            return {}
        said = self._run([trial.only(rivals)], 0.0)
        if not isinstance(said, str):
            return {}
        if len(rivals) == 1:
            return {rivals[0]: said}
        middle = len(rivals) // 2
        return self._guilty(trial, rivals[:middle]) | self._guilty(trial, rivals[middle:])


def _weight(trial: Trial) -> float:
    return trial.picks[0].seconds * len(trial.picks)


def run(library: Path, seconds: float, most: float = inf) -> dict[str, Any] | str:
    """What :mod:`gtco.tuning.timing` prints of the library, or in words how it failed."""
    times = [str(seconds), str(most)]
    said: dict[str, Any] | str = printed("timing", [str(library), *times], seconds + GRACE)
    return said


def printed(module: str, arguments: Sequence[str], timeout: float) -> Any:
    """What a module of this package prints as JSON in a process of its own, which may take
    ``timeout`` seconds; or in words how that failed, where it prints no text itself.
    """
    command = [sys.executable, "-m", f"gtco.tuning.{module}", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode:
        return f"crashed ({done.stderr.strip().splitlines()[-1:] or done.returncode})"
    return json.loads(done.stdout)
