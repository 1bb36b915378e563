"""Mean and variance of columns side by side, and of a long row, with each element read once. Blocks
of rows are taken about a value between two of their rows, and merged exactly (Chan, Golub and
LeVeque, 1983).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.fold import ACCUMULATORS, add, fold
from gtco.tensor.sketch.shared.columns import ColumnChunk

# Rows of a block. The sum of squared distances from a value, less the part of the mean's distance
# from it, loses at most a factor of the number of rows in accuracy, and only if that value is far
# from all of them. One row far from the others moves the middle of two rows half as far: a quarter
# of the loss.
ROWS = 64
WIDTH = ACCUMULATORS  # vectors of a row that is taken as columns
LEAST = 8  # least elements of such a column

Read = Callable[[Expr, int, Expr], Expr]  # (row, first column of the run, lane) -> value


def column_moments(chunk: ColumnChunk, rows: int, read: Read) -> tuple[Array, Array]:
    """Mean and variance of ``read(0 ...)`` to ``read(rows - 1 ...)`` for every column of the chunk.
    The code that ``read`` emits runs once for every element, and once more for two of a block's
    rows.
    """
    em, width = chunk.em, chunk.width
    blocks = ceil(rows / ROWS)
    block = ceil(rows / blocks)
    # all but the result is relative to the first row: a mean far from zero costs no digits
    origin, mean, squares = (em.registers(width) for _ in range(3))
    shift, total, squared = (em.registers(width) for _ in range(3))

    def start(begin: int, lane: Expr) -> None:
        em.store(origin, [begin + lane], read(0, begin, lane))
        for held in (mean, squares):
            em.store(held, [begin + lane], tirx.const(0.0, "float32"))

    def merge(first: Expr, count: int, share: Expr, weight: Expr) -> None:
        """Merges ``count`` rows from ``first`` on, which are ``share`` of all so far. ``weight`` is
        the weight of the squared distance of the means.
        """

        def begin_block(begin: int, lane: Expr) -> None:
            for held in (shift, total, squared):
                em.store(held, [begin + lane], tirx.const(0.0, "float32"))

        def add_half(r: Expr, begin: int, lane: Expr) -> None:
            x = read(r, begin, lane) * tirx.const(0.5, "float32")
            em.store(shift, [begin + lane], em.load(shift, [begin + lane]) + x)

        def add_row(r: Expr, begin: int, lane: Expr) -> None:
            at = [begin + lane]
            d = em.let(read(r, begin, lane) - em.load(shift, at), "d")
            em.store(total, at, em.load(total, at) + d)
            em.store(squared, at, em.load(squared, at) + d * d)

        def end_block(begin: int, lane: Expr) -> None:
            at = [begin + lane]
            sum_ = em.load(total, at)
            own = em.let(sum_ * tirx.const(1.0 / count, "float32"), "m")  # about the shift
            inside = em.load(squared, at) - sum_ * own
            middle = em.load(shift, at) - em.load(origin, at) + own
            distance = em.let(middle - em.load(mean, at), "d")
            apart = distance * distance * weight
            em.store(squares, at, em.load(squares, at) + inside + apart)
            em.store(mean, at, em.load(mean, at) + distance * share)

        chunk.each(begin_block)
        with em.loop(2, "r") as r:
            chunk.each(partial(add_half, first + r * (count // 2)))
        with em.loop(count, "r") as r:
            chunk.each(partial(add_row, first + r))
        chunk.each(end_block)

    chunk.each(start)
    with em.loop(rows // block, "block") as n:
        number = tirx.Cast("float32", n) if not isinstance(n, int) else tirx.const(n, "float32")
        share = em.let(tirx.const(1.0, "float32") / (number + tirx.const(1.0, "float32")))
        whole = tirx.const(block, "float32")
        merge(n * block, block, share, em.let(whole - whole * share))
    rest = rows % block
    if rest:
        shares = rest / rows, rest * (rows - rest) / rows
        merge(rows - rest, rest, *(tirx.const(s, "float32") for s in shares))

    def finish(begin: int, lane: Expr) -> None:
        at = [begin + lane]
        em.store(mean, at, em.load(origin, at) + em.load(mean, at))
        em.store(squares, at, em.load(squares, at) * tirx.const(1.0 / rows, "float32"))

    chunk.each(finish)
    return mean, squares


def row_moments(em: Emitter, length: int, read: Callable[[Expr], Expr]) -> tuple[Expr, Expr]:
    """Mean and variance of ``read(0)`` to ``read(length - 1)``. The row is cut into columns that
    are some vectors wide, and their moments are merged with those of the rest of the row, about
    their mean.
    """
    width = WIDTH * em.lanes
    rows, rest = divmod(length, width)
    chunk = ColumnChunk(em, (rows, width), [0], [0, 0], 0, width)

    def element(r: Expr, begin: int, lane: Expr) -> Expr:
        # one name: TVM does not always see that a sum's quotient and rest make the same sum again
        return read(em.let_index(r * width + begin, "at") + lane)

    means, variances = column_moments(chunk, rows, element)
    share = tirx.const(1.0 / width, "float32")
    mean = em.let(fold(em, width, lambda j: em.load(means, [j]), add, 0.0) * share, "mean")

    def spread(j: Expr) -> Expr:
        d = em.let(em.load(means, [j]) - mean, "d")
        return em.load(variances, [j]) + d * d

    variance = em.let(fold(em, width, spread, add, 0.0) * share, "variance")
    if not rest:
        return mean, variance

    def distance(j: Expr) -> Expr:
        return em.let(read(rows * width + j) - mean, "d")

    def square(j: Expr) -> Expr:
        d = distance(j)
        return d * d

    moved = em.let(fold(em, rest, distance, add, 0.0) * tirx.const(1.0 / length, "float32"), "m")
    squares = fold(em, rest, square, add, 0.0) * tirx.const(1.0 / length, "float32")
    whole = variance * tirx.const(rows * width / length, "float32")
    return em.let(mean + moved, "mean"), em.let(whole + squares - moved * moved, "variance")


def long_enough(length: int, lanes: int) -> bool:
    """True if merging columns costs little, compared with a row's second pass."""
    return length >= LEAST * WIDTH * lanes
