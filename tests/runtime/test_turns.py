"""A CPU that another process shares (csrc/turns.c): no task begins if the scheduler's next tick
would come before its end. Results beside such a process are right.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime.artifact import write_artifact
from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.table import CSRC
from gtco.support.options import c_compiler
from tests.runtime.test_models import compile_kernels, small_artifact

COARSE = 6  # CLOCK_MONOTONIC_COARSE, which advances at ticks
SETTLING = 50_000  # SETTLING_NS of turns.c


class Turns(ctypes.Structure):
    """The struct ``gtco_turns`` of csrc/turns.h."""

    _fields_ = (
        ("switches", ctypes.c_long),
        ("switched_ns", ctypes.c_int64),
        ("in_a_row", ctypes.c_int32),
        ("asked_ns", ctypes.c_int64),
        ("until_ns", ctypes.c_int64),
        ("held_up", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("turns") / "turns.so"
    command = [c_compiler(), "-std=gnu11", "-O1", "-fPIC", "-shared", str(CSRC / "turns.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    dll = ctypes.CDLL(str(library))
    dll.gtco_turns_look.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    dll.gtco_turns_fit.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_uint32,
    )
    dll.gtco_turns_fit.restype = ctypes.c_uint32
    dll.gtco_turns_look.restype = None
    dll.gtco_watch_ticks.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    dll.gtco_tick_ns.restype = ctypes.c_int64
    assert dll.gtco_tick_ns() == 0
    watch = (ctypes.c_int64 * 2)()
    while dll.gtco_tick_ns() == 0:  # until this process runs when a tick comes
        dll.gtco_watch_ticks(ctypes.addressof(watch), time.monotonic_ns())
    return dll


def shared(turns: Any, ago: int) -> Turns:
    """The state of a thread whose CPU was taken away every ``ago`` nanoseconds."""
    now = time.monotonic_ns()
    state = Turns()
    for _ in range(4):
        state.switches, state.switched_ns = -1, now - ago
        turns.gtco_turns_look(ctypes.addressof(state), now)
    return state


def test_a_cpu_counts_as_shared_when_it_is_taken_often(turns: Any) -> None:
    assert shared(turns, 10**9).until_ns == 0  # only a kernel thread, now and then
    state = shared(turns, 4_000_000)
    assert state.switches >= 0 and state.until_ns > state.switched_ns


@pytest.mark.parametrize("task", [0, 1_000, 200_000])
def test_tasks_that_end_before_the_next_tick(turns: Any, task: int) -> None:
    """Over three ticks, in steps of 10 us: the number of tasks falls until none fits. Then there is
    a pause around the tick.
    """
    tick = turns.gtco_tick_ns()
    assert tick == round(time.clock_getres(COARSE) * 1e9)
    task = min(task, tick // 8)
    state = shared(turns, 4_000_000)
    begin = state.asked_ns
    counts = []
    for now in range(begin, begin + 3 * tick, 10_000):
        state.asked_ns, state.until_ns = now, now + 1  # do not look again meanwhile
        counts.append(turns.gtco_turns_fit(ctypes.addressof(state), now, task, 1 << 30))
    pauses = [i for i, count in enumerate(counts) if count == 0]
    assert 0 < len(pauses) * 10_000 <= 4 * (SETTLING + task + 10_000)
    ticks = [i for i in range(1, len(counts)) if counts[i] > 0 and counts[i - 1] == 0]
    assert 2 <= len(ticks) <= 4
    for a, b in pairwise(ticks):
        assert abs((b - a) * 10_000 - tick) <= 10_000
        if task:  # the time that is left, in tasks, falls after the tick
            assert counts[a] <= (tick - SETTLING) // task
            assert counts[a] > counts[(a + b) // 2] > 0


def test_long_tasks_are_begun_at_any_time(turns: Any) -> None:
    state = shared(turns, 4_000_000)
    tick = turns.gtco_tick_ns()
    for now in range(state.asked_ns, state.asked_ns + tick, tick // 50):
        state.asked_ns, state.until_ns = now, now + 1
        assert turns.gtco_turns_fit(ctypes.addressof(state), now, tick, 3) == 1


def test_that_time_ends(turns: Any) -> None:
    state = shared(turns, 4_000_000)
    later = state.asked_ns = state.until_ns + 1
    assert turns.gtco_turns_fit(ctypes.addressof(state), later, 10**9, 7) == 7
    assert state.until_ns == 0


KERNELS = """
#include <stdint.h>
static float work(float x) {
  for (int i = 0; i < 4000; ++i) x = x * 0.5f + 1.0f;
  return x;
}
void each(float* x, float* y, void* w, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) y[i] = work(x[i]) + x[i];
}
void sum(float* x, float* y, void* w, int64_t begin, int64_t end) {
  float s = 0;
  for (int i = 0; i < 64; ++i) s += x[i];
  y[0] = s;
}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")
def test_right_beside_a_process_that_spins(tmp_path: Path) -> None:
    """Long steps and steps of one task, for a second, so that the threads notice."""
    arena = [BufferRef("arena", 256 * i) for i in range(3)]
    steps = (
        Step("each", (BufferRef("input", 0), arena[0]), 64),
        Step("each", (arena[0], arena[1]), 64),
        Step("sum", (arena[1], BufferRef("output", 1))),
        Step("each", (arena[1], BufferRef("output", 0)), 64),
    )
    artifact = small_artifact(
        compile_kernels(KERNELS, tmp_path),
        inputs=(TensorSpec("x", "float32", (64,)),),
        outputs=(TensorSpec("y", "float32", (64,)), TensorSpec("s", "float32", (1,))),
        steps=steps,
        weights=(),
        arena_bytes=3 * 256,
    )
    path = write_artifact(artifact, tmp_path / "steps.so")
    cpus = sorted(os.sched_getaffinity(0))[:2]
    spin = f"import os; os.sched_setaffinity(0, {{{cpus[1]}}})\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", spin])
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set(cpus))
        with load(path, 2) as model:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                # integers and halves: every sum is exact
                x = np.random.default_rng().integers(-9, 9, 64).astype(np.float32)
                y, s = model(x)
                np.testing.assert_array_equal(y, x + 6)
                assert s[0] == (x + 4).sum()
    finally:
        os.sched_setaffinity(0, before)
        spinning.kill()
        spinning.wait()
