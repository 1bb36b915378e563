"""Whole models made with the language model: what is compiled, and the table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness.lines import append
from bench.language.evaluation import whole
from bench.language.evaluation.whole import Row
from gtco.search.records.shipped import shipped
from gtco.support.options import Tune

TIMES = {"untuned": 3.0, "search": 2.0, "1 x g": 2.5, "10 x g": 2.0}
ROW = Row("vit", 4, TIMES, dict.fromkeys(TIMES, 9.0), ("10 x g",))


def test_speed_is_beside_the_search_and_wrong_libraries_are_named() -> None:
    text = "\n".join(whole.lines([ROW]))
    assert "0.667" in text and "0.800" in text and "1.000" in text
    assert "wrong outputs: 10 x g" in text


def test_measured_models_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "whole.jsonl"
    append(path, ROW)
    monkeypatch.setattr(whole, "measure", lambda name, *_: Row(name, 1, TIMES, TIMES))
    rows = whole.run(["vit", "swin"], tmp_path, 2, (1, 10), 60.0, path, lambda text: None)
    assert rows[0] == ROW and rows[1].model == "swin"
    assert whole.read_rows(path) == rows


def test_the_first_sentence_is_a_pick_and_all_begin_with_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped()
    made: dict[str, dict[str, Any]] = {}

    def compiled(source: Path, library: Path, **how: Any) -> SimpleNamespace:
        assert not shipped()
        made[library.name] = how
        return SimpleNamespace(seconds=1.0, tuning=[{}] * 5)

    work = SimpleNamespace(
        name="vit", onnx=Path("vit.onnx"), build=SimpleNamespace(seconds=1.0, library="vit.so")
    )
    monkeypatch.setattr(whole, "prepare", lambda *_: work)
    monkeypatch.setattr(
        whole,
        "candidates",
        lambda work, peers, threads: ([SimpleNamespace(job={}), *peers], {}),
    )
    monkeypatch.setattr(whole, "compile_to_file", compiled)
    monkeypatch.setattr(
        whole, "compare", lambda rivals, *_, **__: SimpleNamespace(measurements=())
    )
    row = whole.measure("vit", tmp_path, 2, (1, 10), 60.0, lambda text: None)
    assert row.stages == 5 and shipped()
    assert made["vit.search.so"]["tune"] == Tune(seconds=60.0)
    assert "tune" not in made["vit.1xg.so"] and made["vit.1xg.so"]["policy"] == "language-model"
    assert made["vit.10xg.so"]["tune"].trials == 45
