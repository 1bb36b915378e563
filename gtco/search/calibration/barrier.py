"""What stands between two stages, timed by the C runtime's own pool of threads: the barrier, and
reading what other cores wrote.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gtco.runtime.c_objects import COMPILE_FLAGS
from gtco.runtime.table import CSRC
from gtco.support.errors import BuildError
from gtco.support.options import c_compiler
from gtco.support.toolchain import run_compiler

SOURCES = ("barrier.c", "thread_pool.c")
TASK_NS = 2000  # of one task: longer than the pool takes to hand it out
ROUNDS = 300  # runs of 64 steps
MOST_STEPS = 64  # of a run, as barrier.c has them


def barrier_seconds(threads: int, rounds: int = ROUNDS) -> float:
    """Seconds that a step of one task for each of the threads takes beyond its tasks.

    Raises :class:`BuildError` where the C compiler fails, and ``OSError`` where the threads cannot
    be started.
    """
    timed = _pool().gtco_barrier_seconds
    timed.restype = ctypes.c_double
    timed.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return _checked(timed(threads, rounds, TASK_NS), threads)


def handover_seconds(
    threads: int, kernel: Any, tasks: int, x: np.ndarray, y: np.ndarray, rounds: int, steps: int
) -> float:
    """Seconds of a step of a ``kernel`` from ``x`` to ``y``, or back, that reads what the step
    before wrote: ``tasks`` parts of it, each taken by whichever thread is free, as in a model. The
    lower quartile of ``rounds`` runs of so many ``steps``, MOST_STEPS at most. Raises as
    :func:`barrier_seconds`.
    """
    timed = _pool().gtco_handover_seconds
    timed.restype = ctypes.c_double
    number, pointer = ctypes.c_int, ctypes.c_void_p
    timed.argtypes = [number, number, number, pointer, ctypes.c_uint32, pointer, pointer]
    code = ctypes.cast(kernel, pointer)
    seconds = timed(threads, rounds, steps, code, tasks, x.ctypes.data, y.ctypes.data)
    return _checked(seconds, threads)


def _checked(seconds: float, threads: int) -> float:
    if seconds < 0:
        code = round(-seconds)
        raise OSError(code, f"{os.strerror(code)}, with {threads} threads")
    return float(seconds)


def _pool() -> ctypes.CDLL:
    """The pool and what times it."""
    return _built(c_compiler())


@cache
def _built(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="gtco-barrier-") as name:
        folder = Path(name)
        sources = [str(CSRC / source) for source in SOURCES]
        command = [compiler, *COMPILE_FLAGS, f"-I{CSRC}", "-shared", "-o", "barrier.so"]
        try:
            run_compiler([*command, *sources], folder)
            return ctypes.CDLL(str(folder / "barrier.so"))
        except OSError as error:
            raise BuildError(f"cannot link the thread pool in {folder}: {error}") from error
