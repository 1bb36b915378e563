"""How much measuring a compile may do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """At most so many rounds, which begin within so many seconds."""

    rounds: int
    seconds: float


EFFORTS = {"quick": Effort(2, 10.0), "full": Effort(20, 600.0)}
