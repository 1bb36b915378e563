"""What a whole model takes on a GPU, launched in each of the two ways: a graph with a kernel for
each step, or one persistent kernel that walks the steps with a barrier of the whole grid between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from gtco.search.gpu.policy import (
    GRANULE,
    KEPT,
    LATENCY,
    LAUNCH,
    NEAR,
    PARTITIONS,
    WARP,
    GpuPolicy,
    occupancy,
)
from gtco.tensor.cuda.persistent import RESERVED
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Config, Pick, configs

# Seconds from the last block's arrival at a barrier of the whole grid until all go on: what grid
# synchronisation takes with one block a multiprocessor (Zhang et al., "A Study of Single and
# Multi-device Synchronization Methods in Nvidia GPUs", 2020), which the kernel's own is like.
BARRIER = 1.4e-6
WARPS = PARTITIONS * WARP  # threads of as many warps as all partitions have one of each
# Of a block of the persistent kernel, as far as stages have configs with so few: all stages have
# the registers of the one with the most threads, and with these a thread may have all that there
# are names for.
MOST_THREADS = 256
# Of the graph's predicted time. Less is within the error of both predictions, and not worth a
# library of twice the code.
WORTH = 0.95


@dataclass(frozen=True)
class LaunchPrices:
    """Predicted seconds of a run by how it is launched; infinity where it cannot be."""

    graph: float
    persistent: float

    @property
    def cheaper(self) -> str:
        return "persistent" if self.persistent < WORTH * self.graph else "graph"

    def to_json(self) -> dict[str, float | None]:
        """Without the infinity, which JSON has not."""
        return {name: s if s < inf else None for name, s in vars(self).items()}


def narrow(policy: GpuPolicy, pick: Pick) -> Pick:
    """What the persistent kernel does the pick's stage with: the pick, without warp roles where its
    warps have any, or where its blocks have more than MOST_THREADS the sketch's config of least
    predicted time whose blocks have not; the pick where there is none.
    """
    sketch = pick.sketch

    def launch(config: Config) -> Launch:
        found: Any = sketch.workload(config)
        return found

    if launch(pick.config).copying:
        alike = (config for config in configs(sketch) if not launch(config).copying)
        nearest = min(alike, key=lambda config: _differences(config, pick.config))
        pick = Pick(sketch, nearest, policy.price(sketch, nearest))
    if launch(pick.config).threads <= MOST_THREADS:
        return pick
    picks = [
        Pick(sketch, config, policy.price(sketch, config))
        for config in configs(sketch)
        if launch(config).threads <= MOST_THREADS and launch(config).trusted
    ]
    best = min(picks, key=lambda one: one.seconds, default=pick)
    return best if best.seconds < inf else pick


def _differences(one: Config, other: Config) -> int:
    """Decisions that are not the same in both."""
    return len({*one.choices} ^ {*other.choices})


def launch_prices(
    policy: GpuPolicy,
    steps: Sequence[tuple[Launch, float]],
    within: Sequence[tuple[Launch, float]] | None = None,
) -> LaunchPrices:
    """Of a model whose steps are these launches, with the bytes of constants that each reads;
    ``within``: as they are in the persistent kernel, where that differs. ``registers`` of the
    launches best are those that the compiler gave.
    """
    graph = sum(policy.seconds(launch, constants) for launch, constants in steps)
    return LaunchPrices(graph, _persistent(policy, steps if within is None else within))


def _persistent(policy: GpuPolicy, steps: Sequence[tuple[Launch, float]]) -> float:
    """Every step's blocks are dealt to as many as are resident of a kernel with the most threads,
    shared memory and registers of any step, but for those that so many threads cannot have: the
    compiler then makes do with fewer. While a block waits at the barrier it fetches the next
    step's weights into L2: so memory gives them in the time from the step before.
    """
    if not steps:
        return inf
    target, launches = policy.target, [launch for launch, _ in steps]
    threads = max(launch.threads for launch in launches)
    most = target.registers_sm // (ceil(threads / WARPS) * WARPS) // GRANULE * GRANULE
    whole = replace(
        launches[0],
        threads=threads,
        shared=RESERVED + max(launch.shared for launch in launches),
        registers=min(most, max(launch.registers for launch in launches)),
    )
    room = occupancy(whole, target).blocks
    if not room:
        return inf
    seconds, idle = LAUNCH, 0.0  # of memory, while the last blocks of the step before compute
    for number, (launch, constants) in enumerate(steps):
        left = constants
        if number:
            seconds += BARRIER
            left -= min(constants, KEPT * target.l2, (BARRIER + idle) * target.bandwidth)
        took = max(policy.loops(launch, room), policy.memory(launch, room, left))
        seconds += took + (LATENCY if left or not constants else NEAR)
        waves = ceil(launch.blocks / (room * target.sms))
        idle = took / waves if launch.blocks % (room * target.sms) else 0.0
    return seconds
