"""Rounds of propose, measure, decide: the stages' picks, held against others on this very machine.

The scheduler (:mod:`gtco.search.scheduler`) says which stages a round goes to, and
:mod:`gtco.tuning.proposals` what is tried of each. All of it is built by the workers, and timed
when it is built, so that nothing disturbs the readings. A pick that is clearly beaten gives way,
and the next round starts from what beat it. A stage is done when as many slots on end have gained
nothing as the effort has patience for, or nothing is left to try.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import numpy as np

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.options import Tune
from gtco.search.policy import Policy
from gtco.search.records import Outcome, Record, Records, circumstances, now
from gtco.search.scheduler import Task, allot, gradient
from gtco.tensor.space import Pick
from gtco.tuning.measure import START_SECONDS, Measurer, Timed
from gtco.tuning.proposals import propose
from gtco.tuning.result import StageResult, summary
from gtco.tuning.trial import Trial
from gtco.tuning.verdict import Verdict, judge

SMALL_SHARE = 0.01  # stages that take less of the predicted time are left as they are
CANDIDATES, LEAST_CANDIDATES = 8, 3  # of one slot; where time is short
SLOTS = 8  # of one round, after the first
# Rounds of readings go on for so many times as long as the least number takes, and so many seconds.
GENEROUS, SHORTEST = 4.0, 1.0


def tune(
    models: Sequence[Generated],
    policy: Policy,
    workers: Workers,
    *,
    threads: int,
    effort: Tune,
    records: Records | None = None,
    progress: Callable[[str], None] = lambda news: None,
) -> list[StageResult]:
    """Improve ``models`` in place, as far as ``effort`` goes. A stage that several of them have is
    tuned once, and counts for all of them.

    ``records`` gets a row for each candidate as soon as its stage's round is decided, and what it
    has of this machine is not measured again. Returns what became of each stage that was measured,
    heaviest first. Failures of candidates (builds, crashes, time-outs, wrong results) are notes of
    the models; the pick stands then.
    """
    tuner = _Tuner(models, policy, workers, threads, effort, records, progress)
    while tuner.round():
        pass
    return [result for result in tuner.results.values() if result.measured]


class _Tuner:
    def __init__(
        self,
        models: Sequence[Generated],
        policy: Policy,
        workers: Workers,
        threads: int,
        effort: Tune,
        records: Records | None,
        progress: Callable[[str], None],
    ) -> None:
        self.models, self.policy = models, policy
        self.measurer = Measurer(workers, policy.target, threads)
        self.effort, self.progress = effort, progress
        self.deadline = time.monotonic() + effort.seconds
        self.trials = effort.trials
        self.records, self.circumstances = records, circumstances(policy.target)
        self.random = Random(0)
        self.results = {r.stage.key: r for r in _heaviest(models)}
        if records is not None:
            for key, result in self.results.items():
                known = records.of(key, self.circumstances)
                result.tested.update(record.parsed for record in known)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, doing: str) -> None:
        self.progress(f"{summary(list(self.results.values()))}; {doing}")

    def round(self) -> bool:
        """One round, of the stages that the scheduler gives slots to; False where none is left or
        the budget is spent.
        """
        results = list(self.results.values())
        candidates = self.candidates(results)
        tasks = [self.task(result, candidates) for result in results]
        falls = [g / t.cost for g, t in zip(gradient(tasks), tasks, strict=True)]
        slots = allot(tasks, SLOTS)
        best_first = sorted(range(len(tasks)), key=lambda i: -falls[i])
        chosen = [(results[i], slots[i] * candidates) for i in best_first if slots[i]]
        trials, least = self.built(chosen)
        if trials:
            self.say(f"timing {sum(len(t.picks) for t in trials)} candidates")
            wanted = max(GENEROUS * least, SHORTEST)
            for timed in self.measurer.time(trials, max(min(wanted, self.left), 0.0)):
                self.decide(timed)
        return bool(chosen)

    def candidates(self, results: Sequence[StageResult]) -> int:
        """How many a slot tries: fewer where the time left would not do for a slot of each stage of
        the next round.
        """
        stages = sum(not r.slots for r in results) or min(SLOTS, len(results))
        affordable = int(self.left / 2 / max(self.measurer.build_cost(stages), 1e-9))
        return max(min(affordable, CANDIDATES), LEAST_CANDIDATES)

    def task(self, result: StageResult, candidates: int) -> Task:
        """The stage with what a slot of it costs; with nothing left to try where that is more than
        what is left of the budget.
        """
        cost = self.measurer.build_cost(candidates)
        cost += self.measurer.timing_cost(result.seconds, candidates)
        exhausted = result.exhausted or START_SECONDS + cost > self.left or not self.trials
        return Task(
            result.weights,
            tuple(result.history),
            cost=cost,
            patience=self.effort.patience,
            exhausted=exhausted,
        )

    def built(self, chosen: Sequence[tuple[StageResult, int]]) -> tuple[list[Trial], float]:
        """A trial for each stage, of so many candidates, of as many stages as can be built and
        timed in what is left; and the seconds that timing them takes at the least.
        """
        trials, timing = [], 0.0
        for number, (result, n) in enumerate(chosen):
            n = min(n, self.trials)
            more = self.measurer.timing_cost(result.seconds, n)
            needed = self.measurer.build_cost(n) + timing + more + START_SECONDS
            if n < 1 or needed > self.left:
                continue
            self.say(f"building for stage {number + 1} of {len(chosen)}")
            picks = propose(result, self.policy, self.random, n)
            if trial := self.trial(result, picks):
                trials.append(trial)
                timing += more
            else:
                result.exhausted = True
        return trials, timing

    def trial(self, result: StageResult, picks: Sequence[Pick]) -> Trial | None:
        """What is picked now and those of the ``picks`` that could be built."""
        self.trials -= len(picks)
        result.rounds += 1
        result.tested.update(pick.config for pick in picks)
        key = result.stage.key
        kernel = next(m.kernels[key] for m in self.models if key in m.kernels)
        trial, failed = self.measurer.build(result.stage, result.last, kernel, picks)
        for pick, failure in failed:
            reason = f"could not be built: {failure.reason}"
            self.note(result, pick, reason)
            self.keep([self.record(result, pick, "failed", reason=reason)])
            if failure.rejected:
                self.models[0].rejections[failure.rejected] += 1
        return trial

    def decide(self, timed: Timed) -> None:
        """Take a candidate that beats the pick; keep what was measured."""
        trial = timed.trial
        result = self.results[trial.stage.key]
        if timed.failed:
            result.exhausted = True
            what = f"or a rival of it {timed.failed} while it was timed"
            self.note(result, trial.picks[-1], what)
            failed = [
                self.record(result, p, "failed", reason=timed.failed) for p in trial.picks[1:]
            ]
            self.keep(failed)
            return
        for n in timed.wrong - {0, len(trial.picks)}:
            self.note(result, trial.picks[n], "computes something else")
        verdict = judge(timed.readings, timed.wrong)
        self.keep(self.outcomes(timed, verdict))
        result.add(timed, verdict)
        if verdict.best:
            result.last = trial.picks[verdict.best]
            for model in self.models:
                if trial.stage.key in model.kernels:
                    model.choices[trial.stage.key] = result.last
                    model.kernels[trial.stage.key] = trial.kernels[verdict.best]

    def outcomes(self, timed: Timed, verdict: Verdict) -> Iterator[Record]:
        """What came of each candidate of a trial."""
        result = self.results[timed.trial.stage.key]
        readings = timed.readings
        first = (readings[:, 0] + readings[:, -1]) / 2
        for n, pick in enumerate(timed.trial.picks):
            outcome: Outcome = "wrong" if n in timed.wrong else "slower"
            if n == verdict.best:
                outcome = "taken" if n else "kept"
            elif n == 0:
                outcome = "beaten"
            times = readings[:, n] if n else first
            measured = float(np.median(times)), float(np.median(times / first)), verdict.noise
            yield self.record(result, pick, outcome, measured)

    def record(
        self,
        result: StageResult,
        pick: Pick,
        outcome: Outcome,
        measured: tuple[float | None, float | None, float | None] = (None, None, None),
        reason: str = "",
    ) -> Record:
        config = json.dumps(pick.config.to_json())
        return Record(
            result.stage.key,
            result.stage.label,
            self.circumstances,
            config,
            outcome,
            pick.seconds,
            *measured,
            reason,
            now(),
        )

    def keep(self, records: Iterable[Record]) -> None:
        if self.records is not None:
            self.records.add(records)

    def note(self, result: StageResult, pick: Pick, what: str) -> None:
        """To every model that has the stage."""
        stage = f"{result.stage.label} ({result.stage.key}, {pick.config.to_json()})"
        for model, weight in zip(self.models, result.weights, strict=True):
            if weight:
                model.notes.append(f"tuning: a candidate of stage {stage} {what}")


def _heaviest(models: Sequence[Generated]) -> list[StageResult]:
    """The different stages by their share of the predicted time, without those that are small in
    every model.
    """
    counts = [Counter(stage.key for stage in model.stages) for model in models]
    canonical = {stage.key: stage.canonical for model in models for stage in model.stages}
    picks = {key: pick for model in models for key, pick in model.choices.items()}
    totals = [sum(n * picks[key].seconds for key, n in count.items()) for count in counts]
    heavy = {
        key
        for count, total in zip(counts, totals, strict=True)
        for key, n in count.items()
        if n * picks[key].seconds >= SMALL_SHARE * total
    }
    found = [
        StageResult(canonical[key], tuple(count[key] for count in counts), picks[key], picks[key])
        for key in canonical
        if key in heavy
    ]
    return sorted(found, key=lambda r: -r.occurrences * r.first.seconds)
