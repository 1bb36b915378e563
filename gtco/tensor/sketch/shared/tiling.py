"""The cuts of rows and columns of a contraction into tasks, panels and blocks of two heights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.contraction import Contraction
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.space import Decision


@dataclass(frozen=True)
class TaskShape:
    """The cut of rows and panels: ``blocks`` row blocks, of which the first ``taller`` are one row
    higher than ``height``.
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

    @cached_property
    def task_rows(self) -> int:
        """The most rows of a task."""
        return self.rows(self.task_blocks)

    def rows(self, blocks: int) -> int:
        """The most rows of ``blocks`` blocks."""
        return blocks * self.height + min(self.taller, blocks)

    def first_row(self, block: Expr) -> Expr:
        """The row at which a block starts."""
        start = block * self.height
        return start if self.taller == 0 else start + tirx.min(block, self.taller)

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
            return (self.height + (self.taller > 0),)
        return self.height + 1, self.height


def task_shape(view: Contraction, tile: MicroKernel, chunks_m: int, chunks_n: int) -> TaskShape:
    return _task_shape(view.batch, view.m, view.n, tile.rows, tile.columns, chunks_m, chunks_n)


@lru_cache(maxsize=4096)  # a ranking needs each cut many times
def _task_shape(
    batch: int, m: int, n: int, rows: int, columns: int, chunks_m: int, chunks_n: int
) -> TaskShape:
    blocks = ceil(m / rows)
    height, taller = divmod(m, blocks)
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
    )


def tile_options(rows: Sequence[MicroKernel], height: int, width: int) -> list[MicroKernel]:
    """The ``rows`` worth trying for a product of ``height`` x ``width``: those of full height, or
    of the height that cuts it into equal blocks.
    """
    best: dict[tuple[str, int, int], MicroKernel] = {}
    for tile in rows:
        if tile.rows <= height and (tile.vectors - 1) * tile.lanes < width:
            # tallest first; equal numbers of blocks give the same program
            best.setdefault((tile.kind.name, tile.vectors, ceil(height / tile.rows)), tile)
    chosen = [t for t in best.values() if t.rows * t.vectors >= 8 or t.rows >= height // 2]
    return chosen or [min(best.values(), key=lambda t: -t.rows * t.vectors)]


def tile_decision(tiles: Sequence[MicroKernel], columns: int = 0) -> Decision:
    """The choice of a micro-kernel. If ``columns`` is given, its copies are laid over them side by
    side, and may cover more than there are.
    """
    kernels = []
    for tile in tiles:
        covered = ceil(columns / tile.columns) * tile.columns
        useful = columns / covered if columns else 1.0
        kernels.append((tile.kernel, tile.kind.products * useful))
    names = tuple(tile.name for tile in tiles)
    return Decision("tile", "micro-kernel", names, tuple(kernels))


def chunk_options(pieces: int, cores: int) -> tuple[int, ...]:
    """Numbers of chunks: one, and multiples of the core count. The largest chunk is rounded up, so
    only few numbers differ.
    """
    wanted = [1, *(cores * f for f in (1, 2, 3, 4, 6, 8, 16, 32, 64))]
    return tuple(sorted({ceil(pieces / ceil(pieces / min(w, pieces))) for w in wanted}))
