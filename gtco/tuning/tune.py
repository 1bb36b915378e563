"""Tunes the stages of models in rounds: propose candidates, measure them on this machine, decide.

The scheduler (:mod:`gtco.search.scheduler`) says which stages a round tunes, and
:mod:`gtco.tuning.proposals` says which candidates of each are tried. The workers build all
candidates of a round first and time them afterwards, so that building does not disturb the
readings. A candidate that clearly beats the pick becomes the pick, and the next round starts from
it. A stage is done when several slots in a row gained nothing (the patience of the effort) or when
no candidate is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.search.closed_form.policy import written
from gtco.search.policy import Policy
from gtco.search.recorded import by_stage
from gtco.search.records.records import Outcome, Record, Records, circumstances
from gtco.search.records.shipped import nearest
from gtco.search.records.standing import standing
from gtco.search.scheduler import Task, allot, gradient, prospect
from gtco.support.options import Tune
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from gtco.tuning.latencies import Latencies, peak_seconds
from gtco.tuning.learned import LearnedProposals
from gtco.tuning.measure import START_SECONDS, Measurer, Timed
from gtco.tuning.proposals import AnalyticProposals, KnownFirst, Proposals
from gtco.tuning.result import StageResult
from gtco.tuning.runner import Runner
from gtco.tuning.sentences import SentenceProposals, writer_of
from gtco.tuning.trial import Trial
from gtco.tuning.verdict import Verdict, first_seconds, judge, outcome
from gtco.tuning.view import HOUR, StageView, View

SMALL_SHARE = 0.01  # stages that take less of the predicted time are left as they are
CANDIDATES, LEAST_CANDIDATES = 8, 3  # candidates of one slot; those of one where time is short
SLOTS = 8  # slots of one round, after the first
# Rounds of readings go on for so many times as long as the least number takes, and so many seconds.
GENEROUS, SHORTEST = 4.0, 1.0
READS_PEAK = 60.0  # seconds of an effort that is worth reading the machine's peak for, 1.4 s


def tune(
    models: Sequence[Generated],
    policy: Policy,
    workers: Workers,
    *,
    threads: int,
    effort: Tune,
    records: Records | None = None,
    shipped: Sequence[Record] = (),
    progress: Callable[[View], None] = lambda view: None,
    earlier: Sequence[StageResult] = (),
    runner: Runner | None = None,
    proposals: Proposals | None = None,
) -> list[StageResult]:
    """Improves ``models`` in place, within the limits of ``effort``. A stage that several models
    have is tuned once and counts for all of them.

    - ``records`` gets a row for each candidate as soon as the round of its stage is decided.
      Candidates that it has from this machine are not measured again.
    - ``shipped`` are the records that come with gtco. If their circumstances are those of this
      machine they count like ``records``. A config that stood elsewhere, by either, is measured
      first.
    - ``progress`` is told the state of the tuning, and the result at the end.
    - ``earlier`` is what the same compile tuned before; tuning continues from it, and the totals
      include it.
    - ``runner`` runs the candidates; None is this machine.
    - ``proposals``: who proposes candidates, in place of whom ``effort`` names.

    Returns the result of each stage that was measured, the heaviest first. If candidates fail
    (builds, crashes, time-outs, wrong results), the budget is too small or the machine is too
    noisy, the picks stay and the models get a note.
    """
    tuner = _Tuner(
        models, policy, workers, threads, effort, records, shipped, progress, earlier, runner,
        proposals,
    )
    while tuner.round():
        pass
    tuner.end()
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
        shipped: Sequence[Record],
        progress: Callable[[View], None],
        earlier: Sequence[StageResult],
        runner: Runner | None,
        proposals: Proposals | None,
    ) -> None:
        self.models, self.policy = models, policy
        self.effort, self.progress = effort, progress
        self.begin = time.monotonic()
        deadline = self.begin + effort.seconds
        self.measurer = Measurer(workers, policy.target, threads, deadline, runner)
        self.trials = effort.trials
        self.records, self.circumstances = records, circumstances(policy.target)
        self.results = {r.stage.key: r for r in heaviest(models)}
        self.earlier: dict[str, list[StageResult]] = {}
        for result in earlier:
            self.earlier.setdefault(result.stage.key, []).append(result)
        self.latencies = Latencies(
            models, policy, self.results, self.earlier, threads, effort.seconds >= READS_PEAK
        )
        known = [r for r in records.all() if r.outcome != "noisy"] if records is not None else []
        here = [record for record in known if record.circumstances == self.circumstances]
        measured = by_stage((*(r for r in shipped if r.circumstances == self.circumstances), *here))
        for key, result in self.results.items():
            space = space_of(result.stage, policy.target)
            rows = [(r, space.spelled_out(r.parsed)) for r in measured.get(key, ())]
            rows = [(r, config) for r, config in rows if space.check(config) is None]
            result.tested.update(config for _, config in rows)
            result.exhausted = not effort.again and standing(r for r, _ in rows) is not None
        elsewhere = [record for record in known if record.circumstances != self.circumstances]
        others = [*shipped, *elsewhere]
        stages = records.stages() if records is not None else {}
        self.proposals = self.named(here, others, stages) if proposals is None else proposals
        if records is not None:
            records.remember(result.stage for result in self.results.values())

    def named(
        self, here: Sequence[Record], others: Sequence[Record], stages: Mapping[str, Stage]
    ) -> Proposals:
        """Who proposes candidates, by the effort: the records of this machine and of ``others``
        tell what is known, ``stages`` the programs of what they name.
        """
        first = nearest(others, self.results.keys(), self.circumstances)
        if self.effort.policy == "closed-form":
            tuned = (result.stage for result in self.results.values())
            for key, config in written(self.policy, tuned).items():
                first[key] = [config, *first.get(key, ())]
        writer = writer_of(self.policy, self.effort)
        proposals: Proposals = (
            LearnedProposals(self.policy, self.results, here, others, stages, writer)
            if self.effort.learned
            else AnalyticProposals(self.policy)
        )
        if writer is not None:
            proposals = SentenceProposals(writer, proposals)
        return KnownFirst(proposals, self.policy, first)

    @property
    def left(self) -> float:
        return self.begin + self.effort.seconds - time.monotonic()

    @property
    def done(self) -> int:
        """The number of stages that have nothing left to try."""
        return sum(result.exhausted for result in self.results.values())

    @property
    def tried(self) -> int:
        """The slots so far in which candidates were built, or could not be."""
        return sum(result.rounds for result in self.results.values())

    def say(self, doing: str) -> None:
        self.progress(self.view(doing))

    def view(self, doing: str = "") -> View:
        """The state of the tuning while it is ``doing`` something; at the end ``doing`` is empty.
        """
        results = list(self.results.values())
        tasks = [self.task(result, CANDIDATES) for result in results]
        open_ = [task for task in tasks if not task.stopped]
        slots = int(HOUR / sum(task.cost for task in open_)) if open_ else 0
        ending = sum(task.cost * (task.patience - task.unchanged) for task in open_)
        stages = [
            self.stage_view(result, task.stopped)
            for result, task in zip(results, tasks, strict=True)
        ]
        gone = [r for key, rs in self.earlier.items() if key not in self.results for r in rs]
        unranked = [result for result in results if not result.ranked]
        return View(
            doing,
            tuple(sorted(stages, key=lambda stage: -stage.total)),
            tuple(self.latencies.model(number) for number in range(len(self.models))),
            time.monotonic() - self.begin,
            max(min(self.left, ending), 0.0) if doing else 0.0,
            changed=sum(r.last.config != self.latencies.since(r)[0].first.config for r in results),
            unranked=len(unranked),
            noise=max((result.noise for result in unranked), default=0.0),
            hour=sum(sum(task.weights) * prospect(task, slots) for task in tasks),
            others=sum(result.measured for result in gone),
        )

    def stage_view(self, result: StageResult, stopped: bool) -> StageView:
        first, now = self.latencies.stage(result)
        trials = sum(r.measured for r in self.latencies.since(result))
        return StageView(
            result.stage.label,
            result.occurrences,
            first,
            now,
            self.latencies.share(result, now),
            trials,
            "done" if stopped else "open" if trials else "waiting",
        )

    def end(self) -> None:
        """Adds the notes about the whole tuning."""
        view = self.view()
        wanting = any(now > self.effort.latency for _, now in view.models)
        exhausted = any(result.exhausted for result in self.results.values())
        nothing = not view.measured and not view.others
        if self.results and wanting and not exhausted and nothing:
            least = min(self.cost(r, LEAST_CANDIDATES) for r in self.results.values())
            self.note_all(
                f"tuning: nothing was measured: {self.effort.seconds:.2g} s do not suffice for one "
                f"stage, which takes about {least + START_SECONDS:.0f} s to build and to time; the "
                "picks stand"
            )
        if view.unranked:
            noise = ""
            if view.noise >= 0.01:
                noise = f" (two readings of one kernel were up to {view.noise:.0%} apart)"
            self.note_all(
                "tuning: the machine was too noisy, or too slow for the time given, to rank the "
                f"candidates of {view.unranked} of {view.measured} stages{noise}, whose picks "
                "stand; tune where nothing else runs, or for longer"
            )
        for failure in self.proposals.failures:
            self.note_all(f"tuning: {failure}")
        self.progress(view)

    def note_all(self, what: str) -> None:
        for model in self.models:
            model.notes.append(what)

    def round(self) -> bool:
        """Runs one round for the stages that the scheduler gives slots to. Gives False if none is
        left or the budget is spent.
        """
        results = list(self.results.values())
        candidates = self.candidates(results)
        tasks = [self.task(result, candidates) for result in results]
        tasks = [  # nothing is left to try of what the budget does not suffice for
            replace(task, exhausted=True)
            if self.trials < 1 or START_SECONDS + task.cost > self.left
            else task
            for task in tasks
        ]
        needed = [self.effort.latency - self.latencies.rest(n) for n in range(len(self.models))]
        falls = [g / t.cost for g, t in zip(gradient(tasks, needed), tasks, strict=True)]
        slots = allot(tasks, SLOTS, needed)
        best_first = sorted(range(len(tasks)), key=lambda i: -falls[i])
        chosen = [(results[i], slots[i] * candidates) for i in best_first if slots[i]]
        before = self.tried, self.done
        trials, least = self.built(chosen)
        if trials:
            self.say(f"timing {sum(len(t.picks) for t in trials)} candidates")
            wanted = max(GENEROUS * least, SHORTEST)
            for timed in self.measurer.time(trials, max(min(wanted, self.left), 0.0)):
                self.decide(timed)
        return (self.tried, self.done) != before

    def candidates(self, results: Sequence[StageResult]) -> int:
        """The number of candidates of a slot. It is smaller if the time left is too short for a
        full slot of each stage in the next round.
        """
        stages = sum(not r.slots for r in results) or min(SLOTS, len(results))
        affordable = int(self.left / 2 / max(self.measurer.build_cost(stages), 1e-9))
        return max(min(affordable, CANDIDATES), LEAST_CANDIDATES)

    def task(self, result: StageResult, candidates: int) -> Task:
        """The stage in the form that the scheduler takes."""
        return Task(
            result.weights,
            tuple(result.history),
            floor=peak_seconds(result, self.policy),
            cost=self.cost(result, candidates),
            patience=self.effort.patience,
            exhausted=result.exhausted,
        )

    def cost(self, result: StageResult, candidates: int) -> float:
        """Seconds that a slot of so many candidates takes."""
        timing = self.measurer.timing_cost(result.stage, result.seconds, candidates)
        return self.measurer.build_cost(candidates) + timing

    def built(self, chosen: Sequence[tuple[StageResult, int]]) -> tuple[list[Trial], float]:
        """Builds a trial for each stage, as many as can be built and timed in the time left. Gives
        the trials and the least number of seconds that timing them takes.
        """
        trials, timing = [], 0.0
        for number, (result, wanted) in enumerate(chosen):
            spare = self.left - timing - START_SECONDS
            n = min(wanted, self.trials)
            while n > LEAST_CANDIDATES and self.cost(result, n) > spare:
                n -= 1
            if n < 1 or self.cost(result, n) > spare:
                continue
            more = self.measurer.timing_cost(result.stage, result.seconds, n)
            self.say(f"building for stage {number + 1} of {len(chosen)}")
            begin = time.monotonic()
            picks = self.proposals.propose(result, n)
            self.measurer.proposed(time.monotonic() - begin)
            trial = self.trial(result, picks) if picks else None
            if trial:
                trials.append(trial)
                timing += more
            result.unbuilt = 0 if trial else result.unbuilt + 1
            # Others may be built where these could not.
            result.exhausted = not picks or result.unbuilt >= self.effort.patience
        return trials, timing

    def trial(self, result: StageResult, picks: Sequence[Pick]) -> Trial | None:
        """A trial of the current pick and those of ``picks`` that could be built."""
        self.trials -= len(picks)
        result.rounds += 1
        result.tested.update(pick.config for pick in picks)
        key = result.stage.key
        kernel = next(m.kernels[key] for m in self.models if key in m.kernels)
        trial, failed = self.measurer.build(result.stage, result.last, kernel, picks)
        for pick, failure in failed:
            reason = f"could not be built: {failure.reason}"
            self.note(result, pick, reason)
            self.keep([Record.of(result.stage, pick, self.circumstances, "failed", reason=reason)])
            if failure.rejected:
                self.models[0].rejections[failure.rejected] += 1
        return trial

    def decide(self, timed: Timed) -> None:
        """Takes a candidate if it beats the pick, and records what was measured."""
        trial = timed.trial
        result = self.results[trial.stage.key]
        if timed.failed:
            what = f"{timed.failed} while it was timed"
            self.note(result, trial.picks[-1], what)
            if len(trial.picks) == 1:  # what stands cannot be timed, and so no rival of it
                result.exhausted = True
            else:
                (_, pick), known = trial.picks, self.circumstances
                by = timed.machine
                self.keep([Record.of(trial.stage, pick, known, "failed", reason=what, machine=by)])
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
        """A record for each candidate of a trial."""
        result = self.results[timed.trial.stage.key]
        readings = timed.readings
        first = first_seconds(readings)
        for n, pick in enumerate(timed.trial.picks):
            came: Outcome = "wrong" if n in timed.wrong else outcome(verdict, n)
            times = readings[:, n] if n else first
            measured = float(np.median(times)), float(np.median(times / first)), verdict.noise
            yield Record.of(
                result.stage, pick, self.circumstances, came, measured, machine=timed.machine
            )

    def keep(self, records: Iterable[Record]) -> None:
        if self.records is not None:
            self.records.add(records)

    def note(self, result: StageResult, pick: Pick, what: str) -> None:
        """Adds a note to every model that has the stage."""
        stage = f"{result.stage.label} ({result.stage.key}, {pick.config.to_json()})"
        for model, weight in zip(self.models, result.weights, strict=True):
            if weight:
                model.notes.append(f"tuning: a candidate of stage {stage} {what}")


def heaviest(models: Sequence[Generated]) -> list[StageResult]:
    """The different stages by their share of the predicted time. Stages that are small in every
    model are left out.
    """
    counts = [Counter(stage.key for stage in model.stages) for model in models]
    canonical = {stage.key: stage.canonical for model in models for stage in model.stages}
    # the first model's, where they differ, as its kernel is what is timed
    picks = {key: pick for model in reversed(models) for key, pick in model.choices.items()}
    totals = [sum(n * picks[key].seconds for key, n in count.items()) for count in counts]
    heavy = {
        key
        for count, total in zip(counts, totals, strict=True)
        for key, n in count.items()
        if n * picks[key].seconds >= SMALL_SHARE * total
    }

    def calls(key: str) -> tuple[int, ...]:
        return tuple(m.times * count[key] for m, count in zip(models, counts, strict=True))

    found = [
        StageResult(canonical[key], calls(key), picks[key], picks[key])
        for key in canonical
        if key in heavy
    ]
    return sorted(found, key=lambda r: -r.occurrences * r.first.seconds)
