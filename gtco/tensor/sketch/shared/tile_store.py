"""A finished tile of a contraction: epilogue and store, by rows or by columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.intrinsics.table import MicroKernel

LINE = 16  # elements of a cache line, of the widest that are stored


@dataclass(frozen=True)
class TileStore:
    """What writing a tile takes. ``n``: columns of the product, of which the last panel may have
    fewer than the tile; ``heights``: rows that tiles have; ``by_columns``: neighbours among rows,
    not columns, are neighbours in the output; ``index``: the product's element at (row, column).
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
        """The tile of ``height`` rows from ``start`` and of a panel's columns."""
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
        """Ask for the lines that :meth:`write` will take of this tile, row by row: each lies in a
        page of its own, where no hardware prefetcher follows.
        """
        em, columns = self.em, self.tile.columns
        if self.by_columns:
            with em.loop(columns, "column") as j:
                self._prefetch(start, panel * columns + j)
        else:
            with em.loop(height, "row") as i:
                m = em.let_index(start + i, "m")
                for j in range(0, columns, LINE):
                    self._prefetch(m, panel * columns + j)

    def _prefetch(self, m: Expr, n: Expr) -> None:
        self.reader.prefetch(self.tail, self.index(m, n), self.output)

    def _rows(self, tile: Array, column: Expr, start: Expr, height: Expr, width: int) -> None:
        """Row by row, vectors along n."""
        em, lanes = self.em, self.tile.lanes
        with em.loop(height, "row") as i:
            m = em.let_index(start + i, "m")
            for j in range(0, width, lanes):
                with em.vector(min(lanes, width - j)) as v:
                    self._element(tile, i, j + v, m, column + j + v)

    def _columns(self, tile: Array, column: Expr, start: Expr, height: Expr, width: int) -> None:
        """Column by column, vectors along m, where neighbours in m are neighbours in the output."""
        em = self.em

        def body(rows: int) -> Callable[[], None]:
            def emit() -> None:
                with em.loop(width, "column") as j, em.vector(rows) as v:
                    self._element(tile, v, j, start + v, column + j)

            return emit

        if len(self.heights) == 1:
            body(self.heights[0])()
        else:
            em.branch(height == self.heights[0], body(self.heights[0]), body(self.heights[1]))

    def _element(self, tile: Array, i: Expr, j: Expr, m: Expr, n: Expr) -> None:
        value = self.em.load(tile, [i, j])
        self.reader.finish(self.tail, self.index(m, n), value, self.output)
