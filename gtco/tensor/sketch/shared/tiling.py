"""The options of a contraction's cuts: micro-kernels, and numbers of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.space import Decision


def tile_options(rows: Sequence[MicroKernel], height: int, width: int) -> list[MicroKernel]:
    """The ``rows`` worth trying for a product of ``height`` x ``width``: those of full height, or
    of the height that cuts it into equal blocks.
    """
    best: dict[tuple[str, int, int], MicroKernel] = {}
    for tile in rows:
        if tile.rows - tile.kind.height < height and (tile.vectors - 1) * tile.lanes < width:
            # tallest first; equal numbers of blocks give the same program
            best.setdefault((tile.kind.name, tile.vectors, ceil(height / tile.rows)), tile)
    chosen = [t for t in best.values() if t.rows * t.vectors >= 8 or t.rows >= height // 2]
    return chosen or [min(best.values(), key=lambda t: -t.rows * t.vectors)]


def tile_decision(tiles: Sequence[MicroKernel], columns: int = 0, rows: int = 0) -> Decision:
    """The choice of a micro-kernel. If ``columns`` is given, its copies are laid over them side by
    side, and may cover more than there are. So may the rows of the tile unit, if ``rows`` is given.
    """
    kernels = []
    for tile in tiles:
        covered = ceil(columns / tile.columns) * tile.columns
        useful = columns / covered if columns else 1.0
        useful *= rows / tile.covered(rows) if rows else 1.0
        kernels.append((tile.kernel, tile.kind.products * useful))
    names = tuple(tile.name for tile in tiles)
    return Decision("tile", "micro-kernel", names, tuple(kernels))


def held_options(capacity: int, shares: Sequence[float], block: int, most: int) -> tuple[int, ...]:
    """Numbers of row blocks, of ``block`` bytes each, that take these shares of a cache; at most
    ``most``.
    """
    fitting = (max(1, int(share * capacity / block)) for share in shares)
    return tuple(sorted({min(n, most) for n in fitting}))


def chunk_options(pieces: int, cores: int) -> tuple[int, ...]:
    """Numbers of chunks: one, and multiples of the core count. The largest chunk is rounded up, so
    only few numbers differ.
    """
    wanted = [1, *(cores * f for f in (1, 2, 3, 4, 6, 8, 16, 32, 64))]
    return tuple(sorted({ceil(pieces / ceil(pieces / min(w, pieces))) for w in wanted}))
