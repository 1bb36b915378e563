"""Folding rows into one value each, in vectors and through several accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from gtco.tensor.emit import Array, Emitter, Expr

Combine = Callable[[Expr, Expr], Expr]
Over = Callable[[Callable[[Expr], None]], None]

# Independent chains: an addition's latency x vectors a cycle, in few registers; of one row, and of
# all rows together.
ACCUMULATORS, ALL_ACCUMULATORS = 4, 8


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
    return fold_rows(em, 1, length, lambda r, j: value(j), combine, start, over)


def fold_rows(
    em: Emitter,
    rows: int,
    length: int,
    value: Callable[[int, Expr], Expr],
    combine: Combine,
    start: float,
    over: Over | None = None,
) -> Expr:
    """``value(r, 0)`` to ``value(r, length - 1)`` combined, for ``rows`` rows side by side (1, 2 or
    4): a vector of as many lanes, of one row a scalar.

    The rows' chains hide each other's latency, and their lanes are folded together.
    """
    lanes = em.lanes
    chains = min(ACCUMULATORS, ALL_ACCUMULATORS // rows, length // lanes)
    acc = em.registers(rows * max(chains, 1) * lanes)
    odd = em.registers(rows * lanes) if length % lanes else None
    for c in range(rows * chains):
        em.store_vector(acc, [c * lanes], em.splat(start))
    if odd is not None:
        for r in range(rows):
            em.store_vector(odd, [r * lanes], em.splat(start))

    def into(register: Array, chain: int, chains: int, begin: Expr, width: int) -> None:
        for r in range(rows):
            with em.vector(width) as lane:
                at = (r * chains + chain) * lanes
                held = em.load(register, [at + lane])
                em.store(register, [at + lane], combine(held, value(r, begin + lane)))

    def row() -> None:
        groups, rest = divmod(length // lanes, max(chains, 1))
        with em.loop(groups, "group") as group:
            for c in range(chains):
                into(acc, c, chains, (group * chains + c) * lanes, lanes)
        for c in range(rest):
            into(acc, c, chains, (groups * chains + c) * lanes, lanes)
        if odd is not None:
            into(odd, 0, 1, length // lanes * lanes, length % lanes)

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
    return em.reduce_vector(_stacked(em, folded, combine), combine, left=rows)


def by_pairs(em: Emitter, values: Sequence[Expr], combine: Combine) -> Expr:
    """All values combined in short chains: neighbours first, then what they make."""
    left = list(values)
    while len(left) > 1:
        pairs = [left[i : i + 2] for i in range(0, len(left), 2)]
        left = [em.let(combine(*pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return left[0]


def _stacked(em: Emitter, vectors: list[Expr], combine: Combine) -> Expr:
    """Vectors of one row each, one or 2 or 4, folded into one whose lanes are the rows' parts in
    turn: r0 r1 r2 r3 r0 r1 ... What moves stays within its 128 bits, where that is cheap.
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
