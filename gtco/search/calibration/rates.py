"""The table of rates: the speed of each micro-kernel with its operands in L1, in vector operations
per second of one core; the speed of work of other kinds; and the costs between two stages.

Helix (Section 5.2) profiles level 0, because no formula describes out-of-order execution, and
models every level above. The default rates follow from the target's constants;
:mod:`gtco.search.calibration.profile` measures this machine's table once and caches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from gtco.machine.target import MemoryLevel, Target
from gtco.tensor.intrinsics.table import MicroKernel

# Level-0 work that is measured beside micro-kernels. It counts vector instructions as the sketches
# do (``Extra.kernel``). In order: work of few instructions per element; exp and other long chains;
# reductions along vectors, whose lanes are folded; exchanges between the lanes of vectors; copies
# of rows to where a micro-kernel reads them; the store of a micro-kernel's sums to the output.
# ``fma`` is the fastest micro-kernel's rate.
WORK = ("vector", "exp", "reduce", "shuffle", "pack", "store")
LAUNCH = 1.0e-6  # seconds of the barrier between two stages
# Cycles of a product of two tiles with its share of the loads from L1: on a Granite Rapids a group
# of four takes 17.1 ns without loads and 20 ns with them.
TILE_CYCLES = 18.5
LOAD_PORTS = 2  # loads a cycle
# Loads that a nest adds to each step of k: it prefetches a line of the next panel of B, and one of
# the next rows of A. Level 0 is measured without them.
PREFETCHES = 2


@dataclass(frozen=True)
class RateTable:
    """Measured rates.

    - ``measured``: by kernel name; a missing name has the rate of the default formula. A
      micro-kernel has at most the rate at which the ports for loads serve it and its prefetches;
    - ``launch``: seconds of the barrier between two stages;
    - ``handed``: by level of memory, bytes per second at which a stage reads and writes tensors in
      that level that other cores wrote; of one core for a cache, of all cores for DRAM;
    - ``kept``: the same of tensors that the core itself wrote. A table of a time when any core took
      any task has the mean of both as ``handed``, and no ``kept``.
    """

    target: Target
    measured: tuple[tuple[str, float], ...] = ()
    launch: float = LAUNCH
    handed: tuple[tuple[str, float], ...] = ()
    kept: tuple[tuple[str, float], ...] = ()

    def rate(self, kernel: str) -> float:
        """Vector operations per second of one core."""
        found = self._known.get(kernel)
        if found is None:
            found = self._known[kernel] = default_rate(self.target, kernel)
        return found

    def handover(self, level: MemoryLevel, share: float = 1.0) -> float:
        """Bytes per second of tensors of which other cores wrote this share. If ``handed`` was not
        measured, data in a cache of one core reaches another core through the innermost level that
        they share.
        """
        found = self._between.get(level.name)
        if found is None:
            shared = next(m for m in self.target.memory if m.shared)
            handed = level.bandwidth if level.shared else min(level.bandwidth, shared.bandwidth)
            found = handed, handed
        kept, handed = found
        return 1.0 / (1.0 / kept + share * (1.0 / handed - 1.0 / kept))

    @cached_property
    def _between(self) -> dict[str, tuple[float, float]]:
        """``kept`` and ``handed`` by level."""
        kept = dict(self.kept)
        return {name: (max(kept.get(name, rate), rate), rate) for name, rate in self.handed}

    @cached_property
    def _known(self) -> dict[str, float]:
        """The rates of what was measured. Rates by the formula are added when they are asked for.
        """
        return {name: min(rate, rate_of_loads(self.target, name)) for name, rate in self.measured}


def rate_of_loads(target: Target, kernel: str) -> float:
    """The most vector operations per second that the ports for loads allow a micro-kernel in a
    nest. There is no such bound on other work, and none on the tile unit.
    """
    if ":" not in kernel or (tile := MicroKernel.parse(kernel, target.lanes)).kind.in_tiles:
        return inf
    kind = tile.kind
    loads = tile.loads + PREFETCHES
    done = kind.step / kind.products * tile.rows * tile.vectors
    return done / (loads / LOAD_PORTS) * target.frequency


def default_rate(target: Target, kernel: str) -> float:
    """The rate of a micro-kernel by its bounds: the FMA ports, which also convert B; the latency of
    an iteration over independent chains; the loads. The tile unit has one port. Other work: one
    instruction per port.
    """
    if ":" not in kernel:
        return target.frequency * target.fma_ports
    tile = MicroKernel.parse(kernel, target.lanes)
    kind, cells = tile.kind, tile.rows * tile.vectors
    if kind.in_tiles:
        rows = tile.covered(tile.rows)
        products = rows // kind.height * tile.vectors
        cycles = max(TILE_CYCLES * products, kind.latency)
        return rows * tile.vectors / cycles * target.frequency
    steps = kind.step / kind.products  # sums that an iteration adds to, one after the other
    operations = steps * cells + kind.step * kind.converts * tile.vectors
    cycles = max(operations / target.fma_ports, steps * kind.latency)
    rate = 0.98 * steps * cells / cycles * target.frequency
    return min(rate, rate_of_loads(target, kernel))
