"""The table of rates: how fast each micro-kernel runs with its operands in L1, in vector operations
a second of one core; how fast work of other kinds goes; and what stands between two stages.

Helix (Section 5.2) profiles level 0 because out-of-order execution defies a formula, and models
every level above. A shipped default follows from the target's constants;
:mod:`gtco.search.calibration.profile` measures this machine's table once and caches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gtco.machine.target import MemoryLevel, Target
from gtco.tensor.intrinsics.table import MicroKernel

# Level-0 work beside micro-kernels that is measured, in the vector instructions that sketches count
# (``Extra.kernel``): of few instructions an element; of exp and whatever else is a long chain; of
# reductions along vectors, whose lanes are folded; exchanges between the lanes of vectors; copies
# of rows to where a micro-kernel reads them; a micro-kernel's sums on their way to the output.
# ``fma`` is the fastest micro-kernel's rate.
WORK = ("vector", "exp", "reduce", "shuffle", "pack", "store")
LAUNCH = 1.0e-6  # seconds of the barrier between two stages


@dataclass(frozen=True)
class RateTable:
    """Measured rates by kernel name; names without one get the default formula. ``launch`` are the
    seconds of the barrier between two stages; ``handed`` by level of memory the bytes a second of
    one core, of DRAM of all, that it reads and writes where a stage's tensors lie there that passed
    through other cores' hands.
    """

    target: Target
    measured: tuple[tuple[str, float], ...] = ()
    launch: float = LAUNCH
    handed: tuple[tuple[str, float], ...] = ()

    def rate(self, kernel: str) -> float:
        """Vector operations a second of one core."""
        found = self._known.get(kernel)
        if found is None:
            found = self._known[kernel] = default_rate(self.target, kernel)
        return found

    def handover(self, level: MemoryLevel) -> float:
        """Bytes a second of ``handed``; where it was not measured, what is in a cache of one core
        comes to another by the innermost level that they share.
        """
        found = self._handed.get(level.name)
        if found is None:
            shared = next(m for m in self.target.memory if m.shared)
            found = level.bandwidth if level.shared else min(level.bandwidth, shared.bandwidth)
        return found

    @cached_property
    def _handed(self) -> dict[str, float]:
        return dict(self.handed)

    @cached_property
    def _known(self) -> dict[str, float]:
        """The measured rates, to which those by the formula come as they are asked for."""
        return dict(self.measured)


def default_rate(target: Target, kernel: str) -> float:
    """A micro-kernel's bounds: the FMA ports, which also convert what B is made of; an iteration's
    latency over independent chains; two loads a cycle. Other work: one instruction a port.
    """
    if ":" not in kernel:
        return target.frequency * target.fma_ports
    tile = MicroKernel.parse(kernel, target.lanes)
    kind, cells = tile.kind, tile.rows * tile.vectors
    steps = kind.step / kind.products  # sums that an iteration adds to one after the other
    operations = steps * cells + kind.step * kind.converts * tile.vectors
    loads = kind.step / kind.a.step * tile.rows + tile.vectors
    cycles = max(operations / target.fma_ports, steps * kind.latency, loads / 2)
    return 0.98 * steps * cells / cycles * target.frequency
