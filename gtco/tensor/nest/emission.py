"""The loops of a nest, emitted as a kernel.

::

    for task in batch x groups of lines x chunks of rows x chunks of columns:    # parallel
      begin                                      # what a task does once
      for part of `held` blocks of rows:
        for kb in blocks of k:                   # with order=k inside of panel
          feed                                   # A and B come to lie as the row reads them
          for panel of the task's columns:
            feed_panel
            for position, for line, for block of the part:
              C[height, columns] (+)= rows_of_a[height, kc] x panel_of_b[kc, columns]
              on the last kb: C -> output, through the epilogue; from registers if it is short
            finish_panel                         # with several positions: C -> output
              # by_block: the loops of lines and blocks are around that of positions and this

A family of kernels is a :class:`NestLoops` that says what differs: ``begin``, ``feed``,
``feed_panel``, ``rows_of_a``, ``panel_of_b`` and ``finish_panel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

from tvm import tirx

from gtco.machine.target import CACHE_LINE
from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.contraction import Contraction
from gtco.tensor.cost import epilogue_vectors
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.nest.nest import Nest
from gtco.tensor.nest.shape import Task
from gtco.tensor.nest.tile_store import TileStore
from gtco.tensor.stage import Stage, item_bytes

AHEAD = 16  # iterations of k: some 100 ns, about DRAM's latency
AHEAD_IN_TILES = 5  # the same time in the tile unit
# Vector instructions of an epilogue that is written out for every vector of a tile. A sum in
# registers saves two instructions of each, and long epilogues would be much code for that.
SHORT = 6.0


@dataclass(frozen=True)
class At:
    """A place in the loops: the task, the part of its rows (its number, first block, number of
    blocks and first row), the block of k, and within the task the panel, the position, the line,
    the part's block and that block's first row in its line.
    """

    task: Task
    part: Expr
    first: Expr
    blocks: Expr
    row0: Expr
    kb: Expr
    panel: Expr = 0
    position: Expr = 0
    line: Expr = 0
    block: Expr = 0
    start: Expr = 0

    @property
    def whole_panel(self) -> Expr:
        """The panel, among those of all tasks."""
        return self.task.first_panel + self.panel


class NestLoops:
    """The emitter of one config of one stage. ``view`` is its product and ``tail`` what follows it.
    ``by_columns``: as in :class:`gtco.tensor.nest.tile_store.TileStore`.
    """

    def __init__(
        self, nest: Nest, stage: Stage, view: Contraction, tail: Epilogue, by_columns: bool
    ) -> None:
        self.nest, self.stage, self.view = nest, stage, view
        self.tail, self.by_columns = tail, by_columns
        self.row, self.kind, self.shape = nest.row, nest.row.kind, nest.shape
        # elements of the buffer of constant B: those of a step of k, and those in a cache line
        self.b_step = nest.stored.places(nest.row.columns)
        self.b_line = CACHE_LINE // ceil(item_bytes(nest.b.dtype))
        self.scratch = Scratch(tuple(self.pieces()))

    # what differs ---------------------------------------------------------------------------------
    def pieces(self) -> Iterable[Piece]:
        """The scratch that a thread keeps beside its registers."""
        return (p for p in self.nest.pieces() if p.name != "tiles" or not self.from_registers)

    @cached_property
    def from_registers(self) -> bool:
        """True if sums go from their registers through the epilogue to the output."""
        nest, elsewhere = self.nest, self.kind.in_tiles or self.by_columns
        if elsewhere or nest.kblocks > 1 or nest.positions > 1:
            return False
        return epilogue_vectors(self.tail, self.row.lanes).total <= SHORT

    def begin(self, task: Task) -> None:
        """What a task does before its loops."""

    def feed(self, at: At) -> None:
        """Brings A and B of a block of k to where the row reads them."""

    def feed_panel(self, at: At) -> None:
        """Brings a panel of B to where the row reads it."""

    def rows_of_a(self, at: At) -> Operand:
        """A's rows of the block: here those of a position, of which each has a plane in scratch."""
        planes, lda = self.arrays["rows"], self.nest.lda
        place = planes.flat([at.position, (at.start - at.row0) * lda])
        return Operand(planes.buffer, self.em.let_index(place, "a_row"), lda)

    def panel_of_b(self, at: At) -> Operand:
        """B's block of k of the panel: here a constant in panels."""
        array = self.args.inputs[self.view.op.inputs[1]]
        base = self.em.let_index(self.place_of_b(at, at.whole_panel), "b_panel")
        return Operand(array.buffer, base, self.b_step * self.kind.b.step)

    def batch_of_b(self, at: At) -> Expr:
        """The batch of constant B that the task reads."""
        return self.view.packed_batch(at.task.batch)

    def steps(self, at: At) -> tuple[Expr, int]:
        """The steps of k of a run of A, and the number of runs in a block of k."""
        nest, k = self.nest, self.nest.extents[3]
        if k % nest.kc == 0:
            return nest.kc, 1
        return self.em.let_index(tirx.min(nest.kc, k - at.kb * nest.kc), "depth"), 1

    def index(self, at: At) -> Callable[[Expr, Expr], list[Expr]]:
        """The output's index of the element of C at (row of the line, column)."""
        return lambda m, n: self.view.c_index(at.task.batch, m, n)

    def finish_panel(self, at: At) -> None:
        """What becomes of the sums of all positions of a panel, if there are several."""

    # the loops ------------------------------------------------------------------------------------
    def emit(self, em: Emitter, args: KernelArguments) -> None:
        nest, shape, held = self.nest, self.shape, self.nest.held
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        self.arrays = self.scratch.arrays(args)
        split = held < nest.task_blocks
        around, within = (1, nest.kblocks) if nest.order == "k" else (nest.kblocks, 1)
        with (
            prepared(em, self.row, shape.heights[0]),
            em.range(args.begin, args.end, "task") as number,
        ):
            task = shape.task(em, number)
            self.begin(task)
            parts = em.index((task.blocks + (held - 1)) // held) if split else 1
            with em.loop(parts, "part") as part, em.loop(around, "kb") as kb:
                first = em.let_index(task.first_block + part * held, "here")
                blocks = 1 if split else task.blocks
                if split and held > 1:
                    blocks = em.let_index(tirx.min(held, task.blocks - part * held), "count")
                row0 = em.let_index(shape.first_row(first), "row0")
                at = At(task, part, first, blocks, row0, kb)
                self.feed(at)
                with em.loop(task.panels, "panel") as panel, em.loop(within, "kb") as inner:
                    at = replace(at, panel=panel, kb=inner if within > 1 else kb)
                    self.feed_panel(at)
                    self._products(at)

    def _products(self, at: At) -> None:
        """The products of a panel and of all blocks of the part."""
        em, by_block, positions = self.em, self.nest.by_block, self.nest.positions
        with (
            em.loop(1 if by_block else positions, "position") as outer,
            em.loop(at.task.lines, "line") as line,
            em.loop(at.blocks, "block") as block,
        ):
            at = replace(at, line=line, block=block)
            with em.loop(positions if by_block else 1, "position") as inner:
                self._block(replace(at, position=inner if by_block else outer))
            if by_block:
                self.finish_panel(at)
        if not by_block:
            self.finish_panel(at)

    def block_of(self, at: At) -> tuple[At, Expr]:
        """The place with the block's first row, and the number of rows of C that it finishes."""
        em, shape = self.em, self.shape
        this = em.let_index(at.first + at.block, "this_block")
        at = replace(at, start=em.let_index(shape.first_row(this), "start"))
        return at, shape.finished(this)

    def _block(self, at: At) -> None:
        """The product of a block of rows and a panel, and what becomes of it."""
        em, nest, shape = self.em, self.nest, self.shape
        at, height = self.block_of(at)
        this = em.index(at.first + at.block)
        store = self.store(self.index(at), shape.finished_heights) if nest.positions == 1 else None
        last = at.kb == nest.kblocks - 1 if nest.kblocks > 1 else True
        dropped = em.let_index(shape.dropped(this), "dropped")
        if store and nest.prefetch != "none":
            with em.when(last):
                store.prefetch(at.whole_panel, at.start + dropped, height)
        if self.from_registers:
            shape.by_height(em, this, partial(self._multiply_and_write, at))
            return
        sums = self.sums(at)
        shape.by_height(em, this, partial(self._multiply, at, sums))
        if store:
            kept = replace(sums, offset=sums.offset + dropped * self.row.columns)
            with em.when(last):
                store.write(kept, at.whole_panel, at.start + dropped, height)

    def _multiply_and_write(self, at: At, rows: int) -> None:
        """The product of a block of so many rows and a panel, by registers to the output."""
        kept = self.em.registers(rows * self.row.columns, self.kind.accumulator)
        sums = Array(kept.buffer, (rows, self.row.columns), kept.dtype)
        self._multiply(at, sums, rows)
        self.store(self.index(at), (rows,)).write(sums, at.whole_panel, at.start, rows)

    def _multiply(self, at: At, sums: Array, rows: int) -> None:
        """sums[rows, columns] (+)= A[rows, kc] x B[kc, columns], accumulators in registers."""
        em, nest = self.em, self.nest
        depth, runs = self.steps(at)
        # If each block of rows meets all panels, they lie in L2 from the first one on. A prefetch
        # takes a load's port, of which tiles need many.
        once = self.kind.in_tiles and nest.order == "rows"

        def step(k: Expr) -> None:
            if nest.prefetch != "none":
                with em.when(at.part == 0 if once else True):
                    self._next_of_b(at, em.index(depth * runs), k)
                self._next_rows(at, rows, k)
            if nest.prefetch == "both":
                self._soon_of_b(at, k)

        row = replace(self.row, rows=rows)
        with prepared(em, row, rows, self.shape.heights[0]):
            multiply(
                em,
                row,
                depth,
                self.rows_of_a(at),
                self.panel_of_b(at),
                sums,
                first=at.kb == 0,
                step=step,
                runs=runs,
            )

    # places ---------------------------------------------------------------------------------------
    def height_of(self, at: At) -> Expr:
        """The rows of the part."""
        return self.em.let_index(self.shape.end_row(at.first + at.blocks) - at.row0, "rows")

    def sums(self, at: At) -> Array:
        """The tile of C of a block of rows and a panel."""
        nest, columns = self.nest, self.row.columns
        if nest.positions > 1:  # the rows of a part follow each other
            planes = self.arrays["sums"]
            row = 0 if nest.by_block else at.start - at.row0
            place = planes.flat([at.position, row * columns])
            place = self.em.let_index(place, "c_row")
            return Array(planes.buffer, (self.row.rows, columns), planes.dtype, place)
        which = at.line * self.shape.blocks + at.block
        if nest.order != "k":
            which = which * self.shape.task_panels + at.panel
        return self.arrays["tiles"].part(which if nest.kblocks > 1 else 0, self.em, "tile")

    def store(
        self, index: Callable[[Expr, Expr], list[Expr]], heights: tuple[int, ...]
    ) -> TileStore:
        """The way in which finished tiles of such heights are written."""
        return TileStore(
            self.em,
            self.tail,
            self.reader,
            self.args.output,
            self.row,
            self.view.n,
            heights,
            self.by_columns,
            index,
        )

    def place_of_b(self, at: At, panel: Expr) -> Expr:
        """The place where a block of k of a panel of constant B starts."""
        nest = self.nest
        number = (self.batch_of_b(at) * self.shape.panels + panel) * nest.positions + at.position
        depth = ceil(nest.extents[3] / nest.whole) * nest.whole
        return (number * depth + at.kb * nest.kc) * self.b_step

    # prefetches -----------------------------------------------------------------------------------
    def _next_of_b(self, at: At, depth: Expr, k: Expr) -> None:
        """Prefetches a share of the part of B that is read after this one: the next panel, or the
        next block of k or position, which lies behind. The steps of all row blocks together cover
        it.
        """
        nest = self.nest
        share = ceil(self.b_step / nest.held)  # elements of it, for each step of k
        if nest.order == "k" or nest.positions > 1:
            begin = self.place_of_b(at, at.whole_panel) + nest.kc * self.b_step
        else:
            begin = self.place_of_b(at, at.whole_panel + 1)
        block = at.line * self.shape.blocks + at.block
        if not self.kind.in_tiles:
            self._prefetch_b(begin + (block * depth + k) * share, share)
            return
        # Two pages in turn. What the lines of one page bring is hidden behind the products worse:
        # 2.2 us for a panel of 16 KB from L3, where its products alone take 1.5, and 1.75 with two
        # pages (2 cores of a Granite Rapids).
        turn, half = (block * depth + k) // self.kind.step, nest.kc * self.b_step // 2
        self._prefetch_b(begin + turn % 2 * half + turn // 2 * share * self.kind.step, share)

    def _soon_of_b(self, at: At, k: Expr) -> None:
        """Prefetches the data of this panel of B that an iteration reads some iterations later, or
        the start of the next panel. A hardware prefetcher stops at the end of a page, and no
        earlier panel of the task prefetched the first one.
        """
        ahead = (AHEAD_IN_TILES if self.kind.in_tiles else AHEAD) * self.kind.step
        begin = self.place_of_b(at, at.whole_panel)
        self._prefetch_b(begin + (k + ahead) * self.b_step, self.b_step)

    def _prefetch_b(self, place: Expr, each: int) -> None:
        """Prefetches ``each`` elements of constant B a step of k from ``place`` on, for an
        iteration.
        """
        array = self.args.inputs[self.view.op.inputs[1]]
        for n in range(0, each * self.kind.step, self.b_line):
            self.em.prefetch(array, place + n)

    def _next_rows(self, at: At, rows: int, k: Expr) -> None:
        """Prefetches a share of the next block's rows, if they follow each other in an input."""
        em, nest = self.em, self.nest
        if nest.a.how != "direct" or nest.a.stride != nest.extents[3] or nest.kblocks > 1:
            return
        # Rows lie in L2 from the first panel on, and whole tiles of them are many lines.
        with em.when(at.panel == 0 if self.kind.in_tiles else True):
            here = self.rows_of_a(at)
            place = here.offset + rows * here.stride + k * rows
            line = CACHE_LINE // self.kind.a.nbytes
            for n in range(0, rows * self.kind.step, line):
                em.prefetch_value(here.buffer[em.index(place + n)])
