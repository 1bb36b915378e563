"""Configs that are tried in place of a pick for GPUs whose kernel spills.

A price counts registers, but the compiler sometimes needs more of them than a thread can have. The
values that it spills go to memory and back in every step, and no price contains this.
"""

from __future__ import annotations

from typing import Any

from gtco.search.recorded import RecordedPolicy
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

TRIED = 3  # each takes a compile
LOOKED_AT = 100  # configs of least predicted time
# Times the pick's predicted time: a few bytes that are spilled outside a loop cost less than that.
SLOWER = 1.25


def stand_ins(policy: RecordedPolicy, stage: Stage, pick: Pick) -> list[Pick]:
    """The stage's configs of least predicted time that should need fewer registers per thread than
    the pick, each with fewer than the one before. None for a pick that was measured with this
    kernel.
    """
    if any(record.parsed == pick.config for record in policy.known(stage)):
        return []
    found, least = list[Pick](), _registers(pick)
    for other in policy.best(stage, LOOKED_AT):
        if other.seconds > SLOWER * pick.seconds or len(found) == TRIED:
            break
        if _registers(other) < least:
            found.append(other)
            least = _registers(other)
    return found


def _registers(pick: Pick) -> int:
    launch: Any = pick.sketch.workload(pick.config)
    return int(launch.registers)
