"""Which configs the records of a stage let stand, and how fast each is beside the first pick."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.cli import main
from gtco.search.records.records import Outcome, Record, Records
from gtco.search.records.standing import last_ends, only_standing, relative
from gtco.search.records.text import from_lines, to_lines
from gtco.support.errors import RecordError
from gtco.tensor.space import Config
from tests.search.records.some import matmul_stage, record

A, B, C = (Config("gemm", (("kc", n),)) for n in (1, 2, 3))


def trial(*rows: tuple[Config, Outcome, float]) -> list[Record]:
    """The records of a trial: of each config its outcome, and its time over that of the pick."""
    return [replace(record(config, outcome=outcome), ratio=of) for config, outcome, of in rows]


def test_times_beside_the_first_pick_without_noisy_readings() -> None:
    first = trial((A, "kept", 1.0), (B, "slower", 1.5), (C, "noisy", 0.1))
    assert relative(first) == {A: 1.0, B: 1.5}
    assert relative([*first, *trial((A, "kept", 1.0), (C, "slower", 1.2))])[C] == 1.2


@pytest.mark.parametrize(
    ("second", "of_c"),
    [
        (trial((B, "kept", 1.0), (C, "slower", 1.5)), 0.75),
        (trial((B, "beaten", 1.0), (C, "taken", 0.5)), 0.25),
    ],
    ids=["kept", "beaten"],
)
def test_a_later_pick_is_as_fast_as_its_first_trial_said(
    second: list[Record], of_c: float
) -> None:
    """The second trial begins with B, which took half as long as A, and stays or goes."""
    first = trial((A, "beaten", 1.0), (B, "taken", 0.5))
    assert relative([*first, *second]) == {A: 1.0, B: 0.5, C: of_c}


def test_the_last_end_is_the_newest_wherever_it_stands() -> None:
    """Files that are joined have older ends behind newer ones."""

    def end(stage: str, time: str) -> Record:
        return replace(record(A, stage, outcome="chosen"), reason="model", time=time)

    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    old, new = [end("a", early), end("b", early)], [end("a", late)]
    for rows in ([*old, *new], [*new, *old]):
        assert last_ends(rows) == new
        assert [one.time for one in only_standing(rows) if one.stage == "a"] == [late]


@pytest.mark.parametrize("field", ["seconds", "predicted", "ratio", "noise"])
def test_an_infinite_time_is_no_record(field: str) -> None:
    good = json.loads(to_lines([record(A)]))
    with pytest.raises(RecordError, match=f"export, line 1, is not a record: .*{field}"):
        from_lines(json.dumps(good | {field: float("inf")}), "export")


def test_what_stands_is_exported_without_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = matmul_stage(3).canonical
    rows = [record(A, stage.key), record(B, stage.key, outcome="slower")]
    with Records(tmp_path / "a.records") as records:
        records.add(rows)
        records.remember([stage])
    assert main(["records", "export", "--standing", str(tmp_path / "a.records")]) == 0
    assert capsys.readouterr().out == to_lines(rows[:1])
