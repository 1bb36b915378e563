"""Runs CUDA kernels on the CPU, unchanged, and finds their faults; see tests/cuda/emulator."""

from __future__ import annotations

import ctypes
import functools
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.tensor import space
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Config
from tests.cuda.emulated_objects import LOWERED, Fault, compiled_object, kernel_object, link

# Dynamic shared memory that a block may have, in bytes.
SHARED = {750: 64 << 10, 800: 163 << 10, 890: 99 << 10, 900: 227 << 10}
ARGUMENTS = 24
SITES = 2048
GUARD = 1 << 16
ACCESS = ("constant", "output", "scratch", "any", "counters")  # machine.h
KINDS = ("shared read", "shared write", "global read", "global write", "ldmatrix")


@dataclass(frozen=True)
class Site:
    """An instruction that touches memory. The requests of warps to it (``requests``) took
    ``passes`` wavefronts of shared memory, or sectors of 32 bytes of global memory; ``least`` would
    be enough.
    """

    line: str
    kind: str
    bytes: int
    requests: int
    passes: int
    least: int


@dataclass(frozen=True)
class Report:
    """The cost of a run: the figures of its first accesses (``sites``), and how often its threads
    met.
    """

    sites: tuple[Site, ...]
    collectives: int
    seed: int

    def _total(self, *kinds: str) -> tuple[int, int]:
        of = [s for s in self.sites if s.kind in kinds]
        return sum(s.passes for s in of), sum(s.least for s in of)

    @property
    def bank_conflicts(self) -> int:
        """The wavefronts of shared memory beyond the fewest possible."""
        passes, least = self._total("shared read", "shared write", "ldmatrix")
        return passes - least

    @property
    def conflicts(self) -> tuple[Site, ...]:
        """The sites with bank conflicts, the worst first."""
        of = [s for s in self.sites if not s.kind.startswith("global") and s.passes > s.least]
        return tuple(sorted(of, key=lambda s: s.least - s.passes))

    @property
    def sector_ratio(self) -> float:
        """The sectors of global memory that were asked for, over the fewest that hold the bytes: 1
        is best.
        """
        passes, least = self._total("global read", "global write")
        return passes / least if least else 1.0


def emulate(
    program: CudaProgram,
    symbol: str,
    arrays: Sequence[np.ndarray],
    out: np.ndarray,
    *,
    arch: int = 800,
    seed: int | None = None,
    sample: int = 200_000,
) -> Report:
    """Runs all blocks of ``program`` on ``arrays`` (packed already) and fills ``out``.

    ``seed`` draws the order of blocks and threads, afresh by default. Raises :class:`Fault`.
    ``sample``: how many accesses the figures of the report are drawn from.
    """
    assert out.flags.c_contiguous and program.shared <= SHARED[arch], "shared memory over the limit"
    assert 0 < program.threads <= 1024 and len(arrays) + 2 < ARGUMENTS
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    library = _library(program.source, arch)
    given = [(a, "constant") for a in arrays]
    if program.counters:
        given.append((np.full(program.scratch, 0xFF, np.uint8), _scratch(program)))
        given.append((np.zeros(program.counters, np.uint32), "counters"))
    held = [guarded(np.ascontiguousarray(a)) for a, _ in (*given, (out, ""))]
    held[-1].fill(0xFF)
    buffers = (_Buffer * len(held))(
        *(
            (b.ctypes.data, b.size, ACCESS.index(what), i)
            for i, (b, what) in enumerate(
                zip(held, [*(what for _, what in given), "output"], strict=True)
            )
        )
    )
    sites = (_SiteFigures * SITES)()
    job = _Job(
        ctypes.cast(getattr(library, symbol), ctypes.c_void_p),
        None,
        program.grid,
        program.threads,
        program.shared,
        len(held),
        seed,
        sample,
        buffers,
        sites_room=SITES,
        site=sites,
    )
    library.gtco_emulate(ctypes.byref(job))
    _raise_fault(job, library._name, seed)
    out.reshape(-1).view(np.uint8)[:] = held[-1]
    found = sites[: job.sites]
    lines = _lines(library._name, tuple(s.pc for s in found))
    figures = (
        Site(line, KINDS[s.kind], s.bytes, s.requests, s.passes, s.least)
        for line, s in zip(lines, found, strict=True)
    )
    return Report(tuple(figures), job.collectives, seed)


def emulate_grid(
    program: CudaProgram,
    symbol: str,
    parameters: Sequence[ctypes.Array[Any] | ctypes.Structure | ctypes._SimpleCData[Any]],
    memory: Sequence[tuple[np.ndarray, str]],
    *,
    blocks: int,
    arch: int = 800,
    seed: int | None = None,
) -> None:
    """Runs ``blocks`` blocks of a cooperative kernel, all alive at once, on these parameters.

    ``memory`` is the memory that it may touch, from :func:`guarded`: each part is "constant",
    "output" (not written before, complete afterwards), "scratch" (not written before) or "counters"
    (with the same values before and after). Raises :class:`Fault`.
    """
    assert program.shared <= SHARED[arch], "shared memory over the limit"
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    library = _library(program.source, arch)
    buffers = (_Buffer * len(memory))(
        *((a.ctypes.data, a.nbytes, ACCESS.index(what), i) for i, (a, what) in enumerate(memory))
    )
    for array, what in memory:
        if what not in ("constant", "counters"):
            array.reshape(-1).view(np.uint8)[:] = 0xFF
    given = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(p) for p in parameters))
    job = _Job(
        ctypes.cast(getattr(library, symbol), ctypes.c_void_p),
        given,
        (blocks, 1, 1),
        program.threads,
        program.shared,
        len(memory),
        seed,
        0,
        buffers,
    )
    library.gtco_emulate(ctypes.byref(job))
    _raise_fault(job, library._name, seed)


def _scratch(program: CudaProgram) -> str:
    """How its scratch may be accessed. If TVM's loops set a sum in their first round, g++ keeps it
    in a register, and for that it reads it before the loops.
    """
    return "any" if LOWERED.search(program.source) else "scratch"


def _raise_fault(job: _Job, library: str, seed: int) -> None:
    if job.fault:
        places = [line for pc in job.fault_pcs if pc for line in _lines(library, (pc,))]
        raise Fault("\n  ".join([f"{job.fault.decode()} (seed {seed})", *places]))
    for first, second in job.met_pcs[: job.met]:
        met = [_lines(library, (pc,))[0] for pc in (first, second)]
        if met[0] != met[1]:
            raise Fault(f"divergent: threads of one warp meet at {met[0]} and at {met[1]}")


def run_stage(
    sketch: Any,
    config: Config,
    arrays: Sequence[np.ndarray],
    *,
    arch: int | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """The output of the sketch's program for ``config``, emulated on ``arrays`` in the order of the
    stage's inputs. If no architecture is named, it is the sketch's own.
    """
    return run_reported(sketch, config, arrays, arch=arch, seed=seed)[0]


def run_reported(
    sketch: Any,
    config: Config,
    arrays: Sequence[np.ndarray],
    *,
    arch: int | None = None,
    seed: int | None = None,
) -> tuple[np.ndarray, Report]:
    """:func:`run_stage`, with the report of the run."""
    program: Any = space.build(sketch, config, "kernel_under_test")
    assert isinstance(program, CudaProgram), f"rejected: {program}"
    stage = sketch.stage
    packed = [
        program.packings[i.name].apply(a) if i.name in program.packings else a
        for i, a in zip(stage.inputs, arrays, strict=True)
    ]
    type_ = stage.output.type
    out = np.empty([int(d) for d in type_.shape], np.dtype(type_.dtype))
    arch = arch or 10 * sketch.target.generation
    return out, emulate(program, "kernel_under_test", packed, out, arch=arch, seed=seed)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
    )


class _SiteFigures(ctypes.Structure):
    _fields_ = (
        ("pc", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("requests", ctypes.c_uint64),
        ("passes", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("buffers", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("sample", ctypes.c_uint32),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("fault", ctypes.c_char * 2048),
        ("fault_pcs", ctypes.c_uint64 * 2),
        ("met", ctypes.c_uint32),
        ("met_pcs", ctypes.c_uint64 * 2 * 64),
        ("sites_room", ctypes.c_uint32),
        ("sites", ctypes.c_uint32),
        ("site", ctypes.POINTER(_SiteFigures)),
        ("collectives", ctypes.c_uint64),
    )


def guarded(array: np.ndarray) -> np.ndarray:
    """The array's bytes, aligned as the driver aligns; the bytes on either side belong to no
    buffer.
    """
    whole = np.empty(array.nbytes + 2 * GUARD + 256, np.uint8)
    start = GUARD + -(whole.ctypes.data + GUARD) % 256
    part = whole[start : start + array.nbytes]
    part[:] = array.reshape(-1).view(np.uint8)
    return part


def build_shared(
    kernels: Mapping[str, tuple[CudaProgram, Sequence[int]]],
    persistent: Mapping[str, CudaProgram] = MappingProxyType({}),
    *,
    arch: int = 800,
) -> Path:
    """A shared object that runs kernels by their symbols, as the fake driver of the tests calls
    them (emulator/library.cpp). Each kernel has its program and the bytes of its inputs and, last,
    of its output. ``persistent`` kernels find their memory themselves. :func:`faults_of` tells what
    they did wrong.
    """
    objects, calls = [], ['#include "machine.h"\nextern "C" {\n' + _LAUNCH]
    for symbol, (program, sizes) in kernels.items():
        between = [(program.scratch, _scratch(program)), (4 * program.counters, "counters")]
        given = [*((n, "constant") for n in sizes[:-1]), *between[: 2 * bool(program.counters)]]
        given.append((sizes[-1], "output"))
        assert len(given) <= ARGUMENTS and program.shared <= SHARED[arch]
        objects.append((program.source, symbol))
        calls.append(
            _CALL.format(
                symbol=symbol,
                count=len(given),
                sizes=", ".join(str(n) for n, _ in given),
                access=", ".join(str(ACCESS.index(what)) for _, what in given),
            )
        )
    for symbol, program in persistent.items():
        assert program.shared <= SHARED[arch]
        objects.append((program.source, symbol))
        calls.append(_CALL_OF_ALL.format(symbol=symbol))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda o: kernel_object(o[0], arch, o[1]), objects))
    made.append(compiled_object("".join([*calls, "}\n"]), ["-DGTCO_ARCH=800", "-O1"]))
    return link(made)


def faults_of(path: Path) -> list[str]:
    """What kernels of :func:`build_shared` did wrong in this process, and where."""
    library = ctypes.CDLL(str(path))
    library.gtco_faults.restype = ctypes.c_char_p
    found = []
    for line in library.gtco_faults().decode().splitlines():
        text, places = re.fullmatch(r"(.*) \[(\w+ \w+)\]", line).groups()  # type: ignore[union-attr]
        pcs = [int(pc, 16) for pc in places.split() if int(pc, 16)]
        found.append("\n  ".join([text, *_lines(str(path), pcs)]))
    return found


def launches_of(path: Path) -> int:
    """The number of kernels of :func:`build_shared` that have run in this process."""
    return int(ctypes.CDLL(str(path)).gtco_launches())


_LAUNCH = (
    "void gtco_launch(const char*, void*, int, const uint64_t*, const uint32_t*, void**, "
    "const unsigned*, unsigned, unsigned);\n"
    "void gtco_launch_all(const char*, void*, void**, const unsigned*, unsigned, unsigned);\n"
)
_CALL = """
void gtco_kernel_{symbol}();
extern __attribute__((visibility("default"))) int {symbol}_count;
int {symbol}_count = {count};
__attribute__((visibility("default"))) void {symbol}(
    void** arguments, const unsigned* grid, unsigned threads, unsigned shared) {{
  static const uint64_t bytes[] = {{{sizes}}};
  static const uint32_t access[] = {{{access}}};
  gtco_launch("{symbol}", reinterpret_cast<void*>(gtco_kernel_{symbol}), {count}, bytes, access,
              arguments, grid, threads, shared);
}}
"""


# A persistent kernel gets copies of its parameters, which have these sizes.
_CALL_OF_ALL = """
void gtco_kernel_{symbol}();
extern __attribute__((visibility("default"))) int {symbol}_count, {symbol}_sizes[5];
int {symbol}_count = 5, {symbol}_sizes[5] = {{8, 4, 8, 512, 8}};
__attribute__((visibility("default"))) void {symbol}(
    void** parameters, const unsigned* grid, unsigned threads, unsigned shared) {{
  gtco_launch_all("{symbol}", reinterpret_cast<void*>(gtco_kernel_{symbol}), parameters, grid,
                  threads, shared);
}}
"""


@functools.cache
def _library(source: str, arch: int) -> ctypes.CDLL:
    return ctypes.CDLL(str(link([kernel_object(source, arch)])))


def _lines(library: str, places: Sequence[int]) -> list[str]:
    """The source lines of instructions, the innermost last: "kernel:12 < gemm.cuh:80"."""
    if not places:
        return []
    command = ["addr2line", "-a", "-i", "-e", library, *map(hex, places)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("0x"):
            found.append("")
        else:
            name = Path(line.split(" ")[0]).name
            if name.startswith("emulat"):
                continue
            where = "kernel" + name[name.index(".cpp") + 4 :] if ".cpp:" in name else name
            found[-1] = f"{where} < {found[-1]}" if found[-1] else where
    return found
