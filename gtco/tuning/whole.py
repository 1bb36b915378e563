"""Runs the untuned and the tuned model alternately, to check in the model what was measured of
single stages.

A stage that is timed alone finds the caches as its trial left them, and nothing reads its result.
In the model the neighbouring stages decide both. So this is the last test of what tuning changed.
Inside the model, a stage keeps its untuned kernel if that is as fast, and the model keeps its
untuned partition if that is as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gtco.codegen.generate import Generated
from gtco.search.recorded import measured_seconds
from gtco.search.records.records import Record
from gtco.support.counting import counted
from gtco.tuning.alternating import LEAST_ROUNDS
from gtco.tuning.local import LocalRunner
from gtco.tuning.runner import Budget, Runner
from gtco.tuning.view import became

# The largest share of the time for measuring; if it is too little, this test is left out
SHARE = 0.25
SECONDS = 1.0  # of rounds
MOST_SECONDS, LATE = 300.0, 5.0  # until a process hangs: so long, and so many times as expected


@dataclass(frozen=True)
class ModelReadings:
    """Seconds of every stage in each run, [rounds, stages], in the order of the model."""

    first: np.ndarray
    tuned: np.ndarray


@dataclass(frozen=True)
class ModelVerdict:
    """``back``: keys of the stages that get their untuned pick again. ``uncut``: the model gets its
    untuned partition again. ``before`` and ``after``: seconds of a run without tuning, and with
    what is kept of it.
    """

    back: frozenset[str]
    uncut: bool
    before: float
    after: float

    def __str__(self) -> str:
        went = [counted(len(self.back), "pick")] if self.back else []
        went += ["the partition"] if self.uncut else []
        said = f"; {' and '.join(went)} went back to what was there" if went else ""
        return f"a run of the whole model: {became(self.before, self.after)}{said}"


def cost(seconds: float, weights_bytes: int) -> float:
    """Seconds that this test takes for a model of ``seconds`` a run: the runs, and two links."""
    return max(4 * LEAST_ROUNDS * seconds, SECONDS) + 2 * (weights_bytes / 4e8 + 0.3)


def judge(first: Generated, tuned: Generated, readings: ModelReadings) -> ModelVerdict:
    """Compares first the stages that both models have, each by its share of the run in the same
    round, and then all the other stages, with the better picks in both models.
    """
    was, became = _by_stage(first, readings.first), _by_stage(tuned, readings.tuned)
    back, best = set(), {}
    for key in was.keys() & became.keys():
        if first.choices[key].config == tuned.choices[key].config:  # any difference is noise
            was[key] = became[key] = best[key] = (was[key] + became[key]) / 2
        elif float(np.median(became[key] / was[key])) < 1.0:
            best[key] = became[key]
        else:
            back.add(key)
            best[key] = was[key]

    def total(stages: Mapping[str, np.ndarray], of: Generated) -> np.ndarray:
        return np.sum([stages[s.key] for s in of.stages], axis=0)

    before, old, new = total(was, first), total(was | best, first), total(became | best, tuned)
    uncut = was.keys() != became.keys() and float(np.median(new / old)) >= 1.0
    seconds = first.times * float(np.median(before))
    after = seconds * float(np.median((old if uncut else new) / before))
    return ModelVerdict(frozenset(back), uncut, seconds, after)


def _by_stage(model: Generated, readings: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each different stage [rounds], the mean over its occurrences."""
    columns: dict[str, list[int]] = {}
    for number, stage in enumerate(model.stages):
        columns.setdefault(stage.key, []).append(number)
    return {key: readings[:, of].mean(axis=1) for key, of in columns.items()}


def settled(first: Generated, tuned: Generated, verdict: ModelVerdict) -> Generated:
    """The model with the picks that the verdict keeps."""
    base = first if verdict.uncut else tuned
    better = {
        key: first if key in verdict.back or key not in tuned.kernels else tuned
        for key in base.kernels
    }
    return replace(
        base,
        kernels={key: of.kernels[key] for key, of in better.items()},
        choices={key: of.choices[key] for key, of in better.items()},
        notes=tuned.notes,
        rejections=tuned.rejections,
    )


def refuted(
    first: Generated,
    tuned: Generated,
    readings: ModelReadings,
    known: Mapping[str, Sequence[Record]],
    circumstances: str,
) -> list[Record]:
    """Records that keep a later tuning from choosing the rejected partition again. They raise the
    times of the stages that it alone has, as read alone, by the factor that what it differs in took
    longer in the model than what is back. They change prices only. The rows ``chosen`` say which
    picks and which partition a compile by records gets (:func:`gtco.driver.measuring.conclude`).
    """
    was, became = _by_stage(first, readings.first), _by_stage(tuned, readings.tuned)
    canonical = {s.key: s.canonical for s in tuned.stages}
    of_first, of_tuned = (Counter(s.key for s in m.stages) for m in (first, tuned))
    back, went = of_first - of_tuned, of_tuned - of_first  # how often more than the other
    if not went or not back:
        return []
    inside = [_sum(went, became), _sum(back, was)]
    alone = [
        sum(n * (measured_seconds(known.get(key, ())) or 0.0) for key, n in counts.items())
        for counts in (went, back)
    ]
    more = inside[0] / inside[1] * (alone[1] / alone[0] if all(alone) else 1.0)
    times = max(more, 1.0)
    found = []
    for key in sorted(became.keys() - was.keys()):
        seconds = measured_seconds(known.get(key, ())) or float(np.median(became[key]))
        measured = times * seconds, times, 0.0
        pick = tuned.choices[key]
        found.append(Record.of(canonical[key], pick, circumstances, "kept", measured))
    return found


def _sum(counts: Mapping[str, int], seconds: Mapping[str, np.ndarray]) -> float:
    return sum(n * float(np.median(seconds[key])) for key, n in counts.items())


# running ------------------------------------------------------------------------------------------
def read(
    first: Path, tuned: Path, runner: Runner | None = None, expected: float = 0.0
) -> ModelReadings | str:
    """The readings of both libraries, or a sentence on how running them failed. ``expected``: the
    seconds that it should take.
    """
    reading: Runner = LocalRunner() if runner is None else runner
    most = max(MOST_SECONDS, LATE * expected)
    said = reading.read([first, tuned], Budget(LEAST_ROUNDS, SECONDS, most))
    return said.failed or ModelReadings(*said.seconds)
