"""Times three things with the C runtime's own pool of threads: the barrier between two stages,
reads of data that other cores wrote, and memory that no cache holds.

Each measurement takes about ``most`` seconds, at least one run. It raises :class:`BuildError` if
the C compiler fails, and ``OSError`` if the threads cannot be started.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gtco.machine.isa import host
from gtco.machine.target import CACHE_LINE
from gtco.runtime.writing.c_objects import COMPILE_FLAGS
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from gtco.support.errors import BuildError
from gtco.support.toolchain import run_compiler

SOURCES = (
    *("barrier.c", "kernels_begin.c", "kernels_end.c", "restart.c", "thread_pool.c"),
    "cpu/count.c",
)
TASK_NS = 2000  # the length of a task: longer than the pool needs to hand it out
ROUNDS = 300  # runs of 64 steps
MOST_STEPS = 64  # steps of a run, as in barrier.c
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p


def barrier_seconds(threads: int, rounds: int = ROUNDS, most: float = inf) -> float:
    """Seconds of a step beyond its tasks. The step has one task for each thread."""
    timed = _timed("gtco_barrier_seconds", _INT, _INT, ctypes.c_double, ctypes.c_int64)
    return _checked(timed(threads, rounds, most, TASK_NS), threads)


def handover_seconds(
    threads: int,
    kernel: Any,
    tasks: int,
    across: bool,
    x: np.ndarray,
    y: np.ndarray,
    rounds: int,
    steps: int,
    most: float = inf,
) -> float:
    """Seconds of a step of a ``kernel`` from ``x`` to ``y``, or back, that reads what the step
    before wrote: what another thread wrote if it goes ``across``, else what the same one wrote.
    The step has ``tasks`` parts. The result is the lower quartile of ``rounds`` runs of ``steps``
    steps each (at most MOST_STEPS).
    """
    of = (_INT, _INT, ctypes.c_double, _INT, _POINTER, ctypes.c_uint32, _INT, _POINTER, _POINTER)
    timed = _timed("gtco_handover_seconds", *of)
    code, places = ctypes.cast(kernel, _POINTER), (x.ctypes.data, y.ctypes.data)
    return _checked(timed(threads, rounds, most, steps, code, tasks, across, *places), threads)


def memory_seconds(
    threads: int, tasks: int, x: np.ndarray, y: np.ndarray | None, rounds: int, most: float = inf
) -> float:
    """Seconds that all threads together take to read ``x``, or to copy ``x`` to ``y`` if ``y`` is
    given. The caches are flushed before each run, so this measures DRAM, however large the caches
    are. The work is ``tasks`` equal parts; the result is the lower quartile of ``rounds`` runs.
    """
    part = x.nbytes // tasks // CACHE_LINE * CACHE_LINE
    of = (_INT, _INT, ctypes.c_double, ctypes.c_uint32, ctypes.c_int64, _POINTER, _POINTER)
    timed = _timed("gtco_memory_seconds", *of)
    to = None if y is None else y.ctypes.data
    return _checked(timed(threads, rounds, most, tasks, part, x.ctypes.data, to), threads)


def _timed(name: str, *types: Any) -> Any:
    """A function of barrier.c. It returns seconds, or minus an errno."""
    function = getattr(_built(c_compiler()), name)
    function.restype, function.argtypes = ctypes.c_double, list(types)
    return function


def _checked(seconds: float, threads: int) -> float:
    if seconds < 0:
        code = round(-seconds)
        raise OSError(code, f"{os.strerror(code)}, with {threads} threads")
    return float(seconds)


@cache
def _built(compiler: str) -> ctypes.CDLL:
    """The library of the pool and barrier.c."""
    with tempfile.TemporaryDirectory(prefix="gtco-barrier-") as name:
        folder = Path(name)
        sources = [str(CSRC / source) for source in SOURCES]
        flags = [*COMPILE_FLAGS, *(isa.c_flags if (isa := host()) else ())]
        command = [compiler, *flags, f"-I{CSRC}", "-shared", "-o", "barrier.so"]
        try:
            run_compiler([*command, *sources], folder)
            return ctypes.CDLL(str(folder / "barrier.so"))
        except OSError as error:
            raise BuildError(f"cannot link the thread pool in {folder}: {error}") from error
