"""Winograd's minimal filtering for convolutions of any size (Lavin and Gray 2016): F(4 x 4, 3 x 3)
and F(2 x 2, 5 x 5) by one kernel.

::

    for task in chunks of tiles x chunks of columns:                   # parallel
      for part of `held` blocks of tiles:
        for tile: inputs[p, tile, channel] = (B^T x B)[p]              # p: 36 positions
        for panel of the task's columns:
          for p, for block of the part:
            products[p, height, columns] = inputs[p, height, :] x B[panel, p, :, columns]
          for tile: output = A^T products A                            # what lies inside

Both have tiles of six by six inputs and the same B^T; they differ in how A^T gathers the products,
and in the weights. The rows of the product are tiles. Weights are transformed when they are packed,
in double precision (csrc/products/convolutions.c), and lie as [vector of
columns][p][channel][lanes].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.filtering import TRANSFORMS, Transform
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.nest.open import FIELDS, OpenNest
from gtco.tensor.nest.open_images import WINDOW, copy_run
from gtco.tensor.nest.open_loops import LOAD, STORE, OpenLoops, Part, any_size, rolled

# Filters, by the window's width. Tiles of six inputs share their points.
FILTERS: Mapping[int, Transform] = {
    3: TRANSFORMS[4],
    5: Transform(2, TRANSFORMS[4].pairs, 5),
}
WIDTH = TRANSFORMS[4].width
POSITIONS = WIDTH**2
# Behind a window's numbers: outputs of a tile along an axis, tiles of an image, and how far apart
# the positions of transformed inputs and of products lie in scratch.
TILES = ("size", "tiles_h", "tiles_w", "plane_a", "plane_c")


def filtering_kernel(nest: OpenNest, symbol: str) -> Any:
    """The kernel ``symbol(a, b, numbers, out, workspace, begin, end)`` of a nest: the images, B in
    panels, the numbers of a cut and a window and those of :data:`TILES`, and the output. In the
    cut, rows are tiles and k is the channels.
    """
    numbers = len(FIELDS) + len(WINDOW) + len(TILES)
    return any_size(symbol, numbers, nest.row.lanes, lambda em, args: _Loops(nest, em, args).emit())


class _Loops(OpenLoops):
    """Scratch is the inputs, [p][tile][lda]; the products of a panel, [p][tile][columns]; and a
    tile at the border of an image, [row][column][channel].
    """

    def __init__(self, nest: OpenNest, em: Emitter, args: KernelArguments) -> None:
        super().__init__(nest.row.rows, em, args)
        self.row, self.lanes = nest.row, nest.row.lanes
        self.image = self.more((*WINDOW, *TILES))
        self.scratch = args.workspace.buffer
        self.products = em.let(self.image["plane_a"] * POSITIONS, "products")
        self.patch = em.let(self.products + self.image["plane_c"] * POSITIONS, "patch")

    def emit(self) -> None:
        em = self.em
        with self.each_part() as part:
            tiles = self.held(self.first_row(part.end) - part.row0, "tiles")
            with em.loop(tiles, "t") as t:
                self.transform_inputs(part.row0, t)
            with em.range(part.panel0, part.panels, "panel") as panel:
                with em.loop(POSITIONS, "p") as p:
                    with em.range(part.here, part.end, "block") as block:
                        self.heights(block, partial(self.variants, part, panel, p, block))
                with em.loop(tiles, "t") as t:
                    self.transform_products(part.row0, t, panel)

    def place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """The image of a tile, and the row and column of its first output."""
        of = self.image
        above = self.em.let(tirx.truncdiv(tile, of["tiles_w"]), "above")
        image = self.held(tirx.truncdiv(above, of["tiles_h"]), "image")
        row = self.held((above - image * of["tiles_h"]) * of["size"], "row")
        return image, row, self.held((tile - above * of["tiles_w"]) * of["size"], "column")

    # inputs ---------------------------------------------------------------------------------------
    def transform_inputs(self, row0: Expr, t: Expr) -> None:
        """inputs[p, t, c] = (B^T x B)[p] of the tile ``row0 + t``. A tile that lies partly outside
        is copied with zeros there before.
        """
        em, of = self.em, self.image
        image, row, column = self.place(row0 + t)
        y0 = self.held(row - of["padding"], "y0")
        x0 = self.held(column - of["padding"], "x0")
        line = self.held(of["image_w"] * of["channels"], "line")
        first_line = self.held(image * of["image_h"] + y0, "first_line")
        inside = tirx.all(
            y0 >= 0, y0 + WIDTH <= of["image_h"], x0 >= 0, x0 + WIDTH <= of["image_w"]
        )

        def whole() -> None:
            start = self.held(first_line * line + x0 * of["channels"], "start")
            self.transform_tile(t, self.args.inputs["a"].buffer, start, line)

        def border() -> None:
            run = self.held(of["channels"] * WIDTH, "run")
            at = self.held(x0 * of["channels"], "at")
            with em.loop(WIDTH, "i") as i:
                into = self.held(self.patch + i * run, "into")
                there = tirx.all(y0 + i >= 0, y0 + i < of["image_h"])
                copy_run(em, self, there, (first_line + i) * line, line, at, run, into)
            self.transform_tile(t, self.scratch, self.patch, run)

        em.branch(inside, whole, border)

    def transform_tile(self, t: Expr, source: Any, start: Expr, line: Expr) -> None:
        """``start`` is the place of the tile's first input, and ``line`` what rows are apart."""
        em, of, lanes = self.em, self.image, self.lanes
        channels = of["channels"]
        with em.loop(self.up(channels, tirx.const(lanes, "int64")), "v") as v:
            c = self.held(v * lanes, "c")
            count = em.let(self.count(channels - c), "count")

            def read(i: int, j: int) -> Expr:
                where = tirx.address_of(source[start + i * line + j * channels + c])
                return em.let(tirx.call_extern(f"float32x{lanes}", LOAD, where, count), "x")

            x = [[read(i, j) for j in range(WIDTH)] for i in range(WIDTH)]
            into = self.held(t * self.of["lda"] + c, "into")
            for i, made in enumerate(FILTERS[3].transformed(em, x)):
                for j, value in enumerate(made):
                    place = into + (i * WIDTH + j) * of["plane_a"]
                    T.buffer_store(self.scratch, value, [tirx.Ramp(place, 1, lanes)])

    # products -------------------------------------------------------------------------------------
    def variants(self, part: Part, panel: Expr, p: Expr, block: Expr, rows: int) -> None:
        """The product of a block."""
        product = partial(self.product, part, panel, p, block, rows)
        self.arriving(rows, block == part.here, partial(product, ahead=True), product)

    def product(
        self, part: Part, panel: Expr, p: Expr, block: Expr, rows: int, ahead: bool = False
    ) -> None:
        """products[p, tiles of a block] = inputs[p, those] x B[panel, p]. ``ahead``: it prefetches
        B.
        """
        em, of, row, lanes = self.em, self.image, self.row, self.lanes
        first = self.held(self.first_row(block) - part.row0, "first")
        a = self.held(p * of["plane_a"] + first * self.of["lda"], "a_row")
        number = panel * (row.vectors * POSITIONS) + p
        start = self.held(number * of["channels"] * lanes, "b_panel")
        apart = of["channels"] * (POSITIONS * lanes)
        b = Operand(self.args.inputs["b"].buffer, start, lanes, vector=apart)
        c = self.held(self.products + p * of["plane_c"] + first * row.columns, "c_row")

        def store(i: int, j: int, vector: Expr) -> None:
            place = tirx.Ramp(c + (i * row.columns + j), 1, lanes)
            T.buffer_store(self.scratch, vector, [place])

        tile = replace(row, rows=rows)
        fma_tile(
            em,
            tile,
            of["channels"],
            Operand(self.scratch, a, self.of["lda"]),
            b,
            store,
            step=partial(self.prefetch_panels, b, tile.vectors if ahead else 0),
            rolled=rolled(tile),
        )

    # outputs --------------------------------------------------------------------------------------
    def transform_products(self, row0: Expr, t: Expr, panel: Expr) -> None:
        """The outputs of the tile ``row0 + t`` in a panel's columns."""
        em, of, lanes, columns = self.em, self.image, self.lanes, self.row.columns
        n = self.of["n"]
        image, row, column = self.place(row0 + t)
        high = self.held(tirx.min(of["size"], of["out_h"] - row), "high")
        wide = self.held(tirx.min(of["size"], of["out_w"] - column), "wide")
        pixel = (image * of["out_h"] + row) * of["out_w"] + column
        start = self.held(pixel * n + panel * columns, "start")
        across = self.held(of["out_w"] * n, "across")
        left = self.held(n - panel * columns, "left")
        with em.loop(self.row.vectors, "v") as v:
            with em.when(left > v * lanes):
                count = em.let(self.count(left - v * lanes), "count")
                at = self.held(self.products + t * columns + v * lanes, "at")
                m = [
                    em.let(self.scratch[tirx.Ramp(at + p * of["plane_c"], 1, lanes)], "m")
                    for p in range(POSITIONS)
                ]
                tile = [m[i * WIDTH : (i + 1) * WIDTH] for i in range(WIDTH)]

                def gather(transform: Transform, m: Sequence[Sequence[Expr]] = tile) -> None:
                    for i, made in enumerate(transform.gathered(em, m)):
                        for j, value in enumerate(made):
                            with em.when(tirx.all(high > i, wide > j)):
                                place = start + v * lanes + i * across + j * n
                                where = tirx.address_of(self.args.output.buffer[place])
                                T.evaluate(tirx.call_extern("int32", STORE, where, value, count))

                three, five = FILTERS[3], FILTERS[5]
                em.branch(of["size"] == three.size, partial(gather, three), partial(gather, five))
