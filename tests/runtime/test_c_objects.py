"""The objects of the C runtime are compiled once, kept for other processes, and compiled early if
other work can run meanwhile.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gtco.runtime.writing import c_objects
from gtco.runtime.writing.c_objects import CPU_SOURCES, made_early, write_objects
from gtco.support.environment import c_compiler

SOURCES = CPU_SOURCES[:2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The state of a process that has compiled no objects, and none are kept."""
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
    another_process(monkeypatch)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_objects, "_made", {})
    monkeypatch.setattr(c_objects, "_begun", {})


def compiler(folder: Path, body: str = "") -> str:
    """A C compiler that notes each time it runs."""
    script = folder / "cc.sh"
    script.write_text(f'#!/bin/sh\necho x >> {folder}/runs\n{body}\nexec {c_compiler()} "$@"\n')
    script.chmod(0o755)
    return str(script)


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().split())


def objects(folder: Path, cc: str) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    return [(folder / name).read_bytes() for name in write_objects(SOURCES, folder, cc)]


def test_they_are_made_once(tmp_path: Path) -> None:
    cc = compiler(tmp_path)
    with made_early(SOURCES, tmp_path, cc):
        first = objects(tmp_path / "a", cc)
    assert all(code[:4] == b"\x7fELF" for code in first)
    with made_early(SOURCES, tmp_path, cc):
        assert objects(tmp_path / "b", cc) == first == objects(tmp_path / "c", cc)
    assert runs(tmp_path) == 1


def test_another_process_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = compiler(tmp_path)
    first = objects(tmp_path / "a", cc)
    another_process(monkeypatch)
    with made_early(SOURCES, tmp_path, cc):
        assert objects(tmp_path / "b", cc) == first
    assert runs(tmp_path) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    at = whole.index(b"\x7fELF") + 100
    for damaged in (whole[:at] + b"?!?!?" + whole[at + 5 :], whole[:50], b""):
        kept.write_bytes(damaged)
        another_process(monkeypatch)
        assert objects(tmp_path / "c", cc) == first
        assert kept.read_bytes() != damaged
    assert runs(tmp_path) == 4


def test_another_compiler_and_another_source_are_other_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the same place, where an update puts them."""
    cc = compiler(tmp_path)
    first = objects(tmp_path / "a", cc)
    another_process(monkeypatch)
    compiler(tmp_path, "# newer")
    assert objects(tmp_path / "b", cc) == first
    assert runs(tmp_path) == 2
    another_process(monkeypatch)
    changed = tmp_path / "csrc"
    shutil.copytree(c_objects.CSRC, changed)
    (changed / "memory.c").write_text("int gtco_changed;\n")
    monkeypatch.setattr(c_objects, "CSRC", changed)
    assert objects(tmp_path / "c", cc) != first
    assert runs(tmp_path) == 3


def test_where_nothing_can_be_kept_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file"))
    assert objects(tmp_path / "a", compiler(tmp_path))[0][:4] == b"\x7fELF"


def test_other_flags_are_other_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with a sanitizer neither takes objects that were compiled without it nor leaves its
    own for builds without it.
    """
    plain = objects(tmp_path / "a", c_compiler())
    with monkeypatch.context() as patch:
        patch.setattr(c_objects, "COMPILE_FLAGS", [*c_objects.COMPILE_FLAGS, "-O0"])
        assert objects(tmp_path / "b", c_compiler()) != plain
    assert objects(tmp_path / "c", c_compiler()) == plain


def test_what_fails_early_is_tried_again(tmp_path: Path) -> None:
    once = f"[ $(wc -l < {tmp_path}/runs) -gt 1 ] || exit 1"
    cc = compiler(tmp_path, once)
    with made_early(SOURCES, tmp_path, cc):
        assert objects(tmp_path / "a", cc)[0][:4] == b"\x7fELF"
    assert runs(tmp_path) == 2


def test_what_nobody_takes_ends(tmp_path: Path) -> None:
    cc = compiler(tmp_path, "sleep 300")
    with pytest.raises(KeyboardInterrupt), made_early(SOURCES, tmp_path, cc):
        (begun,) = c_objects._begun.values()
        raise KeyboardInterrupt
    assert begun[0].process.poll() is not None and not c_objects._begun
