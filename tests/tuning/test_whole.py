"""What stays after a tuned model was run beside the untuned one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gtco
from gtco.codegen.generate import Generated
from gtco.runtime.library import read_metadata
from gtco.search.recorded import by_stage
from gtco.search.records.records import Record, Records
from gtco.search.records.standing import standing
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType
from gtco.tuning import whole
from gtco.tuning.runner import Budget, Readings
from gtco.tuning.whole import ModelReadings, judge, refuted, settled
from tests.tuning.small import small_model

ROUNDS = 7


def stage(size: int) -> Stage:
    type_ = TensorType((size, 8))
    return Stage((StageInput("x", type_),), (Operator("relu", ("x",), "y", type_),))


def model(*sizes: int, config: str) -> Generated:
    """Stages of these sizes, all with the same config, which identifies their kernels."""
    stages = [stage(size) for size in sizes]
    sketch: Any = None
    return Generated(
        stages,
        {s.key: config for s in stages},  # type: ignore[misc]
        {s.key: Pick(sketch, Config(config), 1.0) for s in stages},
    )


def readings(first: Sequence[float], tuned: Sequence[float], noise: float = 0.0) -> ModelReadings:
    """The machine's speed halves in some rounds."""
    random = np.random.default_rng(3)
    drift = 1.0 + (random.random((ROUNDS, 1)) > 0.5)

    def times(seconds: Sequence[float]) -> np.ndarray:
        return drift * np.array(seconds) * (1 + noise * random.random((ROUNDS, len(seconds))))

    return ModelReadings(times(first), times(tuned))


def kernels(of: Generated) -> list[Any]:
    return [of.kernels[s.key] for s in of.stages]


def test_each_stage_keeps_the_pick_that_is_faster_in_the_model() -> None:
    first, tuned = model(1, 2, 1, config="a"), model(1, 2, 1, config="b")
    read = readings([1.0, 5.0, 1.0], [1.2, 4.0, 1.2])
    verdict = judge(first, tuned, read)
    assert verdict.back == {stage(1).key} and not verdict.uncut
    # of one median round: 5 and twice the first pick's second where it was 7
    assert verdict.after / verdict.before == pytest.approx(6.0 / 7.0)
    stands = settled(first, tuned, verdict)
    assert kernels(stands) == ["a", "b", "a"]
    assert [stands.choices[s.key].config.sketch for s in stands.stages] == ["a", "b", "a"]
    assert kernels(tuned) == ["b", "b", "b"], "both are left as they were"
    assert "1 pick went back" in str(verdict)


def test_seconds_are_those_of_all_parts_of_a_batch() -> None:
    first, tuned = model(1, config="a"), model(1, config="b")
    first.times = tuned.times = 12
    verdict = judge(first, tuned, ModelReadings(np.full((3, 1), 2.0), np.full((3, 1), 1.0)))
    assert (verdict.before, verdict.after) == (24.0, 12.0)


def test_a_stage_with_one_config_says_nothing() -> None:
    """Both models have the same kernel for it. The difference of its two readings is noise, and no
    gain or loss.
    """
    first, tuned = model(1, 2, config="a"), model(1, 2, config="b")
    tuned.choices[stage(2).key] = first.choices[stage(2).key]
    verdict = judge(first, tuned, readings([1.0, 5.0], [0.9, 9.0]))
    assert not verdict.back and not verdict.uncut
    assert verdict.after / verdict.before == pytest.approx(7.9 / 8.0)


def test_what_gained_everywhere_stays() -> None:
    first, tuned = model(1, 2, config="a"), model(1, 2, config="b")
    verdict = judge(first, tuned, readings([1.0, 5.0], [0.9, 4.9], noise=0.01))
    assert not verdict.back and not verdict.uncut and "back" not in str(verdict)
    assert kernels(settled(first, tuned, verdict)) == ["b", "b"]


@pytest.mark.parametrize(("came", "uncut"), [(2.5, False), (3.5, True)])
def test_a_partition_that_is_slower_in_the_model_goes(came: float, uncut: bool) -> None:
    """Stages of sizes 2 and 3 became one of size 4. A stage that both partitions have keeps its
    better kernel.
    """
    first, tuned = model(1, 2, 3, config="a"), model(1, 4, config="b")
    verdict = judge(first, tuned, readings([1.0, 2.0, 1.0], [0.5, came]))
    assert verdict.uncut == uncut and not verdict.back
    assert verdict.after / verdict.before == pytest.approx((0.5 + min(came, 3.0)) / 4.0)
    stands = settled(first, tuned, verdict)
    assert kernels(stands) == (["b", "a", "a"] if uncut else ["b", "b"])


def test_a_partition_that_went_is_no_bargain_by_the_records() -> None:
    """Alone, its stage took 2.4 s, and the stages that it replaced 3 s. In the model they took 3.5
    s and 3 s.
    """
    first, tuned = model(1, 2, 3, config="a"), model(1, 4, config="b")
    read = readings([1.0, 2.0, 1.0], [0.5, 3.5])
    assert judge(first, tuned, read).uncut
    known = by_stage(
        Record.of(stage(n), of.choices[stage(n).key], "here", "kept", (seconds, 1.0, 0.0))
        for n, of, seconds in ((2, first, 2.0), (3, first, 1.0), (4, tuned, 2.4))
    )
    (row,) = refuted(first, tuned, read, known, "here")
    assert (row.stage, row.outcome, row.circumstances) == (stage(4).key, "kept", "here")
    assert row.parsed == Config("b") and row.seconds == pytest.approx(3.5)


def test_a_partition_that_went_may_have_every_stage_of_the_other() -> None:
    """Size 3 is sizes 1 and 2 as one kernel, at one of two places: the other keeps them apart. The
    stages that went took 2.5 s, and those that are back 2 s.
    """
    first, tuned = model(1, 2, 1, 2, config="a"), model(1, 2, 3, config="a")
    read = readings([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.5])
    assert judge(first, tuned, read).uncut
    (row,) = refuted(first, tuned, read, {}, "here")
    assert row.stage == stage(3).key and row.ratio == pytest.approx(1.25)


# with libraries -----------------------------------------------------------------------------------
Said = Callable[[Path, Path], ModelReadings | str]  # of the libraries before and after tuning


def tuned_model(path: Path, patch: pytest.MonkeyPatch, said: Said | None) -> Any:
    """The first candidate of every stage beats its pick. ``said`` gives the readings of the whole
    model; if it is None they are real.
    """
    from gtco.tuning import tune as module
    from gtco.tuning.verdict import judge as honest

    def taken(rounds: np.ndarray, wrong: frozenset[int] = frozenset()) -> Any:
        found = honest(rounds, wrong)
        best = next(n for n in range(rounds.shape[1] - 1) if n and n not in wrong)
        return replace(found, best=best, seconds=0.9 * found.first_seconds, ranked=True)

    patch.setattr(module, "judge", taken)
    if said is not None:
        patch.setattr(whole, "read", lambda first, tuned, runner, expected: said(first, tuned))
    effort = gtco.Tune(trials=6, seconds=60.0, patience=1, learned=False)
    return gtco.compile_model(small_model(), tune=effort, records=path, verify=True)


def test_a_tuned_model_is_run_beside_the_untuned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readings are real. The records name the same picks as the result."""
    path = tmp_path / "m.records"
    compiled = tuned_model(path, monkeypatch, None)
    settled = compiled.report.settled
    assert settled is not None and 0 < settled.after and 0 < settled.before
    assert compiled.report.verification.passed
    stands = schedules(compiled)
    for row in compiled.report.tuning:
        assert row["last"] == stands[row["key"]]
        assert (row["last"] == row["first"]) == (row["key"] in settled.back)
    with Records(path) as records:
        known = by_stage(records.all())
    for key, rows in known.items():
        config = standing(rows)
        assert config is None or config.to_json() == stands[key]


@pytest.mark.parametrize("faster", ["first", "tuned"])
def test_what_stands_is_compiled_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    """Either all first picks are restored or none. A row says what its own config read when it was
    timed, and a later tuning begins with it.
    """

    def said(first: Path, tuned: Path) -> ModelReadings:
        stages = len(read_metadata(first)["steps"])
        times = {"first": [2.0] * stages, "tuned": [2.0] * stages} | {faster: [1.0] * stages}
        return readings(times["first"], times["tuned"])

    path = tmp_path / "m.records"
    compiled = tuned_model(path, monkeypatch, said)
    back = compiled.report.settled.back
    assert back if faster == "first" else not back
    with Records(path) as records:
        rows = by_stage(records.all())
    for stage_ in compiled.stages:
        *trials, last = rows[stage_["key"]]
        assert last.outcome == "chosen" and last.parsed.to_json() == stage_["schedule"]
        read = [r.seconds for r in trials if r.parsed == last.parsed and r.outcome != "noisy"]
        assert last.seconds == (read[-1] if read else None)
        assert all(r.outcome != "kept" for r in trials), "every trial had a rival that won"
    monkeypatch.undo()
    again = gtco.compile_model(small_model(), records=path)
    assert schedules(again) == schedules(compiled)
    effort = gtco.Tune(trials=1, seconds=20.0, patience=1, learned=False)
    more = gtco.compile_model(small_model(), tune=effort, records=path)
    assert all(row["first"] == schedules(compiled)[row["key"]] for row in more.report.tuning)


def schedules(compiled: Any) -> dict[str, Any]:
    return {stage["key"]: stage["schedule"] for stage in compiled.stages}


@pytest.mark.parametrize(("expected", "limit"), [(0.5, 300.0), (400.0, 2000.0)])
def test_a_slow_model_gets_the_time_that_it_takes(expected: float, limit: float) -> None:
    """Twenty runs of half a minute each are no process that hangs."""
    given: list[Budget] = []

    class Asked:
        machines = 1

        def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
            given.append(budget)
            return Readings(failed="asked")

    assert whole.read(Path("a"), Path("b"), Asked(), expected) == "asked"
    assert [budget.limit for budget in given] == [limit]


def test_a_tuned_model_that_crashes_is_left_untuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tuned_model(tmp_path / "m.records", monkeypatch, lambda *_: "crashed (SIGSEGV)")
    assert compiled.report.settled is None
    assert any("crashed (SIGSEGV)" in note for note in compiled.report.notes)
    assert compiled.report.verification.passed
    assert all(row["last"] == row["first"] for row in compiled.report.tuning)


def test_where_time_is_short_the_whole_is_not_run(tmp_path: Path) -> None:
    effort = gtco.Tune(trials=4, seconds=1.5, learned=False)
    compiled = gtco.compile_model(small_model(), tune=effort, records=tmp_path / "r")
    assert compiled.report.settled is None
