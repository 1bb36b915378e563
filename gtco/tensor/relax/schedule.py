"""Simple schedules for the functions that TVM legalizes, so that LLVM's vectorizer finds contiguous
inner loops.

::

    producer; consumer               ->  consumer(producer)            # padding, transposes, casts
    for i, j, k: C[i, j] += A * B    ->  for i: C[i, :] = 0
                                         for i, k, j: C[i, j] += A * B      # B contiguous in j
    for i, j, k, l: C[i, j, k, l] =  ->  parallel for ij: for k, l: ...     # if it is alone
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir
from tvm.tirx import IterVar, analysis

TASKS = 64  # outer loops are fused until they have as many iterations
MOST_TASKS = 1024  # with more, a task is several iterations
LEAST_EXTENT = 4  # a shorter inner loop is not worth the memory traffic of its accumulators


def scheduled(module: Any, apart: bool = False) -> Any:
    """The module, with its function ``f`` rescheduled if TVM finds that legal. ``apart`` is for
    threads that each take one independent iteration, not for vectors.
    """
    schedule = s_tir.Schedule(module)
    try:
        root = schedule.get_sblock("root", func_name="f")
    except s_tir.ScheduleError:  # loops written by hand, without blocks
        return module
    for block in schedule.get_child_blocks(root):
        if schedule.get_consumers(block):
            _attempt(schedule.compute_inline, block)
    blocks = schedule.get_child_blocks(root)
    for block in [] if apart else blocks:
        _contiguous(schedule, block)
    if len(blocks) == 1 and len(schedule.get_child_blocks(root)) == 1:
        _parallel(schedule, blocks[0], apart)
    return schedule.mod


def _parallel(schedule: Any, block: Any, apart: bool) -> None:
    """Fuses the outermost loops of independent iterations into one parallel loop, which is then the
    only outermost one. The innermost loop is left for LLVM to vectorize, unless all are taken
    ``apart``.
    """
    axes, loops = schedule.get(block).iter_vars, schedule.get_loops(block)
    if len(axes) != len(loops):
        return
    chosen: list[Any] = []
    count = 1
    pairs = list(zip(axes, loops, strict=True))
    for axis, loop in pairs if apart else pairs[:-1]:
        if (count >= TASKS and not apart) or axis.iter_type != IterVar.DataPar:
            break
        chosen.append(loop)
        count *= int(axis.dom.extent)
    if count < 2:
        return
    outer = schedule.fuse(*chosen)
    if count > MOST_TASKS and not apart:
        outer, _ = schedule.split(outer, [MOST_TASKS, None])
    _attempt(schedule.parallel, outer)


def _attempt(primitive: Any, *args: Any) -> bool:
    try:
        primitive(*args)
        return True
    except s_tir.ScheduleError:  # not legal here
        return False


def _contiguous(schedule: Any, block: Any) -> None:
    """Moves a contraction's last output axis innermost, if operands are contiguous along it or do
    not have it.
    """
    statement, loops = schedule.get(block), schedule.get_loops(block)
    axes = list(statement.iter_vars)
    if len(axes) != len(loops):
        return
    spatial = [i for i, v in enumerate(axes) if v.iter_type == IterVar.DataPar]
    reduced = [i for i, v in enumerate(axes) if v.iter_type == IterVar.CommReduce]
    if not spatial or not reduced or int(axes[spatial[-1]].dom.extent) < LEAST_EXTENT:
        return
    inner = axes[spatial[-1]].var
    written = statement.writes[0].region
    if not written or not _uses(written[-1].min, inner):
        return
    contiguous = False
    for read in statement.reads:
        where = [_uses(r.min, inner) for r in read.region]
        if any(where[:-1]):
            return
        contiguous |= bool(where) and where[-1]
    if not contiguous:
        return
    if _attempt(schedule.reorder, *(loops[i] for i in reduced), loops[spatial[-1]]):
        _attempt(schedule.decompose_reduction, block, loops[reduced[0]])


def _uses(expr: Any, var: Any) -> bool:
    return any(v.same_as(var) for v in analysis.undefined_vars(expr, []))
