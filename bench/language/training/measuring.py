"""The loop of iterative optimization (TLM, Section 5.3, Fig. 8): write sentences, measure them,
take the best of each stage, fine-tune from the base, and write better ones.

Stages are sorted by their operators and dealt into batches. A turn takes the next batch: the tuner
measures what the model of now writes about its stages, and records it. Then the model is fine-tuned
from the base on all records. The loop has converged when a fifth more measurements make all stages
together less than 1 % faster. It may be stopped at any moment: what was measured is in the records,
and which turn comes next follows from them.

The paper measures and fine-tunes at the same time on two devices. Here one machine does both, and
timings are taken while nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gtco.codegen.generate import generate
from gtco.codegen.workers import Workers
from gtco.search.policy import Policy
from gtco.search.recorded import by_stage
from gtco.search.records.records import Record, Records
from gtco.search.records.standing import relative
from gtco.support.options import Tune
from gtco.tensor.stage import Stage
from gtco.tuning.tune import tune

BATCHES = 4  # k_b of the paper
SENTENCES = 16  # k_p: for each stage in a turn
MORE, GAIN = 0.2, 0.01  # converged: so many more measurements gain less than this


@dataclass(frozen=True)
class Turn:
    """After a turn: measurements so far, the stages that have some, and the mean over these of the
    best time over the first pick's.
    """

    measurements: int
    stages: int
    relative: float


def dealt(stages: Sequence[Stage], batches: int = BATCHES) -> list[list[Stage]]:
    """Stages of the same operators go to different batches: what is good for one helps its like."""
    ordered = sorted(stages, key=lambda stage: (stage.label, stage.key))
    return [ordered[n::batches] for n in range(batches)]


def next_batch(batches: Sequence[Sequence[Stage]], rows: Sequence[Record]) -> int:
    """The batch whose stages were measured least, in the mean; the first of equal ones."""
    known = by_stage(rows)

    def tried(batch: Sequence[Stage]) -> float:
        if not batch:
            return inf
        return sum(len({r.config for r in known.get(s.key, ())}) for s in batch) / len(batch)

    return min(range(len(batches)), key=lambda n: tried(batches[n]))


def measure_batch(
    stages: Sequence[Stage],
    policy: Policy,
    workers: Workers,
    records: Records,
    threads: int,
    seconds: float,
    weights: Path,
    sentences: int = SENTENCES,
) -> int:
    """Measures up to so many ``sentences`` of each stage by the tuner, written by the model in the
    file ``weights``; gives how many it did.
    """
    made = generate(stages, policy.choose, policy.target, workers)
    effort = Tune(
        trials=sentences * len(stages),
        seconds=seconds,
        patience=1000,
        learned=False,
        policy="language-model",
        weights=str(weights),
    )
    results = tune([made], policy, workers, threads=threads, effort=effort, records=records)
    return sum(result.measured for result in results)


def state(rows: Sequence[Record]) -> Turn:
    """What all records say together."""
    best = [min(times.values()) for mine in by_stage(rows).values() if (times := relative(mine))]
    timed = sum(row.ratio is not None for row in rows)
    return Turn(timed, len(best), sum(best) / len(best) if best else 1.0)


def converged(turns: Sequence[Turn]) -> bool:
    """True if the last fifth of the measurements gained under 1 % of the same stages."""
    if len(turns) < 2:
        return False
    last = turns[-1]
    same = [turn for turn in turns if turn.stages == last.stages]
    before = [turn for turn in same if turn.measurements * (1 + MORE) <= last.measurements]
    return bool(before) and before[-1].relative <= last.relative * (1 + GAIN)


def loop(
    stages: Sequence[Stage],
    policy: Policy,
    workers: Workers,
    records: Records,
    circumstances: str,
    threads: int,
    weights: Path,
    finetune: Callable[[Sequence[Record], Mapping[str, Stage]], Path],
    left: Callable[[], float],
    sentences: int = SENTENCES,
    say: Callable[[str], None] = lambda text: None,
) -> list[Turn]:
    """Turns until the loop has converged or no time is ``left``. The first turn writes with the
    model in ``weights``, the next one with what ``finetune`` makes of the records.
    """
    batches = [batch for batch in dealt(stages) if batch]
    programs = {stage.key: stage for stage in stages}
    turns = [state(records.under(circumstances))]
    while left() > 0 and not converged(turns):
        batch = batches[next_batch(batches, records.under(circumstances))]
        done = measure_batch(batch, policy, workers, records, threads, left(), weights, sentences)
        rows = records.under(circumstances)
        turns.append(state(rows))
        say(
            f"{done} sentences about {len(batch)} stages; in all {turns[-1].measurements} "
            f"measurements, the best are {turns[-1].relative:.4f} of the first picks' time"
        )
        if not done:
            break
        weights = finetune(rows, programs)
    return turns
