"""The barrier between two stages, timed by the thread pool of the C runtime."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import detect
from gtco.search.calibration.barrier import (
    MOST_STEPS,
    barrier_seconds,
    handover_seconds,
    memory_seconds,
)
from gtco.search.calibration.level0 import copy_kernel
from gtco.search.calibration.timing import aligned
from gtco.support.errors import BuildError


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_seconds_beyond_the_tasks(threads: int) -> None:
    """This holds on a busy machine too. More threads than cores are slow, but never hang."""
    seconds = barrier_seconds(threads, 2)
    assert math.isfinite(seconds) and seconds >= 0


def test_no_threads() -> None:
    with pytest.raises(OSError, match="with 0 threads"):
        barrier_seconds(0, 2)


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("threads", "tasks", "steps"), [(1, 1, 2), (2, 16, MOST_STEPS), (5, 8, 6)])
def test_steps_that_read_what_the_step_before_wrote(
    threads: int, tasks: int, steps: int, across: bool
) -> None:
    """Each step adds 1 to its whole input, alternately from one buffer to the other. The first run
    is not counted.
    """
    machine = detect()
    size = tasks * 4 * machine.lanes
    library = load([copy_kernel("small", 4 * size, tasks, machine)], machine)
    x, y = aligned(size), aligned(size)
    seconds = handover_seconds(threads, library.copy_small, tasks, across, x, y, 3, steps)
    assert math.isfinite(seconds) and seconds > 0
    made = (1 + 3) * steps
    assert (x == made).all() and (y == made - 1).all()


@pytest.mark.parametrize(("threads", "steps"), [(0, 2), (1, 0), (1, MOST_STEPS + 1)])
def test_nothing_to_hand_over(threads: int, steps: int) -> None:
    machine, x = detect(), aligned(64)
    library = load([copy_kernel("small", 256, 1, machine)], machine)
    with pytest.raises(OSError, match=f"with {threads} threads"):
        handover_seconds(threads, library.copy_small, 1, True, x, x, 2, steps)


@pytest.mark.parametrize(("threads", "tasks"), [(1, 1), (2, 16), (5, 7)])
def test_memory_is_read_or_copied_whole(threads: int, tasks: int) -> None:
    x, y = aligned(7 * 16 * 64), aligned(7 * 16 * 64)
    x[:] = np.arange(x.size)
    read = memory_seconds(threads, tasks, x, None, 2)
    assert math.isfinite(read) and read > 0 and not y.any()
    copied = memory_seconds(threads, tasks, x, y, 2)
    assert math.isfinite(copied) and copied > 0
    assert (y == x).all() and (x == np.arange(x.size)).all()


def test_runs_end_with_their_time() -> None:
    """One run is made in any case; a million would take minutes."""
    x, y = aligned(1024), aligned(1024)
    assert barrier_seconds(1, 1_000_000, 0.0) >= 0
    assert memory_seconds(1, 1, x, y, 1_000_000, 0.0) > 0


def test_parts_of_no_line() -> None:
    with pytest.raises(OSError, match="with 1 threads"):
        memory_seconds(1, 1000, aligned(1024), None, 1)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(BuildError, match="compiler"):
        barrier_seconds(2, 2)
