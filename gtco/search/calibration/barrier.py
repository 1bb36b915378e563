"""What the C runtime's own pool of threads times: the barrier between two stages, reading what
other cores wrote, and memory that no cache holds.

Each takes ``most`` seconds about, a run at least, and raises :class:`BuildError` where the C
compiler fails, and ``OSError`` where the threads cannot be started.
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

from gtco.runtime.c_objects import COMPILE_FLAGS
from gtco.runtime.table import CSRC
from gtco.support.errors import BuildError
from gtco.support.options import c_compiler
from gtco.support.toolchain import run_compiler

SOURCES = ("barrier.c", "thread_pool.c", "turns.c")
TASK_NS = 2000  # of one task: longer than the pool takes to hand it out
ROUNDS = 300  # runs of 64 steps
MOST_STEPS = 64  # of a run, as barrier.c has them
LINE = 64  # bytes of a cache line
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p


def barrier_seconds(threads: int, rounds: int = ROUNDS, most: float = inf) -> float:
    """Seconds that a step of one task for each of the threads takes beyond its tasks."""
    timed = _timed("gtco_barrier_seconds", _INT, _INT, ctypes.c_double, ctypes.c_int64)
    return _checked(timed(threads, rounds, most, TASK_NS), threads)


def handover_seconds(
    threads: int,
    kernel: Any,
    tasks: int,
    x: np.ndarray,
    y: np.ndarray,
    rounds: int,
    steps: int,
    most: float = inf,
) -> float:
    """Seconds of a step of a ``kernel`` from ``x`` to ``y``, or back, that reads what the step
    before wrote: ``tasks`` parts of it, each taken by whichever thread is free, as in a model. The
    lower quartile of ``rounds`` runs of so many ``steps``, MOST_STEPS at most.
    """
    of = (_INT, _INT, ctypes.c_double, _INT, _POINTER, ctypes.c_uint32, _POINTER, _POINTER)
    timed = _timed("gtco_handover_seconds", *of)
    code = ctypes.cast(kernel, _POINTER)
    seconds = timed(threads, rounds, most, steps, code, tasks, x.ctypes.data, y.ctypes.data)
    return _checked(seconds, threads)


def memory_seconds(
    threads: int, tasks: int, x: np.ndarray, y: np.ndarray | None, rounds: int, most: float = inf
) -> float:
    """Seconds that the threads take together to read ``x``, or where there is a ``y`` to copy ``x``
    to it, while no cache holds a line of either: they are flushed before each run, so this is DRAM
    whatever size the caches have. ``tasks`` equal parts; the lower quartile of ``rounds`` runs.
    """
    part = x.nbytes // tasks // LINE * LINE
    of = (_INT, _INT, ctypes.c_double, ctypes.c_uint32, ctypes.c_int64, _POINTER, _POINTER)
    timed = _timed("gtco_memory_seconds", *of)
    to = None if y is None else y.ctypes.data
    return _checked(timed(threads, rounds, most, tasks, part, x.ctypes.data, to), threads)


def _timed(name: str, *types: Any) -> Any:
    """A function of barrier.c, which answers with seconds or minus an errno."""
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
    """The pool and what times it."""
    with tempfile.TemporaryDirectory(prefix="gtco-barrier-") as name:
        folder = Path(name)
        sources = [str(CSRC / source) for source in SOURCES]
        command = [compiler, *COMPILE_FLAGS, f"-I{CSRC}", "-shared", "-o", "barrier.so"]
        try:
            run_compiler([*command, *sources], folder)
            return ctypes.CDLL(str(folder / "barrier.so"))
        except OSError as error:
            raise BuildError(f"cannot link the thread pool in {folder}: {error}") from error
