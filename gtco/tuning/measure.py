"""Builds candidates of stages in the workers and hands them to a
:class:`~gtco.tuning.runner.Runner`, which times them together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import inf

import numpy as np

from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine, cpu_target
from gtco.runtime.publish import temporary
from gtco.runtime.writing.linking import write_artifact
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from gtco.tuning.local import LocalRunner
from gtco.tuning.runner import Budget, Readings, Runner
from gtco.tuning.timing import LEAST_ROUNDS
from gtco.tuning.trial import REPEATS, Trial, artifact, batches, buffers

BUILD_SECONDS = 0.1  # seconds for one candidate, until some were built
START_SECONDS = 1.0  # seconds of a process that times: linking, opening, ending
BYTES_A_SECOND = 4e8  # bytes of a trial's tensors for each second that is reckoned
SLOWER = 1.5  # how much longer than its stage's pick a candidate is reckoned to run


@dataclass(frozen=True)
class Timed:
    """The readings of a trial.

    - ``readings``: seconds [rounds, candidates + 1]; the last column is the first candidate again;
    - ``wrong``: the candidates that compute something else;
    - ``failed``: says how timing ended, if it failed. It is about the trial's rival if there is
      only one, about the first candidate if there is no rival, and else about no particular
      candidate;
    - ``machine``: who read it (:class:`~gtco.tuning.runner.Readings`).
    """

    trial: Trial
    readings: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    wrong: frozenset[int] = frozenset()
    failed: str = ""
    machine: str = ""


class Measurer:
    """Builds candidates here, has them timed by ``runner``, and predicts how long that takes.
    Readings stop at the ``deadline`` (of ``time.monotonic()``), however few there are.
    """

    def __init__(
        self,
        workers: Workers,
        target: Machine,
        threads: int,
        deadline: float = inf,
        runner: Runner | None = None,
    ) -> None:
        self.workers, self.target, self.threads = workers, cpu_target(target), threads
        self.deadline = deadline
        self.runner: Runner = LocalRunner() if runner is None else runner
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

    def time(
        self, trials: Sequence[Trial], seconds: float, machines: int = 0
    ) -> Iterator[Timed]:
        """Yields the readings of each trial, as they come. Timing all of them takes ``seconds`` of
        machines, or as long as the least number of rounds takes. All candidates of a trial are
        timed together, on one machine. The trials are dealt out to so many ``machines``, 0 for all.
        """
        machines = machines or self.runner.machines
        total = sum(map(_weight, trials)) or 1.0
        given = [
            (batch, seconds * sum(map(_weight, batch)) / total)
            for some in shares(trials, machines)
            for batch in batches(some)
        ]
        if machines == 1:
            for batch, share in given:
                yield from self._time(batch, share)
            return
        with ThreadPoolExecutor(machines) as threads:
            reading = [
                threads.submit(lambda of=one: list(self._time(*of)))  # type: ignore[misc]
                for one in given
            ]
            try:
                for done in as_completed(reading):
                    yield from done.result()
            finally:
                for one in reading:
                    one.cancel()

    def _time(self, batch: Sequence[Trial], seconds: float) -> Iterator[Timed]:
        readings, groups = self._run(batch, seconds)
        if readings.failed:
            if len(batch) == 1:
                yield from self._apart(batch[0], seconds, readings)
                return
            for trial in batch:  # it is one of them: the others are worth another try
                yield from self._time([trial], seconds / len(batch))
            return
        for trial, steps in zip(batch, groups, strict=True):
            columns = steps[1:]  # the first one brought in the activations
            bad = frozenset(n for n, step in enumerate(columns) if step in readings.wrong)
            yield Timed(trial, readings.seconds[0][:, columns], bad, machine=readings.machine)

    def _run(self, batch: Sequence[Trial], seconds: float) -> tuple[Readings, list[list[int]]]:
        """The readings of a batch, and the numbers of each trial's steps."""
        made = artifact(batch, self.target, self.threads)
        with temporary("trials") as folder:
            library = folder / "trials.so"
            write_artifact(made, library)
            limit = max(self.deadline - time.monotonic(), 0.0)
            read = self.runner.read([library], Budget(LEAST_ROUNDS, seconds, limit))
        return read, made.metadata["trials"]

    def _apart(self, trial: Trial, seconds: float, said: Readings) -> Iterator[Timed]:
        """Finds out which candidates made the timing of a trial fail (``said``): yields these, each
        with the first candidate alone, and then the readings of the others. If the first candidate
        is at fault, or no single one, or the time is too short to find out, no rival is blamed.
        """
        first = trial.only([])
        rivals = list(range(1, len(trial.picks)))
        if self._run([first], 0.0)[0].failed:
            yield Timed(first, failed=said.failed, machine=said.machine)
            return
        guilty = self._guilty(trial, rivals)
        for rival, how in guilty.items():
            yield Timed(trial.only([rival]), failed=how.failed, machine=how.machine)
        left = trial.only([rival for rival in rivals if rival not in guilty])
        if guilty and len(left.picks) > 1 and time.monotonic() < self.deadline:
            yield from self._time([left], seconds)
        elif not guilty:
            yield Timed(first, failed=said.failed, machine=said.machine)

    def _guilty(self, trial: Trial, rivals: Sequence[int]) -> dict[int, Readings]:
        """The ``rivals`` whose timing fails, and how, found by halving."""
        if not rivals or time.monotonic() >= self.deadline:
            return {}
        said, _ = self._run([trial.only(rivals)], 0.0)
        if not said.failed:
            return {}
        if len(rivals) == 1:
            return {rivals[0]: said}
        middle = len(rivals) // 2
        return self._guilty(trial, rivals[:middle]) | self._guilty(trial, rivals[middle:])


def _weight(trial: Trial) -> float:
    return trial.picks[0].seconds * len(trial.picks)


def shares(trials: Sequence[Trial], machines: int) -> list[list[Trial]]:
    """The trials, dealt out to so many machines: the heaviest first, each to the machine that has
    the least to do. Without the empty shares.
    """
    found: list[list[Trial]] = [[] for _ in range(max(machines, 1))]
    if len(found) == 1:
        return [list(trials)]
    for trial in sorted(trials, key=_weight, reverse=True):
        min(found, key=lambda share: sum(map(_weight, share))).append(trial)
    return [share for share in found if share]
