"""Reading a library without loading it, and seeing damage of any loaded byte."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime import library as library_module
from gtco.runtime.elf import BUNDLE, _Elf, read_contents
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError
from tests.runtime.test_models import check, example_inputs, kernels, small, small_artifact


def test_the_metadata_is_read_and_nothing_is_run(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the library was loaded")

    with load(small) as model:
        wanted = model.metadata
    monkeypatch.setattr(library_module.ctypes, "CDLL", refuse)
    assert read_metadata(small) == wanted and wanted["name"] == "small"
    assert read_metadata(str(small)) == wanted


def test_every_damaged_byte_of_the_loaded_part_is_seen(small: Path, tmp_path: Path) -> None:
    """Headers, code, tables and metadata. Section headers and weights are left out, because damage
    there cannot make a process die.
    """
    data = small.read_bytes()
    rng = random.Random(0)
    with small.open("rb") as file:
        metadata, _ = _Elf(small, file).place(0)
    code = data.index(b"\x55\x48\x89") if b"\x55\x48\x89" in data else 0x1000
    places = [*range(40), *range(48, 58), *range(64, 600, 7), metadata, code]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        (tmp_path / "m.so").write_bytes(damaged)
        with pytest.raises(ArtifactError):
            read_contents(tmp_path / "m.so")


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_stripped_library_loads(kernels: bytes, tmp_path: Path, limit: int) -> None:
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=limit)
    before = path.stat().st_size
    subprocess.run(["strip", str(path)], check=True)
    assert path.stat().st_size < before
    with load(path) as model:
        check(model(*example_inputs()), *example_inputs())


def test_no_digest_no_regular_file_no_such_name(small: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.so")
    with pytest.raises(ArtifactError, match="not a file"):
        load(tmp_path / "pipe.so")
    with pytest.raises(ArtifactError, match="not a file"):
        load(tmp_path)
    with pytest.raises(ArtifactError, match="cannot read"):
        load("a\0b.so")
    data = small.read_bytes()
    note = (5).to_bytes(4, "little") + (64).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert note in data
    earlier = data.replace(note, note[:8] + (9).to_bytes(4, "little"))
    (tmp_path / "earlier.so").write_bytes(earlier)
    with pytest.raises(ArtifactError, match="earlier version of gtco"):
        load(tmp_path / "earlier.so")


@pytest.mark.parametrize("kept", [0, 20, 5000])
def test_what_a_file_was_to_be_is_what_its_error_names(
    small: Path, tmp_path: Path, kept: int
) -> None:
    """The kind of file comes from its name or from the reader."""
    for name in ("m.so", "m.bundle"):
        (tmp_path / name).write_bytes(small.read_bytes()[:kept])
    compiles, candidates = r"gtco compile|compile the model", "'gtco candidates'"
    for name, wanted, said in (
        ("m.so", None, compiles),
        ("m.so", BUNDLE, candidates),
        ("m.bundle", None, candidates),
    ):
        with pytest.raises(ArtifactError, match=said):
            read_metadata(str(tmp_path / name), wanted)


def test_the_weights_are_no_part_of_the_digest(kernels: bytes, tmp_path: Path) -> None:
    """A library of gigabytes opens without being read."""
    weights = ((0, np.arange(3)), (64, np.full(1 << 20, 7.0, np.float32)))
    path = write_artifact(small_artifact(kernels, weights=weights), tmp_path / "m.so")
    data = path.read_bytes()
    place = data.index(np.full(16, 7.0, np.float32).tobytes())
    path.write_bytes(data[: place + 100] + b"\1" + data[place + 101 :])
    read_contents(path)
