"""Emitting a row of the intrinsic table: a micro-kernel as TIR, its accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable

from gtco.tensor.emit import Emitter, Expr
from gtco.tensor.intrinsics.table import FmaTile


def fma_tile(
    em: Emitter,
    tile: FmaTile,
    depth: Expr,
    a: Callable[[int, Expr], Expr],
    b: Callable[[Expr, int], Expr],
    store: Callable[[int, int, Expr], None],
    *,
    load: Callable[[int, int], Expr] | None = None,
    first: Expr = True,
    step: Callable[[Expr], None] = lambda k: None,
    passes: int = 1,
    runs: Expr = 1,
) -> None:
    """C[rows, columns] = A[rows, depth] x B[depth, columns], plus C itself where ``load`` gives it.

    ``a(i, k)`` is a scalar of A; ``b(k, j)`` the vector of B that starts at column j; ``store(i, j,
    vector)`` and ``load(i, j)`` write and read C by vectors. With ``load``, C counts from zero
    where ``first`` holds. ``step(k)`` emits what else a step of k does, as a prefetch. ``passes``
    runs over k more than once, which only a measurement wants. With ``runs``, k is that many loops
    of ``depth`` steps, one behind the other: what is given a k may divide it by ``depth``.
    """
    lanes = tile.lanes
    acc = em.registers(tile.rows * tile.columns)
    cells = [
        (i, j * lanes, (i * tile.vectors + j) * lanes)
        for i in range(tile.rows)
        for j in range(tile.vectors)
    ]

    def clear() -> None:
        for _, _, at in cells:
            em.store_vector(acc, [at], em.splat(0.0))

    def resume() -> None:
        assert load is not None
        for i, j, at in cells:
            em.store_vector(acc, [at], load(i, j))

    if load is None:
        clear()
    else:
        em.branch(first, clear, resume)
    with em.loop(passes, "pass"), em.loop(runs, "run") as run, em.loop(depth, "k") as position:
        k = em.index(run * depth + position)
        step(k)
        vectors = [em.let(b(k, j * lanes), "b") for j in range(tile.vectors)]
        for i in range(tile.rows):
            value = em.let(em.splat(a(i, k)), "a")
            for j in range(tile.vectors):
                at = (i * tile.vectors + j) * lanes
                em.store_vector(acc, [at], em.load_vector(acc, [at]) + value * vectors[j])
    for i, j, at in cells:
        store(i, j, em.load_vector(acc, [at]))
