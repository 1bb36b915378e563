"""The barrier between two stages, as the C runtime has it: timed by its own pool of threads."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from gtco.errors import BuildError
from gtco.options import c_compiler
from gtco.runtime.c_objects import COMPILE_FLAGS
from gtco.runtime.table import CSRC
from gtco.toolchain import run_compiler

SOURCES = ("barrier.c", "thread_pool.c")
TASK_NS = 2000  # of one task: longer than the pool takes to hand it out
ROUNDS = 300  # runs of 64 steps


def barrier_seconds(threads: int, rounds: int = ROUNDS) -> float:
    """Seconds that a step of one task for each of the threads takes beyond its tasks.

    Raises :class:`BuildError` where the C compiler fails, and ``OSError`` where the threads cannot
    be started.
    """
    with tempfile.TemporaryDirectory(prefix="gtco-barrier-") as name:
        folder = Path(name)
        sources = [str(CSRC / source) for source in SOURCES]
        command = [c_compiler(), *COMPILE_FLAGS, f"-I{CSRC}", "-shared", "-o", "barrier.so"]
        try:
            run_compiler([*command, *sources], folder)
            library = ctypes.CDLL(str(folder / "barrier.so"))
        except OSError as error:
            raise BuildError(f"cannot link the thread pool in {folder}: {error}") from error
    timed = library.gtco_barrier_seconds
    timed.restype = ctypes.c_double
    timed.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    seconds = float(timed(threads, rounds, TASK_NS))
    if seconds < 0:
        code = round(-seconds)
        raise OSError(code, f"{os.strerror(code)}, with {threads} threads")
    return seconds
