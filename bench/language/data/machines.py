"""The machines that sentences are sampled for: those that gtco knows by name, each also a little
smaller, larger, slower and faster, so that a model learns what the words of a machine mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from gtco.machine.gpu import GPUS, GpuTarget
from gtco.machine.target import TARGETS, Machine, Target
from gtco.search.calibration.rates import LAUNCH, RateTable

from .workloads import GPU

M = TypeVar("M")
CORES = (1, 2, 2, 2, 4, 8, 16, 32)
VARIED = 0.6  # octaves up or down, at most
MACHINES = 48  # of each kind


@dataclass(frozen=True)
class Place:
    """A machine with its table of rates; a GPU has none."""

    machine: Machine
    rates: RateTable | None = None


def places(kind: str) -> Sequence[Place]:
    """The machines of a kind, always the same."""
    random = Random(f"machines of kind {kind}")
    if kind == GPU:
        return [Place(_gpu(gpu, random)) for gpu in _cycled(GPUS.values())]
    return [_cpu(target, random) for target in _cycled(TARGETS.values())]


def _cycled(machines: Iterable[M]) -> list[M]:
    every = list(machines)
    return [every[n % len(every)] for n in range(MACHINES)]


def _cpu(target: Target, random: Random) -> Place:
    memory = tuple(
        replace(
            level,
            capacity=_cache(level.capacity, random),
            bandwidth=level.bandwidth * _factor(random),
            latency=level.latency * _factor(random),
        )
        for level in target.memory
    )
    machine = replace(
        target,
        memory=memory,
        cores=random.choice(CORES),
        frequency=target.frequency * _factor(random),
    )
    return Place(machine, RateTable(machine, launch=LAUNCH * _factor(random)))


def _gpu(gpu: GpuTarget, random: Random) -> GpuTarget:
    return replace(
        gpu,
        sms=max(8, round(gpu.sms * _factor(random))),
        bandwidth=gpu.bandwidth * _factor(random),
        l2_bandwidth=gpu.l2_bandwidth * _factor(random),
    )


def _cache(capacity: int, random: Random) -> int:
    """DRAM stays as it is; caches are the same, half or twice as large, mostly the same."""
    return capacity if capacity >= 1 << 38 else int(capacity * random.choice((0.5, 1, 1, 1, 2)))


def _factor(random: Random) -> float:
    return float(2.0 ** random.uniform(-VARIED, VARIED))
