"""What the environment and the options may set."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gtco.compiler import compile_to_file
from gtco.errors import BuildError, OptionError
from gtco.options import CompileOptions, c_compiler, cache_folder


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    for empty in (False, True):
        if empty:
            monkeypatch.setenv("GTCO_CACHE", "")
        else:
            monkeypatch.delenv("GTCO_CACHE")
        assert cache_folder() == Path.home() / ".cache" / "gtco"


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
    assert c_compiler("clang") == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "absent-cc")
    with pytest.raises(BuildError, match=r"absent-cc"):
        c_compiler()


def test_defaults() -> None:
    options = CompileOptions()
    assert options.target == "native" and options.threads == 0 and options.simplify


def test_unknown_option(tmp_path: Path) -> None:
    known = "unknown option thread; known: target, precision, launches, untrusted, threads"
    with pytest.raises(OptionError, match=known):
        compile_to_file(b"", tmp_path / "m.so", thread=2)


@pytest.mark.parametrize("output", ["m.dll", "absent/m.so"])
def test_impossible_output(tmp_path: Path, output: str) -> None:
    with pytest.raises(OptionError, match=r"must end in \.so|does not exist"):
        compile_to_file(b"", tmp_path / output)
