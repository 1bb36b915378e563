"""The analytic policy for GPUs. It predicts the time of launches from hardware limits alone and
measures nothing.

The model has the levels of a GPU. Blocks run in waves over the multiprocessors (Helix, eq. 6: a
last, partial wave takes as long as its blocks do). Shared memory, registers and threads limit how
many blocks run side by side (DyGen, eq. 2 to 5). In each block a loop computes while its loads are
under way, or waits for them (Helix, eq. 5). The constants come from the vendor's documents and from
published latencies; none was fitted to readings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from gtco.machine.gpu import GpuTarget
from gtco.search.pricing import CERTAIN, PricingPolicy, products
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Config, Pick, Sketch, configs
from gtco.tensor.stage import Operator, Stage, TensorType

LAUNCH = 1.3e-6  # seconds between two kernels of a CUDA graph
LATENCY = 0.7e-6  # seconds of a load from memory
NEAR = 0.3e-6  # seconds of a load from L2
MEETING = 3 * NEAR  # seconds: sums of a block to L2, a counter there and back, sums of others
STEP = 150  # clocks from barrier to barrier: ldmatrix, a few dependent mma, the barrier
PARTITIONS = 4  # partitions of a multiprocessor; each has its share of every unit
# Bytes a clock of one multiprocessor. L1 and shared memory are one memory with one port: an access
# to L1 takes it for a clock for each line that the warp's lanes touch.
L2_PORT, SHARED_PORT = 64, 128
INTEGERS = 64  # integer operations a clock of one multiprocessor (CUDA C++ Programming Guide)
WARP = 32  # threads
BLOCKS = {75: 16, 80: 32, 89: 24, 90: 32}  # at most on a multiprocessor, by generation
# Bytes of shared memory that each block costs beside its own, and the unit of allocation.
RESERVED, SHARED_GRANULE = (
    {75: 0, 80: 1024, 89: 1024, 90: 1024},
    {75: 256, 80: 128, 89: 128, 90: 128},
)
GRANULE = 8  # the registers of a thread are allocated in eights
KEPT = 0.5  # share of L2 that a stage may count on for activations
RANKED = 16  # configs of a signature among which its next stages choose


@dataclass(frozen=True)
class Occupancy:
    """The number of blocks that a multiprocessor has room for, and the resource that limits it."""

    blocks: int
    limit: str


def occupancy(launch: Launch, target: GpuTarget) -> Occupancy:
    """The occupancy of a kernel with these threads, registers and shared memory; no blocks if a
    single one is too large.
    """
    if launch.shared > target.shared:
        return Occupancy(0, "shared memory")
    of, warps = target.generation, ceil(launch.threads / WARP)
    registers = max(1, ceil(launch.registers / GRANULE)) * GRANULE * WARP  # of a warp
    # A launch is refused unless every partition has room for the warps of the fullest one.
    whole = ceil(warps / PARTITIONS) * PARTITIONS * registers <= target.registers_sm
    resident = target.registers_sm // PARTITIONS // registers * PARTITIONS
    shared = ceil((launch.shared + RESERVED[of]) / SHARED_GRANULE[of]) * SHARED_GRANULE[of]
    rooms = {
        "threads": target.threads_sm // WARP // warps,
        "registers": resident // warps if whole else 0,
        "shared memory": target.shared_sm // shared if shared else BLOCKS[of],
        "blocks": BLOCKS[of],
    }
    limit = min(rooms, key=lambda name: rooms[name])
    return Occupancy(rooms[limit], limit)


class Priced(NamedTuple):
    """The config of a launch, and three facts about it: whether it may be picked unmeasured,
    whether its blocks add up their sums, and whether some of its warps only copy.
    """

    seconds: float
    config: Config
    trusted: bool
    joined: bool
    roles: bool


def with_rival(ranked: Sequence[Priced], n: int, kind: Callable[[Priced], bool]) -> list[Priced]:
    """The first ``n``. If there are several and all are of one kind, the first one of the other
    kind, if there is one, takes the last place.
    """
    found = [*ranked[:n]]
    if len(found) > 1 and len({kind(one) for one in found}) == 1:
        rivals = (one for one in ranked if kind(one) is not kind(found[0]))
        found[-1] = next(rivals, found[-1])
    return found


class GpuPolicy(PricingPolicy):
    """Picks the config of least predicted time for a stage on one GPU. Only configs that may be
    picked unmeasured count (``Launch.trusted``), or all of them with ``untrusted``.
    """

    def __init__(self, target: GpuTarget, untrusted: bool = False) -> None:
        super().__init__(target)
        self.target: GpuTarget = target
        self.untrusted = untrusted
        self._ranked: dict[object, tuple[Config, ...]] = {}
        self._rooms: dict[tuple[int, int, int], int] = {}

    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of exactly this config; infinity if it cannot be launched."""
        launch: Any = sketch.workload(config)
        return self.seconds(launch, constant_bytes(sketch.stage))

    def compared(self, sketch: Sketch) -> tuple[Sequence[Config], np.ndarray]:
        """Every config that can be launched, with its seconds. Sketches of one signature differ
        only in the work beside the loops, so the later ones compare only the best configs of the
        first.
        """
        found = self._compared(sketch)
        return [one.config for one in found], np.array([one.seconds for one in found])

    def _compared(self, sketch: Sketch) -> list[Priced]:
        """The configs by predicted time, the fastest first."""
        signature = getattr(sketch, "signature", None)
        known = self._ranked.get(signature) if signature is not None else None
        constants, found = constant_bytes(sketch.stage), []
        for config in known or configs(sketch):
            launch: Any = sketch.workload(config)
            seconds = self.seconds(launch, constants)
            if seconds < inf:
                trusted = self.untrusted or launch.trusted
                joined, roles = launch.joined > 0, launch.copying > 0
                found.append(Priced(seconds, config, trusted, joined, roles))
        found.sort(key=lambda one: one.seconds)
        if signature is not None and known is None:
            kinds: dict[object, list[Config]] = {}
            for one in found:
                kinds.setdefault((one.trusted, one.joined, one.roles), []).append(one.config)
            self._ranked[signature] = tuple(c for kind in kinds.values() for c in kind[:RANKED])
        return found

    def picks(self, sketch: Sketch, n: int = 1) -> list[Pick]:
        """The ``n`` trusted configs of least predicted time, best first."""
        trusted = (one for one in self._compared(sketch) if one.trusted)
        return [Pick(sketch, one.config, one.seconds) for one in islice(trusted, n)]

    def propose(self, stage: Stage, n: int) -> list[Config]:
        """The ``n`` configs that are worth measuring: those of :meth:`best`, with some places for
        other kinds.

        - The best configs that are not trusted take the last places: a quarter of all, at least one
          beside the first.
        - If blocks share tiles in all the other configs, or in none, the best config of the other
          kind takes the place before them, so that readings show whether sharing pays.
        - If several are not trusted, the last of them is chosen in the same way: the best with warp
          roles if no other has them, or the best without.
        """
        every = self._of_sketches(stage, self._compared)
        trusted = [one for one in every if one.trusted]
        others = [one for one in every if not one.trusted]
        taken = with_rival(others, min(max(n // 4, 1), n - 1), lambda one: one.roles)
        found = with_rival(trusted, n - len(taken), lambda one: one.joined)
        return [one.config for one in found + taken]

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        """A lower bound on the predicted seconds of any stage with this operator: its launch, and
        the products of a contraction at the peak of its operands' format.
        """
        multiplied = products(op, types)
        if not multiplied:
            return LAUNCH
        return LAUNCH + CERTAIN * 2 * multiplied / self.peak(types[op.inputs[0]].dtype)

    def peak(self, operand: str) -> float:
        """FLOP/s of products of operands of this dtype, on all multiprocessors."""
        return self.target.rate(f"mma:{operand}") or self.target.rate("fma")

    def seconds(self, launch: Launch, constants: float = 0.0) -> float:
        """Seconds of a launch in a CUDA graph. ``constants`` are the bytes that come from memory,
        however large L2 is: between two readings of them the model reads all its other constants.
        """
        target = self.target
        room = self._room(launch)
        if not room or (launch.work and not target.rate(launch.unit)):
            return inf
        return (
            LAUNCH + LATENCY + max(self.loops(launch, room), self.memory(launch, room, constants))
        )

    def _room(self, launch: Launch) -> int:
        """Blocks by :func:`occupancy`. Many configs have the same number."""
        key = launch.threads, launch.shared, launch.registers
        known = self._rooms.get(key)
        if known is None:
            known = self._rooms[key] = occupancy(launch, self.target).blocks
        return known

    def loops(self, launch: Launch, room: int) -> float:
        """Seconds of all blocks, ``room`` of them on a multiprocessor at once, without the limits
        of memory. If several blocks share a tile, its last block adds up their sums afterwards.
        """
        full, rest = divmod(ceil(launch.blocks / self.target.sms), room)
        seconds = full * self._wave(launch, room) if full else 0.0
        seconds += self._wave(launch, rest)
        if launch.joined:
            seconds += MEETING + launch.joined / L2_PORT / self.target.clock
        return seconds

    def _wave(self, launch: Launch, blocks: int) -> float:
        """Seconds of ``blocks`` blocks side by side on one multiprocessor."""
        if not blocks:
            return 0.0
        target, share = self.target, blocks / launch.blocks
        warps = blocks * ceil((launch.threads - launch.copying) / WARP)
        # a partition is idle if it has no warp, or while its only warp waits
        busy = min(1.0, warps / PARTITIONS) * warps / (warps + 1)
        rate, fma = (target.rate(unit) / target.sms * busy for unit in (launch.unit, "fma"))
        work = share * launch.work / rate if launch.work else 0.0
        vector = share * launch.vector / (fma / 2)
        vector += share * launch.indexing / (INTEGERS * target.clock * busy)
        near = launch.staged / SHARED_PORT + launch.lines
        ports = share * max(launch.traffic / L2_PORT, near) / target.clock
        chain = launch.steps * STEP / target.clock
        if launch.overlapped:
            return max(work, ports, chain) + vector
        return max(work, chain) + ports + launch.steps * NEAR + vector

    def memory(self, launch: Launch, room: int, constants: float) -> float:
        """Seconds that memory and L2 take for all blocks. A few blocks do not request enough at
        once to reach the full rate: in one latency they receive at most the loads that they have
        under way.
        """
        target = self.target
        moved = launch.read + launch.written
        weights = min(constants, launch.read)
        activations = moved - weights
        kept = min(1.0, KEPT * target.l2 / activations) if activations else 1.0
        far = weights + (1 - kept) * activations
        under_way = launch.threads * launch.asked
        if launch.overlapped:
            under_way = max(under_way, launch.shared)
        asked = min(launch.blocks, room * target.sms) * under_way
        return max(
            far / min(target.bandwidth, asked / LATENCY),
            max(launch.traffic, moved) / min(target.l2_bandwidth, asked / NEAR),
        )


def constant_bytes(stage: Stage) -> float:
    return float(sum(i.type.nbytes for i in stage.inputs if i.constant))
