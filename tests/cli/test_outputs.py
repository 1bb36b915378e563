"""Where a library is written by default, and which files it does not replace."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from gtco import cli
from gtco.frontend.identity import identity
from gtco.runtime.library import read_metadata
from tests.driver.test_compiler import mlp


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, one with the same operators that was trained further, and another one; all are
    called m.onnx.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, layers, seed in (("first", 1, 0), ("trained", 1, 1), ("other", 2, 0)):
        (folder / name).mkdir()
        made = mlp(layers=layers)
        if seed:
            tensor = made.graph.initializer[0]
            values = onnx.numpy_helper.to_array(tensor) + 1
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(made, folder / name / "m.onnx")
    return folder


def compiled(model: Path, *more: str) -> int:
    return cli.main(["compile", str(model), "--tune", "off", "--threads", "1", *more])


def test_a_library_goes_to_the_current_folder_and_over_its_own_model_alone(
    models, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert compiled(models / "first" / "m.onnx") == 0
    assert {p.name for p in tmp_path.iterdir()} == {"m.so", "m.h"}
    assert {p.name for p in (models / "first").iterdir()} == {"m.onnx"}
    first = (tmp_path / "m.so").read_bytes()
    known = read_metadata(tmp_path / "m.so")["model"]
    assert known == identity(onnx.load(models / "first" / "m.onnx")) and len(known) == 16
    capsys.readouterr()
    assert compiled(models / "other" / "m.onnx") == 1
    said = capsys.readouterr().err
    assert "made it of another model" in said and "--force" in said and " s " not in said
    assert (tmp_path / "m.so").read_bytes() == first
    assert compiled(models / "trained" / "m.onnx") == 0  # the same model, other weights
    assert (tmp_path / "m.so").read_bytes() != first
    assert compiled(models / "other" / "m.onnx", "--force") == 0
    assert read_metadata(tmp_path / "m.so")["model"] != known


@pytest.mark.parametrize("content", [b"", b"\x7fELF and more", b"text"])
def test_a_stranger_is_not_written_over(content, models, tmp_path, capsys):
    path = tmp_path / "libother.so"
    path.write_bytes(content)
    assert compiled(models / "first" / "m.onnx", "-o", str(path)) == 1
    assert "is not a library that gtco made" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_header_of_somebody_is_not_written_over(models, tmp_path, capsys):
    library, header = tmp_path / "m.so", tmp_path / "m.h"
    header.write_text("#pragma once\n")
    model = models / "first" / "m.onnx"
    assert compiled(model, "-o", str(library)) == 1
    said = capsys.readouterr().err
    assert str(header) in said and "--force" in said
    assert header.read_text() == "#pragma once\n" and not library.exists()
    assert compiled(model, "-o", str(library), "--force") == 0
    assert compiled(model, "-o", str(library)) == 0  # its own
    assert "compiled by gtco" in header.read_text()


def test_a_command_writes_over_no_file_of_somebody(tmp_path, monkeypatch, capsys):
    """Before it reads anything: none of these models is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gtco.report.page.check_installed", lambda: None)
    commands = {
        "m.html": "report m.so",
        "page.html": "report m.so -o page.html",
        "r.json": "report m.so --json -o r.json",
        "m.jsonl": "measure m.bundle",
        "m.int8.onnx": "quantize m.onnx --data x.npz",
        "w.onnx": "quantize m.onnx --weights-only -o w.onnx",
        "q.json": "quantize m.onnx --data x.npz -o q.onnx --report q.json",
        "c.html": "compile m.onnx --report c.html",
        "t.html": "tune m.onnx --trials 1 --report t.html",
        "b.json": "bench m.onnx --json b.json",
    }
    for name, command in commands.items():
        path = tmp_path / name
        path.write_text("somebody's")
        assert cli.main(command.split()) == 1
        said = capsys.readouterr().err
        assert f"'{name}' is there already and is not" in said and "--force" in said
        path.write_text("")  # nothing is lost
        for empty in ("", " --force"):
            assert cli.main([*command.split(), *empty.split()]) == 1
            assert "is there already" not in capsys.readouterr().err
            path.write_text("somebody's")
        path.unlink()


def test_the_ending_of_an_onnx_file_does_not_matter(models, tmp_path):
    model = tmp_path / "m.model"
    model.write_bytes((models / "first" / "m.onnx").read_bytes())
    for _ in range(2):
        assert compiled(model, "-o", str(tmp_path / "m.so")) == 0
    assert compiled(models / "other" / "m.onnx", "-o", str(tmp_path / "m.so")) == 1


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_a_model_that_cannot_be_read_is_said_before_the_library(content, models, tmp_path, capsys):
    library, model = tmp_path / "m.so", tmp_path / "m.onnx"
    assert compiled(models / "first" / "m.onnx", "-o", str(library)) == 0
    before = library.read_bytes()
    if content is not None:
        model.write_bytes(content)
    capsys.readouterr()
    assert compiled(model, "-o", str(library)) == 1
    said = capsys.readouterr().err
    assert "is there already" not in said and ("cannot read" in said or "not an ONNX model" in said)
    assert library.read_bytes() == before


def test_two_models_of_one_name_are_refused(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    both = [str(models / name / "m.onnx") for name in ("first", "other")]
    assert cli.main(["tune", *both, "--trials", "1"]) == 1
    assert "would both become m.so" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_refused_before_the_work(models, tmp_path, capsys):
    assert compiled(models / "first" / "m.onnx", "-o", str(tmp_path / "no" / "m.so")) == 1
    assert "does not exist: make it first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_which_model_it_is_depends_on_operators_and_names_not_on_weights_or_shapes(models):
    first, trained, other = (
        onnx.load(models / name / "m.onnx") for name in ("first", "trained", "other")
    )
    assert identity(first) == identity(trained) != identity(other)
    first.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 77
    assert identity(first) == identity(trained)
    first.graph.output[0].name = "renamed"
    assert identity(first) != identity(trained)
