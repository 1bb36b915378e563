"""What is tried in the place of a pick for GPUs whose kernel spills.

A price reckons with registers, and the compiler now and then needs more of them than a thread can
have. What it spills then is on its way to memory and back in every step, which is in no price.
"""

from __future__ import annotations

from typing import Any

from gtco.search.recorded import RecordedPolicy
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

TRIED = 3  # a compile each
LOOKED_AT = 100  # of the configs of least predicted time
# times a pick's predicted time: a few bytes that are spilled outside of a loop do not cost as much
SLOWER = 1.25


def stand_ins(policy: RecordedPolicy, stage: Stage, pick: Pick) -> list[Pick]:
    """The stage's configs of least predicted time that are reckoned with fewer registers a thread
    than the pick, each with fewer than the one before. None for a pick that was measured as it is.
    """
    known = policy.known(stage)
    if any(record.parsed == pick.config for record in known):
        return []
    wrong = {record.parsed for record in known if record.outcome == "wrong"}
    found, least = list[Pick](), _registers(pick)
    for other in policy.best(stage, LOOKED_AT):
        if other.seconds > SLOWER * pick.seconds or len(found) == TRIED:
            break
        if other.config not in wrong and _registers(other) < least:
            found.append(other)
            least = _registers(other)
    return found


def _registers(pick: Pick) -> int:
    launch: Any = pick.sketch.workload(pick.config)
    return int(launch.registers)
