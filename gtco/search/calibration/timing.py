"""Times kernels of this process, called on one thread or on several at once.

Other tenants of a machine can only make a round slower, so callers take the best of several rounds.
All threads exist and have made a first call before a round begins.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from errno import EAGAIN
from statistics import fmean
from typing import Any

import numpy as np

Call = Callable[[], None]


def call(
    function: Any, *buffers: np.ndarray, tasks: int = 1, workspace: np.ndarray | None = None
) -> Call:
    """A call of a kernel over all its tasks. The arrays live as long as the call does."""
    held = buffers if workspace is None else (*buffers, workspace)
    arguments = (
        *(ctypes.c_void_p(b.ctypes.data) for b in held),
        *((None,) if workspace is None else ()),
        ctypes.c_int64(0),
        ctypes.c_int64(tasks),
    )

    def made(held: Sequence[np.ndarray] = held) -> None:
        function(*arguments)

    return made


def together(calls: Sequence[Call], seconds: float) -> float:
    """Calls per second of all threads together (one thread for each of ``calls``), during at least
    ``seconds`` of the clock. The threads start at once; a thread that comes late counts as idle.
    """
    starts, ends, done = _windows(calls, seconds, time.perf_counter)
    return sum(n / (end - min(starts)) for n, end in zip(done, ends, strict=True))


def of_each(calls: Sequence[Call], seconds: float) -> float:
    """Calls per second of one thread while each of ``calls`` runs on its own thread; the mean of
    all threads. It counts each thread's own time, which stops while other processes have the core.
    """
    starts, ends, done = _windows(calls, seconds, time.thread_time)
    return fmean(n / (b - a) for n, a, b in zip(done, starts, ends, strict=True))


def _windows(
    calls: Sequence[Call], seconds: float, now: Callable[[], float]
) -> tuple[list[float], list[float], list[int]]:
    """For each thread, when it began and ended, and how many calls it made between."""
    barrier = threading.Barrier(len(calls))
    starts, ends = [0.0] * len(calls), [0.0] * len(calls)
    done = [0] * len(calls)

    def run(i: int) -> None:
        calls[i]()
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return
        starts[i] = ends[i] = now()
        while ends[i] - starts[i] < seconds:
            calls[i]()
            done[i] += 1
            ends[i] = now()

    others = [threading.Thread(target=run, args=(i,)) for i in range(1, len(calls))]
    started: list[threading.Thread] = []
    try:
        for thread in others:
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(EAGAIN, f"{error}, of {len(calls)} threads") from error
            started.append(thread)
        run(0)
    except BaseException:  # Ctrl-C too: those that wait at the barrier would wait for ever
        barrier.abort()
        raise
    finally:
        for thread in started:
            thread.join()
    return starts, ends, done


def operands(count: int, size: int) -> list[np.ndarray]:
    """``count`` arrays of ones, each of which begins at a cache line."""
    arrays = [aligned(size) for _ in range(count)]
    for x in arrays:
        x[...] = 1.0
    return arrays


def aligned(size: int) -> np.ndarray:
    """float32 zeros that begin at a cache line."""
    raw = np.zeros(size + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + size]
