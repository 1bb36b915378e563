"""What a program may do around its models (in_process.c): end while a thread runs one, handle its
own faults, enter a sandbox, go to another folder, fork while sizes change, and run out of memory.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gtco.runtime.writing.linking import write_artifact
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from tests.runtime.test_models import kernels, small_artifact
from tests.runtime.test_ranges import model as ranged
from tests.runtime.test_restart import library, needs_restarts, needs_two_cpus, spinner

# the n-th allocation after arm(n) fails
FAILING = """
#include <errno.h>
#include <stdlib.h>
static int left;
void arm(int n) { left = n; }
int disarm(void) { int rest = left; left = 0; return rest; }
static int fails(void) { return left > 0 && --left == 0 && (errno = ENOMEM); }
void* __libc_calloc(size_t, size_t);
void* __libc_memalign(size_t, size_t);
void* calloc(size_t a, size_t b) { return fails() ? 0 : __libc_calloc(a, b); }
void* aligned_alloc(size_t a, size_t b) { return fails() ? 0 : __libc_memalign(a, b); }
"""
OPENS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <dirent.h>
#include <stdio.h>
#include <unistd.h>
#include "gtco_api.h"
static int threads(void) {
  DIR* tasks = opendir("/proc/self/task");
  int count = 0;
  for (struct dirent* task; (task = readdir(tasks));) count += task->d_name[0] != '.';
  closedir(tasks);
  return count;
}
int main(int count, char** arguments) {
  void (*arm)(int) = dlsym(RTLD_DEFAULT, "arm");
  int (*disarm)(void) = dlsym(RTLD_DEFAULT, "disarm");
  void* library = dlopen(arguments[1], RTLD_NOW);
  gtco_status (*open)(const gtco_options*, gtco_model**) = dlsym(library, "gtco_open");
  void (*close)(gtco_model*) = dlsym(library, "gtco_close");
  const gtco_options options = {.num_threads = 3};
  for (int n = 1;; ++n) {
    gtco_model* model = 0;
    arm(n);
    const gtco_status status = open(&options, &model);
    if (disarm() > 0) {
      close(model);
      printf("%d\\n", n - 1);
      return status;
    }
    /* glibc frees a thread's memory a moment after its end */
    for (int i = 0; threads() > 1 && i < 1000; ++i) usleep(1000);
    if ((status == GTCO_OK) != (model != 0) || (!model && threads() > 1)) return 100 + n;
    close(model);
  }
}
"""


def built(source: Path | str, folder: Path, *flags: str) -> Path:
    program = folder / "program"
    if isinstance(source, str):
        (folder / "program.c").write_text(source)
        source = folder / "program.c"
    every = ["-std=gnu11", "-O1", "-Wall", "-pthread", f"-I{CSRC}", *flags]
    subprocess.run([c_compiler(), *every, str(source), "-o", str(program), "-ldl"], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(Path(__file__).with_name("in_process.c"), tmp_path_factory.mktemp("in_process"))


def runs(program: Path, *arguments: str | Path, folder: Path | None = None) -> None:
    done = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={"MALLOC_PERTURB_": "165"},  # who reads what was freed finds no address there
    )
    if done.returncode == 77:
        pytest.skip("the system has no filters of calls")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_ends_while_a_thread_runs(program: Path, library: Path, tmp_path: Path) -> None:
    """Its destructors run beside that thread."""
    source = "#include <unistd.h>\n__attribute__((destructor)) void slow(void) { usleep(30000); }"
    slow = built(source, tmp_path, "-shared", "-fPIC")
    for _ in range(10):
        runs(program, "exit", library, slow)


def test_the_process_ends_while_threads_with_messages_end(program: Path, library: Path) -> None:
    runs(program, "messages", library)


def test_handlers_of_faults_are_called_in_every_thread(program: Path, library: Path) -> None:
    runs(program, "fault", library)


@needs_restarts
@needs_two_cpus
@pytest.mark.parametrize("what", ["barriers", "clocks"])
def test_a_sandbox_is_entered_later(what: str, program: Path, library: Path) -> None:
    """Nothing is taken over there; the process goes on."""
    with spinner():
        runs(program, what, library)


def test_weights_are_found_from_another_folder(
    program: Path, kernels: bytes, tmp_path: Path
) -> None:
    """A relative path is one of the folder in which the library was loaded."""
    write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=100)
    assert len(list(tmp_path.glob("m.so.weights-*"))) == 1
    runs(program, "folder", "./m.so", folder=tmp_path)


def test_a_fork_while_sizes_change(program: Path, ranged) -> None:  # type: ignore[no-untyped-def]
    runs(program, "fork", Path(ranged.path))


def test_no_memory_at_any_allocation(ranged, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Opening fails with an error, and leaves no thread behind."""
    (tmp_path / "failing").mkdir()
    failing = built(FAILING, tmp_path / "failing", "-shared", "-fPIC")
    done = subprocess.run(
        [built(OPENS, tmp_path, "-Wno-unused-parameter"), ranged.path],
        capture_output=True,
        text=True,
        timeout=60,
        env={"LD_PRELOAD": str(failing)},
    )
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) > 8
