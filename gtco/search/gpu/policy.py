"""The analytic policy for GPUs. It predicts the time of launches and measures nothing.

The model has the levels of a GPU. Blocks run in waves over the multiprocessors (Helix, eq. 6: a
last, partial wave takes as long as its blocks do). Shared memory, registers and threads limit how
many blocks run side by side (DyGen, eq. 2 to 5). In each block a loop computes while its loads are
under way, or waits for them (Helix, eq. 5). The constants below, and the rates of Hopper, were
fitted to 1586 kernels of nine models that an NVIDIA H200 timed
(``bench/gpu/readings/h200.jsonl.gz``). No other GPU has been measured: its rates come from the
vendor's documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from gtco.machine.gpu import REGISTER_GRANULE, WARP, GpuTarget
from gtco.search.pricing import CERTAIN, PricingPolicy, products
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Config, Pick, Sketch, configs
from gtco.tensor.stage import Operator, Stage, TensorType

LAUNCH = 1.0e-6  # seconds between two kernels of a CUDA graph
LATENCY = 0.3e-6  # seconds of a load
MEETING = 0.7e-6  # seconds: sums of a block to L2, a counter there and back, sums of others
FILL = 1.5e-6  # seconds of a contraction before its loops run full, and behind them
# Clocks from barrier to barrier, by the unit that multiplies: with mma.sync the barrier, ldmatrix
# and a few dependent products. A warp group's products go on behind it.
STEP = {"wgmma": 124, "mma": 369, "fma": 369}
# The same where nothing is multiplied: no thread waits for another, and warps wait in turn.
WAIT = 150
# A multiprocessor with so many warps reaches half of a unit's rate: while one waits, others work.
HALF = {"wgmma": 0.5, "mma": 4.5, "fma": 4.5}
ALONE = 1.0  # the same for kernels without a contraction, whose steps do not depend on each other
PARTITIONS = 4  # partitions of a multiprocessor; each has its share of every unit
# Bytes a clock of one multiprocessor. L1 and shared memory are one memory with one port: an access
# to L1 takes it for a clock for each line that the warp's lanes touch.
SHARED_PORT = 64
INTEGERS = 64  # integer operations a clock of one multiprocessor (CUDA C++ Programming Guide)
COPIED = 19  # bytes a clock that one warp group brings by itself
BLOCKS = {75: 16, 80: 32, 89: 24, 90: 32}  # at most on a multiprocessor, by generation
# Bytes of shared memory that each block costs beside its own, and the unit of allocation.
RESERVED, SHARED_GRANULE = (
    {75: 0, 80: 1024, 89: 1024, 90: 1024},
    {75: 256, 80: 128, 89: 128, 90: 128},
)
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
    # registers of a warp
    registers = max(1, ceil(launch.registers / REGISTER_GRANULE)) * REGISTER_GRANULE * WARP
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
    """The config of a launch, and two facts about it: whether its blocks add up their sums, and
    whether some of its warps only copy.
    """

    seconds: float
    config: Config
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
    """Picks the config of least predicted time for a stage on one GPU."""

    def __init__(self, target: GpuTarget) -> None:
        super().__init__(target)
        self.target: GpuTarget = target
        self._ranked: dict[object, tuple[Config, ...]] = {}
        self._rooms: dict[tuple[int, int, int], int] = {}

    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of exactly this config; infinity if it cannot be launched."""
        launch: Any = sketch.workload(config)
        return self.seconds(launch, constant_bytes(sketch.stage))

    def compared(self, sketch: Sketch) -> tuple[Sequence[Config], np.ndarray]:
        """Every config that can be launched, with its seconds. Sketches of one signature differ
        in little but the work beside the loops, so the later ones compare only the best configs of
        the first.
        """
        found = self._compared(sketch)
        return [one.config for one in found], np.array([one.seconds for one in found])

    def _compared(self, sketch: Sketch) -> list[Priced]:
        """The configs by predicted time, the fastest first."""
        signature = getattr(sketch, "signature", None)
        known = self._ranked.get(signature) if signature is not None else None
        # a space may lack configs of an earlier one, and none of the known ones be left
        found = self._priced(sketch, known or ()) or self._priced(sketch, configs(sketch))
        if signature is not None and known is None:
            kinds: dict[object, list[Config]] = {}
            for one in found:
                kinds.setdefault((one.joined, one.roles), []).append(one.config)
            self._ranked[signature] = tuple(c for kind in kinds.values() for c in kind[:RANKED])
        return found

    def _priced(self, sketch: Sketch, among: Iterable[Config]) -> list[Priced]:
        """Those of the configs that can be launched, the fastest first."""
        constants, found = constant_bytes(sketch.stage), []
        for config in among:
            launch: Any = sketch.workload(config)
            seconds = self.seconds(launch, constants)
            if seconds < inf:
                found.append(Priced(seconds, config, launch.joined > 0, launch.copying > 0))
        return sorted(found, key=lambda one: one.seconds)

    def picks(self, sketch: Sketch, n: int = 1) -> list[Pick]:
        """The ``n`` configs of least predicted time, best first."""
        return [Pick(sketch, one.config, one.seconds) for one in self._compared(sketch)[:n]]

    def propose(self, stage: Stage, n: int) -> list[Config]:
        """The ``n`` configs that are worth measuring: those of :meth:`best`, with places for other
        kinds. If blocks share tiles in all of them, or in none, the best config of the other kind
        takes a place near the end, so that readings show whether sharing pays. The last place goes
        to warp roles in the same way.
        """
        every = self._of_sketches(stage, self._compared)
        last = int(len({one.roles for one in every}) > 1)
        found = with_rival(every, n - last, lambda one: one.joined)
        others = [one for one in every if one not in found]
        found = with_rival([*found, *others], n, lambda one: one.roles)
        return [one.config for one in found]

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        """A lower bound on the predicted seconds of any stage with this operator: its launch, and
        the products of a contraction at the peak of its operands' format.
        """
        multiplied = products(op, types)
        if not multiplied:
            return LAUNCH
        return LAUNCH + CERTAIN * 2 * multiplied / self.peak(types[op.inputs[0]].dtype)

    def peak(self, operand: str) -> float:
        """FLOP/s of products of operands of this dtype by the fastest unit that multiplies them, on
        all multiprocessors.
        """
        units = max(self.target.rate(f"{unit}:{operand}") for unit in ("mma", "wgmma"))
        return units or self.target.rate("fma")

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
        if launch.work:  # blocks side by side fill each other's gaps
            seconds += FILL * (full + (rest > 0) if room == 1 else 1)
        if launch.joined:
            seconds += MEETING + launch.joined / self.port
        return seconds

    @property
    def port(self) -> float:
        """Bytes a second that one multiprocessor gets from L2, while all of them read."""
        return self.target.l2_bandwidth / self.target.sms

    def _wave(self, launch: Launch, blocks: int) -> float:
        """Seconds of ``blocks`` blocks side by side on one multiprocessor."""
        if not blocks:
            return 0.0
        target, share = self.target, blocks / launch.blocks
        warps = blocks * ceil((launch.threads - launch.copying) / WARP)
        unit = launch.unit.partition(":")[0]
        # a partition is idle if it has no warp, or while all its warps wait
        partitions = min(1.0, warps / PARTITIONS)

        def reached(half: float) -> float:
            """The share of a unit's rate."""
            return partitions * warps / (warps + half)

        rate = target.rate(launch.unit) / target.sms * reached(HALF[unit])
        work = share * launch.work / rate if launch.work else 0.0
        issuing = reached(HALF["fma"] if launch.work else ALONE)
        vector = share * launch.vector / (target.rate("fma") / target.sms * issuing / 2)
        vector += share * launch.indexing / (INTEGERS * target.clock * issuing)
        loads = share * launch.traffic / self.port
        near = launch.staged / SHARED_PORT + launch.lines
        ports = max(loads, share * near / target.clock)
        chain = launch.steps * STEP[unit] / target.clock
        if not launch.overlapped:
            return max(work, chain) + ports + launch.steps * LATENCY + vector
        if not launch.work:
            return max(ports, launch.steps * WAIT / target.clock) + vector + LATENCY
        # a slice is asked for `ahead` slices before its use, and comes behind those of all blocks
        waiting = (launch.steps * LATENCY + loads) / launch.ahead
        if launch.copying:
            waiting = max(waiting, launch.traffic / launch.blocks / COPIED / target.clock)
        return max(work, ports, chain, waiting) + vector

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
            max(launch.traffic, moved) / target.l2_bandwidth,
        )


def constant_bytes(stage: Stage) -> float:
    return float(sum(i.type.nbytes for i in stage.inputs if i.constant))
