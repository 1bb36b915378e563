"""The places of the extremes of columns, found in one pass: the best of each column so far and its
position are kept side by side.

A pass for the best and a second one for its place would read everything twice, from L2 or beyond.
The reduced positions of a column are often a power of two apart, and share a few sets of every
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from tvm import tirx

from gtco.tensor.emit.arithmetic import is_nan
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.sketch.shared.columns import ColumnChunk


def places(
    em: Emitter,
    groups: Sequence[ColumnChunk],
    count: int,
    read: Callable[[list[Expr]], Expr],
    largest: bool,
) -> list[Array]:
    """For each group of columns, the first of ``count`` positions (int32) that holds the largest or
    smallest value. ``read`` gives the value at an index. A NaN beats every number.
    """
    best = [em.registers(group.width) for group in groups]
    place = [em.registers(group.width, "int32") for group in groups]

    def start(k: int, begin: int, lane: Expr) -> None:
        em.store(best[k], [begin + lane], tirx.const(-inf if largest else inf, "float32"))
        em.store(place[k], [begin + lane], tirx.const(0, "int32"))

    def compare(k: int, r: Expr, begin: int, lane: Expr) -> None:
        column = [begin + lane]
        x = em.let(read(groups[k].at(r, begin, lane)))
        top = em.let(em.load(best[k], column))
        worse = x <= top if largest else x >= top
        better = em.let(tirx.And(tirx.Not(worse), tirx.Not(is_nan(top))))
        em.store(best[k], column, tirx.Select(better, x, top))
        here, before = r.astype("int32"), em.load(place[k], column)
        em.store(place[k], column, tirx.Select(better, here, before))

    for k, group in enumerate(groups):
        group.each(lambda begin, lane, k=k: start(k, begin, lane))  # type: ignore[misc]
    with em.loop(count, "r") as r:
        for k, group in enumerate(groups):
            group.each(lambda begin, lane, k=k: compare(k, r, begin, lane))  # type: ignore[misc]
    return place
