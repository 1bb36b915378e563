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

from dataclasses import dataclass, fields

from gtco.machine.target import Target
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels

FEW_COLUMNS = 4  # the most columns of products whose vectors lie along k
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
    """The numbers of one product's loops, in the order in which a kernel reads them. The library
    computes them (csrc/products/cut.c).

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


FIELDS = tuple(field.name for field in fields(Cut))


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
