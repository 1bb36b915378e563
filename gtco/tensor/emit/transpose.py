"""Moving elements between the lanes of vectors in registers, as shuffles of two operands."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr, lanes_of


def transpose(em: Emitter, rows: Sequence[Expr]) -> list[Expr]:
    """n vectors of n lanes (n a power of two) -> the n columns, by log2(n) rounds of two-operand
    shuffles.

    Round b exchanges, for rows i and i + b, the lanes that have bit b clear in one and set in the
    other.
    """
    n = len(rows)
    current = list(rows)
    b = 1
    while b < n:
        for i in range(n):
            if i & b:
                continue
            low, high = current[i], current[i + b]
            first = [lane if not lane & b else n + lane - b for lane in range(n)]
            second = [lane + b if not lane & b else n + lane for lane in range(n)]
            current[i] = em.let(tirx.Shuffle([low, high], first), "t")
            current[i + b] = em.let(tirx.Shuffle([low, high], second), "t")
        b *= 2
    return current


def weave(em: Emitter, vectors: Sequence[Expr]) -> list[Expr]:
    """p vectors of n lanes, a0 a1 ..., b0 b1 ..., ... -> a0 b0 ... a1 b1 ..., in p vectors of n."""
    p, n = len(vectors), lanes_of(vectors[0])
    if p == 1:
        return list(vectors)
    if p % 2 == 0:
        halves = zip(weave(em, vectors[::2]), weave(em, vectors[1::2]), strict=True)
        order = [lane for k in range(n) for lane in (k, n + k)]
        return [
            em.let(tirx.Shuffle([a, b], part), "w")
            for a, b in halves
            for part in (order[:n], order[n:])
        ]
    return [
        _choose(em, vectors, [((k * n + lane) % p, (k * n + lane) // p) for lane in range(n)])
        for k in range(p)
    ]


def pick(em: Emitter, array: Array, first: Expr, step: int, lanes: int) -> Expr:
    """The vector of every ``step``-th element of ``array`` from flat position ``first`` on. It
    reads nothing beyond the last of them.
    """
    reach = (lanes - 1) * step + 1
    starts = [*range(0, reach - lanes, lanes), reach - lanes]
    first = em.let_index(first, "first")
    vectors = [em.let(array.buffer[em.ramp(first + at, lanes)], "s") for at in starts]
    where = [min(lane * step // lanes, len(starts) - 1) for lane in range(lanes)]
    return _choose(em, vectors, [(v, k * step - starts[v]) for k, v in enumerate(where)])


def _choose(em: Emitter, vectors: Sequence[Expr], wanted: Sequence[tuple[int, int]]) -> Expr:
    """The vector of the ``wanted`` (vector, lane)."""
    n = len(wanted)
    first, *others = sorted({v for v, _ in wanted})
    chosen, done = vectors[first], {first}
    if not others:
        return em.let(tirx.Shuffle([chosen], [lane for _, lane in wanted]), "c")
    for turn, other in enumerate(others):
        here = [
            n + lane if v == other else (k if turn else lane) if v in done else 0
            for k, (v, lane) in enumerate(wanted)
        ]
        chosen = em.let(tirx.Shuffle([chosen, vectors[other]], here), "c")
        done.add(other)
    return chosen
