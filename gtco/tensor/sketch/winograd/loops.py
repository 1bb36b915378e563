"""The loops of a Winograd convolution's kernel; the picture is in
:mod:`gtco.tensor.sketch.winograd.cpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.indices import reshape_index
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.filtering import TRANSFORMS
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.sketch.shared.pack import copy_run
from gtco.tensor.sketch.shared.streaming import vector_runs
from gtco.tensor.sketch.shared.tile_store import TileStore
from gtco.tensor.sketch.winograd.facts import WinogradFacts
from gtco.tensor.space import Config
from gtco.tensor.stage import ITEM_BYTES

LINE = 64  # bytes of a cache line


def spread(elements: int, dtype: str = "float32") -> int:
    """The number of elements, rounded up to an odd number of cache lines. Data at such distances
    does not share cache sets.
    """
    line = LINE // ITEM_BYTES[dtype]
    return (ceil(elements / line) // 2 * 2 + 1) * line


class WinogradLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: WinogradFacts, config: Config) -> None:
        self.sketch, self.config, self.view, self.stage = sketch, config, sketch.view, sketch.stage
        self.tile = sketch.row(config)
        self.shape = sketch.shape(config)
        self.transform = TRANSFORMS[config["m"]]
        self.size, self.width = self.transform.size, self.transform.width
        self.held = sketch.blocks_at_once(config)
        self.rows = self.shape.rows(self.held)  # tiles that are held at once
        self.channels, self.columns = self.view.channels, self.tile.columns
        self.operand, self.multiplied = sketch.product.operand, self.tile.kind.a.dtype
        self.lda = spread(self.channels, self.multiplied)
        self.plane_a = spread(self.rows * self.lda, self.multiplied)
        self.plane_c = spread(self.rows * self.columns)
        self.scratch = Scratch(tuple(self.pieces()))

    def pieces(self) -> Iterator[Piece]:
        """The scratch that a thread keeps beside its registers."""
        positions = self.transform.positions
        yield Piece("inputs", (positions, self.plane_a), self.multiplied)
        yield Piece("products", (positions, self.plane_c))
        yield Piece("outputs", (self.size, self.size, self.columns))
        if self.sketch.borders(self.size):
            yield Piece("patch", (positions, spread(self.channels)))

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        shape = self.shape
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        self.arrays = self.scratch.arrays(args)
        self.store = TileStore(
            em,
            self.sketch.product.tail,
            self.reader,
            args.output,
            self.tile,
            self.view.n,
            self.sketch.widths(self.size),
            self.sketch.product.stores_columns,
            lambda m, n: [],
        )
        with em.range(args.begin, args.end, "task") as task:
            _, first_block, blocks, first_panel, panels = shape.pieces(em, task)
            passes = em.index((blocks + (self.held - 1)) // self.held)
            with em.loop(passes, "part") as part:
                here = em.let_index(first_block + part * self.held, "here")
                count = em.let_index(tirx.min(self.held, blocks - part * self.held), "count")
                start = em.let_index(shape.first_row(here), "start")
                tiles = em.let_index(shape.first_row(here + count) - start, "tiles")
                with em.loop(tiles, "t") as t:
                    self.transform_inputs(start, t)
                with em.loop(panels, "panel") as p:
                    panel = em.let_index(first_panel + p, "this_panel")
                    with em.loop(self.transform.positions, "position") as position:
                        with em.loop(count, "block") as block:
                            self.product(position, panel, here, block, start)
                    with em.loop(tiles, "t") as t:
                        self.transform_products(start, t, panel)

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
        em, view, width = self.em, self.view, self.width
        (top, left, _, _), (height, across) = view.op["padding"], view.image
        image, row, column = self.place(start + t)
        row, column = em.let_index(row - top, "y"), em.let_index(column - left, "x")
        self.prefetch(image, row, column + self.size)

        def inside() -> None:
            self.transform_tile(
                t,
                lambda i, j, c: self.source(image, row + i, column + j, c),
            )

        if not self.sketch.borders(self.size):
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
        index = self.view.x_index(0, image, row, column, c)
        value = self.reader.value(self.view.op.inputs[0], index)
        return convert(self.em, value, self.operand, "float32")

    def prefetch(self, image: Expr, row: Expr, column: Expr) -> None:
        """Prefetches the part of the tile at an input's row and column that the tile to its left
        does not have: short runs in many rows, which no hardware prefetcher follows. It is done
        only if the input is read in place.
        """
        em, view = self.em, self.view
        source = view.op.inputs[0]
        if source in self.stage.producers:
            return
        run = LINE // ITEM_BYTES[self.operand]
        with em.loop(ceil(self.channels / run), "line") as line:
            for i in range(self.width):
                for j in range(self.width - self.size, self.width):
                    place = view.x_index(0, image, row + i, column + j, line * run)
                    em.prefetch_value(self.reader.value(source, place))

    def transform_tile(self, t: Expr, read: Callable[[int, int, Expr], Expr]) -> None:
        em, inputs, width = self.em, self.arrays["inputs"], self.width
        breaks = run_breaks(self.stage, self.view)
        for start, end in itertools.pairwise([0, *breaks, self.channels]):
            for begin, count, lanes in vector_runs(end - start, em.lanes):
                with em.loop(count, "v") as v, em.vector(lanes) as lane:
                    c = em.let_index(start + begin + v * lanes, "c") + lane
                    x = [[em.let(read(i, j, c), "x") for j in range(width)] for i in range(width)]
                    for i, made in enumerate(self.transform.transformed(em, x)):
                        for j, value in enumerate(made):
                            value = convert(em, value, "float32", self.multiplied)
                            em.store(inputs, [i * width + j, t * self.lda + c], value)

    # products -------------------------------------------------------------------------------------
    def product(
        self, position: Expr, panel: Expr, first_block: Expr, block: Expr, row0: Expr
    ) -> None:
        """products[position, tiles of a block] = inputs[position, those] x B[position, panel]."""
        em, shape = self.em, self.shape
        this_block = em.let_index(first_block + block, "this_block")
        first = em.let_index(shape.first_row(this_block) - row0, "first")

        def micro(rows: int) -> Callable[[], None]:
            return lambda: self.micro_kernel(rows, position, panel, block, first)

        if len(shape.heights) == 1:
            micro(shape.heights[0])()
        else:
            em.branch(this_block < shape.taller, *(micro(h) for h in shape.heights))

    def micro_kernel(
        self, rows: int, position: Expr, panel: Expr, block: Expr, first: Expr
    ) -> None:
        em, view, columns, depth = self.em, self.view, self.columns, self.channels
        inputs, products = self.arrays["inputs"], self.arrays["products"]
        array = self.args.inputs[view.op.inputs[1]]
        number = panel * self.transform.positions + position
        base = em.let_index(number * depth * columns, "b_panel")
        a = em.let_index(inputs.flat([position, first * self.lda]), "a_row")
        c = em.let_index(position * self.plane_c + first * columns, "c_row")
        share = ceil(columns / self.held)

        def step(k: Expr) -> None:
            if self.config["prefetch"] == "next":
                em.prefetch(array, base + depth * columns + (block * depth + k) * share)

        fma_tile(
            em,
            replace(self.tile, rows=rows),
            depth,
            Operand(inputs.buffer, a, self.lda),
            Operand(array.buffer, base, columns * self.tile.kind.b.step),
            lambda i, j, vector: em.store_vector(products, [0, c + i * columns + j], vector),
            step=step,
        )

    # outputs --------------------------------------------------------------------------------------
    def transform_products(self, start: Expr, t: Expr, panel: Expr) -> None:
        """A^T m A of the tile ``start + t`` and of a panel's columns, through the epilogue."""
        em, size, width, lanes = self.em, self.size, self.width, self.tile.lanes
        products, outputs = self.arrays["products"], self.arrays["outputs"]
        with em.loop(self.tile.vectors, "v") as v, em.vector(lanes) as lane:
            at = em.let_index(t * self.columns + v * lanes, "at")
            m = [
                [em.let(em.load(products, [i * width + j, at + lane]), "m") for j in range(width)]
                for i in range(width)
            ]
            for i, made in enumerate(self.transform.gathered(em, m)):
                for j, value in enumerate(made):
                    em.store(outputs, [i, j, v * lanes + lane], value)
        _, height, across = self.view.result
        image, row, column = self.place(start + t)
        rows, columns = self._least(size, height, row), self._least(size, across, column)
        with em.loop(rows, "i") as i:
            y = em.let_index(row + i, "y")
            store = replace(self.store, index=lambda m, n: self.view.place(image, y, m, n))
            store.write(outputs.part(i, em, "line"), panel, column, columns)

    def _least(self, size: int, extent: int, first: Expr) -> Expr:
        """The number of outputs of a tile along an axis."""
        if extent % size == 0:
            return size
        return self.em.let_index(tirx.min(size, extent - first), "outputs")
