"""The loops of a contraction's kernel; the picture is in :mod:`gtco.tensor.sketch.gemm.cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil, lcm

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.intrinsics.emission import Operand, nibbles
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.sketch.gemm import norm_prologue
from gtco.tensor.sketch.gemm.facts import GemmFacts
from gtco.tensor.sketch.shared.pack import pack_columns, pack_rows
from gtco.tensor.sketch.shared.tile_store import TileStore
from gtco.tensor.space import Config
from gtco.tensor.stage import INT4, item_bytes

LINE = 64  # bytes of a cache line


AHEAD = 16  # iterations of k: some 100 ns, about DRAM's latency
AHEAD_IN_TILES = 5  # the same time in the tile unit


class GemmLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: GemmFacts, config: Config) -> None:
        self.sketch, self.config, self.view, self.stage = sketch, config, sketch.view, sketch.stage
        nest = self.nest = sketch.nest(config)
        self.tile, self.kind, self.shape = nest.row, nest.row.kind, nest.shape
        self.kc, self.kblocks, self.lda, self.held = nest.kc, nest.kblocks, nest.lda, nest.held
        self.packed_a = nest.a.how == "packed"
        self.packed_b, self.widened_b = nest.b.how == "packed", nest.b.how == "widened"
        self.stored = sketch.stored(nest.row)
        self.whole = lcm(self.kind.step, self.stored.step)  # steps at a multiple of which B ends
        # of the buffer of constant B: elements of a step of k, and those in a cache line
        self.width = self.stored.places(self.tile.columns)
        self.line = LINE // ceil(item_bytes(sketch.operand))
        self.scratch = Scratch(tuple(self.pieces()))

    def pieces(self) -> Iterator[Piece]:
        """The scratch that a thread keeps beside its registers."""
        pieces = {piece.name: piece for piece in self.nest.pieces()}
        if self.packed_a:
            yield pieces.pop("rows")
        if self.sketch.norm is not None:  # its statistics
            yield Piece("mean", (self.shape.task_rows,))
            yield Piece("scale", (self.shape.task_rows,))
        yield from pieces.values()

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        view, shape = self.view, self.shape
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        self.arrays = self.scratch.arrays(args)
        with (
            prepared(em, self.tile, shape.heights[0]),
            em.range(args.begin, args.end, "task") as task,
        ):
            batch, first_block, blocks, first_panel, panels = shape.pieces(em, task)
            if (norm := self.sketch.norm) is not None:
                row0 = em.let_index(shape.first_row(first_block), "row0")
                rows = em.let_index(shape.first_row(first_block + blocks) - row0, "rows")
                mean, scale = self.arrays["mean"], self.arrays["scale"]
                norm_prologue.statistics(self.reader, norm, row0, rows, mean, scale)
                self.reader.known[norm.output] = norm_prologue.normalised(
                    self.reader, norm, row0, mean, scale
                )
            split = self.held < shape.task_blocks
            passes = em.index((blocks + (self.held - 1)) // self.held) if split else 1
            with em.loop(passes, "part") as part, em.loop(self.kblocks, "kb") as kb:
                here = em.let_index(first_block + part * self.held, "here")
                count = 1 if split else blocks
                if split and self.held > 1:
                    count = em.let_index(tirx.min(self.held, blocks - part * self.held), "count")
                start = em.let_index(shape.first_row(here), "row0")
                if self.packed_a:
                    height = em.let_index(shape.first_row(here + count) - start, "rows")
                    packed = self.arrays["rows"]
                    step = self.kind.step
                    pack_rows(self.reader, view, packed, batch, start, height, kb, self.kc, step)
                if self.packed_b:
                    into = self.arrays["panels"]
                    with em.when(part == 0 if self.kblocks == 1 else True):
                        pack_columns(
                            self.reader, view, into, batch, first_panel, panels, kb, self.kc,
                            self.kind.step,
                        )  # fmt: skip
                with em.loop(panels, "panel") as panel:
                    if self.widened_b:
                        self.widen_panel(batch, kb, first_panel + panel)
                    with em.loop(count, "block") as block:
                        self.tile_program(batch, kb, first_panel, panel, here, block, start)

    def widen_panel(self, batch: Expr, kb: Expr, panel: Expr) -> None:
        """Converts a block of k of a panel of constant B to the dtype that the row reads."""
        em, into = self.em, self.arrays["panel"]
        array = self.args.inputs[self.view.op.inputs[1]]
        start = em.let_index(self.packed_panel(batch, kb, panel), "stored")
        wide, step = f"{into.dtype}x{em.lanes}", self.stored.step
        many = self.stored.places(step)
        with em.loop(em.index((self.depth(kb) + (step - 1)) // step), "steps") as number:
            k = em.index(number * step)
            scaled = self.scaled(kb, panel, k)
            for j in range(0, self.tile.columns, em.lanes):
                at = em.ramp(start + k * self.width + j * many, em.lanes * many)
                value = array.buffer[at]
                if self.stored.dtype == INT4:
                    words = em.let(tirx.reinterpret(f"int32x{em.lanes}", value), "words")
                    parts = [*nibbles(em, words)]
                else:
                    parts = [tirx.Cast(wide, value)]
                for n, vector in enumerate(scaled(j, parts)):
                    em.store_vector(into, [k + n, j], vector)

    def scaled(
        self, kb: Expr, panel: Expr, k: Expr
    ) -> Callable[[int, Sequence[Expr]], Sequence[Expr]]:
        """Makes weights of steps: (step - zero point) * scale, with those of the block of k that
        step ``k`` lies in, for vectors from a column of the panel on. They stay steps if blocks
        have no scales.
        """
        sketch, em = self.sketch, self.em
        if sketch.scales is None:
            return lambda j, parts: parts
        block = em.let_index((kb * self.kc + k) // self.view.op["block"], "block")
        start = em.let_index((panel * sketch.blocks + block) * self.tile.columns, "scales")

        def read(name: str, j: int) -> Expr:
            value = self.args.inputs[name].buffer[em.ramp(start + j, em.lanes)]
            return em.let(tirx.Cast(f"float32x{em.lanes}", value), "scale")

        def scaled(j: int, parts: Sequence[Expr]) -> Sequence[Expr]:
            scale = read(sketch.scales or "", j)
            if sketch.zeros is not None:
                zero = read(sketch.zeros, j)
                parts = [x - zero for x in parts]
            return [x * scale for x in parts]

        return scaled

    def tile_program(
        self,
        batch: Expr,
        kb: Expr,
        first_panel: Expr,
        panel: Expr,
        first_block: Expr,
        block: Expr,
        row0: Expr,
    ) -> None:
        em, shape = self.em, self.shape
        this_block = em.let_index(first_block + block, "this_block")
        start = em.let_index(shape.first_row(this_block), "start")
        which = block * shape.task_panels + panel if self.kblocks > 1 else 0
        tile = self.arrays["tiles"].part(which, em, "tile")

        def micro(rows: int) -> Callable[[], None]:
            return lambda: self.micro_kernel(
                rows, tile, batch, kb, first_panel, panel, block, start, row0
            )

        height = (
            shape.heights[0]
            if len(shape.heights) == 1
            else tirx.Select(
                this_block < shape.taller,
                *map(em.number, shape.heights),
            )
        )
        view = self.view
        store = TileStore(
            em,
            self.sketch.tail,
            self.reader,
            self.args.output,
            self.tile,
            view.n,
            shape.heights,
            self.sketch.stores_columns,
            lambda m, n: view.c_index(batch, m, n),
        )
        last = kb == self.kblocks - 1 if self.kblocks > 1 else True
        if self.config["prefetch"] != "none":
            with em.when(last):
                store.prefetch(first_panel + panel, start, height)
        if len(shape.heights) == 1:
            micro(shape.heights[0])()
        else:
            em.branch(this_block < shape.taller, micro(shape.heights[0]), micro(shape.heights[1]))
        with em.when(last):
            store.write(tile, first_panel + panel, start, height)

    def micro_kernel(
        self,
        rows: int,
        tile: Array,
        batch: Expr,
        kb: Expr,
        first_panel: Expr,
        panel: Expr,
        block: Expr,
        start: Expr,
        row0: Expr,
    ) -> None:
        """tile[rows, columns] (+)= A[rows, kc] x B[kc, columns], accumulators in registers."""
        em = self.em
        depth = self.depth(kb)

        ahead = self.config["prefetch"]

        def step(k: Expr) -> None:
            if ahead != "none":
                self.next_panel(batch, kb, first_panel + panel + 1, block, depth, k)
                # Rows lie in L2 from the first panel on, and whole tiles of them are many lines.
                with em.when(panel == 0 if self.kind.in_tiles else True):
                    self.next_rows(batch, kb, start, rows, k)
            if ahead == "both":
                self.this_panel(batch, kb, first_panel + panel, k)

        row = replace(self.tile, rows=rows)
        with prepared(em, row, rows, self.shape.heights[0]):
            multiply(
                em,
                row,
                depth,
                self.rows_of_a(batch, kb, start, row0),
                self.panel_of_b(batch, kb, first_panel, panel),
                tile,
                first=kb == 0,
                step=step,
            )

    def next_panel(
        self, batch: Expr, kb: Expr, panel: Expr, block: Expr, depth: Expr, k: Expr
    ) -> None:
        """Prefetches a share of the next panel of B. The steps of all blocks together cover the
        panel.
        """
        em = self.em
        array = self.args.inputs[self.view.op.inputs[1]]
        share = ceil(self.width / self.held)  # elements of it, for each step of k
        at = self.packed_panel(batch, kb, panel) + (block * depth + k) * share
        for n in range(0, share * self.kind.step, self.line):
            em.prefetch(array, at + n)

    def this_panel(self, batch: Expr, kb: Expr, panel: Expr, k: Expr) -> None:
        """Prefetches the data of this panel of B that an iteration reads some iterations later, or
        the start of the next panel. A hardware prefetcher stops at the end of a page, and no
        earlier panel of the task prefetched the first one.
        """
        em, step, array = self.em, self.kind.step, self.args.inputs[self.view.op.inputs[1]]
        ahead = AHEAD_IN_TILES if self.kind.in_tiles else AHEAD
        at = self.packed_panel(batch, kb, panel) + (k + ahead * step) * self.width
        for n in range(0, self.width * step, self.line):
            em.prefetch(array, at + n)

    def next_rows(self, batch: Expr, kb: Expr, start: Expr, rows: int, k: Expr) -> None:
        """Prefetches a share of the next block's rows, if they follow each other in an input."""
        if self.packed_a or self.sketch.direct_rows != self.view.k or self.kblocks > 1:
            return
        em = self.em
        here = self.rows_of_a(batch, kb, start, start)
        at, line = here.offset + rows * here.stride + k * rows, LINE // self.kind.a.nbytes
        for n in range(0, rows * self.kind.step, line):
            em.prefetch_value(here.buffer[em.index(at + n)])

    def depth(self, kb: Expr) -> Expr:
        if self.view.k % self.kc == 0:
            return self.kc
        return self.em.let_index(tirx.min(self.kc, self.view.k - kb * self.kc), "depth")

    def rows_of_a(self, batch: Expr, kb: Expr, start: Expr, row0: Expr) -> Operand:
        """A's rows from ``start`` on, in the packed copy or in an input."""
        em = self.em
        if self.packed_a:
            packed = self.arrays["rows"]
            base = em.let_index(packed.flat([start - row0, 0]), "a_row")
            return Operand(packed.buffer, base, self.lda)
        stride = self.sketch.direct_rows or 0
        origin = self.reader.value(
            self.view.op.inputs[0], self.view.a_index(batch, start, kb * self.kc)
        )
        return Operand(origin.source, em.let_index(origin.indices[0], "a_row"), stride)

    def packed_panel(self, batch: Expr, kb: Expr, panel: Expr) -> Expr:
        """The place where a block of k of a panel of constant B starts."""
        place = self.view.packed_batch(batch) * self.shape.panels + panel
        depth = ceil(self.view.k / self.whole) * self.whole
        return (place * depth + kb * self.kc) * self.width

    def panel_of_b(self, batch: Expr, kb: Expr, first_panel: Expr, panel: Expr) -> Operand:
        """A panel's block of k, in the packed copy or in an input."""
        em, columns = self.em, self.tile.columns
        if self.widened_b:
            return Operand(self.arrays["panel"].buffer, self.arrays["panel"].flat([0, 0]), columns)
        if self.sketch.constant_b:
            array = self.args.inputs[self.view.op.inputs[1]]
            base = em.let_index(self.packed_panel(batch, kb, first_panel + panel), "b_panel")
            return Operand(array.buffer, base, self.width * self.kind.b.step)
        if not self.packed_b:
            stride = self.sketch.direct_columns or 0
            origin = self.reader.value(
                self.view.op.inputs[1],
                self.view.b_index(batch, kb * self.kc, (first_panel + panel) * columns),
            )
            return Operand(origin.source, em.let_index(origin.indices[0], "b_rows"), stride)
        packed = self.arrays["panels"]
        base = em.let_index(packed.flat([panel, 0, 0]), "b_panel")
        return Operand(packed.buffer, base, columns)
