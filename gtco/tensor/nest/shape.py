"""The cuts of rows and columns of a contraction into tasks, panels and blocks of two heights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.contraction import Contraction
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.intrinsics.tiles import serves


@dataclass(frozen=True)
class Task:
    """The part of C that a task computes: its batch, and from where on how many lines, blocks of
    rows in each of them, and panels it has.
    """

    batch: Expr
    first_line: Expr
    lines: Expr
    first_block: Expr
    blocks: Expr
    first_panel: Expr
    panels: Expr


@dataclass(frozen=True)
class TaskShape:
    """The cut of rows and panels: ``blocks`` row blocks, of which the first ``taller`` are ``more``
    rows higher than ``height``. Rows may lie in several ``lines``, each of which is cut like that;
    a task has up to ``task_lines`` of them.
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
    lines: int = 1
    task_lines: int = 1

    @cached_property
    def task_rows(self) -> int:
        """The most rows of a task."""
        return self.task_lines * self.rows(self.task_blocks)

    def rows(self, blocks: int) -> int:
        """The most rows of ``blocks`` blocks of a line."""
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

    def task(self, em: Emitter, number: Expr) -> Task:
        """The part of a task."""
        em.bind(number, self.tasks)
        chunk_n = em.let_index(number % self.chunks_n, "chunk_n")
        rest = em.let_index(number // self.chunks_n, "rest")
        chunk_m = em.let_index(rest % self.chunks_m, "chunk_m")
        batch = em.let_index(rest // self.chunks_m, "batch")
        groups = ceil(self.lines / self.task_lines)
        first_line = em.let_index(batch % groups * self.task_lines, "first_line")
        batch = em.let_index(batch // groups, "batch")
        lines = em.let_index(_up_to(self.task_lines, self.lines, first_line), "lines")
        first_block = em.let_index(chunk_m * self.task_blocks, "first_block")
        blocks = em.let_index(_up_to(self.task_blocks, self.blocks, first_block), "blocks")
        first_panel = em.let_index(chunk_n * self.task_panels, "first_panel")
        panels = em.let_index(_up_to(self.task_panels, self.panels, first_panel), "panels")
        return Task(batch, first_line, lines, first_block, blocks, first_panel, panels)

    def by_height(self, em: Emitter, block: Expr, body: Callable[[int], None]) -> None:
        """Emits ``body`` of the number of rows that a block has."""
        tall, *low = self.heights
        if low:
            em.branch(block < self.taller, partial(body, tall), partial(body, *low))
        else:
            body(tall)

    @property
    def heights(self) -> tuple[int, ...]:
        """The numbers of rows that blocks have, the larger one first."""
        if self.taller in (0, self.blocks):
            return (self.height + (self.more if self.taller else 0),)
        return self.height + self.more, self.height


def _up_to(most: int, whole: int, first: Expr) -> Expr:
    """The pieces of ``whole`` from ``first`` on, at most ``most`` of them."""
    return most if whole % most == 0 else tirx.min(most, whole - first)


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
    lines: int = 1,
    task_lines: int = 1,
) -> TaskShape:
    """The cut into blocks of at most ``rows`` by ``columns`` of ``lines`` of ``m`` rows. Blocks of
    rows have two neighbouring heights, or, if ``full``, all but the last have ``rows``: where
    instructions multiply several rows at once, a lower block may take as long.
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
        batch * ceil(lines / task_lines) * chunks_m * chunks_n,
        more,
        lines,
        task_lines,
    )
