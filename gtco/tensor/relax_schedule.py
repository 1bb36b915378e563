"""Simple schedules for what TVM legalizes: an injective block goes into its one consumer,
reductions go inside their outputs' row.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir


def scheduled(module: Any) -> Any:
    """The module with injective producers (padding, transposes, casts) computed where they are
    read.
    """
    schedule = s_tir.Schedule(module)
    root = schedule.get_sblock("root") if _has_blocks(schedule) else None
    if root is None:
        return module
    for block in schedule.get_child_blocks(root):
        if schedule.get_consumers(block):
            try:
                schedule.compute_inline(block)
            except s_tir.ScheduleError:
                # a reduction, or several consumers that read it in ways TVM does not follow
                continue
    return schedule.mod


def _has_blocks(schedule: Any) -> bool:
    try:
        return bool(schedule.get_child_blocks(schedule.get_sblock("root")))
    except Exception:
        return False
