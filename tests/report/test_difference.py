"""Two libraries of one model, stage by stage."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gtco import cli
from gtco.report.difference import difference
from gtco.report.difference import row as row_of
from gtco.report.facts import Decision
from gtco.report.page import difference_page
from gtco.support.errors import OptionError
from tests.report.test_facts import valid
from tests.report.test_page import check, timed


def covered(found, side) -> list[int]:
    return sorted(n for row in found.models[0].rows for n in getattr(row, side))


def test_a_library_and_itself(made):
    found = difference(made.facts, made.facts)
    valid(found.to_json(), "difference")
    rows = found.models[0].rows
    assert len(rows) == len(made.facts.models[0].stages)
    assert all(row.state == "same" and row.before == row.after for row in rows)
    assert all(row.before_seconds == row.after_seconds > 0 for row in rows)


def test_another_precision(made, narrow):
    found = difference(made.facts, narrow.facts)
    valid(found.to_json(), "difference")
    assert covered(found, "before") == list(range(len(made.facts.models[0].stages)))
    assert covered(found, "after") == list(range(len(narrow.facts.models[0].stages)))
    said = [change for row in found.models[0].rows for change in row.changes]
    assert any(change == "format: float32 → bfloat16" for change in said)
    assert any("VDPBF16PS" in change for change in said)


def test_another_config(made):
    (model,) = made.facts.models
    first = model.stages[1]
    config = (*first.config, Decision("more", 7, ""))
    stages = (model.stages[0], replace(first, config=config), *model.stages[2:])
    found = difference(made.facts, replace(made.facts, models=(replace(model, stages=stages),)))
    (row,) = [row for row in found.models[0].rows if row.state != "same"]
    assert row.state == "changed" and row.changes == ("more: none → 7",) and row.before == (1,)


def test_another_partition(made):
    """The second library does the work of two stages in one, and lacks the last stage."""
    (model,) = made.facts.models
    first, second = model.stages[:2]
    fused = replace(second, operators=(*first.operators, *second.operators), number=0)
    rest = [replace(s, number=s.number - 1) for s in model.stages[2:-1]]
    other = replace(model, stages=(fused, *rest))
    found = difference(made.facts, replace(made.facts, models=(other,)))
    row, *_, last = found.models[0].rows
    assert row.state == "partition" and row.before == (0, 1) and row.after == (0,)
    assert row.changes[0].startswith("2 stages (") and "became 1 stage (" in row.changes[0]
    assert row.before_seconds == pytest.approx(first.seconds + second.seconds)
    (gone,) = [row for row in found.models[0].rows if row.state == "before only"]
    assert gone.before == (len(model.stages) - 1,) and gone.after == ()
    assert len(found.models[0].rows) == len(model.stages) - 1 and last.before
    check(difference_page(found))


def test_a_row_is_called_by_its_heaviest_stage(made):
    (model,) = made.facts.models
    light, heavy, *_ = sorted(model.stages, key=lambda stage: stage.number)
    light, heavy = replace(light, predicted_seconds=1.0), replace(heavy, predicted_seconds=9.0)
    assert light.name != heavy.name
    for before, after in (([light, heavy], []), ([light], [heavy]), ([heavy], [light])):
        found = row_of(before, after)
        assert found.name == heavy.name
        assert found.operators == tuple(operator.kind for operator in heavy.operators)


def test_what_is_no_other_library_of_the_model(made, shaped, capsys):
    with pytest.raises(OptionError, match="not of one model in one shape"):
        difference(made.facts, shaped.facts)
    (model,) = made.facts.models
    for changed in ({"inputs": ("x: bool[1]",)}, {"outputs": ("y: bool[1]",)}):
        other = replace(made.facts, models=(replace(model, **changed),))
        with pytest.raises(OptionError, match="not of one model in one shape"):
            difference(made.facts, other)
    argv = ["report", str(made.library), str(shaped.library), "--json", "--no-run"]
    assert cli.main(argv) == 1
    assert "x: float32[1x24]" in capsys.readouterr().err


def test_the_page_shows_every_row(made, narrow):
    found = difference(timed(made.facts), narrow.facts)
    text = difference_page(found)
    seen = check(text)
    assert text == difference_page(found)
    for number, row in enumerate(found.models[0].rows):
        assert f"row-{number}" in seen.ids and row.name in seen.text
    assert "Only one of the two libraries was measured" in seen.text
    assert "format: float32 → bfloat16" in seen.text


def test_variants_are_compared_by_their_sizes(shaped):
    one = replace(shaped.facts, models=shaped.facts.models[1:])
    found = difference(shaped.facts, one)
    assert [model.sizes for model in found.models] == [{"batch": 3}]


def test_the_command(made, narrow, tmp_path, capsys):
    argv = ["report", str(made.library), str(narrow.library), "--no-run"]
    assert cli.main([*argv, "--json", "-o", str(tmp_path / "d.json")]) == 0
    written = json.loads((tmp_path / "d.json").read_text())
    valid(written, "difference")
    assert written["before"]["file"] == "block.so" and written["after"]["file"] == "narrow.so"
    assert cli.main([*argv, "-o", str(tmp_path / "d.html")]) == 0
    assert "narrow" in (tmp_path / "d.html").read_text()
