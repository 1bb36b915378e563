"""Files of records: nothing is lost, no record of another machine is applied, and damage is
reported.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import gtco
from gtco.cli import main
from gtco.driver.policies import overruled
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.recorded import RecordedPolicy
from gtco.search.records import records as module
from gtco.search.records.records import (
    Record,
    Records,
    circumstances,
    now,
)
from gtco.search.records.standing import last_ends, standing
from gtco.support.errors import RecordError
from gtco.tensor.space import Config
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType
from tests.search.records.some import HERE, MACHINE, record, some
from tests.tuning.small import small_model


def test_what_is_added_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    records = [*some(5), record(Config("fallback"), outcome="failed", seconds=None)]
    with Records(tmp_path / "a") as base:
        base.add(records[:2])
        base.add(records[2:])
    with Records(tmp_path / "a") as base:
        assert base.all() == records
        assert base.of("s1", HERE) == [records[1], records[4]]
        assert base.of("s1", "{}") == []
        assert [r.parsed for r in base.of("s0", HERE)] == [
            Config("gemm", (("tile", f"{i}x2"), ("kc", 7))) for i in (0, 3)
        ]


def test_the_newest_that_stood_stands() -> None:
    a, b, c = (Config("gemm", (("kc", n),)) for n in (1, 2, 3))
    rows = [record(a, outcome="beaten"), record(b, outcome="taken"), record(c, outcome="slower")]
    assert standing(rows) == b
    assert standing([*rows, record(c, outcome="taken"), record(b, outcome="beaten")]) == c
    assert standing(rows[:1]) is None and standing([]) is None


# files that are not as they should be ---------------------------------------------------------
def test_files_that_cannot_be_used_are_said_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but longer than the header of one" * 10)
    other = tmp_path / "other"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE t (x)")
    newer = tmp_path / "newer"
    with Records(newer) as records:
        records.add(some(1))
    with sqlite3.connect(newer) as base:
        base.execute("PRAGMA user_version = 99")
    for path, said in (
        (text, "could not be opened"),
        (other, "something else than gtco"),
        (newer, "version 99"),
        (tmp_path / "none" / "a", "could not be opened"),
        (tmp_path, "could not be opened"),
    ):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(RecordError, match=said):
            Records(path)
        assert (path.read_bytes() if path.is_file() else None) == before


def test_reading_needs_no_lock(tmp_path: Path) -> None:
    """Another process holds the file for writing, and it can still be read."""
    with Records(tmp_path / "r") as records:
        records.add(some(2))
    writer = sqlite3.connect(tmp_path / "r", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WAIT_SECONDS", 0.0)
        with Records(tmp_path / "r") as records:
            assert len(records.all()) == 2
        with pytest.raises(RecordError, match="locked"):
            Records(tmp_path / "r", write=True)
    writer.close()


def test_a_file_that_cannot_be_written_is_compiled_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring into it is refused before the work begins. The test opens the file as read-only in
    SQLite, because root may write to any file.
    """
    with Records(tmp_path / "r") as records:
        records.add(some(2))
    connect = sqlite3.connect
    monkeypatch.setattr(
        module.sqlite3,
        "connect",
        lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options),
    )
    compiled = gtco.compile_model(small_model(), records=tmp_path / "r")
    assert compiled.stages
    phases: list[str] = []
    with pytest.raises(RecordError, match=r"readonly(.|\n)*--tune off(.|\n)*only reads it"):
        gtco.compile_model(
            small_model(),
            records=tmp_path / "r",
            tune="quick",
            progress=lambda name, *_: phases.append(name),
        )
    assert not phases


def test_two_ends_within_a_second_are_two(tmp_path: Path) -> None:
    """Only the later one counts."""
    rows = [replace(record(Config("gemm")), outcome="chosen", reason="m", stage=s) for s in "ab"]
    rows = [replace(row, time=now()) for row in rows]
    assert rows[0].time < rows[1].time
    assert last_ends(rows) == rows[1:]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with Records(path) as records:
        records.add(some(2000))
    whole = path.read_bytes()
    draw = random.Random(3)
    said = 0
    for _ in range(30):
        at = draw.randrange(0, len(whole) - 400)
        path.write_bytes(whole[:at] + draw.randbytes(400) + whole[at + 400 :])
        try:
            with Records(path) as records:
                assert all(isinstance(r, Record) for r in records.all())
        except RecordError:
            said += 1
    assert said > 0
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError), Records(path) as records:
        records.all()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seconds", -1.0),
        ("seconds", "fast"),
        ("outcome", "won"),
        ("label", b"\xff"),
        ("config", "{"),
        ("config", "[1]"),
    ],
)
def test_a_row_that_is_no_record_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: object
) -> None:
    path = tmp_path / "a"
    with Records(path) as records:
        records.add(some(3))
    with sqlite3.connect(path) as base:
        base.execute(f"UPDATE records SET {column} = ? WHERE id = 2", (value,))
    with pytest.raises(RecordError), Records(path) as records:
        standing([record for record in records.all() if record.parsed])
    assert main(["records", "show", str(path)]) == 1
    said = capsys.readouterr().err
    assert "record" in said and "internal failure" not in said


def test_a_full_disk_keeps_what_was_there(root: Path, tmp_path: Path) -> None:
    """A limit on the file's size stands for the full disk: the system refuses SQLite's write in the
    same way.
    """
    path = tmp_path / "a"
    with Records(path) as records:
        records.add(some(10))
    script = f"""
import resource, signal
from gtco.support.errors import RecordError
from gtco.search.records.records import Record, Records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Records({str(path)!r}) as records:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({path.stat().st_size}, {path.stat().st_size}))
    try:
        records.add([Record("s", "matmul", "{{}}", "{{}}", "slower")] * 20000)
    except RecordError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert "could not be written" in done.stdout, done.stderr
    with Records(path) as records:
        assert len(records.all()) == 10


def test_writers_at_once_and_killed_at_any_moment(root: Path, tmp_path: Path) -> None:
    """Three processes write transactions of three rows and are killed at random moments. After this
    the file has whole transactions, in order, and as many as were reported.
    """
    path = tmp_path / "a"
    Records(path).__exit__()
    script = f"""
import sys, time
from gtco.search.records.records import Record, Records
with Records({str(path)!r}) as records:
    for n in range(10**6):
        records.add([Record(f"{{sys.argv[1]}}-{{n}}", "matmul", "{{}}", "{{}}", "slower")] * 3)
        print(n, flush=True)
        time.sleep(0.01)  # SQLite's lock is not fair: who never pauses may starve the others
"""
    draw = random.Random(11)
    reported: dict[str, int] = {}
    for turn in range(2):
        names = [f"{turn}{i}" for i in range(3)]
        started = [
            subprocess.Popen(
                [sys.executable, "-c", script, name], cwd=root, stdout=subprocess.PIPE, text=True
            )
            for name in names
        ]
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "0\n"
        time.sleep(draw.random() / 5)
        for process in started:
            os.kill(process.pid, signal.SIGKILL)
        for name, process in zip(names, started, strict=True):
            lines = [line for line in process.communicate()[0].split("\n") if line]
            reported[name] = max([0, *(int(line) for line in lines[:-1])])
    with Records(path) as records:
        found = [r.stage for r in records.all()]
    for name, most in reported.items():
        numbers = [int(s.split("-")[1]) for s in found if s.startswith(f"{name}-")]
        assert numbers == sorted(list(range(max(numbers) + 1)) * 3)
        assert max(numbers) >= most


# the policy -----------------------------------------------------------------------------------
def linear() -> Stage:
    x, w, y = (TensorType(s) for s in ((50, 72), (72, 96), (50, 96)))
    inputs = (StageInput("x", x), StageInput("w", w, True))
    return Stage(inputs, (Operator("matmul", ("x", "w"), "y", y),)).canonical


def test_stages_are_remembered_by_what_they_compute(tmp_path: Path) -> None:
    """An old file has no stages. Those that another version wrote are ignored."""
    stage = linear()
    with Records(tmp_path / "a") as records:
        assert records.stages() == {}
        for _ in range(2):
            records.remember([stage])
        records.add(some(2))
    base = sqlite3.connect(tmp_path / "a")
    strange = ("{}", "no JSON", '{"inputs": 3}', json.dumps(stage.to_json()))
    base.executemany("INSERT INTO stages VALUES (?, ?)", list(zip("wxyz", strange, strict=True)))
    base.commit()
    base.close()
    with Records(tmp_path / "a") as records:
        assert records.stages() == {stage.key: stage} and records.all() == some(2)


def test_a_record_of_this_machine_overrules_the_prediction(tmp_path: Path) -> None:
    analytic, stage = AnalyticPolicy(MACHINE), linear()
    pick = analytic.choose(stage)
    assert pick is not None
    other = analytic.alternatives(stage, pick, {pick.config})[0]
    with Records(tmp_path / "a") as records:
        records.add([record(pick.config, stage.key, "beaten"), record(other.config, stage.key)])
        policy = RecordedPolicy(analytic, records)
        chosen = policy.choose(stage)
        assert chosen is not None and chosen.config == other.config
        assert chosen.seconds == other.seconds
        without = policy.choose(stage, {other.sketch.name})
        assert without is None or without.sketch.name != other.sketch.name


@pytest.mark.parametrize("case", ["cpu", "threads", "features", "gtco", "illegal", "stage"])
def test_a_record_of_elsewhere_is_not_applied(tmp_path: Path, case: str) -> None:
    analytic, stage = AnalyticPolicy(MACHINE), linear()
    pick = analytic.choose(stage)
    assert pick is not None
    other = analytic.alternatives(stage, pick, {pick.config})[0]
    kept = record(other.config, stage.key)
    if case == "illegal":
        kept = record(Config("gemm", (*other.config.choices[:-1], ("kc", 13))), stage.key)
    elif case == "stage":
        kept = replace(kept, stage="0" * 16)
    else:
        kept = replace(kept, circumstances=json.dumps(json.loads(HERE) | {case: "other"}))
    with Records(tmp_path / "a") as records:
        records.add([kept])
        assert RecordedPolicy(analytic, records).choose(stage) == pick
        _, notes = overruled(analytic, MACHINE, records, ())
        assert len(notes) == (case not in ("illegal", "stage"))
        assert all("nothing that was measured on this machine with" in note for note in notes)
        assert overruled(analytic, MACHINE, records, [kept])[1] == []  # it is measured now


def test_answers_of_another_machine_are_followed_where_its_kind_is_named(tmp_path: Path) -> None:
    """``gtco candidates --target znver4``, measured on a server, compiled on a PC."""
    named, stage = replace(target("znver4"), cores=2), linear()
    analytic = AnalyticPolicy(named)
    pick = analytic.choose(stage)
    assert pick is not None
    other = analytic.alternatives(stage, pick, {pick.config})[0]
    there = json.loads(circumstances(named)) | {"cpu": {"model": "other"}}
    kept = replace(record(other.config, stage.key), circumstances=json.dumps(there, sort_keys=True))
    with Records(tmp_path / "a") as records:
        records.add([kept])
        policy, notes = overruled(analytic, named, records, ())
        assert not notes
        chosen = policy.choose(stage)
        assert chosen is not None and chosen.config == other.config
        unknown = replace(named, cores=3)
        _, notes = overruled(AnalyticPolicy(unknown), unknown, records, ())
        assert len(notes) == 1 and "nothing that was measured on this machine" in notes[0]


# the command ----------------------------------------------------------------------------------
def test_the_command_carries_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    with Records(a) as records:
        records.add(some(4))
    with Records(b) as records:
        records.add(some(6))
        records.remember([linear()])
    assert main(["records", "show", a]) == 0
    assert "4 records" in capsys.readouterr().out
    assert main(["records", "export", a]) == 0
    (tmp_path / "a.jsonl").write_text(capsys.readouterr().out)
    assert main(["records", "import", c, str(tmp_path / "a.jsonl")]) == 0
    assert "4 of 4 records added" in capsys.readouterr().out
    with Records(a) as one, Records(c) as two:
        assert one.all() == two.all()
    assert main(["records", "merge", c, a, b]) == 0
    with Records(c) as records:
        assert {r.config for r in records.all()} == {r.config for r in some(6)}
        assert records.stages() == {linear().key: linear()}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    for action in ("show", "export"):
        assert main(["records", action, missing]) == 1
        assert "there is no file of records" in capsys.readouterr().err
    assert main(["records", "merge", str(tmp_path / "new"), missing]) == 1
    assert not (tmp_path / "new").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert main(["records", "import", str(tmp_path / "new"), str(bad)]) == 1
    assert "line 1, is not a record" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    shutil.copyfile(bad, tmp_path / "odd")
    assert main(["records", "show", str(tmp_path / "odd")]) == 1
