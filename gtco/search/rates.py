"""The table of rates: how fast each micro-kernel runs with its operands in L1, in vector operations
a second of one core.

Helix (Section 5.2) profiles level 0 because out-of-order execution defies a formula, and models
every level above. A shipped default follows from the target's constants; :mod:`gtco.search.profile`
measures this machine's table once and caches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gtco.target import Target
from gtco.tensor.intrinsics.table import FMA_LATENCY, FmaTile


@dataclass(frozen=True)
class RateTable:
    """Measured rates by kernel name; names without one get the default formula."""

    target: Target
    measured: tuple[tuple[str, float], ...] = ()

    def rate(self, kernel: str) -> float:
        """Vector operations a second of one core."""
        found = self._known.get(kernel)
        if found is None:
            found = self._known[kernel] = default_rate(self.target, kernel)
        return found

    @cached_property
    def _known(self) -> dict[str, float]:
        """The measured rates, to which those by the formula come as they are asked for."""
        return dict(self.measured)


def default_rate(target: Target, kernel: str) -> float:
    """A micro-kernel's bounds: FMA ports, latency over independent chains, two loads a cycle."""
    if not kernel.startswith("fma:"):
        return target.frequency * target.fma_ports
    tile = FmaTile.parse(kernel.removeprefix("fma:"), target.lanes)
    cells = tile.rows * tile.vectors
    cycles = max(cells / target.fma_ports, FMA_LATENCY, (tile.rows + tile.vectors) / 2)
    return 0.98 * cells / cycles * target.frequency
