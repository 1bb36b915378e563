"""What every policy offers: configs of a sketch, best first. It neither builds nor measures."""

from __future__ import annotations

from typing import Protocol

from gtco.tensor.space import Config, Sketch


class Policy(Protocol):
    """Picks points in a sketch's space; all policies share the space."""

    def propose(self, sketch: Sketch, n: int) -> list[Config]:
        """Up to ``n`` different configs, the most promising first."""
        ...
