"""Rounds of propose, measure, decide: the stages' picks, held against what the policy thinks next
best on this very machine.

The stages that take most of the predicted time go first. A round gives each of them the policy's
alternatives to its pick; they are built by the workers, and timed when all of them are built, so
that nothing disturbs the readings. A pick that is clearly beaten gives way, and the next round
starts from what beat it (coordinate descent over the decisions of the space). From the second round
on, mutations of the pick go along, which the policy's own model would never propose. A stage is
done when as many rounds on end have changed nothing as the effort has patience for, or nothing is
left to try.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from gtco.codegen.build import Job, Kernel
from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers, environment
from gtco.options import Tune
from gtco.runtime.artifact import write_artifact
from gtco.search.policy import Policy
from gtco.search.records import Outcome, Record, Records, circumstances, now
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Rejection
from gtco.tensor.stage import Stage
from gtco.tuning.trial import Trial, artifact, batches
from gtco.tuning.verdict import Verdict, judge

SMALL_SHARE = 0.01  # stages that take less of the predicted time are left as they are
ALTERNATIVES = 8  # that a stage gets in one round
MUTATIONS = 4  # beside them, from the second round on
DRAWS = 8  # for one mutation that was not tested yet
HOPELESS = 3.0  # times the pick's predicted time: nothing that is worth building
GRACE = 60.0  # seconds that timing may take beyond what it was given: opening, a slow first round


@dataclass
class StageResult:
    """What tuning did to one stage that occurs ``occurrences`` times: seconds a run, the first pick
    and the last one.
    """

    stage: Stage
    occurrences: int
    first: Pick
    last: Pick
    first_seconds: float = 0.0
    seconds: float = 0.0
    noise: float = 0.0
    rounds: int = 0
    measured: int = 0
    unchanged: int = 0  # rounds on end
    done: bool = False
    tested: set[Config] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """What a report says of the stage."""
        return {
            "stage": self.stage.label,
            "key": self.stage.key,
            "occurrences": self.occurrences,
            "candidates": self.measured,
            "first": self.first.config.to_json(),
            "last": self.last.config.to_json(),
            "first_seconds": self.first_seconds,
            "seconds": self.seconds,
            "noise": self.noise,
        }


def tune(
    generated: Generated,
    policy: Policy,
    workers: Workers,
    *,
    threads: int,
    effort: Tune,
    records: Records | None = None,
    progress: Callable[[str], None] = lambda news: None,
) -> list[StageResult]:
    """Improve ``generated`` in place, as far as ``effort`` goes.

    ``records`` gets a row for each candidate as soon as its stage's round is decided, and what it
    has of this machine is not measured again. Returns what became of each stage that was measured,
    heaviest first. Failures of candidates (builds, crashes, time-outs, wrong results) are notes of
    ``generated``; the pick stands then.
    """
    tuner = _Tuner(generated, policy, workers, threads, effort, records, progress)
    for _ in range(effort.rounds):
        open_ = [r for r in tuner.results.values() if not r.done]
        if not open_ or tuner.left <= 0:
            break
        tuner.round(open_)
    return [result for result in tuner.results.values() if result.measured]


def summary(results: Iterable[StageResult]) -> str:
    """What was done, and what the stages that were measured take in a run of the model."""
    found = [r for r in results if r.measured]
    before = 1e3 * sum(r.occurrences * r.first_seconds for r in found)
    after = 1e3 * sum(r.occurrences * r.seconds for r in found)
    measured, changed = sum(r.measured for r in found), sum(r.last != r.first for r in found)
    return (
        f"{measured} candidates of {len(found)} stages measured, {changed} picks changed, "
        f"{before:.2f} -> {after:.2f} ms"
    )


class _Tuner:
    def __init__(
        self,
        generated: Generated,
        policy: Policy,
        workers: Workers,
        threads: int,
        effort: Tune,
        records: Records | None,
        progress: Callable[[str], None],
    ) -> None:
        self.generated, self.policy, self.workers = generated, policy, workers
        self.threads, self.effort, self.progress = threads, effort, progress
        self.deadline = time.monotonic() + effort.seconds
        self.records, self.circumstances = records, circumstances(policy.target)
        self.serial, self.random = 0, Random(0)
        self.results = {r.stage.key: r for r in _heaviest(generated)}
        if records is not None:
            for key, result in self.results.items():
                known = records.of(key, self.circumstances)
                result.tested.update(record.parsed for record in known)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, doing: str) -> None:
        self.progress(f"{summary(self.results.values())}; {doing}")

    def round(self, results: Sequence[StageResult]) -> None:
        """Alternatives of each stage, built in order of weight until a half of the time is over;
        then timed.
        """
        begin, left = time.monotonic(), self.left
        trials = []
        for number, result in enumerate(results):
            if time.monotonic() - begin > left / 2:
                break
            self.say(f"building for stage {number + 1} of {len(results)}")
            picks = self.policy.alternatives(result.stage, result.last, result.tested)
            picks = picks[:ALTERNATIVES] + (self.mutations(result) if result.rounds else [])
            hopeful = {
                p.config: p for p in picks if p.seconds <= HOPELESS * result.last.seconds
            }
            result.rounds += 1
            if trial := self.built(result, list(hopeful.values())):
                trials.append(trial)
            else:
                result.done = True
        total = sum(self.results[t.stage.key].last.seconds for t in trials) or 1.0
        for batch in batches(trials):
            share = sum(self.results[t.stage.key].last.seconds for t in batch) / total
            self.say(f"timing {sum(len(t.picks) for t in batch)} candidates")
            self.time(batch, max(self.left, 0.0) * share)

    def mutations(self, result: StageResult) -> list[Pick]:
        """The pick with a decision changed at random, for every draw that was not tested yet."""
        space = space_of(result.stage, self.policy.target)
        found: dict[Config, Pick] = {}
        for _ in range(DRAWS * MUTATIONS):
            config = space.mutate(result.last.config, self.random)
            if config in result.tested or config in found or len(found) == MUTATIONS:
                continue
            sketch = space.sketch(config)
            assert not isinstance(sketch, Rejection)
            found[config] = Pick(sketch, config, self.policy.price(sketch, config))
        return list(found.values())

    def built(self, result: StageResult, picks: Sequence[Pick]) -> Trial | None:
        """The trial of what is picked now and of the ``picks``, of those that could be built."""
        result.tested.update(pick.config for pick in picks)
        key, target = result.stage.key, self.policy.target
        named: dict[str, Pick] = {}
        for pick in picks:
            self.serial += 1
            named[f"gtco_{key}_{self.serial}"] = pick
        jobs = [Job(name, result.stage, pick.config, target) for name, pick in named.items()]
        kernels = []
        for answer in self.workers.build(jobs):
            if isinstance(answer, Kernel):
                kernels.append(answer)
            else:
                pick, reason = named[answer.symbol], f"could not be built: {answer.reason}"
                self.note(result, pick, reason)
                self.keep([self.record(result, pick, "failed", reason=reason)])
                if answer.rejected:
                    self.generated.rejections[answer.rejected] += 1
        if not kernels:
            return None
        kept = (result.last, *(named[k.symbol] for k in kernels))
        return Trial(result.stage, kept, (self.generated.kernels[key], *kernels))

    def time(self, batch: Sequence[Trial], seconds: float) -> None:
        """Time the candidates, and take those that beat their first."""
        target = self.policy.target
        with tempfile.TemporaryDirectory(prefix="gtco-trials-") as folder:
            library = Path(folder, "trials.so")
            write_artifact(artifact(batch, target, self.threads), library)
            said = _run(library, seconds)
        if isinstance(said, str):
            if len(batch) > 1:  # it is one of them: the others are worth another try
                for trial in batch:
                    self.time([trial], seconds / len(batch))
                return
            result = self.results[batch[0].stage.key]
            result.done = True
            self.note(result, batch[0].picks[-1], f"or a rival of it {said} while it was timed")
            failed = [self.record(result, p, "failed", reason=said) for p in batch[0].picks[1:]]
            self.keep(failed)
            return
        readings = np.array(said["seconds"])
        wrong = set(said["wrong"])
        for trial, steps in zip(batch, said["trials"], strict=True):
            columns = steps[1:]  # the first one brought in the activations
            bad = frozenset(n for n, step in enumerate(columns) if step in wrong)
            for n in bad - {0, len(trial.picks)}:
                what = "computes something else"
                self.note(self.results[trial.stage.key], trial.picks[n], what)
            self.decide(trial, readings[:, columns], bad)

    def decide(self, trial: Trial, readings: np.ndarray, wrong: frozenset[int]) -> None:
        result = self.results[trial.stage.key]
        verdict = judge(readings, wrong)
        self.keep(self.outcomes(trial, readings, wrong, verdict))
        result.measured += len(trial.picks) - 1
        result.noise = verdict.noise
        # the gains of rounds multiply: their seconds were read at different moments
        if not result.first_seconds:
            result.first_seconds = result.seconds = verdict.first_seconds
        result.seconds *= verdict.seconds / verdict.first_seconds
        if not verdict.best:
            result.unchanged += 1
            result.done = result.unchanged >= self.effort.patience
        else:
            result.unchanged = 0
            result.last = trial.picks[verdict.best]
            self.generated.choices[trial.stage.key] = result.last
            self.generated.kernels[trial.stage.key] = trial.kernels[verdict.best]

    def outcomes(
        self, trial: Trial, readings: np.ndarray, wrong: frozenset[int], verdict: Verdict
    ) -> Iterator[Record]:
        """What came of each candidate of a trial."""
        result = self.results[trial.stage.key]
        first = (readings[:, 0] + readings[:, -1]) / 2
        for n, pick in enumerate(trial.picks):
            outcome: Outcome = "wrong" if n in wrong else "slower"
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
        stage = f"{result.stage.label} ({result.stage.key}, {pick.config.to_json()})"
        self.generated.notes.append(f"tuning: a candidate of stage {stage} {what}")


def _heaviest(generated: Generated) -> list[StageResult]:
    """The different stages by their share of the predicted time, without the small ones."""
    counts = Counter(stage.key for stage in generated.stages)
    canonical = {stage.key: stage.canonical for stage in generated.stages}
    picks = generated.choices
    weights = {key: n * picks[key].seconds for key, n in counts.items()}
    least = SMALL_SHARE * sum(weights.values())
    return [
        StageResult(canonical[key], counts[key], picks[key], picks[key], tested={picks[key].config})
        for key in sorted(counts, key=lambda key: -weights[key])
        if weights[key] >= least
    ]


def _run(library: Path, seconds: float) -> dict[str, Any] | str:
    """What :mod:`gtco.tuning.timing` prints of the library, or in words how it failed."""
    command = [sys.executable, "-m", "gtco.tuning.timing", str(library), str(seconds)]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + GRACE,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode:
        return f"crashed ({done.stderr.strip().splitlines()[-1:] or done.returncode})"
    said: dict[str, Any] = json.loads(done.stdout)
    return said
