"""Folding rows into one value each, in vectors and through several accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from tvm import tirx

from gtco.tensor.emit.arithmetic import is_nan
from gtco.tensor.emit.emitter import Array, Emitter, Expr

Combine = Callable[[Expr, Expr], Expr]
Over = Callable[[Callable[[Expr], None]], None]

# Independent chains: the latency of an addition x vectors a cycle, in few registers; for one row,
# and for all rows together.
ACCUMULATORS, ALL_ACCUMULATORS = 4, 8


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def maximum(a: Expr, b: Expr) -> Expr:
    return tirx.max(a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    return tirx.min(a, b)


def combination(em: Emitter, kind: str) -> tuple[Combine, float]:
    """The combination of two elements, and its neutral value. NaN propagates through extremes, as
    in numpy.
    """
    if kind in ("sum", "mean"):
        return add, 0.0
    if kind == "prod":
        return (lambda a, b: a * b), 1.0
    choose = tirx.max if kind == "max" else tirx.min

    def extreme(a: Expr, b: Expr) -> Expr:
        a = em.let(a)
        return tirx.Select(is_nan(a), a, choose(a, b))

    return extreme, -inf if kind == "max" else inf


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
    folds one row; several rows are then folded into the one value.
    """
    return fold_rows(em, 1, length, lambda r, j: value(j), combine, start, over)


def fold_rows(
    em: Emitter,
    rows: int,
    length: int,
    value: Callable[[Expr, Expr], Expr],
    combine: Combine,
    start: float,
    over: Over | None = None,
    padded: bool = False,
    apart: int = 0,
    ahead: Callable[[Expr], None] | None = None,
) -> Expr:
    """``value(r, 0)`` to ``value(r, length - 1)`` combined, for ``rows`` rows side by side (1, 2 or
    4). The result is a vector of as many lanes, for one row a scalar. ``ahead(j)`` comes before
    each vector.

    The rows' chains hide each other's latency, and their lanes are folded together. A row's chains
    are one wide vector, which LLVM splits, so that the latency of ``value`` is hidden too.

    The last ``apart`` positions, each for all rows, are vectors of their own, in which r is the
    lane. One more vector takes the other positions that whole vectors leave. It begins so early
    that it ends with the row, so ``value`` is computed twice for some positions; or, if the row is
    ``padded``, it reaches beyond the row's end. Some of its lanes are not combined. Only a row that
    is shorter than a vector and not padded has a shorter vector.
    """
    assert not (apart and over)
    lanes = em.lanes
    whole, rest = divmod(length - apart, lanes)
    chains = min(ACCUMULATORS, ALL_ACCUMULATORS // rows, whole)
    groups, left = divmod(whole, max(chains, 1))
    short = bool(rest) and not (padded or whole)
    # few vectors are unrolled, and the first ones need not be combined with anything
    written_out = over is None and groups <= 2
    acc = em.registers(rows * max(chains, 1) * lanes)
    odd = em.registers(rows * lanes) if rest else None
    if not written_out:
        for c in range(rows * chains):
            em.store_vector(acc, [c * lanes], em.splat(start))
    if odd is not None and (over is not None or short):
        for r in range(rows):
            em.store_vector(odd, [r * lanes], em.splat(start))

    def into(begin: Expr, first: bool = False, wide: int = 1) -> None:
        if ahead is not None:
            for c in range(wide):
                ahead(begin + c * lanes)
        for r in range(rows):
            with em.vector(wide * lanes) as lane:
                at = [r * chains * lanes + lane]
                x = value(r, begin + lane)
                em.store(acc, at, x if first else combine(em.load(acc, at), x))

    def rest_into(register: Array) -> None:
        begin = whole * lanes if padded or short else length - apart - lanes
        if ahead is not None:
            ahead(begin)
        for r in range(rows):
            with em.vector(rest if short else lanes) as lane:
                at = [r * lanes + lane]
                x = value(r, begin + lane)
                if not short:
                    meant = lane < rest if padded else lane >= lanes - rest
                    x = tirx.Select(meant, em.let(x), tirx.const(start, "float32"))
                once = over is None and not short
                em.store(register, at, x if once else combine(em.load(register, at), x))

    def row() -> None:
        if written_out:
            for n in range(groups):
                into(n * chains * lanes, first=not n, wide=chains)
        elif groups:
            with em.loop(groups, "group") as group:
                into(group * chains * lanes, wide=chains)
        if left:
            into(groups * chains * lanes, wide=left)
        if odd is not None:
            rest_into(odd)

    if over is None:
        row()
    else:
        over(lambda _: row())
    folded = []
    for r in range(rows):
        vectors = [em.load_vector(acc, [(r * chains + c) * lanes]) for c in range(chains)]
        if odd is not None:
            vectors.append(em.load_vector(odd, [r * lanes]))
        folded.append(em.let(by_pairs(em, vectors, combine)))
    total = em.reduce_vector(_stacked(em, folded, combine), combine, left=rows)
    if apart:
        last = em.registers(apart * rows)
        for k in range(apart):
            with em.vector(rows) as lane:
                em.store(last, [k * rows + lane], value(lane, length - apart + k))
        parts = [em.load_vector(last, [k * rows], rows) for k in range(apart)]
        total = by_pairs(em, [em.let(total), *parts], combine)
    return total


def fold_vectors(
    em: Emitter, count: int, value: Callable[[Expr], Expr], combine: Combine, start: float
) -> Expr:
    """``value(0)`` to ``value(count - 1)``, explicit vectors, combined into one scalar, from
    ``start`` on.
    """
    lanes, chains = em.lanes, min(ACCUMULATORS, count)
    groups, left = divmod(count, chains)
    acc = em.registers(chains * lanes)
    for c in range(chains):
        em.store_vector(acc, [c * lanes], em.splat(start))

    def into(first: Expr, wide: int) -> None:
        for c in range(wide):
            at = [c * lanes]
            em.store_vector(acc, at, combine(em.load_vector(acc, at), value(first + c)))

    with em.loop(groups, "group") as group:
        into(group * chains, chains)
    into(groups * chains, left)
    vectors = [em.load_vector(acc, [c * lanes]) for c in range(chains)]
    return em.reduce_vector(by_pairs(em, vectors, combine), combine)


def by_pairs(em: Emitter, values: Sequence[Expr], combine: Combine) -> Expr:
    """All values combined in short chains: first neighbours, then their results."""
    left = list(values)
    while len(left) > 1:
        pairs = [left[i : i + 2] for i in range(0, len(left), 2)]
        left = [em.let(combine(*pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return left[0]


def _stacked(em: Emitter, vectors: list[Expr], combine: Combine) -> Expr:
    """Vectors of one row each (1, 2 or 4) folded into one, whose lanes are parts of the rows in
    turn: r0 r1 r2 r3 r0 r1 ... Values move only within 128 bits, where moving is cheap.
    """
    n = 1  # rows of a vector so far
    while len(vectors) > 1:
        first, second = (
            [
                block + half + lane // (2 * n) * n + lane % n + lane // n % 2 * em.lanes
                for block in range(0, em.lanes, 4)
                for lane in range(4)
            ]
            for half in (0, 2)
        )
        vectors = [
            em.let(combine(tirx.Shuffle([a, b], first), tirx.Shuffle([a, b], second)))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        n *= 2
    return vectors[0]
