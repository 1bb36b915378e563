"""What the environment and the options may set."""

from __future__ import annotations

import os
import stat
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.cli import main
from gtco.cli.arguments import new_file
from gtco.compiler import compile_to_file, compile_to_files
from gtco.support.environment import c_compiler, cache_folder, variable
from gtco.support.errors import BuildError, ModelError, OptionError
from gtco.support.options import FLAGS, CompileKeywords, CompileOptions, Quantization, Tune
from tests.frontend.test_frontend import linear


def test_editors_are_told_every_option() -> None:
    assert list(CompileKeywords.__annotations__) == list(CompileOptions.__dataclass_fields__)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("GTCO_CACHE", "~/kept")
    assert cache_folder() == Path.home() / "kept"
    monkeypatch.setenv("GTCO_CACHE", "~nobody-of-this-name/kept")
    assert cache_folder() == Path("~nobody-of-this-name/kept")
    for empty in (False, True):
        if empty:
            monkeypatch.setenv("GTCO_CACHE", "")
        else:
            monkeypatch.delenv("GTCO_CACHE")
        assert cache_folder() == Path.home() / ".cache" / "gtco"


def test_a_variable_is_the_users_and_else_ours_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GTCO_TEST", "theirs")
    with variable("GTCO_TEST", "ours"):
        assert os.environ["GTCO_TEST"] == "theirs"
    assert os.environ["GTCO_TEST"] == "theirs"
    monkeypatch.delenv("GTCO_TEST")
    with variable("GTCO_TEST", "ours"):
        assert os.environ["GTCO_TEST"] == "ours"
    assert "GTCO_TEST" not in os.environ


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"apt install gcc.*set CC"):
        c_compiler()
    for name in ("clang", "cc", "gcc"):  # a better one each time
        path = program(tmp_path, name)
        assert c_compiler() == str(path)
    other = program(tmp_path, "other-cc")
    monkeypatch.setenv("CC", "other-cc")
    assert c_compiler() == str(other)
    monkeypatch.setenv("CC", "absent-cc")
    with pytest.raises(BuildError, match=r"absent-cc"):
        c_compiler()


def test_defaults() -> None:
    options = CompileOptions()
    assert options.target == "native" and options.threads == 0 and options.simplify


def test_unknown_option(tmp_path: Path) -> None:
    known = r"unknown option thread \(did you mean threads\?\); known: target, precision, launches"
    with pytest.raises(OptionError, match=known):
        compile_to_file(b"", tmp_path / "m.so", thread=2)


@pytest.mark.parametrize("output", ["m.dll", "absent/m.so"])
def test_impossible_output(tmp_path: Path, output: str) -> None:
    with pytest.raises(OptionError, match=r"must end in \.so|does not exist"):
        compile_to_file(b"", tmp_path / output)


@pytest.mark.parametrize("output", ["folder.so", 5])
def test_an_output_that_is_no_file(tmp_path: Path, output: str | int) -> None:
    (tmp_path / "folder.so").mkdir()
    place = tmp_path / output if isinstance(output, str) else output
    with pytest.raises(OptionError, match=r"is a folder|give a path"):
        compile_to_file(b"", place)  # type: ignore[arg-type]


def test_every_file_that_is_written_has_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before anything is measured."""
    assert new_file(str(tmp_path / "m.json")) == tmp_path / "m.json"
    for place, wrong in ((tmp_path, "is a folder"), (tmp_path / "no" / "m", "does not exist")):
        with pytest.raises(ArgumentTypeError, match=wrong):
            new_file(str(place))
        assert main(["measure", "m.bundle", "--output", str(place)]) == 1
        assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("threads", [-1, "2", 1.5, 1025, 10**12]),
        ("workers", [-1, "2", 0.5]),
        ("simplify_timeout", [0, -1.0, float("nan"), float("inf"), "9"]),
        ("shapes", [["batch"], {"batch": "1"}, {"batch": 1.5}, {"batch": 0}, {"batch": 10**20}, 5]),
        ("verify", ["no", 0, np.zeros(2)]),
        *((name, ["False"]) for name in FLAGS),
        ("target", [5, b"native"]),
        ("precision", [16]),
        ("tune", [5, "loads"]),
        ("dump", [5]),
        ("records", [5]),
    ],
)
def test_values_of_the_wrong_kind_are_named(tmp_path: Path, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(OptionError, match=name):
            compile_to_file(b"", tmp_path / "m.so", **{name: value})


def test_every_flag_is_checked() -> None:
    assert {*FLAGS} == {f.name for f in fields(CompileOptions) if f.type == "bool"}


def test_numpys_numbers_are_numbers() -> None:
    assert CompileOptions(strict=np.True_).strict  # type: ignore[arg-type]
    options = CompileOptions(threads=np.int64(2), shapes={"batch": np.int32(4)})  # type: ignore[arg-type]
    assert options.threads == 2
    assert Tune(trials=np.int64(3), seconds=np.float32(2.0)).trials == 3  # type: ignore[arg-type]


def test_a_budget_of_the_wrong_kind_is_named() -> None:
    for name in ("trials", "seconds", "patience", "latency"):
        with pytest.raises(OptionError, match=name):
            Tune(**{name: "a"})  # type: ignore[arg-type]
    wrong = {"trials": 2.5, "patience": float("nan"), "seconds": 1e308, "again": "no"}
    for name, value in {**wrong, "learned": 1, "fusion": None}.items():
        with pytest.raises(OptionError, match=name):
            Tune(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="weights=5: give a path"):
        Tune(policy="language-model", weights=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("smooth", [0, 1, 0.0, 1.0, -0.5, float("nan"), "much"])
def test_a_strength_lies_between_0_and_1(smooth: float | str) -> None:
    with pytest.raises(OptionError, match="give off, auto, or a number between 0 and 1"):
        Quantization(smooth=smooth)
    assert Quantization(smooth=0.5).smooth == 0.5


def test_records_that_are_not_there_where_nothing_is_measured(tmp_path: Path) -> None:
    missing = tmp_path / "mistyped.records"
    with pytest.raises(OptionError, match=r"the file does not exist\. With tune='off'"):
        compile_to_file(b"", tmp_path / "m.so", records=missing)
    assert not missing.exists()


def test_models_that_are_not_there_are_said_before_anything_is_made(tmp_path: Path) -> None:
    there, absent = tmp_path / "there.onnx", tmp_path / "absent.onnx"
    there.write_bytes(b"nothing")
    models = [(there, tmp_path / "a.so", None), (str(absent), tmp_path / "b.so", None)]
    with pytest.raises(ModelError, match=r"cannot read .*absent\.onnx"):
        compile_to_files(models, tune="quick", records=tmp_path / "r")
    with pytest.raises(ModelError, match="cannot read"):
        compile_to_file("a\0b", tmp_path / "a.so")
    assert list(tmp_path.iterdir()) == [there]


class Named:
    """A path of another class than pathlib's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_paths_and_bytes_of_any_kind_are_models(tmp_path: Path) -> None:
    proto = linear()
    proto.ir_version = 10  # a version that ONNX Runtime reads
    data = proto.SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data)
    for source in (Named(tmp_path / "m.onnx"), bytearray(data)):
        report = compile_to_file(source, tmp_path / "m.so", verify=True)
        assert report.verification.passed
