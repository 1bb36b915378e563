"""A finished tile of a contraction: epilogue and store, by rows or by columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from gtco.machine.target import CACHE_LINE
from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.stage import ITEM_BYTES

LINE = 16  # elements of a cache line, for the widest dtype that is stored


@dataclass(frozen=True)
class TileStore:
    """Writes finished tiles.

    - ``n``: columns of the product; the last panel may have fewer than the tile;
    - ``heights``: the numbers of rows that tiles have;
    - ``by_columns``: True if neighbours among rows, not columns, are neighbours in the output;
    - ``index``: the output's index of the product's element at (row, column).
    """

    em: Emitter
    tail: Epilogue
    reader: Reader
    output: Array
    tile: MicroKernel
    n: int
    heights: tuple[int, ...]
    by_columns: bool
    index: Callable[[Expr, Expr], list[Expr]]

    def write(self, tile: Array, panel: Expr, start: Expr, height: Expr) -> None:
        """Writes the tile of ``height`` rows from ``start`` and of a panel's columns."""
        columns = self.tile.columns
        rest, panels = self.n % columns, ceil(self.n / columns)
        store = self._columns if self.by_columns else self._rows

        def cut(width: int) -> Callable[[], None]:
            return lambda: store(tile, panel * columns, start, height, width)

        if rest == 0:
            cut(columns)()
        elif panels == 1:
            cut(rest)()
        else:
            self.em.branch(panel < panels - 1, cut(columns), cut(rest))

    def prefetch(self, panel: Expr, start: Expr, height: Expr) -> None:
        """Prefetches the lines of this tile that :meth:`write` will write, row by row. Each row
        lies in a page of its own, where no hardware prefetcher follows.
        """
        em, columns = self.em, self.tile.columns
        if self.by_columns:
            with em.loop(columns, "column") as j:
                self._prefetch(start, panel * columns + j)
        else:
            with em.loop(height, "row", rolled=not isinstance(height, int)) as i:
                m = em.let_index(start + i, "m")
                for j in range(0, columns, max(LINE, self.step(columns))):
                    self._prefetch(m, panel * columns + j)

    def _prefetch(self, m: Expr, n: Expr) -> None:
        self.reader.prefetch(self.tail, self.index(m, n), self.output)

    def _rows(self, tile: Array, column: Expr, start: Expr, height: Expr, width: int) -> None:
        """Writes row by row, with vectors along n."""
        em, step = self.em, self.step(width)
        with em.loop(height, "row", rolled=not isinstance(height, int)) as i:
            m = em.let_index(start + i, "m")
            for j in range(0, width, step):
                with em.vector(min(step, width - j)) as v:
                    self._element(tile, i, j + v, m, column + j + v)

    def step(self, width: int) -> int:
        """The columns of a tile, of ``width``, that are written at once: a vector or, from the tile
        unit, a cache line of an output of two bytes. On a Granite Rapids that made products of 1050
        and 197 rows 5 to 12 % faster: half as many stores miss L1.
        """
        line, lanes = CACHE_LINE // ITEM_BYTES[self.output.dtype], self.tile.lanes
        if not self.tile.kind.in_tiles or line != 2 * lanes or width % line:
            return lanes
        return line if self.output.shape[-1] % line == 0 else lanes

    def _columns(self, tile: Array, column: Expr, start: Expr, height: Expr, width: int) -> None:
        """Writes column by column, with vectors along m, if neighbours in m are neighbours in the
        output.
        """
        em = self.em

        def body(rows: int) -> Callable[[], None]:
            def emit() -> None:
                with em.loop(width, "column") as j:
                    for i in range(0, rows, LINE):
                        with em.vector(min(LINE, rows - i)) as v:
                            self._element(tile, i + v, j, start + i + v, column + j)

            return emit

        if len(self.heights) == 1:
            body(self.heights[0])()
        else:
            em.branch(height == self.heights[0], body(self.heights[0]), body(self.heights[1]))

    def _element(self, tile: Array, i: Expr, j: Expr, m: Expr, n: Expr) -> None:
        value = self.em.load(tile, [i, j])
        self.reader.finish(self.tail, self.index(m, n), value, self.output)
