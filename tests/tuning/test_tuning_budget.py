"""How tuning uses its budget: which stages it goes to, when it ends and what it says; several
models in one run; a machine that is too noisy. Nothing is built and no time passes: builds,
readings and the clock are given.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.cli.live import live
from gtco.codegen.generate import Generated
from gtco.codegen.jobs import Kernel
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.peak import Peak
from gtco.search.records.records import Records
from gtco.search.records.standing import standing
from gtco.support.options import Tune
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from gtco.tuning import latencies, measure, tune
from gtco.tuning.result import StageResult
from gtco.tuning.timing import LEAST_ROUNDS
from gtco.tuning.trial import Trial
from gtco.tuning.view import View
from tests.tuning.small import linear

POLICY = AnalyticPolicy(target("x86-64-v4"))


class Machine:
    """A clock that advances with building and timing. ``factor`` gives the readings of each
    pick.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, build_seconds: float = 0.1) -> None:
        self.now, self.build_seconds = 0.0, build_seconds
        self.noise = 0.0  # the difference between the two readings of the first
        self.trials: list[Trial] = []
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(tune, "time", clock)
        monkeypatch.setattr(measure, "time", clock)
        monkeypatch.setattr(measure.Workers, "build", self.build)
        monkeypatch.setattr(measure.Measurer, "time", self.time)

    def build(self, jobs: Sequence[Any]) -> Iterator[Kernel]:
        for job in jobs:
            self.now += self.build_seconds
            yield Kernel(job.symbol, b"", 1, 0, {})

    def time(self, trials: Sequence[Trial], seconds: float) -> Iterator[measure.Timed]:
        self.now += max(seconds, sum(self.least(trial) for trial in trials))
        self.trials += trials
        for trial in trials:
            times = [self.factor(pick, n) for n, pick in enumerate(trial.picks)]
            readings = np.tile([*times, times[0] * (1 + self.noise)], (20, 1))
            yield measure.Timed(trial, readings * trial.picks[0].seconds)

    def least(self, trial: Trial) -> float:
        return LEAST_ROUNDS * sum(p.seconds for p in trial.picks)

    def factor(self, pick: Pick, number: int) -> float:
        return 1.0 if number == 0 else 1.2


def generated(*stages: Stage) -> Generated:
    made = Generated(list(stages))
    for stage in stages:
        pick = POLICY.choose(stage)
        assert pick is not None
        made.choices[stage.key] = pick
        made.kernels[stage.key] = Kernel(f"gtco_{stage.key}", b"", 1, 0, {})
    return made


def run(
    *models: Generated,
    records: Records | None = None,
    earlier: Sequence[StageResult] = (),
    **effort: Any,
) -> tuple[list[StageResult], View]:
    views: list[View] = []
    workers = object.__new__(measure.Workers)
    results = tune.tune(
        models,
        POLICY,
        workers,
        threads=1,
        effort=Tune(**effort),
        records=records,
        progress=views.append,
        earlier=earlier,
    )
    return results, views[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


STAGES = [linear(64 + 16 * n, 192, 384) for n in range(8)]


def test_no_more_trials_than_were_given(machine: Machine) -> None:
    results, view = run(generated(*STAGES[:3]), trials=10)
    assert sum(r.measured for r in results) == view.trials == 10
    assert sum(len(trial.picks) - 1 for trial in machine.trials) == 10


def test_a_latency_is_that_of_all_parts_of_a_batch(machine: Machine) -> None:
    one, parts = generated(*STAGES[:3]), generated(*STAGES[:3])
    parts.times = 12
    latency = 2 * sum(pick.seconds for pick in one.choices.values())
    assert not any(r.measured for r in run(one, trials=10, latency=latency)[0])
    results, view = run(parts, trials=10, latency=latency)
    assert sum(r.measured for r in results) == 10
    assert view.models[0][0] == pytest.approx(6 * latency)


@pytest.mark.parametrize("seconds", [5.0, 10.0, 40.0])
@pytest.mark.parametrize("build_seconds", [0.05, 0.5])
def test_building_counts_too(
    monkeypatch: pytest.MonkeyPatch, seconds: float, build_seconds: float
) -> None:
    """However long a build takes, only work that is expected to end in time begins. The first build
    is expected to take a guessed time.
    """
    machine = Machine(monkeypatch, build_seconds)
    stages = STAGES[::2]
    results, _ = run(generated(*stages), seconds=seconds, learned=seconds < 40.0)
    assert results
    assert machine.now <= seconds + tune.CANDIDATES * build_seconds
    if seconds == 40.0:
        assert len(results) == len(stages)


@pytest.mark.parametrize("gaining", [False, True])
def test_every_budget_comes_to_an_end(machine: Machine, gaining: bool) -> None:
    """This includes budgets whose rest is enough for one slot and not for the several that are
    wanted.
    """
    if gaining:
        machine.factor = lambda pick, n: 1.0 if n == 0 else 0.9  # type: ignore[method-assign]
    for seconds in np.arange(1.5, 7.0, 0.25):
        begin = machine.now
        run(generated(STAGES[0]), seconds=float(seconds), learned=False)
        assert machine.now - begin <= seconds + 1.0


def test_what_takes_long_to_time_is_held_to_the_budget(machine: Machine) -> None:
    """The readings of one stage alone would take longer than the whole budget, so it is never
    measured. The others are.
    """
    giant, small = linear(40000, 4096, 4096), linear(2000, 1024, 1024)
    least = LEAST_ROUNDS * POLICY.predict(giant)
    assert least > 10
    results, view = run(generated(giant, *[small] * 4), seconds=10.0)
    assert [r.stage.key for r in results] == [small.key]
    assert machine.now <= 10.0
    assert any("1 of 2 stages were not measured" in line for line in view.outlook)


def test_a_budget_for_nothing_is_said(machine: Machine) -> None:
    made = generated(STAGES[0])
    before = dict(made.choices)
    results, view = run(made, seconds=0.5)
    assert results == [] and machine.now == 0 and made.choices == before
    (note,) = made.notes
    assert "nothing was measured: 0.5 s do not suffice for one stage" in note
    assert view.outlook == [] and str(view) == "no candidate was timed"


def test_a_stage_of_two_models_is_tuned_once_for_both(machine: Machine) -> None:
    """The weights are added. A config that beats the pick goes into both models, and each has its
    own report.
    """
    shared, alone = STAGES[0], STAGES[1]
    first, second = generated(shared, shared, alone), generated(shared, shared, shared)
    machine.factor = lambda pick, n: 1.0 if n == 0 else 0.9 if n == 1 else 1.2  # type: ignore[method-assign]
    results, view = run(first, second, trials=16)
    by_key = {r.stage.key: r for r in results}
    assert by_key[shared.key].weights == (2, 3) and by_key[alone.key].weights == (1, 0)
    timed = [trial for trial in machine.trials if trial.stage.key == shared.key]
    assert len(timed) == by_key[shared.key].rounds
    last = by_key[shared.key].last
    assert last != by_key[shared.key].first
    assert first.choices[shared.key] == second.choices[shared.key] == last
    assert first.kernels[shared.key] is second.kernels[shared.key]
    assert alone.key not in second.kernels
    assert by_key[shared.key].to_json(1)["occurrences"] == 3
    assert len(view.models) == 2 and all(now < before for before, now in view.models)


def test_a_model_that_is_fast_enough_is_left_alone(machine: Machine) -> None:
    """The times of its stages, which are predicted here, are half of its requirement. Without a
    requirement it is tuned.
    """
    made = generated(*STAGES[:2])
    enough = 2 * sum(pick.seconds for pick in made.choices.values())
    assert run(made, latency=enough)[0] == [] and machine.now == 0 and not made.notes
    assert run(made, latency=enough / 8, patience=1)[0]


def test_a_machine_too_noisy_is_said_and_changes_nothing(machine: Machine, tmp_path: Path) -> None:
    """No candidate is taken, however fast it reads. The same candidates are measured again when the
    machine is quieter.
    """
    machine.noise = 0.3
    machine.factor = lambda pick, n: 1.0 if n == 0 else 0.3  # type: ignore[method-assign]
    made = generated(STAGES[0])
    before = dict(made.choices)
    with Records(tmp_path / "r") as records:
        _, view = run(made, records=records, patience=1)
        assert made.choices == before and view.changed == 0 and view.unranked == 1
        (note,) = made.notes
        assert "too noisy" in note and "of 1 of 1 stages (two readings of one kernel" in note
        assert {r.outcome for r in records.all()} == {"noisy"}
        assert standing(records.all()) is None
        tried = {p.config for t in machine.trials for p in t.picks}
        machine.noise, machine.trials = 0.0, []
        _, view = run(made, records=records, trials=24)
        assert tried <= {p.config for t in machine.trials for p in t.picks}
        assert made.choices != before and view.changed == 1 and standing(records.all())


def test_what_a_compile_tuned_before_counts_in_what_is_told(machine: Machine) -> None:
    """This includes other partitions. A tuning that has no time left contradicts none of it."""
    machine.factor = lambda pick, n: 1.0 if n == 0 else 0.8  # type: ignore[method-assign]
    both = generated(*STAGES[:2])
    found, before = run(both, trials=16)
    one = generated(STAGES[0])
    key = STAGES[0].key
    one.choices[key], one.kernels[key] = both.choices[key], both.kernels[key]
    results, view = run(one, earlier=found, seconds=0.01)
    assert not results and not one.notes
    (stage,) = view.stages
    (same,) = (s for s in before.stages if s.label == stage.label and s.seconds == stage.seconds)
    assert stage.trials == same.trials and stage.first_seconds == pytest.approx(same.first_seconds)
    assert stage.state != "waiting" and view.changed == 1
    assert view.trials + view.others == before.trials == 16
    assert f"and {view.others} of other partitions measured" in str(view)
    _, alone = run(generated(STAGES[0]), seconds=0.01)
    assert not alone.trials and not alone.others


def test_the_end_says_what_was_gained_and_what_to_expect(machine: Machine) -> None:
    _, flat = run(generated(*STAGES[:2]), patience=1)
    assert flat.now == pytest.approx(flat.before) and {s.state for s in flat.stages} == {"done"}
    assert "none, every stage stopped gaining" in flat.outlook[-1]
    assert flat.outlook[0].endswith("none is faster by more than the noise")
    machine.factor = lambda pick, n: 1.0 if n == 0 else 0.8  # type: ignore[method-assign]
    _, gaining = run(generated(*STAGES[:2]), trials=16)
    assert gaining.now < gaining.before and gaining.changed == 2
    assert gaining.outlook[0].startswith("gained: ")
    assert "of the peak" in gaining.outlook[1]
    assert "expected gain from one more hour: " in gaining.outlook[-1]
    assert 0 < gaining.hour < gaining.now
    # and as a live table
    shown = "\n".join(live(replace(gaining, doing="timing 9 candidates", remaining=7.0)).lines(160))
    assert "timing 9 candidates" in shown and "about 7 s to go" in shown
    assert shown.count("matmul+add+gelu") == 2 and f"{1e3 * gaining.now:.2f}" in shown


def test_the_share_of_the_peak_is_of_the_reading_that_all_commands_show(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is that of this machine. It is read if the effort is worth it; otherwise it is shown
    if it is known.
    """
    native = AnalyticPolicy(replace(POLICY.target, name="native"))
    peak, read = Peak(1, (2e9, 4e9), 0.0), list[str]()

    def reading(threads: int, operand: str, target: object) -> Peak:
        read.append(operand)
        return peak

    monkeypatch.setattr(latencies, "machine_peak", reading)
    monkeypatch.setattr(latencies, "known_peak", lambda *_: None)
    monkeypatch.setattr("tests.tuning.test_tuning_budget.POLICY", native)
    _, long = run(generated(STAGES[0]), trials=4, seconds=600.0)
    (stage,) = long.stages
    flops = 2.0 * 64 * 192 * 384
    assert stage.share == pytest.approx(flops / stage.seconds / 4e9) and read == ["float32"]
    _, short = run(generated(STAGES[0]), trials=4, seconds=20.0)
    assert short.stages[0].share is None and read == ["float32"]
    monkeypatch.setattr(latencies, "known_peak", lambda *_: peak)
    assert run(generated(STAGES[0]), trials=4, seconds=20.0)[1].stages[0].share is not None
