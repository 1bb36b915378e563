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
    rows higher than ``height``. The last one may begin ``again`` rows earlier, inside of the one
    before, so that it is as high as the instructions that multiply it. Its sums of these rows are
    dropped. Rows may lie in several ``lines``, each of which is cut like that; a task has up to
    ``task_lines`` of them.
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
    again: int = 0

    @cached_property
    def task_rows(self) -> int:
        """The most rows of a task."""
        return self.task_lines * self.rows(self.task_blocks)

    def rows(self, blocks: int) -> int:
        """The most rows of ``blocks`` blocks of a line."""
        return min(blocks * self.height + min(self.taller, blocks) * self.more, self._line)

    @cached_property
    def _line(self) -> int:
        """The rows of a line."""
        return self.blocks * self.height + self.taller * self.more - self.again

    @cached_property
    def even(self) -> float:
        """The blocks and panels of an average task, as a share of those of the largest."""
        blocks = self.blocks * self.lines / self.chunks_m / ceil(self.lines / self.task_lines)
        panels = self.panels / self.chunks_n
        return blocks / (self.task_blocks * self.task_lines) * panels / self.task_panels

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
        start = self._rows_before(block)
        return tirx.min(start, self._line - self.heights[-1]) if self.again else start

    def end_row(self, block: Expr) -> Expr:
        """The row at which the blocks before this one end."""
        end = self._rows_before(block)
        return tirx.min(end, self._line) if self.again else end

    def dropped(self, block: Expr) -> Expr:
        """The number of a block's rows, the first ones, that the block before it finishes."""
        return tirx.Select(block == self.blocks - 1, self.again, 0) if self.again else 0

    def finished(self, block: Expr) -> Expr:
        """The number of rows of C that a block finishes: one of ``finished_heights``."""
        tall, *low = self.finished_heights
        taller = self.blocks - 1 if self.again else self.taller
        return tirx.Select(block < taller, tall, *low) if low else tall

    def _rows_before(self, block: Expr) -> Expr:
        """The rows of all blocks before this one, as if none began in another one."""
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

    @property
    def finished_heights(self) -> tuple[int, ...]:
        """The numbers of rows of C that blocks finish, the larger one first."""
        tall, low = self.heights[0], self.heights[-1]
        return (tall, low - self.again) if self.again else self.heights


def _up_to(most: int, whole: int, first: Expr) -> Expr:
    """The pieces of ``whole`` from ``first`` on, at most ``most`` of them."""
    return most if whole % most == 0 else tirx.min(most, whole - first)


def task_shape(view: Contraction, tile: MicroKernel, chunks_m: int, chunks_n: int) -> TaskShape:
    chunks = chunks_m, chunks_n
    size = view.batch, view.m, view.n
    return cut(*size, tile.rows, tile.columns, *chunks, tile.kind.height > 1, unit=unit_of(tile))


def unit_of(tile: MicroKernel) -> int:
    """The multiple of rows that a nest's blocks have. Instructions of the tile unit take as long
    for fewer rows, and a configuration for them takes as long as ten products.
    """
    return tile.kind.height if tile.kind.in_tiles else 1


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
    unit: int = 1,
) -> TaskShape:
    """The cut into blocks of at most ``rows`` by ``columns`` of ``lines`` of ``m`` rows. Blocks of
    rows have two neighbouring heights, or, if ``full``, all but the last have ``rows``: where
    instructions multiply several rows at once, a lower block may take as long. The last of several
    ``full`` blocks then has a multiple of ``unit`` rows.
    """
    blocks, more, again = ceil(m / rows), 1, 0
    height, taller = divmod(m, blocks)
    if full and blocks > 1:
        height = m - (blocks - 1) * rows
        again = -height % unit
        height += again
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
        again,
    )
