"""The C runtime under many threads, handles and thread counts, and under forks, watched by
ThreadSanitizer and by AddressSanitizer with UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from gtco.runtime.writing import c_objects
from gtco.runtime.writing.linking import write_artifact
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from tests.runtime.test_models import KERNELS, small_artifact

DRIVER = Path(__file__).with_name("runtime_stress.c")
WATCHED = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "nothing": [],
}
REPORTS = "exitcode=66 halt_on_error=1 abort_on_error=0"


def stress(
    folder: Path, watched: str, *arguments: str, source: Path = DRIVER
) -> subprocess.CompletedProcess[str]:
    """Builds library and driver with the sanitizer, and runs the driver."""
    flags = ["-g", "-pthread", *WATCHED[watched]]
    (folder / "kernels.c").write_text(KERNELS)
    build = [c_compiler(), *flags, "-O1", "-fPIC", "-c", "kernels.c", "-o", "kernels.o"]
    subprocess.run(build, cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GTCO_CACHE", str(folder / "cache"))  # nobody else needs these objects
        patch.setattr(c_objects, "COMPILE_FLAGS", (*c_objects.COMPILE_FLAGS, *flags))
        code = (folder / "kernels.o").read_bytes()
        library = write_artifact(small_artifact(code), folder / "small.so")
    driver = [c_compiler(), *flags, "-O1", f"-I{CSRC}", str(source), "-o", "stress", "-ldl"]
    subprocess.run(driver, cwd=folder, check=True)
    options = {name: REPORTS for name in ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")}
    command = [str(folder / "stress"), str(library), *arguments]
    # ThreadSanitizer of gcc 12 does not know every layout that the kernel draws at random.
    if watched == "thread" and (setarch := shutil.which("setarch")):
        command = [setarch, platform.machine(), "-R", *command]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **options}, timeout=500
    )


@pytest.mark.parametrize(
    ("watched", "arguments"),
    [("thread", ("4", "12")), ("address", ("4", "12")), ("nothing", ("3", "60", "fork"))],
)
def test_many_threads_and_handles(tmp_path: Path, watched: str, arguments: tuple[str, ...]) -> None:
    done = stress(tmp_path, watched, *arguments)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "done\n" and done.stderr == ""


def test_messages_of_threads_that_outlive_the_library(tmp_path: Path) -> None:
    """LeakSanitizer sees memory that stays allocated."""
    source = DRIVER.with_name("closed_under_threads.c")
    done = stress(tmp_path, "address", source=source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("watched", "fault", "report"),
    [
        # every task of the first step counts in memory that all threads see, unguarded
        ("thread", "static long seen; seen += end - begin; *(volatile long*)&seen;", "data race"),
        (
            "address",
            "char* gone = __builtin_malloc(8); __builtin_free(gone); *gone = 1;",
            "after-free",
        ),
        ("address", "volatile int most = 2147483647; most += (int)(end > 0);", "overflow"),
    ],
)
def test_the_sanitizers_see_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: str, fault: str, report: str
) -> None:
    start = "float* scratch = w;"
    assert start in KERNELS
    monkeypatch.setitem(globals(), "KERNELS", KERNELS.replace(start, f"{start} {fault}", 1))
    done = stress(tmp_path, watched, "2", "4")
    assert done.returncode != 0 and report in done.stderr
