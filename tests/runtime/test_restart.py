"""Calls that are ended in the middle (csrc/restart.h): where another process or a signal takes the
CPU, results stay right, and a thread that waits does the work of one that has no CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing import table
from gtco.runtime.writing.elf_object import closed, symbols
from gtco.runtime.writing.linking import write_artifact
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from tests.random.__main__ import BATCH, graphs_of, precision_of
from tests.random.builder import model_of
from tests.random.engine import in_process, run
from tests.runtime.test_models import compile_kernels, small_artifact

TASKS = 32
# `each` notes which thread began a task first, which began it last, and how often it began.
KERNELS = """
#include <stdint.h>
static uint64_t thread(void) {
  uint64_t pointer;
  __asm__ volatile("mov %%fs:0, %0" : "=r"(pointer));
  return pointer;
}
static float work(float x) {
  for (int i = 0; i < 40000; ++i) x = x * 0.5f + 1.0f;
  return x;
}
void clear(uint64_t* first, uint64_t* last, uint64_t* count, void* w, int64_t begin, int64_t end) {
  for (int i = 0; i < 32; ++i) first[i] = last[i] = count[i] = 0;
}
void each(float* x, float* y, uint64_t* first, uint64_t* last, uint64_t* count, void* w,
          int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    uint64_t none = 0;
    __atomic_compare_exchange_n(&first[i], &none, thread(), 0, 5, 5);
    __atomic_store_n(&last[i], thread(), 5);
    __atomic_fetch_add(&count[i], 1, 5);
    y[i] = work(x[i]) + x[i];
  }
}
void sum(float* x, float* y, void* w, int64_t begin, int64_t end) {
  float s = 0;
  for (int i = 0; i < 32; ++i) s += x[i];
  y[0] = s;
}
"""


def _can_restart() -> bool:
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return hasattr(ctypes.CDLL(None), "__rseq_offset") and version >= (5, 10)


needs_restarts = pytest.mark.skipif(not _can_restart(), reason="takes glibc 2.35 and Linux 5.10")
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long parallel steps, and steps of one task between them."""
    folder = tmp_path_factory.mktemp("restart")
    between = BufferRef("arena", 0)
    notes = tuple(BufferRef("output", i) for i in (2, 3, 4))
    steps = (
        Step("clear", notes),
        Step("each", (BufferRef("input", 0), between, *notes), TASKS),
        Step("sum", (between, BufferRef("output", 1))),
        Step("clear", notes),  # what is noted is of the second step alone
        Step("each", (between, BufferRef("output", 0), *notes), TASKS),
    )
    words = (TensorSpec(name, "int64", (TASKS,)) for name in ("first", "last", "count"))
    artifact = small_artifact(
        compile_kernels(KERNELS, folder),
        inputs=(TensorSpec("x", "float32", (TASKS,)),),
        outputs=(
            TensorSpec("y", "float32", (TASKS,)),
            TensorSpec("s", "float32", (1,)),
            *words,
        ),
        steps=steps,
        weights=(),
        arena_bytes=256,
    )
    return write_artifact(artifact, folder / "steps.so")


def runs_until(model: Model, seen: Callable[[Sequence[np.ndarray]], bool], seconds: float) -> bool:
    """Runs the model on fresh inputs, checks what it computes, and returns whether ``seen`` was
    true of a run's outputs within that time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # integers and halves: every sum is exact
        x = np.random.default_rng().integers(-9, 9, TASKS).astype(np.float32)
        results = model(x)
        np.testing.assert_array_equal(results[0], x + 4)
        assert results[1][0] == (x + 2).sum()
        assert (results[4] >= 1).all()
        if seen(results):
            return True
    return False


@contextmanager
def spinner() -> Iterator[None]:
    """A process that keeps the second CPU busy, and this process bound to that one and another."""
    before = os.sched_getaffinity(0)
    cpus = sorted(before)[:2]
    spin = f"import os; os.sched_setaffinity(0, {{{cpus[1]}}})\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", spin])
    try:
        os.sched_setaffinity(0, set(cpus))
        yield
    finally:
        os.sched_setaffinity(0, before)
        spinning.kill()
        spinning.wait()


@needs_two_cpus
def test_right_beside_a_process_that_spins(library: Path) -> None:
    with spinner(), load(library, 2) as model:
        assert not runs_until(model, lambda _: False, 1.0)


@needs_restarts
@needs_two_cpus
def test_a_range_whose_thread_has_no_cpu_is_taken_over(library: Path) -> None:
    """Some task ends in another thread than that which began it, in a minute at the latest."""
    with spinner(), load(library, 2) as model:
        assert runs_until(model, lambda results: bool((results[2] != results[3]).any()), 60)


def test_a_range_that_its_thread_ends_is_not_taken_over(tmp_path: Path) -> None:
    """While a thread without a CPU is looked at, it gets one and ends its range. If the range were
    kept, it would run twice, perhaps steps later, and the run would wait for ever, because its
    tasks were counted twice.
    """
    assert status_of("take_over_race.c", tmp_path) == 0


def test_two_threads_do_not_move_a_worker_at_once(tmp_path: Path) -> None:
    """The second one would keep it from the CPUs that the first one kept it from for a moment."""
    assert status_of("parted_twice.c", tmp_path) == 0


def status_of(source: str, folder: Path) -> int:
    """The exit status of a program of ``pool/``, which contains the thread pool."""
    flags = ["-std=gnu11", "-O1", "-pthread", f"-I{CSRC}"]
    sources = [str(Path(__file__).parent / "pool" / source), str(CSRC / "cpu/count.c")]
    subprocess.run([c_compiler(), *flags, *sources, "-o", str(folder / "program")], check=True)
    return subprocess.run([folder / "program"], check=False).returncode


@needs_restarts
@needs_two_cpus
def test_threads_are_moved_apart_and_keep_their_cpus(library: Path) -> None:
    """A thread that is moved to another CPU may use all its CPUs afterwards."""
    with spinner(), load(library, 2) as model:
        runs_until(model, lambda _: False, 1.0)
        masks = {
            int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")
        }
        assert set(map(frozenset, masks.values())) == {frozenset(os.sched_getaffinity(0))}


@needs_restarts
@needs_two_cpus
def test_a_signal_ends_a_call_which_is_begun_again(library: Path) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with load(library, 2) as model:
            assert runs_until(model, lambda results: bool((results[4] > 1).any()), 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_restarts
@needs_two_cpus
def test_a_child_takes_over_too(library: Path) -> None:
    with spinner(), load(library, 2) as model:
        runs_until(model, lambda _: True, 60)
        child = os.fork()
        if child == 0:
            found = False
            try:
                found = runs_until(
                    model, lambda results: bool((results[2] != results[3]).any()), 60
                )
            finally:
                os._exit(0 if found else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closed_kernels_call_no_other_code(tmp_path: Path) -> None:
    def compiled(name: str, source: str) -> bytes:
        (tmp_path / name).mkdir()
        return compile_kernels(source, tmp_path / name)

    alone = compiled("alone", "void alone(float* x) { x[0] = 1; }")
    text = "#include <string.h>\nvoid copies(char* x, char* y, long n) { memcpy(x, y, n); }"
    copies = compiled("copies", text)
    calls = compiled("calls", "float erff(float);\nvoid calls(float* x) { *x = erff(*x); }")
    assert symbols(calls) == ({"calls"}, {"erff"})
    assert symbols(copies) == ({"copies"}, {"memcpy"})
    assert closed([alone, copies, calls]) >= {"alone", "copies"}
    assert "calls" not in closed([alone, copies, calls])


def test_kernels_stand_between_their_marks(library: Path, tmp_path: Path) -> None:
    """The linker keeps the order of the files, whatever else it does."""
    listing = subprocess.run(
        ["nm", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    at = {name: int(place, 16) for place, _, name in map(str.split, listing.splitlines())}
    inside = [at[name] for name in ("clear", "each", "sum", "memcpy", "memset", "call_0")]
    assert at["gtco_kernels_begin"] < min(inside)
    assert max(inside) < at["gtco_kernels_end"] < at["gtco_open"]


COPIES = """
#include <stdint.h>
#include <string.h>
void copies(int64_t* size, char* x, char* y, void* w, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    for (int j = 0; j < 4096; ++j) *(volatile char*)(y + 4096 * i + j) = -1;
    memset(y + 4096 * i + i, (int)i, size[0]);
    memcpy(y + 4096 * i + 2048 + i, x + 15 - i, size[0]);
  }
}
"""


def test_copying_and_filling(tmp_path: Path) -> None:
    """The library's own memcpy and memset, at every alignment and small size."""
    kernels = compile_kernels(COPIES, tmp_path)
    assert symbols(kernels)[1] >= {"memcpy", "memset"}
    step = Step(
        "copies", (BufferRef("input", 0), BufferRef("input", 1), BufferRef("output", 0)), 16
    )
    artifact = small_artifact(
        kernels,
        inputs=(TensorSpec("size", "int64", (1,)), TensorSpec("x", "int8", (2048,))),
        outputs=(TensorSpec("y", "int8", (16, 2, 2048)),),
        steps=(step,),
        weights=(),
    )
    x = np.random.default_rng().integers(0, 127, 2048).astype(np.int8)
    with load(write_artifact(artifact, tmp_path / "copies.so"), 2) as model:
        for size in (*range(70), 127, 128, 129, 1000, 2000):
            want = np.full((16, 2, 2048), -1, np.int8)
            for i in range(16):
                want[i, 0, i : i + size] = i
                want[i, 1, i : i + size] = x[15 - i : 15 - i + size]
            np.testing.assert_array_equal(model(np.array([size]), x), want)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_range_that_is_begun_again_gives_the_same(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of drawn graphs whose every call is made twice."""
    written = table._trampolines

    def twice(steps: Sequence[Step]) -> list[str]:
        lines = written(steps)
        calls = [re.sub(r"(kernel_\d+\([^;]*;) }$", r"\1 \1 }", line) for line in lines]
        assert sum(a != b for a, b in zip(lines, calls, strict=True)) == len(lines) // 2
        return calls

    batches = iter(lambda: int(np.random.default_rng().integers(1 << 30)), -1)
    first = next(b * BATCH for b in batches if precision_of(b * BATCH) == precision)
    drawn = graphs_of(first, BATCH // 3)
    feeds = {name: array for graph in drawn for name, array in graph.feeds.items()}
    with in_process():
        model = model_of(drawn)
        once = run(model, feeds, precision)
        monkeypatch.setattr(table, "_trampolines", twice)
        again = run(model, feeds, precision)
    for name, value in once.items():
        np.testing.assert_array_equal(value, again[name], f"seed {first}, {name}")
