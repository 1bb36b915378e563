"""Tuning: what is proposed, how it is timed, and that a pick is only replaced by a config that
beats it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import gtco
from gtco.cli import main
from gtco.codegen.generate import Generated, generate
from gtco.codegen.jobs import Failure
from gtco.codegen.workers import Workers
from gtco.compiler import compile_to_files
from gtco.machine.target import Target, detect, target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.records.records import STANDING, Records
from gtco.support.errors import OptionError
from gtco.support.options import Tune
from gtco.tensor.sketch import sketches
from gtco.tensor.space import Config, Pick, check, configs
from gtco.tensor.stage import Stage
from gtco.tuning import census, local, measure, tune
from gtco.tuning.trial import Trial, artifact
from tests.tuning.small import linear, small_model
from tests.tuning.test_verdict import rounds


@pytest.fixture(scope="module")
def machine() -> Target:
    return detect()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as started:
        yield started


# what is proposed -----------------------------------------------------------------------------
def test_alternatives_are_points_of_the_space_that_were_not_tested() -> None:
    """The best config of each other sketch and, for each decision, one config that decides it
    differently.
    """
    policy = AnalyticPolicy(target("x86-64-v4"))
    stage = linear()
    pick = policy.choose(stage)
    assert pick is not None and pick.sketch.name == "gemm"
    tested = {pick.config}
    seen: list[Config] = []
    for _ in range(3):
        found = policy.alternatives(stage, pick, tested)
        assert [p.seconds for p in found] == sorted(p.seconds for p in found)
        assert not {p.config for p in found} & tested
        for other in found:
            assert check(other.sketch, other.config) is None
        tested |= {p.config for p in found}
        seen += [p.config for p in found]
    assert len(set(seen)) == len(seen)
    first = policy.alternatives(stage, pick, {pick.config})
    names = {s.name for s in sketches(stage, policy.target)}
    assert {p.sketch.name for p in first} == names
    mine = [p.config for p in first if p.sketch.name == "gemm"]
    for name, option in pick.config.choices:
        decided = {c.by_name.get(name) for c in mine}
        assert decided - {option} or name in ("a", "kc"), f"{name} is the same everywhere"


# the whole ------------------------------------------------------------------------------------
class Slow(AnalyticPolicy):
    """Picks the config that it predicts to be the worst first, so that there is something to
    gain.
    """

    def choose(self, stage: Stage, without: Any = ()) -> Pick | None:
        picks = [
            Pick(s, c, self.seconds(s.workload(c)))
            for s in sketches(stage, self.target)
            if s.name == "gemm"
            for c in self.candidates(s)
        ]
        return max(picks, key=lambda p: p.seconds)


def generated(policy: AnalyticPolicy, workers: Workers, *stages: Stage) -> Generated:
    return generate(stages, policy.choose, policy.target, workers)


def test_tuning_replaces_pick_and_kernel_together(machine: Target, workers: Workers) -> None:
    """Readings are given: a config that is predicted to be faster reads faster, so the result is
    known.
    """
    policy = Slow(machine)
    stage = linear(197, 192, 576)
    made = generated(policy, workers, stage)
    first = made.choices[stage.key]
    told: list[dict[str, Any]] = []

    def read(self: Any, trials: list[Trial], seconds: float) -> Iterator[measure.Timed]:
        for t in trials:
            told.append({p.config: k.symbol for p, k in zip(t.picks, t.kernels, strict=True)})
            yield measure.Timed(t, rounds(*(p.seconds for p in t.picks)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Measurer, "time", read)
        (result,) = tune.tune([made], policy, workers, threads=0, effort=Tune(learned=False))
    assert result.first == first and result.last.seconds < first.seconds
    assert result.seconds < result.first_seconds
    assert result.readings[result.last.config] == pytest.approx(result.seconds)
    assert made.choices[stage.key] == result.last
    symbol = made.kernels[stage.key].symbol
    assert any(symbols.get(result.last.config) == symbol for symbols in told)
    assert result.seconds / result.first_seconds == pytest.approx(
        result.last.seconds / first.seconds, rel=1e-6
    )
    assert not made.notes
    proposed = set(policy.candidates(first.sketch))
    tried = {config for symbols in told for config in symbols if config.sketch == "gemm"}
    assert tried - proposed, "mutations leave what the policy's own model would propose"


def test_what_one_tuning_took_is_the_first_of_the_next(machine: Target, workers: Workers) -> None:
    """A trial has a kernel of an earlier tuning beside those of this one; each runs under its own
    name.
    """
    policy = Slow(machine)
    stage = linear(37, 48, 96)
    made = generated(policy, workers, stage)
    told: list[Trial] = []

    def read(self: Any, trials: list[Trial], seconds: float) -> Iterator[measure.Timed]:
        """In the very first trial the first rival gains."""
        for t in trials:
            told.append(t)
            artifact([t], machine, 1)  # raises if two kernels have the same name
            others = [1.5] * (len(t.picks) - 2)
            yield measure.Timed(t, rounds(1.0, 0.5 if len(told) == 1 else 1.5, *others))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Measurer, "time", read)
        for _ in range(2):
            effort = Tune(trials=8, patience=1, learned=False)
            tune.tune([made], policy, workers, threads=1, effort=effort)
    assert told[-1].picks[0] != told[0].picks[0], "it was to begin with what another one took"
    for t in told:
        assert len({kernel.symbol for kernel in t.kernels}) == len(t.kernels)


def test_a_crash_while_timing_costs_the_candidate_and_not_the_compile(
    machine: Target, workers: Workers
) -> None:
    policy = AnalyticPolicy(machine)
    stages = linear(), linear(60)
    made = generated(policy, workers, *stages)
    picks = dict(made.choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "run", lambda library, seconds, most: "crashed (SIGSEGV)")
        results = tune.tune([made], policy, workers, threads=1, effort=Tune(seconds=60.0))
    assert made.choices == picks and results == []
    assert len(made.notes) == 2 and all("crashed (SIGSEGV)" in note for note in made.notes)


def test_candidates_that_cannot_be_built_cost_their_slot_alone(
    machine: Target, workers: Workers
) -> None:
    """The stage goes on with others, until so many slots in a row failed as the patience says."""
    policy, stage = Slow(machine), linear(197, 192, 576)
    made, slots = generated(policy, workers, stage), list[int]()
    build = measure.Measurer.build

    def failing(self: Any, stage: Stage, current: Pick, kernel: Any, picks: Any) -> Any:
        slots.append(len(picks))
        if len(slots) != 2:
            return None, [(pick, Failure("k", "drawn by the test")) for pick in picks]
        return build(self, stage, current, kernel, picks)

    def read(self: Any, trials: list[Trial], seconds: float) -> Iterator[measure.Timed]:
        for t in trials:
            yield measure.Timed(t, rounds(*(p.seconds for p in t.picks)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Measurer, "build", failing)
        patch.setattr(measure.Measurer, "time", read)
        effort = Tune(learned=False, patience=2)
        (result,) = tune.tune([made], policy, workers, threads=0, effort=effort)
    assert len(slots) == 4 and result.rounds == 4
    assert result.measured and result.exhausted


@pytest.mark.parametrize("bad", [1, 3])
def test_what_crashes_is_told_from_its_rivals(
    machine: Target, workers: Workers, tmp_path: Path, bad: int
) -> None:
    """One or several candidates of a trial crash the process that times. Only they are recorded as
    failed. The others are timed, and the tuning of the stage continues.
    """
    policy = AnalyticPolicy(machine)
    made = generated(policy, workers, linear())
    crashing: set[str] = set()

    def run(library: Path, seconds: float, most: float) -> dict[str, Any] | str:
        names = [step.kernel for step in artifacts[-1].steps]
        if crashing & set(names):
            return "crashed (SIGSEGV)"
        readings = [[1.0 if n == names[0] else 1.5 for n in names] for _ in range(10)]
        return {"seconds": readings, "wrong": [], "trials": artifacts[-1].metadata["trials"]}

    def write(made: Any, path: Path) -> None:
        if not artifacts:
            crashing.update(step.kernel for step in made.steps[2 : 2 + bad])
        artifacts.append(made)

    artifacts: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, Records(tmp_path / "r") as records:
        patch.setattr(local, "run", run)
        patch.setattr(measure, "write_artifact", write)
        effort = Tune(trials=16, patience=1, learned=False)
        (result,) = tune.tune([made], policy, workers, threads=1, effort=effort, records=records)
        rows = records.all()
    assert len(crashing) == bad
    failed = [r for r in rows if r.outcome == "failed"]
    assert len(failed) == bad and all("crashed (SIGSEGV)" in r.reason for r in failed)
    assert {f"gtco_{r.stage}_{r.parsed.key}" for r in failed} == crashing
    slower = {r.config for r in rows if r.outcome == "slower"}
    assert slower and not slower & {r.config for r in failed}
    assert result.measured == len(slower) and len(made.notes) == bad


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tuned_model_is_right(precision: str) -> None:
    """The whole way, on an ONNX model; the report says what was measured."""
    made, effort = small_model(), gtco.Tune(trials=16)
    compiled = gtco.compile_model(made, tune=effort, verify=True, precision=precision)
    # a busy machine may add a note, which is not a fault
    assert all("too noisy" in note for note in compiled.report.notes)
    assert compiled.report.verification.passed
    assert [name for name, _ in compiled.report.phases].count("tune") == 1
    results = compiled.report.tuning
    assert results and all(r["candidates"] > 0 and r["first_seconds"] > 0 for r in results)
    chosen = {s["key"]: s["schedule"] for s in compiled.stages}
    for r in results:
        assert chosen[r["key"]] == r["last"]


def test_what_cannot_be_tuned_is_said_before_the_work() -> None:
    with pytest.raises(OptionError, match="off, quick, full"):
        gtco.compile_model(b"", tune="fast")
    with pytest.raises(OptionError, match="tuning runs on this machine"):
        gtco.compile_model(b"", tune="quick", target="x86-64-v3")


def test_what_was_measured_is_taken_without_measuring_again(tmp_path: Path) -> None:
    made, path = small_model(), tmp_path / "m.records"
    tuned = gtco.compile_model(made, tune=gtco.Tune(trials=16, seconds=60.0), records=path)
    with Records(path) as records:
        first = records.all()
    # The config differs from the pick, so that the test sees that it was taken. It takes no time,
    # because otherwise fusion would rightly avoid its stage.
    inside = {s["key"] for s in tuned.stages}
    rival = next(r for r in first if r.outcome in ("slower", "noisy") and r.stage in inside)
    with Records(path) as records:
        records.add([replace(rival, outcome="taken", seconds=1e-9, ratio=1e-3)])
    again = gtco.compile_model(made, records=path, verify=True)
    assert again.report.verification.passed and again.report.tuning == []
    (stage,) = [s for s in again.stages if s["key"] == rival.stage]
    assert stage["schedule"] == json.loads(rival.config)
    before = {s["key"]: s["schedule"] for s in tuned.stages if s["key"] != rival.stage}
    kept = [s for s in again.stages if s["key"] in before]  # whose cost did not change
    assert kept and all(s["schedule"] == before[s["key"]] for s in kept)
    # a tuning that continues from here measures only candidates that are not known
    gtco.compile_model(made, tune=gtco.Tune(trials=16, seconds=60.0), records=path)
    with Records(path) as records:
        new = records.all()[len(first) + 1 :]
    # except the pick that rivals are compared with; a round that is too noisy calls it noisy too
    picks = {(r.stage, r.config) for r in (*first, rival) if r is rival or r.outcome in STANDING}
    of_picks = ("kept", "beaten", "chosen")
    tried = {(r.stage, r.config) for r in new if r.outcome not in (*of_picks, "noisy")}
    tried |= {(r.stage, r.config) for r in new if r.outcome == "noisy"} - picks
    assert not tried & {(r.stage, r.config) for r in first if r.outcome != "noisy"}


def test_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gtco tune writes the records, and a library for each model; gtco compile uses them."""
    import onnx

    monkeypatch.chdir(tmp_path)
    models = [tmp_path / "m.onnx", tmp_path / "n.onnx"]
    for model in models:
        onnx.save(small_model(), model)
    names = [str(model) for model in models]
    assert main(["tune", *names, "--trials", "6", "--verify"]) == 0
    told = capsys.readouterr()
    assert "tune" in told.err and "6 candidates of" in told.err
    assert "gain" in told.out and "one more hour" in told.out and "of it: 6 cand" in told.out
    assert all(model.with_suffix(".so").exists() for model in models)
    records = tmp_path / "m.records"
    with Records(records) as kept:  # stages that both models have were measured once
        assert len({(r.stage, r.config) for r in kept.all() if r.outcome != "kept"}) <= 6 + 3
    assert main(["records", "show", str(records)]) == 0
    assert "matmul" in capsys.readouterr().out
    assert main(["compile", names[0], "--records", str(records)]) == 0
    (tmp_path / "text").write_text("text" * 100)
    assert main(["compile", names[0], "--records", str(tmp_path / "text")]) == 1
    assert "could not be opened" in capsys.readouterr().err


def test_what_is_wrong_with_a_budget_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for minutes in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            main(["tune", "m.onnx", "--minutes", minutes])
        assert "not a number of minutes above 0" in capsys.readouterr().err
    for trials in ("0", "-1", "1.5", "many"):
        with pytest.raises(SystemExit):
            main(["tune", "m.onnx", "--trials", trials])
        assert "not a whole number of 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "m.onnx", "--trials", "8", "--minutes", "1"])
    assert "not allowed with" in capsys.readouterr().err
    assert main(["tune", "a.onnx", "b.onnx", "-o", "c.so"]) == 1
    assert "--output is for one model" in capsys.readouterr().err
    (tmp_path / "a").mkdir()
    twice = [(str(tmp_path / "m.onnx"), tmp_path / "a" / "m.so", None)] * 2
    with pytest.raises(OptionError, match="to the same file"):
        compile_to_files(twice)
    for wrong in ({"trials": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"latency": -1.0}):
        with pytest.raises(OptionError):
            Tune(**wrong)  # type: ignore[arg-type]


def test_the_sizes_of_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Target
) -> None:
    import onnx

    onnx.save(small_model(), tmp_path / "m.onnx")
    assert main(["tune", "--space", str(tmp_path / "m.onnx")]) == 0
    told = capsys.readouterr().out
    assert "matmul" in told and "estimated from random walks" in told
    assert not (tmp_path / "m.so").exists() and not (tmp_path / "m.records").exists()
    sketch = next(s for s in sketches(linear(197, 192, 768), machine) if s.name == "gemm")
    whole = sum(1 for _ in configs(sketch))
    random = Random(0)
    assert whole > census.COUNTED
    estimated = census.size(sketch, random)
    assert not estimated.exact and estimated.configs == pytest.approx(whole, rel=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "COUNTED", whole)
        assert census.size(sketch, random) == census.Size(whole, True)
        patch.setattr(census, "COUNTED", whole - 1)
        assert not census.size(sketch, random).exact
