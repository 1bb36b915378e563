"""Measuring this machine once: micro-kernel rates (level 0), memory bandwidths, and the arithmetic
peak.

Takes a few seconds; the result is cached by CPU in the user's cache folder (``GTCO_CACHE``).
Everything is timed on one core, the best of several rounds, since other tenants of a machine can
only slow a round down.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.llvm import object_code
from gtco.errors import BuildError
from gtco.options import c_compiler, cache_folder
from gtco.search.level0 import Level0
from gtco.target import Target, cpu_name, detect
from gtco.tensor.emit import Emitter, KernelArguments, kernel
from gtco.tensor.intrinsics.emission import fma_tile
from gtco.tensor.intrinsics.table import FmaTile, micro_kernels
from gtco.tensor.stage import TensorType

DEPTH = 128  # steps of k: the operands of every tile fit any L1
REPEATS = 1000  # passes over the operands in one call: a call must dwarf what calling costs
ROUNDS = 12
VERSION = 2  # of the cached file


def level0(target: Target) -> Level0:
    """This machine's table: the cached one, or a new measurement that is then cached."""
    path = _path(target)
    try:
        data = json.loads(path.read_text())
        return Level0(Target.from_json(data["target"]), tuple(sorted(data["rates"].items())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent or damaged
        table = measure(target)
        with suppress(OSError):  # nowhere to keep it: measured again next time
            _save(path, table)
        return table


def cached(target: Target) -> Level0 | None:
    """The cached table of this machine, if it has been measured."""
    return level0(target) if _path(target).exists() else None


def measure(target: Target | None = None) -> Level0:
    """Rates of all micro-kernels and bandwidths of all memory levels, by running them (a few
    seconds).
    """
    target = target or detect()
    tiles = micro_kernels(target)
    sizes = {m.name: _probe_bytes(target, i) for i, m in enumerate(target.memory)}
    functions = [_tile_kernel(t) for t in tiles] + [
        _read_kernel(name, size, target) for name, size in sizes.items()
    ]
    with _library(functions, target) as library:
        rates = {f"fma:{t.name}": _tile_rate(library, t) for t in tiles}
        bandwidth = {
            name: _bandwidth(library, name, size, target.cores if name == "DRAM" else 1)
            for name, size in sizes.items()
        }
    memory = tuple(replace(m, bandwidth=bandwidth[m.name]) for m in target.memory)
    best = max(rates.values())
    measured = replace(target, memory=memory, frequency=best / target.fma_ports)
    return Level0(measured, tuple(sorted(rates.items())))


def measure_peak(threads: int, target: Target | None = None) -> float:
    """The machine's float32 peak in FLOP/s: independent FMA chains in registers on ``threads``
    threads at once, best round.
    """
    target = target or detect()
    chains = 24 if target.registers >= 32 else 12
    steps = 2_000_000
    flops = 2.0 * steps * chains * target.lanes
    with _library([_peak_kernel(chains, steps, target.lanes)], target) as library:
        out = [np.zeros(chains * target.lanes, np.float32) for _ in range(threads)]

        def one(x: np.ndarray) -> None:
            at = _pointer(x)
            library.peak(at, at, None, ctypes.c_int64(0), ctypes.c_int64(1))

        best = min(_timed(lambda: _together(one, [(x,) for x in out])) for _ in range(5))
    return threads * flops / best


# kernels ------------------------------------------------------------------------------------------
def _tile_kernel(tile: FmaTile) -> Any:
    def body(em: Emitter, args: KernelArguments) -> None:
        a, b = args.inputs["a"], args.inputs["b"]
        fma_tile(
            em,
            tile,
            DEPTH,
            lambda i, k: em.load(a, [i, k]),
            lambda k, j: em.load_vector(b, [k, j]),
            lambda i, j, vector: em.store_vector(args.output, [i, j], vector),
            passes=REPEATS,
        )

    types = {"a": TensorType((tile.rows, DEPTH)), "b": TensorType((DEPTH, tile.columns))}
    return kernel(
        f"tile_{tile.name}", types, TensorType((tile.rows, tile.columns)), 0, tile.lanes, body
    )


def _read_kernel(name: str, nbytes: int, target: Target) -> Any:
    chains, lanes = 8, target.lanes
    size = nbytes // 4

    def body(em: Emitter, args: KernelArguments) -> None:
        acc = em.registers(chains * lanes)
        for c in range(chains):
            em.store_vector(acc, [c * lanes], em.splat(0.0))
        with em.range(args.begin, args.end, "repeat"), em.loop(size // (chains * lanes), "i") as i:
            for c in range(chains):
                value = em.load_vector(args.inputs["x"], [(i * chains + c) * lanes])
                em.store_vector(acc, [c * lanes], em.load_vector(acc, [c * lanes]) + value)
        for c in range(chains):
            em.store_vector(args.output, [c * lanes], em.load_vector(acc, [c * lanes]))

    return kernel(
        f"read_{name}", {"x": TensorType((size,))}, TensorType((chains * lanes,)), 0, lanes, body
    )


def _peak_kernel(chains: int, steps: int, lanes: int) -> Any:
    def body(em: Emitter, args: KernelArguments) -> None:
        acc = em.registers(chains * lanes)
        factor = em.let(em.splat(em.load(args.inputs["x"], [0]) + 0.999))
        for c in range(chains):
            em.store_vector(acc, [c * lanes], em.load_vector(args.inputs["x"], [c * lanes]))
        with em.loop(steps, "step"):
            for c in range(chains):
                em.store_vector(
                    acc, [c * lanes], em.load_vector(acc, [c * lanes]) * factor + factor
                )
        for c in range(chains):
            em.store_vector(args.output, [c * lanes], em.load_vector(acc, [c * lanes]))

    return kernel(
        "peak", {"x": TensorType((chains * lanes,))}, TensorType((chains * lanes,)), 0, lanes, body
    )


# timing -------------------------------------------------------------------------------------------
class _library:
    """Kernels linked into a library and loaded, for the time of a ``with``."""

    def __init__(self, functions: Sequence[Any], target: Target) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gtco-profile-")
        base = Path(self.folder.name)
        (base / "kernels.o").write_bytes(object_code(functions, target))
        command = [c_compiler(), "-shared", "-o", str(base / "kernels.so"), str(base / "kernels.o")]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(
                f"cannot link the profiling kernels with {command[0]}: {error}"
            ) from error
        self.library = ctypes.CDLL(str(base / "kernels.so"))

    def __enter__(self) -> Any:
        return self.library

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()


def _tile_rate(library: Any, tile: FmaTile) -> float:
    a, b = _aligned(tile.rows * DEPTH), _aligned(DEPTH * tile.columns)
    out = _aligned(tile.rows * tile.columns)
    call = getattr(library, f"tile_{tile.name}")
    seconds = _best(
        lambda: call(
            _pointer(a), _pointer(b), _pointer(out), None, ctypes.c_int64(0), ctypes.c_int64(1)
        )
    )
    return tile.rows * tile.vectors * DEPTH * REPEATS / seconds


def _probe_bytes(target: Target, level: int) -> int:
    if target.memory[level].name == "DRAM":
        return 4 * target.memory[level - 1].capacity
    lower = target.memory[level - 1].capacity if level else 0
    return (lower + target.memory[level].capacity) // 2 // 4096 * 4096


def _bandwidth(library: Any, name: str, nbytes: int, threads: int) -> float:
    """Bytes a second that ``threads`` threads read together, each from memory of its own."""
    arrays = [(_aligned(nbytes // 4), _aligned(1024)) for _ in range(threads)]
    for x, _ in arrays:
        x[...] = 1.0
    repeats = max(1, (8 << 20) // nbytes)
    call = getattr(library, f"read_{name}")

    def read(x: np.ndarray, out: np.ndarray) -> None:
        call(_pointer(x), _pointer(out), None, ctypes.c_int64(0), ctypes.c_int64(repeats))

    return nbytes * repeats * threads / _best(lambda: _together(read, arrays))


def _together(function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call ``function`` with each of the arguments, on a thread each where there are several."""
    if len(arguments) == 1:
        function(*arguments[0])
        return
    workers = [threading.Thread(target=function, args=given) for given in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _best(call: Callable[[], object]) -> float:
    return min(_timed(call) for _ in range(ROUNDS))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + size]


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _path(target: Target) -> Path:
    cpu = "".join(c if c.isalnum() else "-" for c in cpu_name())
    return cache_folder() / f"level0-{cpu}-{target.mcpu}-v{VERSION}.json"


def _save(path: Path, table: Level0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"target": table.target.to_json(), "rates": dict(table.rates)}, indent=1)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
