"""Records as text: there and back, with the stages' programs, and lines that are no records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtco.cli import main
from gtco.search.records.records import Records
from gtco.search.records.text import RECORD, from_lines, program_lines, programs, to_lines
from gtco.support.errors import RecordError
from gtco.tensor.space import Config
from tests.search.records.some import matmul_stage, record, some


def test_a_text_is_not_mistaken_for_a_file_of_records(tmp_path: Path) -> None:
    text = tmp_path / "text"
    for line, said in [
        (to_lines(some(1)), "is a text of records"),
        (program_lines([matmul_stage(5)]), "is a text of records"),
        ('{"name": "value"}', "not a database"),
    ]:
        text.write_text(line)
        with pytest.raises(RecordError, match=said):
            Records(text)
        assert text.read_text() == line


def test_text_and_back(tmp_path: Path) -> None:
    records = [*some(4), record(Config("x"), outcome="failed", seconds=None)]
    assert from_lines(to_lines(records), "text") == records
    assert to_lines(records).encode().startswith(RECORD)
    with Records(tmp_path / "a") as base:
        assert base.merge([*records, records[0]]) == 5
        assert base.merge(records) == 0
        assert base.all() == records


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        '{"a": 1}',
        lambda d: d | {"outcome": "won"},
        lambda d: d | {"seconds": "fast"},
        lambda d: d | {"seconds": True},
        lambda d: d | {"seconds": -1.0},
        lambda d: d | {"seconds": float("nan")},
        lambda d: d | {"predicted": -1},
        lambda d: d | {"ratio": 10**400},
        lambda d: d | {"label": "\ud800"},
        lambda d: d | {"config": '{"sketch": 5}'},
        lambda d: d | {"config": '{"sketch": "gemm", "tile": [6, 4]}'},
        lambda d: d | {"predicted": []},
        lambda d: d | {"stage": None},
        lambda d: d | {"config": "{}"},
        lambda d: d | {"config": "[1]"},
        lambda d: d | {"circumstances": "x"},
        lambda d: d | {"more": 1},
        lambda d: {k: v for k, v in d.items() if k != "time"},
        "[" * 100_000,
    ],
)
def test_lines_that_are_no_records_are_named(line: object) -> None:
    good = json.loads(to_lines(some(1)))
    bad = line if isinstance(line, str) else json.dumps(line(good))  # type: ignore[operator]
    with pytest.raises(RecordError, match="export, line 2, is not a record"):
        from_lines(f"{json.dumps(good)}\n{bad}\n", "export")


def test_answers_in_the_place_of_records_are_to_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, base = tmp_path / "answers.jsonl", tmp_path / "answers.records"
    answers.write_text(to_lines(some(2)))
    for create in (True, False):
        with pytest.raises(RecordError, match=f"gtco records import {base} {answers} makes"):
            Records(answers, create=create)
    assert answers.read_text() == to_lines(some(2))
    for empty in ("", "\n"):
        (tmp_path / "empty.jsonl").write_text(empty)
        assert main(["records", "import", str(base), str(answers), f"{tmp_path}/empty.jsonl"]) == 1
        assert "empty.jsonl has no records" in capsys.readouterr().err
    assert not base.exists()


def test_exports_keep_what_stages_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [matmul_stage(n).canonical for n in (3, 4)]
    base, export, again = tmp_path / "a.records", tmp_path / "a.jsonl", tmp_path / "b.records"
    with Records(base) as records:
        records.add([record(Config("gemm"), stage.key) for stage in stages])
        records.remember(stages)
    assert main(["records", "export", str(base)]) == 0
    export.write_text(capsys.readouterr().out)
    assert main(["records", "import", str(again), str(export)]) == 0
    with Records(base) as one, Records(again) as other:
        assert other.stages() == one.stages() == {s.key: s for s in stages}
        assert other.all() == one.all()
    assert main(["records", "export", "--standing", str(base)]) == 0
    capsys.readouterr()


def test_programs_stand_beside_records_in_a_text() -> None:
    stage = matmul_stage(5)
    text = program_lines([stage, stage]) + to_lines(some(3))
    assert from_lines(text, "text") == some(3)
    assert programs(text, "text") == [stage.canonical]
    for wrong in ("7", "{}", '{"inputs": [], "operators": [["add"]]}', '{"inputs": 1}'):
        with pytest.raises(RecordError, match="text, line 1, is not a record"):
            programs(f'{{"program": {wrong}}}\n', "text")
