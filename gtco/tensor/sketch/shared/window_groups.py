"""One row of a window's taps for narrow groups that mix their channels. A vector of outputs covers
several groups, and separates its input channels by shuffles.

::

    for input column: x = the input channels of the groups that the vector covers   # one load
    for j in a group's input channels:
      for input column, for (column, kw) that it serves:
        accumulators[column] += shuffle(x, "j-th channel of my group") * weight[kw, j]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr


def mix(
    em: Emitter,
    group: tuple[int, int],
    x: Callable[[int, Expr], Expr],
    weight: Callable[[int, Expr, int], Expr | None],
    combine: Callable[[Expr, Expr, Expr | None], Expr],
    taps: Sequence[int],
    serves: Mapping[int, list[tuple[int, int]]],
    first: Expr,
    acc: Array,
    lanes: int,
) -> None:
    """Emits ``lanes`` output channels from ``first``, a multiple of a group's outputs. ``x(p, c)``
    is the input at column p of the block, and ``weight(kw, c, j)`` the factor of output channel c
    for its group's input channel j.
    """
    inputs, outputs = group
    span = lanes // outputs * inputs
    c0 = em.index(tirx.floordiv(first, outputs) * inputs)
    held: dict[int, Callable[[int], Expr]] = {}
    for p in serves:
        read = em.registers(span)
        with em.vector(span) as lane:
            em.store(read, [lane], x(p, c0 + lane))
        held[p] = _spread(em, read, span, lanes, group)
    for j in range(inputs):
        weights: dict[int, Expr] = {}
        for kw in taps:
            factors = em.registers(lanes)
            with em.vector(lanes) as lane:
                em.store(factors, [lane], weight(kw, first + lane, j))
            weights[kw] = em.let(_lanes(em, factors, 0, lanes), "w")
        for p, users in sorted(serves.items()):
            value = em.let(held[p](j), "x")
            for o, kw in users:
                total = _lanes(em, acc, o * lanes, lanes)
                total = combine(total, value, weights[kw])
                if lanes == 1:
                    em.store(acc, [o], total)
                else:
                    em.store_vector(acc, [o * lanes], total, lanes)


def _lanes(em: Emitter, array: Array, at: int, lanes: int) -> Expr:
    """A vector, or a scalar if it has one lane."""
    return em.load(array, [at]) if lanes == 1 else em.load_vector(array, [at], lanes)


def _spread(
    em: Emitter, read: Array, span: int, lanes: int, group: tuple[int, int]
) -> Callable[[int], Expr]:
    """For every output lane, the j-th input channel of its group, out of ``span`` that were
    read.
    """
    if lanes == 1:
        return lambda j: em.load(read, [j])
    if span == 1:
        return lambda j: em.splat(em.load(read, [0]), lanes)
    inputs, outputs = group
    parts = [em.let(em.load_vector(read, [0], span), "x")] * ceil(lanes / span)

    def shuffled(j: int) -> Expr:
        """TVM's shuffle gives at most as many lanes as it takes, so it takes the vector several
        times.
        """
        return tirx.Shuffle(parts, [lane // outputs * inputs + j for lane in range(lanes)])

    return shuffled
