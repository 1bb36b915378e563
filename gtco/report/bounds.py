"""What bounds a stage: the machine's peak in its number format, and the bandwidth of the memory
that its tensors can lie in (Williams, Waterman and Patterson, "Roofline", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import MemoryLevel, Target
from gtco.report.facts import Bound, Machine, Tensor
from gtco.search.calibration.rates import default_rate
from gtco.tensor.intrinsics.table import micro_kernels

PRODUCTS = ("float32", "bfloat16", "int8")  # the dtypes of a CPU's micro-kernels


def nominal(target: Target | GpuTarget, threads: int, source: str) -> Machine:
    """The figures of a target's constants."""
    if isinstance(target, GpuTarget):
        formats = {"float32": "fma", "float16": "mma:float16", "bfloat16": "mma:bfloat16"}
        peaks = {
            dtype: max(target.rate(unit), target.rate(unit.replace("mma:", "wgmma:")))
            for dtype, unit in formats.items()
        }
        return Machine(
            target.name,
            target.sms,
            {dtype: rate for dtype, rate in peaks.items() if rate},
            {"L2": target.l2_bandwidth, "DRAM": target.bandwidth},
            {"L2": target.l2},
            source,
        )
    return Machine(
        target.mcpu,
        threads,
        {dtype: rate for dtype in PRODUCTS if (rate := nominal_peak(target, dtype, threads))},
        bandwidths(target.memory, threads),
        capacities(target.memory, threads),
        source,
    )


def nominal_peak(target: Target, dtype: str, threads: int) -> float:
    """FLOP/s of the best micro-kernel for operands of this dtype; 0 if there is none."""
    rates = (
        default_rate(target, tile.kernel) * tile.lanes * tile.kind.products
        for tile in micro_kernels(target, dtype)
    )
    return 2.0 * threads * max(rates, default=0.0)


def bandwidths(memory: Iterable[MemoryLevel], threads: int) -> dict[str, float]:
    """Bytes a second of all threads together. That of DRAM is for all of them already."""
    return {m.name: m.bandwidth * (1 if m.name == "DRAM" else threads) for m in memory}


def capacities(memory: Iterable[MemoryLevel], threads: int) -> dict[str, int]:
    """Bytes of the caches: each core has its own, or all share one."""
    return {m.name: m.capacity * (1 if m.shared else threads) for m in memory if m.name != "DRAM"}


def bound_of(
    machine: Machine, dtype: str, flops: float, tensors: Iterable[Tensor], weights: int
) -> Bound | None:
    """The least time of a stage on the machine: that of its FLOPs at the peak, or of its bytes.

    A weight is read once a run, so it comes from the innermost level that holds all ``weights`` of
    the model; all else from the innermost level that holds what the stage reads and writes. So no
    stage can be faster by being well placed, and a stage that finds its data further out is slower.
    """
    every = list(tensors)
    peak = machine.peaks.get(dtype) or machine.peaks.get("float32")
    if not peak or not machine.bandwidths:
        return None
    near = level_for(machine, sum(t.nbytes for t in every))
    far = level_for(machine, weights)
    by: dict[str, float] = {}
    for tensor in every:
        level = far if tensor.place == "weight" else near
        by[level] = by.get(level, 0.0) + tensor.nbytes / machine.bandwidths[level]
    memory, compute = sum(by.values()), flops / peak
    if compute >= memory:
        return Bound(compute, "compute")
    return Bound(memory, max(by, key=lambda level: by[level]))


def level_for(machine: Machine, nbytes: int) -> str:
    """The innermost level of memory beyond L1 that holds so many bytes."""
    for level, capacity in machine.capacities.items():
        if level != "L1" and nbytes <= capacity:
            return level
    return "DRAM"


def target_of(metadata: Mapping[str, Any]) -> Target | GpuTarget:
    """The target of a library."""
    data = metadata["target"]
    return GpuTarget.from_json(data) if data.get("kind") == "cuda" else Target.from_json(data)
