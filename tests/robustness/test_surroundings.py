"""What a process finds where it is deployed: users without a home folder, folders that may not be
entered, a current folder with Python files of the user's, and names that are not UTF-8.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import gtco
from gtco import cli
from gtco.cli.commands import doctor_command
from gtco.codegen import processes
from gtco.codegen.jobs import Kernel
from gtco.codegen.workers import Workers
from gtco.search.records.records import Records
from gtco.support.errors import OptionError, RecordError
from gtco.tuning import local
from tests.codegen.test_workers import job
from tests.driver.test_compiler import mlp

STRANGER = 54321  # a user's number that no system knows
NO_HOME = """
import os, pwd, sys
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
os.environ.pop("HOME", None)
from gtco.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
# Modules that gtco, numpy or Python itself import early.
SHADOWING = ("numpy", "onnx", "random", "signal", "socket", "tempfile", "tvm")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path)
    return path


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not enter. Root may enter every folder, so a test that root
    has started runs as another user.
    """
    place = tmp_path / "closed"
    (place / "inside").mkdir(parents=True)
    place.chmod(0o000)
    if os.geteuid() != 0:
        yield place
    else:
        os.setresuid(STRANGER, STRANGER, 0)
        try:
            yield place
        finally:
            os.setresuid(0, 0, 0)
    place.chmod(0o700)


@pytest.fixture
def surrounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: one with Python files that have the names of modules."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in SHADOWING:
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(folder)
    return folder


def test_a_user_without_a_home_folder(model: Path, root: Path, tmp_path: Path) -> None:
    """Neither ``HOME`` nor the system names one."""
    target = ["--target", "x86-64-v3"]  # is not measured
    for command in (["doctor"], ["compile", str(model), "-o", "m.so", "--tune", "off", *target]):
        done = subprocess.run(
            [sys.executable, "-c", NO_HOME, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root), "GTCO_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert gtco.load(tmp_path / "m.so").inputs[0].name == "x"


def test_outputs_and_records_in_a_folder_that_may_not_be_entered(closed: Path) -> None:
    place = closed / "inside"
    with pytest.raises(OptionError, match=r"cannot be written: Permission denied\. Choose another"):
        gtco.compile_to_file(mlp(), place / "m.so")
    with pytest.raises(OptionError, match="the file does not exist"):
        gtco.compile_to_file(mlp(), "m.so", records=place / "r")
    with pytest.raises(RecordError, match="does not exist or may not be entered"):
        Records(place / "r", write=True)
    with pytest.raises(RecordError, match="there is no file of records"):
        Records(place / "r", create=False)


def test_a_cache_in_a_folder_that_may_not_be_entered(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTCO_CACHE_GB", "1")
    monkeypatch.setenv("GTCO_CACHE", str(closed / "inside" / "cache"))
    check = doctor_command.cache_check()
    assert check.mark == "absent" and "cannot be written: set GTCO_CACHE" in check.fix


def test_a_library_that_may_not_be_read_is_not_written_over(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.so").write_bytes(b"someone's")
    monkeypatch.setattr("gtco.cli.outputs.os.access", lambda path, mode: False)
    assert cli.main(["compile", str(model), "-o", str(tmp_path / "m.so")]) == 1
    assert "may not be read. Give another name" in capsys.readouterr().err


@pytest.mark.parametrize("forked", [True, False])
def test_workers_import_nothing_from_the_current_folder(surrounded: Path, forked: bool) -> None:
    command = () if forked else processes.python("gtco.codegen.serve")
    with Workers(1, command=command) as workers:
        (answer,) = workers.build([job("a")])
    assert isinstance(answer, Kernel)


def test_what_times_candidates_imports_nothing_from_the_current_folder(surrounded: Path) -> None:
    said = local.run(surrounded / "absent.so", 1.0)
    assert isinstance(said, str) and "absent.so" in said and "imported" not in said


def test_every_process_of_gtco_is_started_by_its_module(root: Path) -> None:
    """None by ``python -m``, which has the current folder first on its path."""
    for folder in ("gtco", "bench"):
        for path in (root / folder).rglob("*.py"):
            assert 'sys.executable, "-m"' not in path.read_text(), path


def test_a_report_on_a_name_that_is_no_utf_8(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    library = tmp_path / os.fsdecode(b"m\xe9.so")
    gtco.compile_to_file(model, library)
    assert cli.main(["report", str(library), "-o", str(tmp_path / "page.html")]) == 0
    assert "m?.so" in (tmp_path / "page.html").read_text(encoding="utf-8")
