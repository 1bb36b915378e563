"""What csrc/products/cut.c and csrc/products/products.c do, in Python: the numbers of a product's
loops, and packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from math import ceil

import numpy as np

from gtco.tensor.nest.open import FEW_COLUMNS, Cut, FewColumns, OpenNest

LINE = 16  # elements of a cache line
SETS = 256  # elements: rows that a multiple of 1 KiB apart share few sets of L1
FOLDING = 9  # multiply-adds that take as long as folding a vector


class Numbers(Cut):
    """With what follows from them."""

    @property
    def array(self) -> np.ndarray:
        """What a kernel reads."""
        return np.array(astuple(self), np.int64)

    @property
    def chunks_m(self) -> int:
        return ceil(self.blocks / self.task_blocks)

    @property
    def tasks(self) -> int:
        return self.chunks_m * self.chunks_n

    @property
    def workspace(self) -> int:
        """The bytes of scratch of a thread whose kernel packs A."""
        rows = self.held * (self.height + (self.taller > 0))
        return 4 * rows * self.lda


def cut(
    nest: OpenNest | FewColumns,
    m: int,
    n: int,
    k: int,
    *,
    chunks_m: int = 1,
    chunks_n: int = 1,
    kc: int | None = None,
    held: int | None = None,
    ahead: int = 0,
) -> Numbers:
    """C[m, n] = A[m, k] x B[k, n], cut into about so many chunks, blocks of ``kc`` steps of k and
    parts of ``held`` row blocks (None: all). Numbers that are too large are made smaller.
    ``ahead``: where B lies.
    """
    row = nest.row if isinstance(nest, OpenNest) else nest
    blocks, panels = ceil(m / row.rows), ceil(n / row.columns)
    height, taller = divmod(m, blocks)
    task_blocks = ceil(blocks / min(chunks_m, blocks))
    task_panels = ceil(panels / min(chunks_n, panels))
    depth = min(k, kc or k)
    return Numbers(
        n,
        k,
        depth,
        height,
        taller,
        blocks,
        task_blocks,
        panels,
        task_panels,
        ceil(panels / task_panels),
        min(held or task_blocks, task_blocks),
        depth + (LINE if depth % SETS == 0 else -depth % LINE),
        ahead,
    )


def along_k(n: int, k: int, lanes: int) -> bool:
    """True if vectors of a product with these sizes lie along k, whatever its rows: its sums and
    their folding take less than the steps of k of a panel.
    """
    return n <= FEW_COLUMNS and n * (k + FOLDING * lanes) < k * lanes


def packed_vectors(n: int, lanes: int, widths: Sequence[int]) -> int:
    """The panels of packed B: those of ``n`` columns, and so many more that the last tile of every
    width that is not wider than all columns reads inside.
    """
    vectors = ceil(n / lanes)
    return max(ceil(vectors / width) * width for width in widths if width <= vectors)


def pack(b: np.ndarray, lanes: int, widths: Sequence[int]) -> np.ndarray:
    """B[k, n] as kernels read it: in panels, [panel][k][lanes], or [n][k up to whole vectors]."""
    k, n = b.shape
    if along_k(n, k, lanes):
        turned = np.zeros((n, ceil(k / lanes) * lanes), np.float32)
        turned[:, :k] = b.T
        return turned
    panels = packed_vectors(n, lanes, widths)
    wide = np.zeros((k, panels * lanes), np.float32)
    wide[:, :n] = b
    return np.ascontiguousarray(wide.reshape(k, panels, lanes).transpose(1, 0, 2))
