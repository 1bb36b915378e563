"""The loop of measuring and fine-tuning: which stages a turn has, when it has converged, and that
it goes on from its records.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import readings
from bench.language.training import measuring
from bench.language.training.measuring import Turn, converged, dealt, loop, next_batch, state
from gtco.machine.target import TARGETS
from gtco.search.analytic import AnalyticPolicy
from gtco.search.records.records import Outcome, Record, Records, circumstances
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

MACHINE = TARGETS["znver4"]
HERE = circumstances(MACHINE)
STAGES = [stage.canonical for stage in readings.STAGES.values()]


def row(stage: Stage, number: int, ratio: float, outcome: Outcome = "slower") -> Record:
    sketch = space_of(stage, MACHINE).sketches[0]
    config = next(c for n, c in enumerate(space_of(stage, MACHINE).configs()) if n == number)
    return Record.of(stage, Pick(sketch, config, 1e-3), HERE, outcome, (1e-3 * ratio, ratio, 0.0))


def test_stages_of_the_same_operators_go_to_different_batches():
    batches = dealt(STAGES, 4)
    assert sorted(s.key for b in batches for s in b) == sorted(s.key for s in STAGES)
    assert max(map(len, batches)) - min(map(len, batches)) <= 1
    for batch in batches:
        assert sum(s.label == "conv2d+add" for s in batch) <= 1
        assert sum(s.label == "attention" for s in batch) <= 1


def test_the_next_batch_is_the_one_that_was_measured_least():
    batches = dealt(STAGES[:8], 4)
    assert next_batch(batches, []) == 0
    rows = [row(stage, 0, 1.0, "kept") for stage in batches[0]]
    assert next_batch(batches, rows) == 1
    rows += [row(s, n, 1.0) for b in batches[1:] for s in b for n in (0, 1)]
    assert next_batch(batches, rows) == 0
    assert next_batch([[], STAGES[:1]], []) == 1


def test_what_was_measured_is_summed_up():
    one, other = STAGES[:2]
    rows = [row(one, 0, 1.0, "kept"), row(one, 1, 0.8), row(other, 0, 1.0, "kept")]
    assert state(rows) == Turn(3, 2, pytest.approx(0.9))
    assert state([]) == Turn(0, 0, 1.0)


def test_it_has_converged_when_a_fifth_more_gains_under_a_hundredth():
    assert not converged([])
    assert not converged([Turn(100, 9, 0.9)])
    assert not converged([Turn(100, 9, 0.9), Turn(119, 9, 0.9)])  # too few to tell
    assert converged([Turn(100, 9, 0.9), Turn(120, 9, 0.8999)])
    assert not converged([Turn(100, 9, 0.9), Turn(130, 9, 0.88)])
    assert converged([Turn(100, 9, 0.9), Turn(130, 9, 0.88), Turn(160, 9, 0.879)])
    assert not converged([Turn(100, 8, 0.9), Turn(130, 9, 0.9)])  # of other stages


def test_the_loop_goes_on_from_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stopped loop takes the batches that come next, with the model of the last records."""
    stages, turns = STAGES[:8], []

    def measured(batch, policy, workers, records, threads, seconds, weights, sentences):
        turns.append(([s.key for s in batch], weights))
        seen = len({r.config for r in records.all() if r.stage == batch[0].key})
        gain = 0.98 ** (seen + 1)
        records.add([row(s, 0, 1.0, "kept") for s in batch if not seen])
        records.add([row(s, seen + 1, gain) for s in batch])
        return len(batch)

    monkeypatch.setattr(measuring, "measure_batch", measured)
    policy = AnalyticPolicy(MACHINE)

    def run(count: int) -> None:
        left = iter([1.0] * (2 * count) + [0.0] * 9)
        with Records(tmp_path / "a.records") as records:
            loop(
                stages,
                policy,
                None,  # type: ignore[arg-type]
                records,
                HERE,
                1,
                Path("first.npz"),
                lambda rows, programs: Path(f"{len(rows)}.npz"),
                lambda: next(left),
            )

    run(3)
    run(2)
    batches = [[s.key for s in batch] for batch in dealt(stages)]
    assert [keys for keys, _ in turns] == [*batches, batches[0]]
    assert [str(file) for _, file in turns[:3]] == ["first.npz", "4.npz", "8.npz"]
