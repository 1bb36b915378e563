"""Records that come with gtco. Under the same circumstances they count as any other records;
elsewhere they are only measured first. Stale ones are ignored, and damaged ones are reported.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import gtco
from gtco.cli import main
from gtco.search.recorded import RecordedPolicy
from gtco.search.records import shipped as shipping
from gtco.search.records.records import STANDING, Outcome, Record, Records, circumstances
from gtco.search.records.shipped import nearest, shipped, unlike
from gtco.search.records.standing import only_standing, stood
from gtco.search.records.text import from_lines, to_lines
from gtco.support.errors import InternalError, RecordError
from gtco.support.options import Tune
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage
from gtco.tuning import measure, tune
from gtco.tuning.result import StageResult
from tests.tuning.small import small_model
from tests.tuning.test_tuning_budget import POLICY, STAGES, Machine, generated

HERE = circumstances(POLICY.target)
STAGE = STAGES[0]
FIRST = POLICY.choose(STAGE)
assert FIRST is not None
# a config that the analytic policy would not try early
RIVAL = POLICY.alternatives(STAGE, FIRST, {FIRST.config})[-1].config


def elsewhere(**changes: object) -> str:
    return json.dumps({**json.loads(HERE), **changes}, sort_keys=True)


OTHER_CPU = elsewhere(cpu={"model name": "another"})


def row(
    config: Config = RIVAL,
    known: str = OTHER_CPU,
    stage: Stage = STAGE,
    outcome: Outcome = "taken",
    time: str = "2026-01-01T00:00:00+00:00",
) -> Record:
    text = json.dumps(config.to_json())
    return Record(stage.key, stage.label, known, text, outcome, 2e-3, 1e-3, 0.5, 0.01, "", time)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def tuned(
    rows: Sequence[Record], records: Records | None = None, **effort: object
) -> tuple[list[StageResult], Config]:
    """The results of a short tuning of :data:`STAGE`, and its final config."""
    made = generated(STAGE)
    policy = RecordedPolicy(POLICY, records, shipped=rows) if records else POLICY
    pick = policy.choose(STAGE)
    assert pick is not None
    made.choices[STAGE.key] = pick
    results = tune.tune(
        [made],
        policy,
        object.__new__(measure.Workers),
        threads=1,
        effort=Tune(**effort),  # type: ignore[arg-type]
        records=records,
        shipped=rows,
    )
    assert made.notes == []
    return results, made.choices[STAGE.key].config


# elsewhere ------------------------------------------------------------------------------------
@pytest.mark.parametrize("learned", [False, True])
def test_what_stood_on_another_machine_is_measured_first(machine: Machine, learned: bool) -> None:
    _, stands = tuned([row()], learned=learned, patience=1)
    tried = [pick.config for pick in machine.trials[0].picks]
    assert tried[:2] == [FIRST.config, RIVAL], "it reads slower, and the pick stands"
    assert stands == FIRST.config
    machine.trials = []
    tuned([], learned=learned, patience=1)
    assert machine.trials[0].picks[1].config != RIVAL


def test_it_is_taken_where_it_is_faster_and_only_then(machine: Machine) -> None:
    machine.factor = lambda pick, n: 0.8 if pick.config == RIVAL else 1.0  # type: ignore[method-assign]
    _, stands = tuned([row()], learned=False, patience=1)
    assert stands == RIVAL


@pytest.mark.parametrize(
    "known",
    [
        OTHER_CPU,
        elsewhere(threads=64),
        elsewhere(gtco="0.0"),
        elsewhere(tvm="0.0"),
        elsewhere(mcpu="haswell", features=["+avx2"]),
        '{"gpu": "a GPU"}',
    ],
)
def test_no_record_of_elsewhere_is_a_pick(known: str, tmp_path: Path) -> None:
    with Records(tmp_path / "r") as records:
        policy = RecordedPolicy(POLICY, records, shipped=[row(known=known)])
        assert policy.choose(STAGE) == FIRST and not policy.measured
        assert policy.predict(STAGE) == POLICY.predict(STAGE)
        assert not policy.follows_shipped(STAGE)


def test_records_of_another_machine_in_a_users_file_are_tried_first_too(
    machine: Machine, tmp_path: Path
) -> None:
    with Records(tmp_path / "r") as records:
        records.add([row()])
        _, stands = tuned([], records, learned=False, patience=1)
    assert machine.trials[0].picks[1].config == RIVAL and stands == FIRST.config


def test_the_most_alike_circumstances_come_first() -> None:
    here = json.loads(HERE)
    older = elsewhere(mcpu="haswell", features=["+avx2", "+fma"])
    ordered = [
        elsewhere(gtco="0.0"),
        OTHER_CPU,
        elsewhere(threads=here["threads"] * 2),
        elsewhere(threads=here["threads"] * 64),
        elsewhere(mcpu="haswell"),
        older,
    ]
    distances = [unlike(json.loads(known), here) for known in ordered]
    assert distances == sorted(distances) and len(set(distances)) == len(distances)
    configs = POLICY.alternatives(STAGE, FIRST, {FIRST.config})[: len(ordered)]
    rows = [row(p.config, known) for p, known in zip(configs, ordered, strict=True)]
    strange = [row(known='{"gpu": "one"}'), row(known=HERE), row(stage=STAGES[1])]
    strange += [row(known='{"features": 3, "threads": 2}'), row(known=elsewhere(threads=0))]
    found = nearest([*reversed(rows), *strange], {STAGE.key}, HERE)
    assert found == {STAGE.key: [pick.config for pick in configs]}


def test_a_config_that_the_space_has_no_more_is_passed_over(machine: Machine) -> None:
    """On another machine, and on this one; here the stage is measured as if nothing were known."""
    stale = Config("gemm", (*RIVAL.choices, ("decision_of_old", 3)))
    gone = Config("sketch_of_old", (("kc", 1),))
    for known in (OTHER_CPU, HERE):
        machine.trials = []
        rows = [row(gone, known), row(stale, known)]
        results, stands = tuned(rows, learned=False, again=False, patience=1)
        assert stands == FIRST.config and results[0].measured
        tried = {pick.config for trial in machine.trials for pick in trial.picks}
        assert not tried & {stale, gone}


# here -----------------------------------------------------------------------------------------
def test_under_the_same_circumstances_it_counts_as_any_record(
    machine: Machine, tmp_path: Path
) -> None:
    with Records(tmp_path / "r") as records:
        policy = RecordedPolicy(POLICY, records, shipped=[row(known=HERE)])
        chosen = policy.choose(STAGE)
        assert chosen is not None and chosen.config == RIVAL and policy.follows_shipped(STAGE)
        assert policy.predict(STAGE) == 1e-3
        results, stands = tuned([row(known=HERE)], records, learned=False, again=False)
        assert results == [] and stands == RIVAL and machine.trials == []
        results, _ = tuned([row(known=HERE)], records, learned=False, patience=1)
        assert results[0].measured  # a compile that asks for more tuning gets it
        assert RIVAL not in {pick.config for pick in machine.trials[0].picks[1:]}


def test_what_the_user_measured_comes_before_what_ships(tmp_path: Path) -> None:
    with Records(tmp_path / "r") as records:
        records.add([row(FIRST.config, HERE)])
        policy = RecordedPolicy(POLICY, records, shipped=[row(known=HERE)])
        assert policy.choose(STAGE) == FIRST and not policy.follows_shipped(STAGE)
        records.add([row(RIVAL, HERE, outcome="wrong")])
        policy.observe()
        assert policy.choose(STAGE) == FIRST


def test_a_stale_record_of_this_machine_is_no_pick_and_no_note(tmp_path: Path) -> None:
    with Records(tmp_path / "r") as records:
        policy = RecordedPolicy(POLICY, records, shipped=[row(Config("sketch_of_old"), HERE)])
        assert policy.choose(STAGE) == FIRST and policy.passed_over == {}
        assert not policy.follows_shipped(STAGE)


# whole compiles -------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that replaces the package's folder of shipped records."""
    place = tmp_path / "measured"
    place.mkdir()
    monkeypatch.setattr(shipping, "FOLDER", place)
    return place


def product() -> Any:
    """One matmul, which is one stage at any price."""
    weight = np.random.default_rng(5).standard_normal((48, 96)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (37, 48))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (37, 96))],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_compile_follows_it_where_measuring_is_asked_for(folder: Path, tmp_path: Path) -> None:
    made = product()
    effort = gtco.Tune(trials=16, seconds=60.0, again=False)
    analytic = {stage["key"]: stage["schedule"] for stage in gtco.compile_model(made).stages}
    gtco.compile_model(made, tune=effort, records=tmp_path / "r")
    with Records(tmp_path / "r") as records:
        lost = [r for r in records.all() if r.outcome in ("slower", "noisy")]
    # the untuned pick itself may have been noisy
    rival = next(r for r in lost if json.loads(r.config) != analytic[r.stage])
    (folder / "a.jsonl").write_text(to_lines([replace(rival, outcome="taken")]))

    def schedule(**options: object) -> tuple[object, list[str], list[dict[str, object]]]:
        compiled = gtco.compile_model(made, verify=True, **options)
        (stage,) = [s for s in compiled.stages if s["key"] == rival.stage]
        followed = [note for note in compiled.report.notes if "ship with gtco" in note]
        return stage["schedule"], followed, compiled.report.tuning

    chosen, notes, results = schedule(tune=effort)
    assert chosen == json.loads(rival.config) and "1 of " in notes[0]
    assert rival.stage not in [result["key"] for result in results]
    untuned, notes, _ = schedule()
    assert untuned != json.loads(rival.config) and notes == []
    Records(tmp_path / "none").__exit__()
    kept, notes, _ = schedule(records=tmp_path / "none")
    assert kept == untuned and notes == []


@pytest.mark.parametrize("damage", [b"no record\n", b"\xff\xfe\n", b'{"stage": 1}\n'])
def test_damaged_ones_are_said_and_nothing_is_lost(folder: Path, damage: bytes) -> None:
    (folder / "a.jsonl").write_text(to_lines([row()]))
    (folder / "b.jsonl").write_bytes(damage)
    with pytest.raises(RecordError, match=r"b\.jsonl"):
        shipped()
    compiled = gtco.compile_model(small_model(), tune=gtco.Tune(trials=4, seconds=30.0))
    (note,) = [note for note in compiled.report.notes if "come with gtco" in note]
    assert "cannot be read" in note and "b.jsonl" in note
    with pytest.raises(InternalError, match=r"cannot be read.*b\.jsonl"):
        gtco.compile_model(small_model(), tune="quick", strict=True)
    assert gtco.compile_model(small_model(), strict=True).report.notes == []


# how they are made ----------------------------------------------------------------------------
def test_only_what_stood_last_is_left() -> None:
    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    rows = [
        row(RIVAL, time=late),
        row(FIRST.config, time=early),
        row(FIRST.config, outcome="slower", time=late),
        row(FIRST.config, HERE),
        row(RIVAL, HERE, outcome="beaten"),
        row(RIVAL, stage=STAGES[1], outcome="noisy"),
        row(RIVAL, stage=STAGES[2], time=early),
        row(RIVAL, stage=STAGES[2], outcome="wrong", time=late),
    ]
    assert stood(rows[4:6]) is None
    left = only_standing(rows)
    assert {r.circumstances: r.parsed for r in left} == {OTHER_CPU: RIVAL, HERE: FIRST.config}
    assert len(left) == 2 and only_standing(reversed(rows)) == left


def test_the_command_makes_them_of_several_files(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(), row(FIRST.config, HERE), row(RIVAL, HERE, outcome="slower")]
    for name, part in (("a", rows[:1]), ("b", rows[1:])):
        with Records(tmp_path / name) as records:
            records.add(part)
    files = [str(tmp_path / name) for name in "ab"]
    assert main(["records", "export", "--standing", *files]) == 0
    (folder / "machine.jsonl").write_text(capsys.readouterr().out)
    assert shipped() == only_standing(rows) and len(shipped()) == 2
    assert main(["records", "export", *files]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["records", "export", "--standing", files[0], str(tmp_path / "no")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "there is no file of records" in said.err


def test_what_ships_is_what_stood_on_cpus() -> None:
    for file in shipping.FOLDER.iterdir():
        kept = from_lines(file.read_text(encoding="utf-8"), str(file))
        assert kept and kept == sorted(kept, key=lambda r: (r.label, r.stage, r.circumstances))
    rows = shipped()
    for record in rows:
        # a model may end with a pick that its tuning had no time to measure
        assert record.outcome in STANDING
        assert record.seconds or (record.outcome == "chosen" and record.reason)
        assert {"cpu", "features", "gtco", "mcpu", "threads", "tvm"} == set(record.known)
    unnamed = [(r.stage, r.circumstances) for r in rows if not r.reason]  # of no model
    assert len(set(rows)) == len(rows) and len(set(unnamed)) == len(unnamed)


def test_the_wheel_has_them(root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    shutil.copytree(root / "gtco", tree / "gtco", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = sorted(
        f"gtco/search/records/measured/{file.name}" for file in shipping.FOLDER.iterdir()
    )
    with zipfile.ZipFile(wheel) as packed:
        assert [n for n in sorted(packed.namelist()) if "/measured/" in n] == files != []
