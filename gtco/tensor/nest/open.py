"""A product's loop nest whose sizes are arguments: one kernel for any M, N and K (Helix, Alg. 3).

::

    for task in chunks of rows x chunks of columns:            # parallel
      for part of `held` row blocks:
        for kb in blocks of k:
          pack A[rows of the part, kc]                         # or gather it from images
          for panel of the task's columns:
            for block of the part:
              C[height, columns] (+)= A[height, kc] x B[kc, columns]    # in registers

What is compiled is the register level: the columns of a tile, and a micro-kernel for every height
up to the row's. Rows are cut into blocks of two neighbouring heights, as in a nest of fixed sizes,
so any M runs without padding. All numbers of the loops above are an array of int64, which a
:class:`Cut` holds. Every size and place is int64, so no product is too large for its indices.

B lies in panels of one vector of columns, [panel][k][lanes], with zeros behind the last column.
Kernels of every width read the same panels, so weights are packed once for all M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from math import ceil

import numpy as np

from gtco.machine.target import Target
from gtco.support.errors import ShapeError
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels

LARGEST = 2**40  # the largest size; a tensor has 2^61 bytes at most: places in it are int64
LINE = 16  # elements of a cache line
SETS = 256  # elements: rows that a multiple of 1 KiB apart share few sets of L1
FEW_COLUMNS = 4  # the most columns of products whose vectors lie along k
FOLDING = 9  # multiply-adds that take as long as folding a vector
L3, MEMORY = 1, 2  # where B lies; in a nearer cache no kernel prefetches it
SUMS = 16  # vectors of sums of such a product, at most
# A's rows are read where they lie, copied to scratch, or gathered there from images; they are read
# in lines of images that are copied there; or they are tiles of minimal filtering. The order is
# that of csrc/products/table.h.
FEEDS = ("direct", "packed", "gathered", "lines", "filtered")


@dataclass(frozen=True)
class OpenNest:
    """The part of a product's nest that is compiled.

    - ``row``: the tallest micro-kernel; all lower ones of its width are compiled with it;
    - ``feed``: how A's rows come to lie as the row reads them, one of :data:`FEEDS`.
    """

    row: MicroKernel
    feed: str

    @property
    def direct(self) -> bool:
        """True if rows of A are read where they lie."""
        return self.feed == FEEDS[0]

    @property
    def packed(self) -> bool:
        """True if rows of A are copied to scratch."""
        return self.feed in FEEDS[1:3]

    @property
    def gathered(self) -> bool:
        """True if A's rows are windows of images (:mod:`gtco.tensor.nest.open_images`)."""
        return self.feed == FEEDS[2]

    @property
    def name(self) -> str:
        return f"{self.feed}_{self.row.rows}x{self.row.vectors}"


@dataclass(frozen=True)
class FewColumns:
    """The nest of so many ``columns`` whose vectors lie along k, for blocks of up to ``rows``
    (:mod:`gtco.tensor.nest.open_columns`).
    """

    rows: int
    columns: int
    lanes: int

    @property
    def name(self) -> str:
        return f"columns_{self.rows}x{self.columns}"


@dataclass(frozen=True)
class Cut:
    """The numbers of one product's loops, in the order in which a kernel reads them.

    Rows are ``blocks`` blocks, the first ``taller`` of ``height`` + 1 rows and the others of
    ``height``. ``panels`` are those of the row's width. A task has at most ``task_blocks`` by
    ``task_panels``. ``held`` blocks are worked on at once. ``lda`` is the stride of packed rows.
    ``ahead`` is where B comes from, for the prefetches of the first block of a part: :data:`L3`,
    :data:`MEMORY`, or 0 for a nearer place. ``past``: 1 if whole vectors of C are written past the
    caches. All of them begin with a line then, and k is one block.
    """

    n: int
    k: int
    kc: int
    height: int
    taller: int
    blocks: int
    task_blocks: int
    panels: int
    task_panels: int
    chunks_n: int
    held: int
    lda: int
    ahead: int
    past: int = 0

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


FIELDS = tuple(field.name for field in fields(Cut))


def check_sizes(m: int, n: int, k: int) -> None:
    """Raises :class:`ShapeError` for sizes of which there is no product."""
    for name, size in zip(("m", "n", "k"), (m, n, k), strict=True):
        if not 1 <= size <= LARGEST:
            raise ShapeError(
                f"{name}={size} is not a size of a product: sizes are from 1 to {LARGEST}"
            )


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
) -> Cut:
    """The cut of C[m, n] = A[m, k] x B[k, n] into about so many chunks, blocks of ``kc`` steps of k
    and parts of ``held`` row blocks (None: all). Numbers that are too large are made smaller.
    ``ahead``: where B lies.
    Raises :class:`ShapeError` for sizes that are not positive or too large.
    """
    check_sizes(m, n, k)
    row = nest.row if isinstance(nest, OpenNest) else nest
    blocks, panels = ceil(m / row.rows), ceil(n / row.columns)
    height, taller = divmod(m, blocks)
    task_blocks = ceil(blocks / min(chunks_m, blocks))
    task_panels = ceil(panels / min(chunks_n, panels))
    depth = min(k, kc or k)
    return Cut(
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


def nests(target: Target) -> tuple[OpenNest, ...]:
    """The kernels of the classes of float32 products and convolutions: for each width the tallest
    micro-kernel that the registers hold, with each feed.
    """
    tallest: dict[int, MicroKernel] = {}
    for row in micro_kernels(target):
        tallest.setdefault(row.vectors, row)
    return tuple(OpenNest(row, feed) for row in tallest.values() for feed in FEEDS)


def few_columns(target: Target) -> tuple[FewColumns, ...]:
    """The kernels of products of few columns: one for each number of them."""
    counts = range(1, FEW_COLUMNS + 1)
    return tuple(FewColumns(min(8, SUMS // n), n, target.lanes) for n in counts)


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
