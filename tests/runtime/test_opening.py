"""gtco.load of files that may not open: instructions that the CPU lacks, files that are not models,
and weights that are lost, moved or rewritten.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime import library
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.publish import weights_beside
from gtco.runtime.writing.linking import write_artifact
from gtco.support.environment import c_compiler
from gtco.support.errors import ArtifactError, OptionError
from tests.runtime.test_models import SCALE, check, example_inputs, kernels, small, small_artifact


def test_lacking_instructions_are_named_at_open(kernels: bytes, tmp_path: Path) -> None:
    present = set(Path("/proc/cpuinfo").read_text().split())
    rare = [
        name for name in ("amx-fp16", "amx-tile", "sse4a") if name.replace("-", "_") not in present
    ]
    assert rare, "no CPU has both AMX and SSE4a"
    features = ("sse2", rare[0], "avx2")
    path = write_artifact(small_artifact(kernels, cpu_features=features), tmp_path / "m.so")
    with pytest.raises(ArtifactError, match=f"compiled for {rare[0]}, which this machine .* lacks"):
        load(path)
    assert read_metadata(path)["name"] == "small"


def test_present_instructions_are_found(kernels: bytes, tmp_path: Path) -> None:
    """Compared with the kernel's own list, for the instruction sets that both name alike."""
    flags = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
    )
    words = set(flags.split(":")[1].split())
    names = (
        "sse3",
        "ssse3",
        "fma",
        "f16c",
        "avx",
        "avx2",
        "bmi1",
        "bmi2",
        "popcnt",
        "movbe",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512cd",
        "avx512vbmi",
        "avx512_bf16",
        "avx512_vnni",
        "avx_vnni",
        "vaes",
        "gfni",
        "avx512ifma",
        "avx512_bitalg",
        "sse4_1",
        "sse4_2",
        "clwb",
        "sha_ni",
        "amx_tile",
        "avx512_fp16",
    )
    spelt = {"sha_ni": "sha"}
    here = tuple(
        spelt.get(name, name) for name in names if name in {w.replace("pni", "sse3") for w in words}
    )
    absent = tuple(spelt.get(name, name) for name in names if name not in words and name != "sse3")
    assert here
    load(write_artifact(small_artifact(kernels, cpu_features=here), tmp_path / "here.so")).close()
    for name in absent:
        with pytest.raises(ArtifactError, match="lacks"):
            load(
                write_artifact(
                    small_artifact(kernels, cpu_features=(name,)), tmp_path / f"{name}.so"
                )
            )


def test_files_that_are_no_models(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        load(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("hello")
    with pytest.raises(ArtifactError, match="not a shared library"):
        load(tmp_path / "text.so")
    ran, foreign = tmp_path / "ran", tmp_path / "foreign.so"
    (tmp_path / "marker.c").write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) void f(void) {{ fclose(fopen("{ran}", "w")); }}\n'
    )
    subprocess.run(
        [c_compiler(), "-shared", "-fPIC", "marker.c", "-o", foreign.name],
        cwd=tmp_path,
        check=True,
    )
    with pytest.raises(ArtifactError, match="not one that gtco made"):
        load(foreign)
    assert not ran.exists(), "its code was run"
    open_it = f"import ctypes; ctypes.CDLL({str(foreign)!r})"
    subprocess.run([sys.executable, "-c", open_it], check=True)
    assert ran.exists(), "opening it does run its code: else the line above proves nothing"
    data = small.read_bytes()
    for size in (0, 3, 40, 64, 1000, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.so").write_bytes(data[:size])
        with pytest.raises(
            ArtifactError, match="truncated" if size >= 40 else "truncated|not a shared"
        ):
            load(tmp_path / "cut.so")
    old = data.replace(b"gtco\0\0\0\0\1\0\0\0", b"gtco\0\0\0\0\7\0\0\0")
    assert old != data
    (tmp_path / "old.so").write_bytes(old)
    with pytest.raises(ArtifactError, match="another version of gtco"):
        load(tmp_path / "old.so")


@pytest.mark.parametrize("given", [b"model.so", None, 3])
def test_what_is_no_path(given: Any) -> None:
    with pytest.raises(OptionError, match=f"not a {type(given).__name__}"):
        load(given)


def test_weights_file_lost_cut_or_swapped(kernels: bytes, tmp_path: Path) -> None:
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=0)
    other = small_artifact(kernels, weights=((0, np.zeros(3, np.int64)), (64, SCALE + 1)))
    write_artifact(other, tmp_path / "other.so", weights_inside_limit=0)
    (weights,) = weights_beside(path)
    (others,) = weights_beside(tmp_path / "other.so")
    good = weights.read_bytes()
    for bad, message in (
        (None, "cannot be opened"),
        (good[:-1], "truncated"),
        (good[:20], "truncated"),
        (b"x" * len(good), "not a gtco weights file"),
        (others.read_bytes(), "belongs to another compile"),
    ):
        weights.unlink()
        if bad is not None:
            weights.write_bytes(bad)
        with pytest.raises(ArtifactError, match=f"{weights.name}.*{message}"):
            load(path)
        weights.write_bytes(good)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        load(path)
    weights.rmdir()
    weights.write_bytes(good)
    with load(path) as model:
        check(model(*example_inputs()), *example_inputs())


def test_compiled_again_to_the_same_path(kernels: bytes, tmp_path: Path) -> None:
    """The loader knows libraries by name; the second library must not give the first one again."""
    x, mask = example_inputs()
    first = load(write_artifact(small_artifact(kernels), tmp_path / "m.so"))
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)))
    second = load(write_artifact(doubled, tmp_path / "m.so"))
    third = load(tmp_path / "m.so")
    check(first(x, mask), x, mask)
    for model in (second, third):
        np.testing.assert_allclose(
            model(x, mask)[0], np.maximum(2 * x * SCALE + mask[:, None], 0), rtol=1e-6
        )


def test_compiled_again_while_it_is_opened(
    kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the new library must not run with the metadata of the old one."""
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so")
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)), name="second")
    read, published = library.read_contents, []

    def replaced(*given: Any) -> Any:
        contents = read(*given)
        if not published:
            published.append(write_artifact(doubled, path))
        return contents

    monkeypatch.setattr(library, "read_contents", replaced)
    x, mask = example_inputs()
    with load(path) as model:
        assert model.metadata["name"] == "second"
        expected = np.maximum(2 * x * SCALE + mask[:, None], 0)
        np.testing.assert_allclose(model(x, mask)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [0, 10**9])
def test_save(kernels: bytes, tmp_path: Path, limit: int) -> None:
    source = tmp_path / "source"
    path = write_artifact(small_artifact(kernels), source / "m.so", weights_inside_limit=limit)
    with load(path, temporary=True) as model:
        with pytest.raises(OptionError, match="deep' does not exist: make it first"):
            model.save(tmp_path / "deep" / "copy.so")
        (tmp_path / "deep").mkdir()
        saved = model.save(tmp_path / "deep" / "copy.so")
    assert not source.exists()  # a temporary model removes its folder
    names = {p.name for p in saved.parent.iterdir()}
    weights = weights_beside(saved)
    assert len(weights) == (limit == 0)
    assert names == {"copy.so", "copy.h"} | {path.name for path in weights}
    with load(saved) as model:
        check(model(*example_inputs()), *example_inputs())


@pytest.mark.parametrize("limit", [0, 10**9], ids=["weights beside it", "weights inside"])
def test_open_and_close_leave_nothing(kernels: bytes, tmp_path: Path, limit: int) -> None:
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=limit)
    assert len(weights_beside(path)) == (limit == 0)

    def state() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            maps.count(str(path)),  # and of the weights, whose name begins alike
        )

    load(path, 4).close()
    before = state()
    assert before[2] == 0
    for _ in range(20):
        load(path, 4).close()
    assert state() == before


def test_a_moved_model_still_finds_its_weights(kernels: bytes, tmp_path: Path) -> None:
    path = write_artifact(small_artifact(kernels), tmp_path / "a" / "m.so", weights_inside_limit=0)
    shutil.move(path.parent, tmp_path / "b")
    with load(tmp_path / "b" / "m.so") as model:
        check(model(*example_inputs()), *example_inputs())


def test_no_memory_is_an_error(kernels: bytes, tmp_path: Path) -> None:
    path = write_artifact(small_artifact(kernels, arena_bytes=1 << 50), tmp_path / "m.so")
    with pytest.raises(ArtifactError, match=r"needs 1125\d+ bytes of memory.*Cannot allocate"):
        load(path)
