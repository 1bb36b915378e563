"""The threads of a library: how many there are, which one gets which task, handles and calls side
by side, and forks.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.library import Library
from gtco.runtime.module import load
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, OptionError
from tests.runtime.test_models import (
    SLEEPER,
    check,
    example_inputs,
    kernels,
    small,
    small_artifact,
    some_tasks,
)
from tests.runtime.test_module import REPOSITORY, c_run
from tests.runtime.test_restart import status_of


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs the work on so many threads at once, and gives each its number. An exception of one of
    them is raised here.
    """
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work, number) for number in range(count)]:
            done.result()


def test_two_handles_run_at_the_same_time(small: Path) -> None:
    def work(seed: int) -> None:
        x, mask = example_inputs(seed)
        with load(small, 2) as model:
            for _ in range(300):
                check(model(x, mask), x, mask)

    on_threads(3, work)


def test_a_thread_begins_with_its_own_share_of_the_tasks(tmp_path: Path) -> None:
    """Each task is run once all the same: by whoever is free, and after 4096 runs, too."""
    assert status_of("shares.c", tmp_path) == 0


def test_one_handle_from_many_threads(small: Path) -> None:
    with load(small, 2) as model:

        def work(seed: int) -> None:
            x, mask = example_inputs(seed)
            for _ in range(100):
                check(model(x, mask), x, mask)

        on_threads(4, work)


def test_daemon_threads_end_in_silence_with_the_interpreter(small: Path) -> None:
    """It closes all models while such threads still call them."""
    script = f"""
import threading, time
import numpy as np
from gtco.runtime.module import load
from tests.runtime.test_models import example_inputs
model, inputs = load({str(small)!r}, 2), example_inputs(0)
calls = 0
def work():
    global calls
    while True:
        model(*inputs)
        calls += 1
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
while calls < 30:
    time.sleep(0.001)
"""
    command = [sys.executable, "-c", script]
    for _ in range(3):
        result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


WAVES = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
static atomic_int arrived;
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  int threads = (int)((float*)x)[0];
  for (int64_t t = begin; t < end; ++t) {
    int wave = atomic_fetch_add(&arrived, 1) / threads, waited = 0;
    while (atomic_load(&arrived) < (wave + 1) * threads && waited++ < 300000) {
      struct timespec pause = {0, 1000000};
      nanosleep(&pause, 0);
    }
    ((float*)y)[t] = atomic_load(&arrived) < (wave + 1) * threads ? -1 : 1;
  }
}
"""


@pytest.mark.parametrize(("threads", "tasks"), [(1, 8), (2, 8), (8, 8), (2, 2)])
def test_tasks_are_shared_out(threads: int, tasks: int, tmp_path: Path) -> None:
    """A task waits (up to five minutes) until as many tasks have begun as there are threads. So all
    tasks end only if every thread works at once, and each does the same number of them.
    """
    x = np.full(tasks, threads, np.float32)
    with load(some_tasks(WAVES, tmp_path, tasks), threads) as model:
        for _ in range(3):
            np.testing.assert_array_equal(model(x), np.ones(tasks, np.float32))
            time.sleep(0.02)  # the workers may fall asleep or stay awake


# These count, so no range of theirs may be begun again where its thread lost the CPU. Code that
# calls something outside of the library, as abort(), is not.
COUNTS = """
#include <stdint.h>
#include <stdlib.h>
static unsigned char done[200003];
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  if (end < begin) abort();
  for (int64_t t = begin; t < end; ++t) ((float*)y)[t] = (float)++done[t];
}
"""


@pytest.mark.parametrize("tasks", [2, 7, 65537, 200003])
def test_every_task_runs_once(tasks: int, tmp_path: Path) -> None:
    x = np.zeros(tasks, np.float32)
    with load(some_tasks(COUNTS, tmp_path, tasks), 3) as model:
        for run in range(1, 6):
            np.testing.assert_array_equal(model(x), np.full(tasks, run, np.float32))


STEPS = """
#include <stdint.h>
#include <stdlib.h>
static float done[2];
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  if (end < begin) abort();
  for (int64_t t = begin; t < end; ++t) ((float*)y)[t] = ++done[t];
}
"""


def test_every_step_of_very_many_runs_once(tmp_path: Path) -> None:
    """The number of a step has more than 16 bits."""
    steps = 70_001
    with load(some_tasks(STEPS, tmp_path, 2, steps), 2) as model:
        for run in range(1, 4):
            y = model(np.zeros(2, np.float32))
            np.testing.assert_array_equal(y, np.full(2, run * steps, np.float32))


GATE = """
#include <stdint.h>
#include <unistd.h>
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  char c = 's';
  for (int64_t t = begin; t < end; ++t) {
    ((float*)y)[t] = 1;
    if (t == 0 && write((int)((float*)x)[0], &c, 1) + read((int)((float*)x)[1], &c, 1) != 2)
      ((float*)y)[t] = -1;
  }
}
"""


def test_a_busy_handle_is_an_error_in_c(tmp_path: Path) -> None:
    """The first run says that it has begun, and ends when it is told to."""
    begun, say, told, tell = *os.pipe(), *os.pipe()
    x, y = np.array([say, told] + [0] * 6, np.float32), np.zeros(8, np.float32)
    statuses: list[int] = []
    with load(some_tasks(GATE, tmp_path), 2) as model:
        runner = threading.Thread(
            target=lambda: statuses.append(c_run(model, [x.ctypes.data], [y.ctypes.data])[0])
        )
        runner.start()
        try:
            assert os.read(begun, 1) == b"s"
            other = np.zeros(8, np.float32)
            assert c_run(model, [x.ctypes.data], [other.ctypes.data])[0] == 6
        finally:
            os.write(tell, b"e")
            runner.join()
    assert statuses == [0] and (y == 1).all()
    for pipe in (begun, say, told, tell):
        os.close(pipe)


def test_profile_times_every_stage(small: Path, tmp_path: Path) -> None:
    with load(some_tasks(SLEEPER, tmp_path), 2) as model:
        began = time.perf_counter()
        (seconds,) = model.profile(np.zeros(8, np.float32), repeat=2)
        assert 8 * 0.02 / 2 <= seconds <= time.perf_counter() - began
    with load(small, 2) as model:
        began = time.perf_counter()
        seconds = model.profile(*example_inputs())
        assert len(seconds) == 3 and all(s > 0 for s in seconds)
        assert sum(seconds) <= time.perf_counter() - began


def test_fork_after_open(small: Path) -> None:
    x, mask = example_inputs()
    with load(small, 3) as model:
        check(model(x, mask), x, mask)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(50):
                    check(model(x, mask), x, mask)
                threads = len(os.listdir("/proc/self/task"))
                model.close()
                code = 0 if threads == 3 and len(os.listdir("/proc/self/task")) == 1 else 2
            finally:
                os._exit(code)
        check(model(x, mask), x, mask)
        assert os.waitpid(child, 0)[1] == 0
        check(model(x, mask), x, mask)


def test_number_of_threads(kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_artifact(small_artifact(kernels, threads=3), tmp_path / "m.so")
    assert load(path).threads == 3 and load(path, 4).threads == 4
    monkeypatch.setenv("GTCO_NUM_THREADS", "5")
    assert load(path).threads == 5 and load(path, 4).threads == 4
    monkeypatch.setenv("GTCO_NUM_THREADS", "")  # as if it were not set
    assert load(path).threads == 3
    for bad in ("0", "-1", "two", "9999"):
        monkeypatch.setenv("GTCO_NUM_THREADS", bad)
        with pytest.raises(ArtifactError, match=f"GTCO_NUM_THREADS is '{bad}'"):
            load(path)
    monkeypatch.delenv("GTCO_NUM_THREADS")
    for wrong in (-1, 1025, 2**32 + 1, "2", 1.5, None):  # C would read the third as 1
        with pytest.raises(OptionError, match=r"threads=.* a whole number from 0 to 1024"):
            load(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="num_threads is -1"):
        Library(path).open(-1, 0, 0)


def test_default_threads_follow_the_affinity_mask(small: Path) -> None:
    allowed = os.sched_getaffinity(0)
    with load(small) as model:
        assert 1 <= model.threads <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        with load(small) as model:
            assert model.threads == 1
        with load(small, 2) as model:  # a run with more threads than CPUs still ends
            check(model(*example_inputs()), *example_inputs())
    finally:
        os.sched_setaffinity(0, allowed)


def test_no_thread_is_an_error(small: Path) -> None:
    """A thread's stack takes 8 MB of address space; 1 GB more is allowed."""
    script = (
        "import resource, numpy\n"
        "from gtco.support.errors import ArtifactError\n"
        "from gtco.runtime.module import load\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))\n"
        "limit = pages * resource.getpagesize() + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"try: load({str(small)!r}, 1000)\n"
        "except ArtifactError as error: print(error)\n"
        f"print(load({str(small)!r}, 3).threads)\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    message, threads = result.stdout.splitlines()
    assert "cannot start 999 threads: Resource temporarily unavailable" in message
    assert threads == "3"


def workers_seconds(handles: int) -> dict[str, int]:
    """The nanoseconds on a CPU so far, for each worker thread of ``handles`` models of two threads;
    read once all of them sleep.
    """
    while True:
        states, spent = [], {}
        for task in Path("/proc/self/task").iterdir():
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if "gtco-worker" in name:
                states.append(rest.split()[0])
                spent[task.name] = int((task / "schedstat").read_text().split()[0])
        if states == ["S"] * handles:
            return spent
        time.sleep(0.01)


def test_idle_handles_take_no_cpu(small: Path) -> None:
    gc.collect()  # closes what earlier tests left open
    with load(small, 2) as first, load(small, 2) as second:
        check(first(*example_inputs()), *example_inputs())  # the second never runs
        before = workers_seconds(2)
        time.sleep(0.2)
        assert workers_seconds(2) == before
        check(second(*example_inputs()), *example_inputs())
