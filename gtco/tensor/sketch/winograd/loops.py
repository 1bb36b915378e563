"""The loops of a Winograd convolution's kernel; the picture is in
:mod:`gtco.tensor.sketch.winograd.cpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from math import ceil

from tvm import tirx

from gtco.machine.target import CACHE_LINE
from gtco.tensor.analysis.filtering import TAPS
from gtco.tensor.analysis.indices import reshape_index
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Expr
from gtco.tensor.emit.filtering import TRANSFORMS
from gtco.tensor.emit.runs import copy_run
from gtco.tensor.emit.scratch import Piece
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.nest.emission import At, NestLoops
from gtco.tensor.nest.nest import odd_lines
from gtco.tensor.sketch.shared.streaming import vector_runs
from gtco.tensor.sketch.winograd.facts import WinogradFacts
from gtco.tensor.space import Config
from gtco.tensor.stage import ITEM_BYTES


class WinogradLoops(NestLoops):
    """The emitter of one config of one stage. Rows of its nest are tiles of the output."""

    def __init__(self, sketch: WinogradFacts, config: Config) -> None:
        self.sketch, self.conv = sketch, sketch.view
        self.transform = TRANSFORMS[int(config["m"])]
        self.size, self.width = self.transform.size, self.transform.width
        product, nest = sketch.product, sketch.nest(config)
        self.channels, self.operand = self.conv.channels, sketch.operand
        super().__init__(nest, sketch.stage, self.conv, product.tail, product.stores_columns)

    def pieces(self) -> Iterator[Piece]:
        """The scratch that a thread keeps beside its registers."""
        yield from self.nest.pieces()
        yield Piece("outputs", (self.size, self.size, self.row.columns))
        if self.sketch.borders[self.size]:
            yield Piece("patch", (self.nest.positions, odd_lines(self.channels, "float32")))

    def feed(self, at: At) -> None:
        """Transforms the inputs of the part's tiles."""
        with self.em.loop(self.height_of(at), "t") as t:
            self.transform_inputs(at.row0, t)

    def feed_panel(self, at: At) -> None:
        """Transforms a panel of weights of 8 bits."""
        if self.nest.b.how != "widened":
            return
        em, into, columns = self.em, self.arrays["panel"], self.row.columns
        weights = self.args.inputs[self.conv.op.inputs[1]].buffer
        wide = f"{into.dtype}x{em.lanes}"
        start = em.let_index(at.whole_panel * (self.channels * self.nest.taps * columns), "stored")
        with em.loop(self.channels, "k") as k:
            for j in range(0, columns, em.lanes):
                first = em.let_index(start + k * (self.nest.taps * columns) + j, "taps")
                taps = [
                    em.let(tirx.Cast(wide, weights[em.ramp(first + n * columns, em.lanes)]), "w")
                    for n in range(self.nest.taps)
                ]
                window = [taps[n : n + TAPS] for n in range(0, self.nest.taps, TAPS)]
                made = itertools.chain(*self.transform.filtered(em, window))
                for p, value in enumerate(made):
                    em.store_vector(into, [p, k * columns + j], value)

    def panel_of_b(self, at: At) -> Operand:
        """The panel at a position, as a constant or in scratch."""
        if self.nest.b.how != "widened":
            return super().panel_of_b(at)
        panel = self.arrays["panel"]
        base = self.em.let_index(panel.flat([at.position, 0]), "b_panel")
        return Operand(panel.buffer, base, self.row.columns)

    def _next_of_b(self, at: At, depth: Expr, k: Expr) -> None:
        """Panels in scratch need no prefetch."""
        if self.nest.b.how != "widened":
            super()._next_of_b(at, depth, k)

    def finish_panel(self, at: At) -> None:
        """Transforms the products of all positions back."""
        with self.em.loop(self.height_of(at), "t") as t:
            self.transform_products(at, t)

    def place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """The image of a tile, and the row and column of its first output."""
        grid = self.sketch.grid(self.size)
        image, row, column = reshape_index([tile], [self.sketch.tiles(self.size)], grid)
        em = self.em
        return (
            em.let_index(image, "image"),
            em.let_index(row * self.size, "row"),
            em.let_index(column * self.size, "column"),
        )

    # inputs ---------------------------------------------------------------------------------------
    def transform_inputs(self, start: Expr, t: Expr) -> None:
        """inputs[position, t, c] = (B^T x B)[position] of the tile ``start + t``."""
        em, view, width = self.em, self.conv, self.width
        (top, left, _, _), (height, across) = view.op["padding"], view.image
        image, row, column = self.place(start + t)
        row, column = em.let_index(row - top, "y"), em.let_index(column - left, "x")
        self.prefetch(image, row, column + self.size)

        def inside() -> None:
            self.transform_tile(
                t,
                lambda i, j, c: self.source(image, row + i, column + j, c),
            )

        if not self.sketch.borders[self.size]:
            inside()
            return
        patch = self.arrays["patch"]

        def border() -> None:
            with em.loop(width, "i") as i, em.loop(width, "j") as j:
                y, x = em.let_index(row + i, "y"), em.let_index(column + j, "x")
                at = em.let_index(i * width + j, "at")
                em.branch(
                    tirx.all(y >= 0, y < height, x >= 0, x < across),
                    lambda: copy_run(
                        em,
                        self.channels,
                        lambda c: self.source(image, y, x, c),
                        lambda c, value: em.store(patch, [at, c], value),
                        run_breaks(self.stage, view),
                    ),
                    lambda: copy_run(
                        em,
                        self.channels,
                        lambda c: tirx.const(0, "float32"),
                        lambda c, value: em.store(patch, [at, c], value),
                    ),
                )
            self.transform_tile(t, lambda i, j, c: em.load(patch, [i * width + j, c]))

        whole = tirx.all(
            row >= 0, row + (width - 1) < height, column >= 0, column + (width - 1) < across
        )
        em.branch(whole, inside, border)

    def source(self, image: Expr, row: Expr, column: Expr, c: Expr) -> Expr:
        """An element of the input, as float32."""
        index = self.conv.x_index(0, image, row, column, c)
        value = self.reader.value(self.conv.op.inputs[0], index)
        return convert(self.em, value, self.operand, "float32")

    def prefetch(self, image: Expr, row: Expr, column: Expr) -> None:
        """Prefetches the part of the tile at an input's row and column that the tile to its left
        does not have: short runs in many rows, which no hardware prefetcher follows. It is done
        only if the input is read in place.
        """
        em, view = self.em, self.conv
        source = view.op.inputs[0]
        if source in self.stage.producers:
            return
        run = CACHE_LINE // ITEM_BYTES[self.operand]
        with em.loop(ceil(self.channels / run), "run") as number:
            for i in range(self.width):
                for j in range(self.width - self.size, self.width):
                    place = view.x_index(0, image, row + i, column + j, number * run)
                    em.prefetch_value(self.reader.value(source, place))

    def transform_tile(self, t: Expr, read: Callable[[int, int, Expr], Expr]) -> None:
        em, inputs, width = self.em, self.arrays["rows"], self.width
        breaks = run_breaks(self.stage, self.conv)
        for start, end in itertools.pairwise([0, *breaks, self.channels]):
            for begin, count, lanes in vector_runs(end - start, em.lanes):
                with em.loop(count, "v") as v, em.vector(lanes) as lane:
                    c = em.let_index(start + begin + v * lanes, "c") + lane
                    x = [[em.let(read(i, j, c), "x") for j in range(width)] for i in range(width)]
                    for i, made in enumerate(self.transform.transformed(em, x)):
                        for j, value in enumerate(made):
                            value = convert(em, value, "float32", inputs.dtype)
                            em.store(inputs, [i * width + j, t * self.nest.lda + c], value)

    # outputs --------------------------------------------------------------------------------------
    def transform_products(self, at: At, t: Expr) -> None:
        """A^T m A of a tile of the part and of a panel's columns, through the epilogue."""
        em, size, width, lanes = self.em, self.size, self.width, self.row.lanes
        products, outputs = self.arrays["sums"], self.arrays["outputs"]
        with em.loop(self.row.vectors, "v") as v, em.vector(lanes) as lane:
            place = em.let_index(t * self.row.columns + v * lanes, "at")
            m = [
                [em.let(em.load(products, [p, place + lane]), "m") for p in range(i, i + width)]
                for i in range(0, width * width, width)
            ]
            for i, made in enumerate(self.transform.gathered(em, m)):
                for j, value in enumerate(made):
                    em.store(outputs, [i, j, v * lanes + lane], value)
        (_, height, across), widths = self.conv.result, self.sketch.widths(size)
        image, row, column = self.place(at.row0 + t)
        rows, columns = self._least(size, height, row), self._least(size, across, column)
        with em.loop(rows, "i") as i:
            y = em.let_index(row + i, "y")
            store = self.store(lambda m, n: self.conv.place(image, y, m, n), widths)
            store.write(outputs.part(i, em, "line"), at.whole_panel, column, columns)

    def _least(self, size: int, extent: int, first: Expr) -> Expr:
        """The number of outputs of a tile along an axis."""
        if extent % size == 0:
            return size
        return self.em.let_index(tirx.min(size, extent - first), "outputs")
