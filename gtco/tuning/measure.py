"""Builds candidates of stages in the workers and times them together in a process of their own."""

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
    """The readings of a trial.

    - ``readings``: seconds [rounds, candidates + 1]; the last column is the first candidate again;
    - ``wrong``: the candidates that compute something else;
    - ``failed``: says how timing ended, if it failed. It is about the trial's rival if there is
      only one, about the first candidate if there is no rival, and else about no particular
      candidate.
    """

    trial: Trial
    readings: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    wrong: frozenset[int] = frozenset()
    failed: str = ""


class Measurer:
    """Builds and times candidates, and predicts how long that takes. Readings stop at the
    ``deadline`` (of ``time.monotonic()``), however few there are.
    """

    def __init__(
        self, workers: Workers, target: Machine, threads: int, deadline: float = inf
    ) -> None:
        self.workers, self.target, self.threads = workers, cpu_target(target), threads
        self.deadline = deadline
        self._built, self._building = 0, 0.0

    def build_cost(self, candidates: int) -> float:
        """Seconds that building so many candidates takes, judged by those that were built so far.
        """
        each = self._building / self._built if self._built else BUILD_SECONDS
        return candidates * each

    def proposed(self, seconds: float) -> None:
        """Adds the seconds that it took to find candidates; they count as building."""
        self._building += seconds

    def timing_cost(self, stage: Stage, seconds: float, candidates: int) -> float:
        """The least number of seconds that timing so many candidates of a stage takes, if a run of
        its pick takes ``seconds``: the rounds, and making, writing and comparing the tensors.
        """
        rounds = LEAST_ROUNDS * seconds * (1 + REPEATS + SLOWER * candidates)
        return rounds + buffers(stage, 1 + candidates) / BYTES_A_SECOND

    def build(
        self, stage: Stage, first: Pick, kernel: Kernel, picks: Sequence[Pick]
    ) -> tuple[Trial | None, list[tuple[Pick, Failure]]]:
        """Builds the ``picks`` and makes a trial of ``first``, whose kernel is ``kernel``, and
        those that could be built. The trial is None if none could. Gives the failures too.
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
        """Yields the readings of each trial. Timing all of them takes ``seconds``, or as long as
        the least number of rounds takes.
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
        """Finds out which candidates made the timing of a trial fail (``said``): yields these, each
        with the first candidate alone, and then the readings of the others. If the first candidate
        is at fault, or no single one, or the time is too short to find out, no rival is blamed.
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
        """The ``rivals`` whose timing fails, and how, found by halving."""
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
    """The output of :mod:`gtco.tuning.timing` for a library, or a sentence on how it failed."""
    times = [str(seconds), str(most)]
    said: dict[str, Any] | str = printed("timing", [str(library), *times], seconds + GRACE)
    return said


def printed(module: str, arguments: Sequence[str], timeout: float) -> Any:
    """Runs a module of this package in a process of its own for at most ``timeout`` seconds and
    gives the JSON that it prints, or a sentence on how it failed. The module itself never prints a
    text.
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
