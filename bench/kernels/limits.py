"""Measures, by plain C (``streams.c``) on all threads at once, what this machine gives a kernel
that memory or the vector units bound.

Bytes: reading, and scaling (as much read as written), of working sets from those that L1 holds to
those that only DRAM holds. Each thread goes over its own share again and again. Vector
instructions: chains of FMAs in registers, and separately divisions from L1. Normalisation and
softmax of rows of 256 are measured as a whole, for the same working sets. Their passes wait for
memory and for the vector units in turn, and an exponential is bound by some of a core's ports and
by its length; a count of instructions does not show that.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from gtco.machine.target import detect
from gtco.search.calibration.peak import machine_peak
from gtco.support.environment import c_compiler
from gtco.support.errors import BuildError

READ, SCALE, DIVIDE, NORMALISE, SOFTMAX = range(5)  # the kinds of streams.c
BLOCK = 4096  # bytes of the rows that streams.c takes at once
SIZES = tuple(1 << n for n in range(15, 28))  # bytes of a working set: 32 KB to 128 MB
SECONDS, ROUNDS = 10e-3, 6  # of one reading; the best reading counts
IN_L1 = 4096  # bytes of the operands of divisions
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")
WIDE = "-mprefer-vector-width=512"  # ignored by the compilers that lack it


@dataclass(frozen=True)
class Limits:
    """The measured limits.

    - ``read``, ``scale``, ``normalise``, ``softmax``: bytes a second, read and written, of all
      threads together, by working set (:data:`SIZES`)
    - ``instructions``, ``divisions``: float32 vectors of ``lanes`` a second
    """

    threads: int
    lanes: int
    read: tuple[float, ...]
    scale: tuple[float, ...]
    normalise: tuple[float, ...]
    softmax: tuple[float, ...]
    instructions: float
    divisions: float

    def memory(self, read: int, written: int) -> float:
        """Seconds to read and write so many bytes, all of one working set. The time of a written
        byte is the time of scaling minus the time of reading its half.
        """
        total = read + written
        r = 1 / _between(self.read, total)
        return read * r + written * max(2 / _between(self.scale, total) - r, r / 4)

    def rows(self, kind: str, nbytes: int) -> float:
        """Seconds to ``normalise`` or ``softmax`` rows, as many bytes read as written."""
        return nbytes / _between(getattr(self, kind), nbytes)

    def arithmetic(self, instructions: float, divisions: float) -> float:
        """Seconds of so many vector instructions and divisions that run at the same time."""
        return max(instructions / self.instructions, divisions / self.divisions)

    def level(self, nbytes: int) -> str:
        """The memory that holds every thread's share of so many bytes."""
        share = nbytes / self.threads
        return next(m.name for m in detect().memory if share <= m.capacity)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": SIZES}


def _between(rates: tuple[float, ...], nbytes: int) -> float:
    """The rate at a working set of ``nbytes``, between the sizes that were measured."""
    k = bisect_left(SIZES, nbytes)
    if k in (0, len(SIZES)):
        return rates[0 if k == 0 else -1]
    share = log(nbytes / SIZES[k - 1]) / log(SIZES[k] / SIZES[k - 1])
    return float(rates[k - 1] * (rates[k] / rates[k - 1]) ** share)


def measure(threads: int) -> Limits:
    """Takes some seconds; raises ``BuildError`` if ``streams.c`` cannot be built."""
    lanes = detect().lanes
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        rate = _streams(Path(folder), threads)
        read = tuple(n * rate(READ, n) for n in SIZES)
        scale = tuple(n * rate(SCALE, n // 2) for n in SIZES)
        normalise, softmax = (
            tuple(_of_rows(rate, kind, n, threads) for n in SIZES) for kind in (NORMALISE, SOFTMAX)
        )
        divisions = IN_L1 * threads / 4 / lanes * rate(DIVIDE, IN_L1 * threads)
    instructions = machine_peak(threads).flops / (2 * lanes)
    return Limits(threads, lanes, read, scale, normalise, softmax, instructions, divisions)


def _of_rows(rate: Callable[[int, int], float], kind: int, nbytes: int, threads: int) -> float:
    """Bytes a second of whole blocks of rows, about half of ``nbytes`` read and half written."""
    read = max(1, nbytes // 2 // threads // BLOCK) * BLOCK * threads
    return 2 * read * rate(kind, read)


def _streams(folder: Path, threads: int) -> Callable[[int, int], float]:
    """``rate(kind, bytes)``: passes a second that each thread makes over its share, summed over
    threads and divided by their number.
    """
    source, library = Path(__file__).with_name("streams.c"), folder / "streams.so"
    command = [c_compiler(), *FLAGS, WIDE, str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise BuildError(f"cannot build {source.name} with {command[0]}: {reason}") from error
    streams = ctypes.CDLL(str(library)).streams
    streams.restype = ctypes.c_double
    arrays = [np.ones(SIZES[-1] // 4 + 16, np.float32) for _ in range(2)]

    def once(kind: int, nbytes: int) -> float:
        size = nbytes // 4 // threads // 16 * 16
        if not size:
            raise BuildError(f"{threads} threads are too many for a working set of {nbytes} bytes")
        operands = [ctypes.c_void_p(a.ctypes.data // 64 * 64 + 64) for a in arrays]
        passes = streams(kind, threads, *operands, ctypes.c_size_t(size), ctypes.c_double(SECONDS))
        return float(passes) / threads

    return lambda kind, nbytes: max(once(kind, nbytes) for _ in range(ROUNDS))
