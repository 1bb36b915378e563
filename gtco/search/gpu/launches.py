"""The predicted time of a whole model on a GPU for each way to launch it: a graph with a kernel for
each step, or one persistent kernel that does all steps with a barrier of the whole grid between two
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from gtco.machine.gpu import REGISTER_GRANULE, WARP
from gtco.search.gpu.policy import (
    KEPT,
    LATENCY,
    LAUNCH,
    PARTITIONS,
    GpuPolicy,
    occupancy,
)
from gtco.tensor.cuda.persistent import RESERVED
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Config, Pick, configs

# Seconds from the end of a step's last block to the begin of the next step: the barrier of the
# whole grid (1.4 us by Zhang et al., "A Study of Single and Multi-device Synchronization Methods in
# Nvidia GPUs", 2020), and finding the next step's buffers. On an H200 a step of ViT-Ti takes 0.4 us
# longer than its own kernel in a graph, and one of Swin-T 1.9 us.
BARRIER = 2.2e-6
WARPS = PARTITIONS * WARP  # threads of a block with one warp for each partition
# The threads of a block of the persistent kernel, if stages have configs with so few. All stages
# have as many registers per thread as the stage with the most threads; with this number, a thread
# may have all registers that an instruction can name.
MOST_THREADS = 256
# A share of the graph's predicted time. A smaller gain is within the error of both predictions, and
# not worth a library of twice the code.
WORTH = 0.95


@dataclass(frozen=True)
class LaunchPrices:
    """Predicted seconds of a run for each way to launch it; infinity if a way is impossible."""

    graph: float
    persistent: float

    @property
    def cheaper(self) -> str:
        return "persistent" if self.persistent < WORTH * self.graph else "graph"

    def to_json(self) -> dict[str, float | None]:
        """The prices without infinity, which JSON lacks."""
        return {name: s if s < inf else None for name, s in vars(self).items()}


def narrow(policy: GpuPolicy, pick: Pick, wrong: Collection[Config] = ()) -> Pick:
    """The pick with which the persistent kernel does the stage. Usually it is ``pick`` itself. If
    its warps have roles, it is the pick without them. If its blocks have more than MOST_THREADS
    threads, it is the sketch's config of least predicted time whose blocks have at most so many.
    If the sketch has no such config, it is ``pick``. A config that is ``wrong``, which was measured
    to compute something else, is not taken.
    """
    sketch = pick.sketch

    def launch(config: Config) -> Launch:
        found: Any = sketch.workload(config)
        return found

    def allowed() -> list[Config]:
        right = (config for config in configs(sketch) if config not in wrong)
        return [config for config in right if not launch(config).copying]

    if launch(pick.config).copying:
        if not (alike := allowed()):
            return pick
        nearest = min(alike, key=lambda config: _differences(config, pick.config))
        pick = Pick(sketch, nearest, policy.price(sketch, nearest))
    if launch(pick.config).threads <= MOST_THREADS:
        return pick
    picks = [
        Pick(sketch, config, policy.price(sketch, config))
        for config in allowed()
        if launch(config).threads <= MOST_THREADS
    ]
    best = min(picks, key=lambda one: one.seconds, default=pick)
    return best if best.seconds < inf else pick


def _differences(one: Config, other: Config) -> int:
    """The number of decisions that only one of the two has."""
    return len({*one.choices} ^ {*other.choices})


def launch_prices(
    policy: GpuPolicy,
    steps: Sequence[tuple[Launch, float]],
    within: Sequence[tuple[Launch, float]] | None = None,
) -> LaunchPrices:
    """The prices of a model whose steps are these launches.

    - each launch comes with the bytes of constants that it reads;
    - ``within``: the launches as they are in the persistent kernel, if they differ;
    - ``registers`` of a launch should be those that the compiler gave.
    """
    graph = sum(policy.seconds(launch, constants) for launch, constants in steps)
    return LaunchPrices(graph, _persistent(policy, steps if within is None else within))


def _persistent(policy: GpuPolicy, steps: Sequence[tuple[Launch, float]]) -> float:
    """The price as a persistent kernel. Its grid is the number of blocks that are resident at once,
    with the most threads, shared memory and registers that any step has; the blocks of every step
    are dealt to them. Registers that so many threads cannot have are left out: the compiler then
    uses fewer. While a block waits at the barrier it fetches the weights of the next step into L2,
    so memory has the time since the previous step to deliver them.
    """
    if not steps:
        return inf
    target, launches = policy.target, [launch for launch, _ in steps]
    threads = max(launch.threads for launch in launches)
    rounded = ceil(threads / WARPS) * WARPS
    most = target.registers_sm // rounded // REGISTER_GRANULE * REGISTER_GRANULE
    whole = replace(
        launches[0],
        threads=threads,
        shared=RESERVED + max(launch.shared for launch in launches),
        registers=min(most, max(launch.registers for launch in launches)),
    )
    room = occupancy(whole, target).blocks
    if not room:
        return inf
    seconds, idle = LAUNCH, 0.0  # idle: of memory, while the last blocks of a step compute
    for number, (launch, constants) in enumerate(steps):
        left = constants
        if number:
            seconds += BARRIER
            left -= min(constants, KEPT * target.l2, (BARRIER + idle) * target.bandwidth)
        took = max(policy.loops(launch, room), policy.memory(launch, room, left))
        seconds += took + LATENCY
        waves = ceil(launch.blocks / (room * target.sms))
        idle = took / waves if launch.blocks % (room * target.sms) else 0.0
    return seconds
