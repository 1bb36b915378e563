"""The GPU runtime and the fake driver under the sanitizers: every call of the driver fails in turn,
and many threads have handles on two devices.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.writing import c_objects, linking
from gtco.runtime.writing.linking import write_artifact
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from tests.cuda.fake_driver import (
    KERNELS,
    build,
    compile_kernels,
    persistent_kernel,
    small_gpu_artifact,
)
from tests.cuda.runtime.rows import ranged_artifact, rows_artifact
from tests.robustness.test_runtime_stress import REPORTS, WATCHED

PROGRAM = Path(__file__).with_name("runtime_stress.c")
OF_ROWS = Path(__file__).with_name("rows_stress.c")


def build_program(folder: Path, watched: str, source: Path = PROGRAM) -> list[str]:
    """Builds the driver, the kernels and the program in ``folder``; gives the compiler's flags."""
    flags = ["-g", "-pthread", *WATCHED[watched]]
    build(folder, *flags)
    compile_kernels(KERNELS, folder, *flags)
    program = [c_compiler(), *flags, "-O1", f"-I{CSRC}", str(source), "-o", "stress"]
    driver = ["-L.", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN", "-ldl"]
    subprocess.run([*program, *driver], cwd=folder, check=True)
    return flags


def stress(
    folder: Path,
    library: Path,
    flags: list[str],
    runtime: Path = CSRC,
    artifact: GpuArtifact | None = None,
    arguments: Sequence[str] = ("4", "4"),
) -> str:
    """What went wrong, or "done" if nothing did. ``folder`` has the program, and ``runtime`` has
    the sources from which the library is built, of ``artifact`` or else of the small model.
    """
    kernels = folder / "kernels.so"
    artifact = artifact or small_gpu_artifact(kernels, persistent=persistent_kernel(kernels))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GTCO_CACHE", str(folder / "cache"))  # nobody else needs these objects
        patch.setattr(c_objects, "COMPILE_FLAGS", (*c_objects.COMPILE_FLAGS, *flags))
        patch.setattr(c_objects, "CSRC", runtime)
        patch.setattr(linking, "CSRC", runtime)
        write_artifact(artifact, library)
    command = [str(folder / "stress"), str(library), *arguments]
    # ThreadSanitizer of gcc 12 does not know every layout that the kernel draws at random.
    if "-fsanitize=thread" in flags and (setarch := shutil.which("setarch")):
        command = [setarch, platform.machine(), "-R", *command]
    options = {name: REPORTS for name in ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **options}, timeout=300
    )
    assert (done.returncode == 0) == (done.stdout == "done\n" and not done.stderr), done
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def watched_by_address(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("address")
    return folder, build_program(folder, "address")


def test_failures_and_threads_keep_memory_whole(
    watched_by_address: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = watched_by_address
    assert stress(folder, tmp_path / "m.so", flags) == "done\n"


def test_failures_and_threads_do_not_race(tmp_path: Path) -> None:
    assert stress(tmp_path, tmp_path / "m.so", build_program(tmp_path, "thread")) == "done\n"


def test_failures_at_several_shapes_keep_memory_whole(tmp_path: Path) -> None:
    """Of a list of rows, and of the parts of a range."""
    flags, kernels = build_program(tmp_path, "address", OF_ROWS), tmp_path / "kernels.so"
    listed, ranged = rows_artifact(kernels), ranged_artifact(kernels, 40, {1: 10, 4: 20, 16: 50})
    for name, artifact, rows in (("list", listed, "4 96 1 4"), ("range", ranged, "3 40 1 23")):
        library = tmp_path / f"{name}.so"
        said = stress(tmp_path, library, flags, artifact=artifact, arguments=rows.split())
        assert said == "done\n"


@pytest.mark.parametrize(
    ("file", "right", "wrong", "seen"),
    [
        # memory of the host and of the device that is not released
        ("cuda/open.c", "  free(l->nodes);\n", "", "LeakSanitizer"),
        ("cuda/images.c", "gtco_cuda()->cuModuleUnload(kernels->modules[f]);", ";", "modules"),
        # a run that does not wait for the run before it on another stream
        ("cuda/api.c", "if (m->under_way && !captured)", "if (0)", "is not so"),
        # tables without room for the barrier
        ("cuda/persistent.c", "calloc(1, bytes);", "calloc(1, bytes - SPACING);", "overflow"),
        # outputs that are not waited for
        (
            "cuda/api.c",
            "if (status == GTCO_OK) return wait_for(m);",
            "return status;",
            "outputs of the first run",
        ),
    ],
)
def test_a_fault_of_the_runtime_is_seen(
    watched_by_address: tuple[Path, list[str]],
    tmp_path: Path,
    file: str,
    right: str,
    wrong: str,
    seen: str,
) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    text = (tmp_path / "csrc" / file).read_text()
    assert right in text
    (tmp_path / "csrc" / file).write_text(text.replace(right, wrong))
    folder, flags = watched_by_address
    # if two streams must meet, a busy machine may keep them apart for a whole run
    runs = (stress(folder, tmp_path / "m.so", flags, tmp_path / "csrc") for _ in range(5))
    assert any(re.search(seen, said) for said in runs)
