"""Folding a row into one value, in vectors and through several accumulators."""

from __future__ import annotations

from collections.abc import Callable

from gtco.tensor.emit import Array, Emitter, Expr

Combine = Callable[[Expr, Expr], Expr]
Over = Callable[[Callable[[Expr], None]], None]

ACCUMULATORS = 4  # independent chains: an addition's latency x vectors a cycle, in few registers


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def fold(
    em: Emitter,
    length: int,
    value: Callable[[Expr], Expr],
    combine: Combine,
    start: float,
    over: Over | None = None,
) -> Expr:
    """``value(0)`` to ``value(length - 1)`` combined into one scalar, from ``start`` on.

    ``value`` is emitted in vectorized loops. ``over(run)`` may emit loops around ``run``, which
    folds one row: several rows are then folded into the one value.
    """
    lanes = em.lanes
    chains = min(ACCUMULATORS, length // lanes)
    acc = em.registers(max(chains, 1) * lanes)
    odd = em.registers(lanes) if length % lanes else None
    for c in range(chains):
        em.store_vector(acc, [c * lanes], em.splat(start))
    if odd is not None:
        em.store_vector(odd, [0], em.splat(start))

    def into(register: Array, at: int, begin: Expr, width: int) -> None:
        with em.vector(width) as lane:
            held = em.load(register, [at + lane])
            em.store(register, [at + lane], combine(held, value(begin + lane)))

    def row() -> None:
        groups, rest = divmod(length // lanes, max(chains, 1))
        with em.loop(groups, "group") as group:
            for c in range(chains):
                into(acc, c * lanes, (group * chains + c) * lanes, lanes)
        for c in range(rest):
            into(acc, c * lanes, (groups * chains + c) * lanes, lanes)
        if odd is not None:
            into(odd, 0, length // lanes * lanes, length % lanes)

    if over is None:
        row()
    else:
        over(lambda _: row())
    vectors = [em.load_vector(acc, [c * lanes]) for c in range(chains)]
    if odd is not None:
        vectors.append(em.load_vector(odd, [0]))
    while len(vectors) > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [em.let(combine(*pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return em.reduce_vector(em.let(vectors[0]), combine)
