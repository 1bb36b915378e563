"""Times systems side by side: each in a process of its own, all but one stopped, in interleaved
rounds.

Two runtimes that share a process, or are awake at the same time, take each other's cores: their
thread pools spin for a while after each call. So every system is loaded and warmed up in its own
process (``bench/harness/worker.py``) and stopped with SIGSTOP. A round wakes one system, does not
count its first calls, times a few, and stops it again. The order rotates from round to round, so if
the machine drifts (other tenants, frequency), it drifts for all systems.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.processes import python

from .agreement import Judge, agree, losses
from .peers import peer_of
from .process import Worker, WorkerError

Progress = Callable[[str], None]
OPEN_TIMEOUT = 900.0  # seconds; torch.compile of a large model takes minutes
WORKER = python("gtco.bench.harness.worker")


@dataclass(frozen=True)
class Contender:
    """A system to be timed. ``job`` is sent to the worker unchanged; ``command`` starts a worker
    that knows ``job['system']``.
    """

    name: str
    job: Mapping[str, Any]
    command: tuple[str, ...] = WORKER


@dataclass(frozen=True)
class Measurement:
    """The results of one system. ``rounds`` holds every timed call in seconds; ``error`` says why
    there are none.
    """

    system: str
    version: str = ""
    rounds: tuple[tuple[float, ...], ...] = ()
    error: str | None = None
    difference: float | None = (
        None  # largest |output - reference| over the reference's largest magnitude
    )
    disagrees: str | None = None  # why the outputs cannot be the same model's
    judged: str | None = None  # why they are right, where they differ from the reference's
    loss: float | None = None  # relative error against the outputs of ``truth``

    @property
    def median(self) -> float:
        """Median over rounds of each round's median call, seconds."""
        return (
            statistics.median(statistics.median(r) for r in self.rounds)
            if self.rounds
            else math.nan
        )

    @property
    def p90(self) -> float:
        """90th percentile of all timed calls, seconds."""
        return (
            float(np.percentile([s for r in self.rounds for s in r], 90))
            if self.rounds
            else math.nan
        )

    def to_json(self) -> dict[str, Any]:
        numbers = {"median_s": self.median, "p90_s": self.p90} if self.rounds else {}
        return {
            "system": self.system,
            "version": self.version,
            **numbers,
            "error": self.error,
            "difference": self.difference,
            "disagrees": self.disagrees,
            "judged": self.judged,
            "rounds_s": [list(r) for r in self.rounds],
        }


def calls_per_round(seconds: float, budget: float) -> int:
    """The number of calls that fill ``budget`` seconds of one round, from 3 to 50."""
    return min(50, max(3, math.ceil(budget / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Comparison:
    """Measurements in the order of the candidates, and readings of the machine's peak taken between
    rounds (FLOP/s).
    """

    measurements: tuple[Measurement, ...]
    peaks: tuple[float, ...] = ()
    peak_error: str | None = None

    @property
    def peak(self) -> float | None:
        return statistics.median(self.peaks) if self.peaks else None

    def __getitem__(self, system: str) -> Measurement:
        return next(m for m in self.measurements if m.system == system)


def compare(
    candidates: Sequence[Contender],
    rounds: int = 7,
    *,
    warm: float = 1.0,
    budget: float = 0.3,
    peak: Contender | None = None,
    reference: str = "onnxruntime",
    tolerance: float = 1e-3,
    truth: str = "",
    judge: Judge | None = None,
    progress: Progress = lambda text: None,
) -> Comparison:
    """Loads, warms up, checks and times every candidate; one that fails is reported with its
    reason.

    - ``warm``: seconds of warm-up for each
    - ``budget``: seconds of timed calls for each system and round
    - ``reference``: outputs are compared with those of this candidate, or of the first one that
      works and is not gtco's own if it is absent or fails
    - ``tolerance``: the allowed difference, relative to the largest magnitude
    - ``judge``: decides where outputs differ by more than that
    - ``truth``: the candidate from whose outputs the others' losses are counted, if it is there
    - ``peak``: a worker whose ``read`` answers the machine's FLOP/s; it is asked in the first,
      middle and last round
    """
    contest = _Contest(candidates, peak)
    try:
        with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
            for candidate in candidates:
                progress(f"load {candidate.name}")
                contest.load(candidate, warm, budget, Path(folder))
            contest.check(Path(folder), reference, tolerance, truth, judge)
        if peak:
            progress("measure the machine's peak")
            contest.open_peak(peak)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            if number in (0, rounds // 2, rounds - 1):
                contest.read_peak()
            contest.round(number)
    finally:
        contest.close()
    return Comparison(tuple(contest.results.values()), tuple(contest.peaks), contest.peak_error)


class _Contest:
    """The workers of one comparison and their results so far."""

    def __init__(self, candidates: Sequence[Contender], peak: Contender | None):
        self.results = {c.name: Measurement(c.name) for c in candidates}
        self.peaks: list[float] = []
        self.peak_error: str | None = None
        self._workers: dict[str, Worker] = {}
        self._calls: dict[str, int] = {}
        self._names: list[str] = []
        self._own = [c.name for c in candidates if peer_of(str(c.job.get("system"))) == "gtco"]
        self._peak: Worker | None = None

    def load(self, candidate: Contender, warm: float, budget: float, folder: Path) -> None:
        name = candidate.name
        worker = self._workers[name] = Worker(candidate.command)
        try:
            opened = worker.ask(OPEN_TIMEOUT, do="open", job=dict(candidate.job))
            self._update(name, version=str(opened["version"]))
            warmed = worker.ask(OPEN_TIMEOUT, do="warm", seconds=warm)
            self._calls[name] = calls_per_round(float(warmed["seconds"]), budget)
            worker.ask(do="save", file=str(folder / f"{name}.npz"))
            worker.stop()
            self._names.append(name)
        except WorkerError as error:
            self._fail(name, str(error))

    def check(
        self, folder: Path, reference: str, tolerance: float, truth: str, judge: Judge | None
    ) -> None:
        outputs: dict[str, list[np.ndarray]] = {}
        for name in self._names:
            with np.load(folder / f"{name}.npz") as file:
                outputs[name] = [file[key] for key in file.files]
        for name, seen in agree(outputs, reference, tolerance, judge, self._own).items():
            self._update(
                name, difference=seen.difference, disagrees=seen.reason, judged=seen.judged
            )
        for name, loss in losses(outputs, truth).items():
            self._update(name, loss=loss)

    def open_peak(self, peak: Contender) -> None:
        self._peak = Worker(peak.command)
        try:
            self._peak.ask(OPEN_TIMEOUT, do="open", job=dict(peak.job))
            self._peak.ask(OPEN_TIMEOUT, do="read")  # the first call calibrates and builds
            self._peak.stop()
        except WorkerError as error:
            self._end_peak(error)

    def read_peak(self) -> None:
        if self._peak is None:
            return
        try:
            self.peaks.append(float(self._peak.ask(do="read")["value"]))
            self._peak.stop()
        except WorkerError as error:
            self._end_peak(error)

    def _end_peak(self, error: WorkerError) -> None:
        """Ends the worker, which may still be measuring on all cores."""
        assert self._peak is not None
        self._peak.kill()
        self._peak, self.peak_error = None, str(error)

    def round(self, number: int) -> None:
        turn = number % max(1, len(self._names))
        for name in self._names[turn:] + self._names[:turn]:
            if name not in self._workers:
                continue  # failed in an earlier round
            try:
                timed = self._workers[name].ask(do="time", calls=self._calls[name])["seconds"]
                self._workers[name].stop()
                self._update(name, rounds=(*self.results[name].rounds, tuple(timed)))
            except WorkerError as error:
                self._fail(name, f"in round {number + 1}: {error}")

    def close(self) -> None:
        for worker in [*self._workers.values(), *([self._peak] if self._peak else [])]:
            worker.kill()

    def _update(self, name: str, **changes: Any) -> None:
        self.results[name] = replace(self.results[name], **changes)

    def _fail(self, name: str, reason: str) -> None:
        self._update(name, rounds=(), error=reason)
        self._workers.pop(name).kill()
