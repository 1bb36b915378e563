"""The cuts of rows and columns of a contraction into tasks, panels and blocks of two heights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.contraction import Contraction
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.intrinsics.tiles import serves


@dataclass(frozen=True)
class TaskShape:
    """The cut of rows and panels: ``blocks`` row blocks, of which the first ``taller`` are ``more``
    rows higher than ``height``.
    """

    blocks: int
    height: int
    taller: int
    task_blocks: int
    panels: int
    task_panels: int
    chunks_m: int
    chunks_n: int
    tasks: int
    more: int = 1

    @cached_property
    def task_rows(self) -> int:
        """The most rows of a task."""
        return self.rows(self.task_blocks)

    def rows(self, blocks: int) -> int:
        """The most rows of ``blocks`` blocks."""
        return blocks * self.height + min(self.taller, blocks) * self.more

    def covered(self, tile: MicroKernel, blocks: int) -> int:
        """The most rows for which the instructions of ``blocks`` blocks are executed."""
        top, *low = map(tile.covered, self.heights)
        taller = min(self.taller, blocks) if low else blocks
        return taller * top + sum(low) * (blocks - taller)

    def configurations(self, tile: MicroKernel, tasks: int, lasts: int) -> int:
        """How often so many tasks configure the tile unit: at the begin of each and, if the last
        block of rows needs another configuration, before and after each of the ``lasts`` times that
        it is multiplied.
        """
        if not tile.kind.in_tiles:
            return 0
        top, *low = self.heights
        return tasks + (0 if all(serves(top, h) for h in low) else 2 * lasts)

    def first_row(self, block: Expr) -> Expr:
        """The row at which a block starts."""
        start = block * self.height
        if self.taller == 0:
            return start
        taller = tirx.min(block, self.taller)
        return start + (taller if self.more == 1 else taller * self.more)

    def share(self, first: Expr) -> Expr:
        """Blocks of the task that starts at ``first``."""
        whole = self.blocks % self.task_blocks == 0
        return self.task_blocks if whole else tirx.min(self.task_blocks, self.blocks - first)

    def pieces(self, em: Emitter, task: Expr) -> tuple[Expr, Expr, Expr, Expr, Expr]:
        """The parts of a task: its batch, its first row block and their number, its first panel and
        their number.
        """
        em.bind(task, self.tasks)
        chunk_n = em.let_index(task % self.chunks_n, "chunk_n")
        rest = em.let_index(task // self.chunks_n, "rest")
        chunk_m = em.let_index(rest % self.chunks_m, "chunk_m")
        batch = em.let_index(rest // self.chunks_m, "batch")
        first_block = em.let_index(chunk_m * self.task_blocks, "first_block")
        blocks = em.let_index(self.share(first_block), "blocks")
        first_panel = em.let_index(chunk_n * self.task_panels, "first_panel")
        panels: Expr = self.task_panels
        if self.panels % self.task_panels:
            left = self.panels - first_panel
            panels = em.let_index(tirx.min(self.task_panels, left), "panels")
        return batch, first_block, blocks, first_panel, panels

    @property
    def heights(self) -> tuple[int, ...]:
        if self.taller in (0, self.blocks):
            return (self.height + (self.more if self.taller else 0),)
        return self.height + self.more, self.height


def task_shape(view: Contraction, tile: MicroKernel, chunks_m: int, chunks_n: int) -> TaskShape:
    chunks = chunks_m, chunks_n
    return cut(view.batch, view.m, view.n, tile.rows, tile.columns, *chunks, tile.kind.height > 1)


@lru_cache(maxsize=4096)  # a ranking needs each cut many times
def cut(
    batch: int,
    m: int,
    n: int,
    rows: int,
    columns: int,
    chunks_m: int,
    chunks_n: int,
    full: bool = False,
) -> TaskShape:
    """The cut into blocks of at most ``rows`` by ``columns``. Blocks of rows have two neighbouring
    heights, or, if ``full``, all but the last have ``rows``: where instructions multiply several
    rows at once, a lower block may take as long.
    """
    blocks, more = ceil(m / rows), 1
    height, taller = divmod(m, blocks)
    if full and blocks > 1:
        height = m - (blocks - 1) * rows
        more, taller = rows - height, blocks - 1 if height < rows else 0
    panels = ceil(n / columns)
    task_blocks, task_panels = ceil(blocks / chunks_m), ceil(panels / chunks_n)
    chunks_m, chunks_n = ceil(blocks / task_blocks), ceil(panels / task_panels)
    return TaskShape(
        blocks,
        height,
        taller,
        task_blocks,
        panels,
        task_panels,
        chunks_m,
        chunks_n,
        batch * chunks_m * chunks_n,
        more,
    )
