"""Measuring this machine once: micro-kernel rates (level 0), memory bandwidths, and the arithmetic
peak.

Takes a few seconds; the result is cached in the user's cache folder (``GTCO_CACHE``) under all that
it depends on. Level 0 is timed on one core, by the thread's own time, which does not run while
other processes have the core; the peak and DRAM's bandwidth are of all cores at once, by the clock.
Always the best of several rounds, since other tenants of a machine can only slow a round down.
Threads are there and the clocks are up before a round begins.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from gtco.codegen.load import load
from gtco.options import cache_folder
from gtco.search.rates import RateTable
from gtco.target import Target, cpu_identity, detect
from gtco.tensor.emit import Emitter, KernelArguments, kernel
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.intrinsics.table import MicroKernel, every_micro_kernel, micro_kernels
from gtco.tensor.stage import TensorType
from gtco.version import __version__

DEPTH = 128  # steps of k: the operands of every tile fit any L1
REPEATS = 4000  # passes over the operands in one call: a call must dwarf what calling costs
ROUNDS = 8
ROUND_SECONDS = 2e-3  # of a round of level 0; the best of many short ones finds an idle moment
DRAM_SECONDS = 30e-3
WARM_SECONDS = 0.1  # until a core has raised its clock, or lowered it for wide vectors
PEAK_SECONDS, PEAK_ROUNDS = 0.25, 5  # turbo and other tenants hide in shorter samples
VERSION = 6  # of the cached file
# Vector operations and bytes a second of one core that no machine reaches, or falls short of.
RATE_BOUNDS, BANDWIDTH_BOUNDS = (1e6, 1e11), (1e6, 1e14)


def machine_table(target: Target) -> RateTable:
    """This machine's table: the cached one, or a new measurement that is then cached."""
    table = cached(target)
    if table is None:
        table = measure(target)
        with suppress(OSError):  # nowhere to keep it: measured again next time
            _save(_path(target), table, _key(target))
    return table


def cached(target: Target) -> RateTable | None:
    """The cached table of this machine; None where there is none, or one that is damaged, was
    measured under other circumstances, or holds values that cannot be.
    """
    try:
        data = json.loads(_path(target).read_text())
        if data["key"] != _key(target):
            return None
        names = {tile.kernel for tile in every_micro_kernel(target)}
        rates = _checked(data["rates"], names, RATE_BOUNDS)
        bandwidths = _checked(data["bandwidths"], {m.name for m in target.memory}, BANDWIDTH_BOUNDS)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return _table(target, rates, bandwidths)


def _checked(
    values: Mapping[str, Any], names: set[str], bounds: tuple[float, float]
) -> dict[str, float]:
    """The values, where they are a number within the bounds for each of the names; else
    ``ValueError``.
    """
    if values.keys() != names:
        raise ValueError("other names than this version measures")
    for value in values.values():
        if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:
            raise ValueError(f"{value!r} cannot be")
    return {name: float(value) for name, value in values.items()}


def _key(target: Target) -> dict[str, Any]:
    """All that a table depends on; the target holds features, cores and caches."""
    return {
        "version": VERSION,
        "gtco": __version__,
        "tvm": tvm.__version__,
        "cpu": cpu_identity(),
        "target": target.to_json(),
    }


def _table(
    target: Target, rates: Mapping[str, float], bandwidths: Mapping[str, float]
) -> RateTable:
    memory = tuple(replace(m, bandwidth=bandwidths[m.name]) for m in target.memory)
    products = [rate for name, rate in rates.items() if name.startswith("fma:")]
    frequency = max(products) / target.fma_ports
    measured = replace(target, memory=memory, frequency=frequency)
    return RateTable(measured, tuple(sorted(rates.items())))


def measure(target: Target | None = None) -> RateTable:
    """Rates of all micro-kernels and bandwidths of all memory levels, by running them (a few
    seconds).
    """
    target = target or detect()
    tiles = every_micro_kernel(target)
    sizes = {m.name: _probe_bytes(target, i) for i, m in enumerate(target.memory)}
    functions = [_tile_kernel(t) for t in tiles] + [
        _read_kernel(name, size, target) for name, size in sizes.items()
    ]
    library = load(functions, target)
    _sustained([_tile_call(library, tiles[0])], WARM_SECONDS)
    rates = {t.kernel: _tile_rate(library, t) for t in tiles}
    bandwidths = {
        name: _bandwidth(library, name, size, target.cores if name == "DRAM" else 1)
        for name, size in sizes.items()
    }
    return _table(target, rates, bandwidths)


def measure_peak(
    threads: int, target: Target | None = None, operand: str = "float32"
) -> float:
    """The peak in FLOP/s of products of this dtype: what ``threads`` threads sustain together for
    PEAK_SECONDS, the best of PEAK_ROUNDS. In float32, independent FMA chains in registers; else
    the micro-kernel of the most sums, on operands in L1.
    """
    target = target or detect()
    if operand != "float32":
        tile = max(micro_kernels(target, operand), key=lambda t: (t.kind.products, t.registers))
        library = load([_tile_kernel(tile)], target)
        flops = 2.0 * tile.rows * tile.columns * DEPTH * REPEATS
        calls = [_tile_call(library, tile) for _ in range(threads)]
        _sustained(calls, WARM_SECONDS)
        return flops * max(_sustained(calls, PEAK_SECONDS) for _ in range(PEAK_ROUNDS))
    chains = 24 if target.registers >= 32 else 12
    steps = 500_000  # some milliseconds a call
    flops = 2.0 * steps * chains * target.lanes
    library = load([_peak_kernel(chains, steps, target.lanes)], target)
    calls = [_call(library.peak, x, x) for x in _operands(threads, chains * target.lanes)]
    _sustained(calls, WARM_SECONDS)
    return flops * max(_sustained(calls, PEAK_SECONDS) for _ in range(PEAK_ROUNDS))


# kernels ------------------------------------------------------------------------------------------
def _symbol(tile: MicroKernel) -> str:
    return "tile_" + tile.kernel.replace(":", "_")


def _operand_types(tile: MicroKernel) -> tuple[TensorType, TensorType, TensorType]:
    """A, B and C of a row as it reads and writes them, DEPTH steps of k."""
    kind = tile.kind
    return (
        TensorType((tile.rows, DEPTH), kind.a.dtype),
        TensorType((DEPTH // kind.b.step, tile.columns * kind.b.step), kind.b.dtype),
        TensorType((tile.rows, tile.columns), kind.accumulator),
    )


def _tile_kernel(tile: MicroKernel) -> Any:
    def body(em: Emitter, args: KernelArguments) -> None:
        fma_tile(
            em,
            tile,
            DEPTH,
            Operand.of(args.inputs["a"], [0, 0]),
            Operand.of(args.inputs["b"], [0, 0]),
            lambda i, j, vector: em.store_vector(args.output, [i, j], vector),
            passes=REPEATS,
        )

    a, b, c = _operand_types(tile)
    return kernel(_symbol(tile), {"a": a, "b": b}, c, 0, tile.lanes, body)


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
def _call(function: Any, *buffers: np.ndarray, repeats: int = 1) -> Callable[[], None]:
    """A call of a kernel without workspace; the arrays live as long as it does."""
    arguments = (
        *(ctypes.c_void_p(b.ctypes.data) for b in buffers),
        None,
        ctypes.c_int64(0),
        ctypes.c_int64(repeats),
    )

    def call(held: Sequence[np.ndarray] = buffers) -> None:
        function(*arguments)

    return call


def _tile_call(library: Any, tile: MicroKernel) -> Callable[[], None]:
    places = [_aligned(-(-t.nbytes // 4)) for t in _operand_types(tile)]
    return _call(getattr(library, _symbol(tile)), *places)


def _tile_rate(library: Any, tile: MicroKernel) -> float:
    call = _tile_call(library, tile)
    best = max(_sustained([call], ROUND_SECONDS, time.thread_time) for _ in range(ROUNDS))
    return tile.work(tile.rows, DEPTH) * REPEATS * best


def _probe_bytes(target: Target, level: int) -> int:
    if target.memory[level].name == "DRAM":
        return 4 * target.memory[level - 1].capacity
    capacity = target.memory[level].capacity
    lower = target.memory[level - 1].capacity if level else 0
    # what overflows a core's own caches is mostly little beside what all share, and other tenants
    # may hold the rest of that
    middle = isqrt(lower * capacity) if target.memory[level].shared else (lower + capacity) // 2
    return middle // 4096 * 4096


def _bandwidth(library: Any, name: str, nbytes: int, threads: int) -> float:
    """Bytes a second that ``threads`` threads read together, each from memory of its own."""
    repeats = max(1, (32 << 20) // nbytes)
    call = getattr(library, f"read_{name}")
    calls = [
        _call(call, x, _aligned(1024), repeats=repeats) for x in _operands(threads, nbytes // 4)
    ]
    alone = threads == 1
    seconds, clock = (ROUND_SECONDS, time.thread_time) if alone else (DRAM_SECONDS, None)
    return nbytes * repeats * max(_sustained(calls, seconds, clock) for _ in range(ROUNDS))


def _sustained(
    calls: Sequence[Callable[[], None]], seconds: float, clock: Callable[[], float] | None = None
) -> float:
    """Calls a second that threads, one for each of ``calls``, make together for ``seconds`` or
    longer. They start at once, after a first call each: a thread that comes late counts as idle.
    ``clock`` is the wall's where none is given.
    """
    now = clock or time.perf_counter
    barrier = threading.Barrier(len(calls))
    starts, ends, done = ([0.0] * len(calls) for _ in range(3))

    def run(i: int) -> None:
        calls[i]()
        barrier.wait()
        starts[i] = ends[i] = now()
        while ends[i] - starts[i] < seconds:
            calls[i]()
            done[i] += 1
            ends[i] = now()

    others = [threading.Thread(target=run, args=(i,)) for i in range(1, len(calls))]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    return sum(n / (end - min(starts)) for n, end in zip(done, ends, strict=True))


def _operands(count: int, size: int) -> list[np.ndarray]:
    arrays = [_aligned(size) for _ in range(count)]
    for x in arrays:
        x[...] = 1.0
    return arrays


def _aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + size]


def _path(target: Target) -> Path:
    """One file for every key, so that machines, or settings of one, may share the folder."""
    key = json.dumps(_key(target), sort_keys=True).encode()
    return cache_folder() / f"rates-{target.mcpu}-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _save(path: Path, table: RateTable, key: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bandwidths = {m.name: m.bandwidth for m in table.target.memory}
    data = {"key": key, "rates": dict(table.measured), "bandwidths": bandwidths}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)
