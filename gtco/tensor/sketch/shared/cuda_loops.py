"""The loops of the memory-bound templates for GPUs (``device/gtco/rows.cuh``, ``columns.cuh``,
``window.cuh``, ``points.cuh``) as lines to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gtco.machine.gpu import WARP
from gtco.tensor.cuda.loops import Loops, read, written
from gtco.tensor.loops import BLOCKS, STEPS, THREADS, UNROLLED, Line
from gtco.tensor.stage import Operator, Stage

STATISTICS = {
    "softmax": ("largest", "sum of the exponentials"),
    "log_softmax": ("largest", "sum of the exponentials"),
    "layer_norm": ("mean", "variance"),
    "rms_norm": ("mean of the squares",),
    "merged_moments": ("mean", "variance"),
    "moments": ("mean and variance",),
}


@dataclass(frozen=True)
class Teams:
    """What threads share in a reduction.

    - ``count`` rows (or rows of columns), each of ``length`` positions;
    - ``team`` threads share a row or a column, and ``side`` of these lie side by side in a block;
    - ``vector`` neighbours are read at once;
    - ``held``: a thread keeps its part of the row in registers.
    """

    count: int
    length: int
    team: int
    side: int
    vector: int
    held: bool = False


def row_lines(stage: Stage, op: Operator, teams: Teams, wide: bool) -> tuple[Line, ...]:
    """The loops of ``rows.cuh`` and ``counts.cuh``. ``wide``: each position has a result."""
    t = teams
    loops, step = Loops(), t.team * t.vector
    pieces = ceil(t.length // t.vector / t.team)
    where = "by shuffles" if t.team <= WARP else "by shuffles and in shared memory"
    met = f" of the row's {t.team} threads, {where}" if t.team > 1 else ""
    each = f"{t.vector} neighbours by each thread" if t.vector > 1 else ""
    value = read(stage, op.inputs[0])
    statistics = STATISTICS.get(op.kind, (op.kind,))
    with loops.over("block", ceil(t.count / t.side), BLOCKS, f"{t.side} of {t.count} rows each"):
        with (
            loops.over("row", t.side, THREADS, "of the block"),
            loops.over("thread", t.team, THREADS, f"{t.length} positions of a row"),
        ):
            if t.held:
                with loops.over("piece", pieces, UNROLLED, each, step):
                    loops.says(f"{value} -> registers")
                loops.says(f"{', then '.join(statistics)}{met}")
            else:
                for statistic in statistics:
                    with loops.over("piece", pieces, STEPS, each, step):
                        loops.says(f"{value}; {statistic} so far")
                    if met:
                        loops.says(f"{statistic}{met}")
            if not wide:
                loops.says(written(stage, op.output, op.kind))
                return loops.lines
            with loops.over("piece", pieces, UNROLLED if t.held else STEPS, each, step):
                if not t.held:
                    loops.says(value)
                loops.says(written(stage, op.output, op.kind))
    return loops.lines


def column_lines(
    stage: Stage, op: Operator, teams: Teams, width: int, wide: bool
) -> tuple[Line, ...]:
    """The loops of ``columns.cuh``, over rows of ``width`` columns. ``wide``: each position has a
    result.
    """
    t = teams
    loops, chunk = Loops(), t.side * t.vector
    value = read(stage, op.inputs[0])
    cut = f"{min(chunk, width)} of {width} columns each"
    several = f"; {t.count} times" if t.count > 1 else ""
    positions = ceil(t.length / t.team)
    with loops.over("block", t.count * ceil(width / chunk), BLOCKS, f"{cut}{several}"):
        side = f"{t.vector} columns each" if t.vector > 1 else "a column each"
        share = f"of the {t.length} positions of a column"
        with (
            loops.over("column", t.side, THREADS, side, t.vector),
            loops.over("share", t.team, THREADS, share),
        ):
            for statistic in STATISTICS.get(op.kind, (op.kind,)):
                with loops.over("position", positions, step=t.team):
                    loops.says(f"{value}; {statistic} so far")
                if t.team > 1:
                    loops.says(f"{statistic} of the column's {t.team} threads, in shared memory")
            if wide:
                with loops.over("position", positions, step=t.team):
                    loops.says(value)
                    loops.says(written(stage, op.output, op.kind))
            else:
                loops.says(written(stage, op.output, op.kind))
    return loops.lines


def window_lines(
    stage: Stage,
    op: Operator,
    grid: tuple[int, int],
    strip: int,
    vector: int,
    inputs: int,
    kernel: Sequence[int],
    rows: int,
) -> tuple[Line, ...]:
    """The loops of ``window.cuh``.

    - ``grid``: blocks, and threads of one;
    - ``strip`` outputs below one another, of ``vector`` channels, are a thread's;
    - ``inputs``: channels of a group; ``kernel``: height and width of a window;
    - ``rows`` of the image are covered by a strip's windows.
    """
    loops, (high, wide) = Loops(), kernel
    channels = f"{vector} channels" if vector > 1 else "a channel"
    each = f"{strip} outputs below one another, of {channels}, by each"
    many = f"[{strip}, {vector}]" if strip * vector > 1 else ""
    with loops.over("block", grid[0], BLOCKS), loops.over("thread", grid[1], THREADS, each):
        with (
            loops.over("input", inputs, text="channels of a group"),
            loops.over("column", wide, UNROLLED if wide <= 7 else STEPS, "of taps"),
            loops.over("row", rows, UNROLLED if rows <= 32 else STEPS, "that a window covers"),
        ):
            if op.kind == "conv2d":
                last = f"sum{many} += x * weight, for each window that has the row among its {high}"
            else:
                last = f"{'largest' if op.kind == 'max_pool2d' else 'sum'}{many} so far"
            loops.says(f"{read(stage, op.inputs[0])}; {last}")
        loops.says(written(stage, op.output, "mean" if op.kind == "avg_pool2d" else op.kind))
    return loops.lines


def point_lines(
    stage: Stage, op: Operator, grid: tuple[int, int], taps: int, vector: int, repeat: int
) -> tuple[Line, ...]:
    """The loops of ``points.cuh``. A thread makes ``repeat`` vectors of channels of one position,
    each a sum over ``taps`` of the image; ``grid``: blocks, and threads of one.
    """
    loops = Loops()
    channels = f"{vector} channels" if vector > 1 else "a channel"
    each = "a position of the output by each"
    with loops.over("block", grid[0], BLOCKS), loops.over("thread", grid[1], THREADS, each):
        loops.says(f"rows, columns and weights of {taps} taps")
        with loops.over("vector", repeat, UNROLLED, f"{channels} each"):
            loops.says(f"{read(stage, op.inputs[0])}, at {taps} taps; their weighted sum")
            loops.says(written(stage, op.output, op.kind))
    return loops.lines
