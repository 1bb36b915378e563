"""The innermost loop of a product whose sums end in an array, by whatever kind of row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.intrinsics import tiles
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.intrinsics.table import MicroKernel


@contextmanager
def prepared(em: Emitter, tile: MicroKernel, rows: int, before: int = 0) -> Iterator[None]:
    """Prepares for products of so many ``rows``, around all products of a kernel. Within, and for
    products of other rows, it prepares again; ``before`` are then the rows of the preparation
    around.
    """
    if not tile.kind.in_tiles:
        yield
        return
    with tiles.configured(em, rows, before):
        yield


def multiply(
    em: Emitter,
    tile: MicroKernel,
    depth: Expr,
    a: Operand,
    b: Operand,
    c: Array,
    *,
    first: Expr = True,
    step: Callable[[Expr], None] = lambda k: None,
    passes: int = 1,
    runs: Expr = 1,
) -> None:
    """c[rows, columns] = A[rows, depth] x B[depth, columns], plus ``c`` itself unless ``first``.

    The kernel is :func:`prepared` for these rows. The other arguments are those of
    :func:`gtco.tensor.intrinsics.emission.fma_tile`.
    """
    if tile.kind.in_tiles:
        tiles.multiply(em, tile, depth, a, b, c, first=first, step=step, passes=passes, runs=runs)
        return
    fma_tile(
        em,
        tile,
        depth,
        a,
        b,
        lambda i, j, vector: em.store_vector(c, [i, j], vector),
        load=None if first is True else lambda i, j: em.load_vector(c, [i, j]),
        first=first,
        step=step,
        passes=passes,
        runs=runs,
    )
