"""The loops of a convolution's kernel; the picture is in
:mod:`gtco.tensor.sketch.convolution.cpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import convert, literal
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import ALIGN, Piece, Scratch
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.shape import TaskShape
from gtco.tensor.sketch.convolution.facts import ConvolutionFacts
from gtco.tensor.sketch.shared.pack import copy_run
from gtco.tensor.sketch.shared.tile_store import TileStore
from gtco.tensor.space import Config


class ConvolutionLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: ConvolutionFacts, config: Config) -> None:
        self.sketch, self.config, self.view, self.stage = sketch, config, sketch.view, sketch.stage
        self.tile = MicroKernel.parse(config["tile"], sketch.target.lanes)
        self.shape: TaskShape = sketch.shape(config)
        self.rows, self.kc = config["rows"], config["kc"]
        self.kblocks = self.view.k // self.kc
        kind, tile = self.tile.kind, self.tile
        self.halo = sketch.halo(self.rows, kind)
        tiles = self.rows * self.shape.blocks if self.kblocks > 1 else 1
        self.scratch = Scratch(
            (
                Piece("image", (self.halo.elements,), kind.a.dtype),
                Piece("tiles", (tiles, tile.rows, tile.columns), kind.accumulator),
            )
        )

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        view, shape = self.view, self.shape
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        arrays = self.scratch.arrays(args)
        self.image, self.tiles = arrays["image"], arrays["tiles"]
        images, height, _ = view.result
        groups = self.sketch.row_groups(self.config)
        with (
            prepared(em, self.tile, shape.heights[0]),
            em.range(args.begin, args.end, "task") as task,
        ):
            em.bind(task, self.sketch.tasks(self.config))
            chunk_n = em.let_index(task % shape.chunks_n, "chunk_n")
            rest = em.let_index(task // shape.chunks_n, "rest")
            row0 = em.let_index(rest % groups * self.rows, "row0")
            place = em.let_index(rest // groups, "place")
            image = em.let_index(place % images, "image")
            batch = em.let_index(place // images, "batch")
            rows = self.rows
            if height % rows:
                rows = em.let_index(tirx.min(rows, height - row0), "rows")
            first_panel = em.let_index(chunk_n * shape.task_panels, "first_panel")
            panels = shape.task_panels
            if shape.panels % panels:
                panels = em.let_index(tirx.min(panels, shape.panels - first_panel), "panels")
            self.copy_rows(batch, image, row0, rows)
            with em.loop(panels, "panel") as p, em.loop(self.kblocks, "kb") as kb:
                panel = em.let_index(first_panel + p, "this_panel")
                with em.loop(rows, "y") as y, em.loop(shape.blocks, "block") as block:
                    self.tile_program(batch, image, row0, kb, panel, y, block)

    # A ----------------------------------------------------------------------------------------
    def copy_rows(self, batch: Expr, image: Expr, row0: Expr, rows: Expr) -> None:
        """scratch[r] = the input's row under tap row r of the task's first output row, and so on;
        zeros outside the image.
        """
        em, view, halo = self.em, self.view, self.halo
        (sh, _), (top, left, _, _) = view.op["strides"], view.op["padding"]
        (kh, _), (dh, _) = view.kernel, view.op["dilation"]
        height, width = view.image
        needed = em.index((rows - 1) * sh + (kh - 1) * dh + 1)
        inner = max(0, min(halo.width, width + left) - left)  # pixels of a row inside the image
        with em.loop(needed, "r") as r:
            y = em.let_index(row0 * sh + r - top, "y")

            def copy(r: Expr = r, y: Expr = y) -> None:
                self.clear(r, 0, min(left, halo.width))
                self.copy_row(batch, image, r, y, left, inner)
                self.clear(r, left + inner, halo.width)

            inside = tirx.all(y >= 0, y < height) if view.padded else True
            em.branch(inside, copy, lambda r=r: self.clear(r, 0, halo.width))  # type: ignore[misc]

    def copy_row(self, batch: Expr, image: Expr, r: Expr, y: Expr, left: int, inner: int) -> None:
        em, view, source = self.em, self.view, self.view.op.inputs[0]
        if inner <= 0:
            return
        if view.channels_first:
            with em.loop(self.halo.channels, "c") as c:
                copy_run(
                    em,
                    inner,
                    lambda x: self.reader.value(source, view.x_index(batch, image, y, x, c)),
                    lambda x, value: self.put(r, left + x, c, self.read(value)),
                )
            return
        breaks = run_breaks(self.stage, view)
        with em.loop(inner, "x") as x:
            copy_run(
                em,
                self.halo.channels,
                lambda c: self.reader.value(source, view.x_index(batch, image, y, x, c)),
                lambda c, value: self.put(r, left + x, c, self.read(value)),
                breaks,
            )

    def read(self, value: Expr) -> Expr:
        """A value of the input, converted to the dtype in which it is multiplied."""
        dtype = self.stage.types[self.view.op.inputs[0]].dtype
        return convert(self.em, value, dtype, self.image.dtype)

    def clear(self, r: Expr, begin: int, end: int) -> None:
        """Writes zeros to pixels [begin, end) of a row of the scratch."""
        em, halo = self.em, self.halo
        zero = literal(0.0, self.image.dtype)
        if end <= begin:
            return
        if self.view.channels_first:
            with em.loop(halo.channels, "c") as c:
                copy_run(
                    em,
                    end - begin,
                    lambda x: zero,
                    lambda x, value: self.put(r, begin + x, c, value),
                )
            return
        copy_run(
            em,
            (end - begin) * halo.pixel,
            lambda e: zero,
            lambda e, value: self.put(r, begin, e, value),
        )

    def put(self, r: Expr, x: Expr, c: Expr, value: Expr) -> None:
        self.em.store(self.image, [self.place(r, x, c)], value)

    def place(self, r: Expr, x: Expr, c: Expr) -> Expr:
        """The position of channel ``c`` of pixel ``x`` of row ``r`` in the scratch."""
        halo = self.halo
        if self.view.channels_first:
            return (c * halo.rows + r) * halo.width + x
        return (r * halo.width + x) * halo.pixel + c

    def window(self, y: Expr, x: Expr, kb: Expr) -> Operand:
        """The rows of A for a block of k, from pixel ``x`` of the task's output row ``y`` on."""
        em, view, halo = self.em, self.view, self.halo
        (sh, sw), (dh, dw), (kh, kw) = view.op["strides"], view.op["dilation"], view.kernel
        base = em.let_index(self.image.flat([self.place(y * sh, x * sw, 0)]), "a_row")
        first = em.index(kb * (self.kc // halo.depth))

        def along(k: Expr) -> Expr:
            run, step = first + em.index(k // halo.depth), em.index(k % halo.depth)
            if view.channels_first:
                return self.place(run % kh * dh, step * dw, run // kh)
            if halo.runs == kh:
                return self.place(run * dh, 0, step)
            return self.place(run // kw * dh, run % kw * dw, step)

        return Operand(self.image.buffer, base, sw * halo.pixel, along, dense=halo.step == 1)

    # tiles ----------------------------------------------------------------------------------------
    def tile_program(
        self, batch: Expr, image: Expr, row0: Expr, kb: Expr, panel: Expr, y: Expr, block: Expr
    ) -> None:
        em, shape, view = self.em, self.shape, self.view
        start = em.let_index(shape.first_row(block), "start")
        which = y * shape.blocks + block if self.kblocks > 1 else 0
        tile = self.tiles.part(which, em, "tile")

        def micro(rows: int) -> Callable[[], None]:
            return lambda: self.micro_kernel(rows, tile, batch, kb, panel, y, block, start)

        heights = shape.heights
        height: Expr = heights[0]
        if len(heights) > 1:
            tall, low = map(em.number, heights)
            height = tirx.Select(block < shape.taller, tall, low)
        store = TileStore(
            em,
            self.sketch.product.tail,
            self.reader,
            self.args.output,
            self.tile,
            view.n,
            heights,
            self.sketch.product.stores_columns,
            lambda m, n: view.place(image, row0 + y, m, view.group(batch) * view.n + n),
        )
        last = kb == self.kblocks - 1 if self.kblocks > 1 else True
        if self.config["prefetch"] == "next":
            with em.when(last):
                store.prefetch(panel, start, height)
        if len(heights) == 1:
            micro(heights[0])()
        else:
            em.branch(block < shape.taller, micro(heights[0]), micro(heights[1]))
        with em.when(last):
            store.write(tile, panel, start, height)

    def micro_kernel(
        self,
        rows: int,
        tile: Array,
        batch: Expr,
        kb: Expr,
        panel: Expr,
        y: Expr,
        block: Expr,
        start: Expr,
    ) -> None:
        """tile[rows, columns] (+)= A[rows, kc] x B[kc, columns], accumulators in registers."""
        em, view, kind = self.em, self.view, self.tile.kind
        columns = kind.b.places(self.tile.columns)  # elements of the buffer in a step of k
        array = self.args.inputs[view.op.inputs[1]]
        place = view.packed_batch(batch) * self.shape.panels + panel
        base = em.let_index((place * view.k + kb * self.kc) * columns, "b_panel")
        share = ceil(columns / (self.rows * self.shape.blocks))

        def step(k: Expr) -> None:
            if self.config["prefetch"] == "next":  # the next part of the panel, or the next panel
                done = (y * self.shape.blocks + block) * self.kc + k
                part = share * kind.step if kind.in_tiles else 1
                for n in range(0, part, ALIGN // ceil(kind.b.item)):
                    em.prefetch(array, base + self.kc * columns + done * share + n)

        row = replace(self.tile, rows=rows)
        with prepared(em, row, rows, self.shape.heights[0]):
            multiply(
                em,
                row,
                self.halo.depth,
                self.window(y, start, kb),
                Operand(array.buffer, base, columns * kind.b.step),
                tile,
                first=kb == 0,
                step=step,
                runs=self.kc // self.halo.depth,
            )
