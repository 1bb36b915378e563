"""The loops of an :class:`gtco.tensor.nest.open.OpenNest`, as a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments, kernel
from gtco.tensor.emit.llvm_source import source
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.open import FIELDS, L3, MEMORY, OpenNest
from gtco.tensor.nest.open_images import WINDOW, gather
from gtco.tensor.stage import TensorType

# A buffer of unknown size. TVM asks only that places in it are constants of an int64.
ANY = TensorType((2**62,))
STREAMING = 4  # rows: tiles of so few have room for prefetches between any loads
NARROW = 2  # vectors: tiles of so few read A at the speed of memory, if there are many rows
AHEAD = 64  # steps of k: memory's latency, also where a step has one or two multiply-adds
SHORT = 8  # rows: on tiles of so few, prefetches from L3 take more time than they save
LARGE = 20  # sums of a tile: two steps of larger ones have no room in the registers
STORE, LOAD = "gtco_store_first", "gtco_load_first"
PAST, FENCE = "gtco_store_past", "gtco_fence"


def edges(lanes: int) -> str:
    """LLVM functions that store and load the first lanes of a vector, up to all. What lies behind
    is not touched. And those that write a vector past the caches, and order such writes before
    what follows.
    """
    vector, mask = f"<{lanes} x float>", f"<{lanes} x i1>"
    numbers = ", ".join(f"i32 {n}" for n in range(lanes))
    chosen = f"""\
  %one = insertelement <{lanes} x i32> poison, i32 %count, i32 0
  %all = shufflevector <{lanes} x i32> %one, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer
  %mask = icmp slt <{lanes} x i32> <{numbers}>, %all
"""
    store, load = f"llvm.masked.store.v{lanes}f32.p0", f"llvm.masked.load.v{lanes}f32.p0"
    return f"""\
declare void @{store}({vector}, ptr, i32, {mask})
declare {vector} @{load}(ptr, i32, {mask}, {vector})
define internal i32 @{STORE}(ptr %p, {vector} %v, i32 %count) alwaysinline {{
{chosen}  call void @{store}({vector} %v, ptr %p, i32 4, {mask} %mask)
  ret i32 0
}}
define internal {vector} @{LOAD}(ptr %p, i32 %count) alwaysinline {{
{chosen}  %v = call {vector} @{load}(ptr %p, i32 4, {mask} %mask, {vector} zeroinitializer)
  ret {vector} %v
}}
define internal i32 @{PAST}(ptr %p, {vector} %v) alwaysinline {{
  store {vector} %v, ptr %p, align {4 * lanes}, !nontemporal !0
  ret i32 0
}}
define internal i32 @{FENCE}() alwaysinline {{
  fence seq_cst
  ret i32 0
}}
!0 = !{{i32 1}}
"""


def rolled(tile: MicroKernel) -> bool:
    """True if LLVM is to make no copies of a step of k."""
    return tile.rows * tile.vectors >= LARGE


def any_size(
    symbol: str, numbers: int, lanes: int, emit: Callable[[Emitter, KernelArguments], None]
) -> Any:
    """The kernel ``symbol(a, b, numbers, out, workspace, begin, end)`` of buffers of any size,
    which reads so many numbers.
    """
    types = {"a": ANY, "b": ANY, "numbers": TensorType((numbers,), "int64")}

    def body(em: Emitter, args: KernelArguments) -> None:
        with source(edges(em.lanes)):
            emit(em, args)

    return kernel(symbol, types, ANY, ANY.nbytes // 4, lanes, body, wide=True)


def product_kernel(nest: OpenNest, symbol: str) -> Any:
    """The kernel ``symbol(a, b, numbers, out, workspace, begin, end)`` of a nest: A[m, k] or the
    images of which it is, B in panels, the numbers of a :class:`gtco.tensor.nest.open.Cut` and
    behind them those of a :class:`gtco.tensor.nest.open_images.Window`, and C[m, n].
    """
    numbers = len(FIELDS) + (len(WINDOW) if nest.gathered else 0)

    def body(em: Emitter, args: KernelArguments) -> None:
        ProductLoops(nest, em, args).emit()

    return any_size(symbol, numbers, nest.row.lanes, body)


@dataclass(frozen=True)
class Tile:
    """A tile's first row and panel, the block of k from ``k0`` of ``depth``, and the place of its
    first element of A.
    """

    start: Expr
    panel: Expr
    k0: Expr
    depth: Expr
    a_row: Expr


@dataclass(frozen=True)
class Part:
    """The row blocks of a task that are worked on at once, ``here`` to ``end`` with the first row
    ``row0``; and the task's panels, ``panel0`` to ``panels``.
    """

    here: Expr
    end: Expr
    row0: Expr
    panel0: Expr
    panels: Expr


class OpenLoops:
    """What loops over blocks of two heights share: the numbers, tasks and parts, and the choice of
    a height among 1 ... ``most``.
    """

    def __init__(self, most: int, em: Emitter, args: KernelArguments) -> None:
        self.most, self.em, self.args = most, em, args
        self.a, self.b, self.out = args.inputs["a"], args.inputs["b"], args.output
        numbers = args.inputs["numbers"].buffer
        self.of = {name: em.let(numbers[i], name) for i, name in enumerate(FIELDS)}

    def more(self, names: Sequence[str]) -> dict[str, Expr]:
        """The numbers behind those of a cut."""
        numbers = self.args.inputs["numbers"].buffer
        return {n: self.em.let(numbers[len(FIELDS) + i], n) for i, n in enumerate(names)}

    def held(self, value: Expr, name: str) -> Expr:
        """The integer, read from a register. TVM's passes write bound values out in each other,
        which takes them seconds where there are many.
        """
        cell = self.em.registers(1, "int64")
        T.buffer_store(cell.buffer, value, [0])
        return self.em.let(cell.buffer[0], name)

    def copy(self, source: Expr | None, target: Expr, count: Expr) -> None:
        """Copies ``count`` elements of A to scratch, or without a ``source`` puts zeros there."""
        em, lanes = self.em, self.em.lanes
        into, a = self.args.workspace.buffer, self.a.buffer
        source = source if source is None else self.held(source, "source")
        whole = self.held(tirx.truncdiv(count, tirx.const(lanes, "int64")), "whole")
        with em.loop(whole, "v") as v:
            value = em.splat(0.0) if source is None else a[tirx.Ramp(source + v * lanes, 1, lanes)]
            T.buffer_store(into, value, [tirx.Ramp(target + v * lanes, 1, lanes)])
        rest = self.held(count - whole * lanes, "rest")
        with em.when(rest > 0):
            few = tirx.Cast("int32", rest)
            value = em.splat(0.0)
            if source is not None:
                where = tirx.address_of(a[source + whole * lanes])
                value = tirx.call_extern(f"float32x{lanes}", LOAD, where, few)
            where = tirx.address_of(into[target + whole * lanes])
            T.evaluate(tirx.call_extern("int32", STORE, where, value, few))

    def count(self, left: Expr) -> Expr:
        """How many elements a vector has where so many are left; none is left at 0 and below."""
        return tirx.Cast("int32", tirx.min(left, tirx.const(self.em.lanes, "int64")))

    def up(self, a: Expr, b: Expr) -> Expr:
        """a / b, rounded up; both are positive."""
        return tirx.truncdiv(a + (b - 1), b)

    def among_neighbours(self, block: Expr) -> Expr:
        """The number of a block among those that are cut together: the taller ones come first."""
        return block

    def first_row(self, block: Expr) -> Expr:
        return block * self.of["height"] + tirx.min(block, self.of["taller"])

    @contextmanager
    def each_part(self) -> Iterator[Part]:
        """A loop over the tasks and the parts of each."""
        em, of = self.em, self.of
        with em.range(self.args.begin, self.args.end, "task") as task:
            chunk_m = tirx.truncdiv(task, of["chunks_n"])
            chunk_n = em.let(task - chunk_m * of["chunks_n"], "chunk_n")
            block0 = em.let(chunk_m * of["task_blocks"], "block0")
            blocks = self.held(tirx.min(block0 + of["task_blocks"], of["blocks"]), "blocks")
            panel0 = em.let(chunk_n * of["task_panels"], "panel0")
            panels = self.held(tirx.min(panel0 + of["task_panels"], of["panels"]), "panels")
            many = em.let(self.up(blocks - block0, of["held"]), "parts")
            with em.loop(many, "part") as part:
                here = self.held(block0 + part * of["held"], "here")
                end = self.held(tirx.min(here + of["held"], blocks), "end")
                row0 = self.held(self.first_row(here), "row0")
                yield Part(here, end, row0, panel0, panels)

    def heights(self, block: Expr, product: Callable[[int], None]) -> None:
        """``product`` of the block's height, which is found by halving."""
        em = self.em
        taller = tirx.Cast("int64", self.among_neighbours(block) < self.of["taller"])
        height = em.let(self.of["height"] + taller, "rows")

        def among(low: int, high: int) -> None:
            if low == high:
                product(low)
                return
            middle = (low + high) // 2
            em.branch(height > middle, lambda: among(middle + 1, high), lambda: among(low, middle))

        among(1, self.most)


    def arriving(
        self, rows: int, first: Expr, ahead: Callable[[], None], other: Callable[[], None]
    ) -> None:
        """``ahead``, a tile that prefetches B, or ``other``.

        The ``first`` block of a part reads panels of B that may lie far away, and in a tall tile so
        many multiply-adds stand between two loads that a core does not get to the next ones in
        time. Later blocks find the panel in L1 or L2, where prefetches would only take time.
        """
        if rows <= STREAMING:
            ahead()
            return
        far = self.of["ahead"] >= (L3 if rows > SHORT else MEMORY)
        self.em.branch(tirx.And(first, far), ahead, other)

    def prefetch_panels(self, b: Operand, vectors: int, k: Expr) -> None:
        """Asks for what a tile reads of B some steps after ``k``."""
        assert b.vector is not None, "panels lie apart"
        for j in range(vectors):
            place = b.offset + (k + AHEAD) * b.stride + j * b.vector
            self.em.prefetch_value(b.buffer[place])


class ProductLoops(OpenLoops):
    """The loops of a nest whose rows are those of A, read in place or copied."""

    def __init__(self, nest: OpenNest, em: Emitter, args: KernelArguments) -> None:
        super().__init__(nest.row.rows, em, args)
        self.nest, self.row = nest, nest.row
        self.window = self.more(WINDOW) if nest.gathered else {}

    def emit(self) -> None:
        em, of = self.em, self.of
        with self.each_part() as part:
            with em.loop(em.let(self.up(of["k"], of["kc"]), "kblocks"), "kb") as kb:
                k0 = self.held(kb * of["kc"], "k0")
                depth = self.held(tirx.min(of["kc"], of["k"] - k0), "depth")
                self.prepare(part, k0, depth)
                with em.range(part.panel0, part.panels, "panel") as panel:
                    with em.range(part.here, part.end, "block") as block:
                        start = self.held(self.first_row(block), "start")
                        a_row = self.held(self.place_of_row(start, part.row0, k0), "a_row")
                        tile = Tile(start, panel, k0, depth, a_row)
                        # Rows of A lie one behind the other where a block of k has all of k.
                        more = tirx.And(block + 1 < part.end, of["kc"] >= of["k"])
                        first = block == part.here
                        self.heights(block, partial(self.variants, at=tile, first=first, more=more))
        with em.when(of["past"] > 0):
            T.evaluate(tirx.call_extern("int32", FENCE))

    def prepare(self, part: Part, k0: Expr, depth: Expr) -> None:
        """Copies A[rows of the part, k0:k0 + depth], if the nest does."""
        if not self.nest.packed:
            return
        em, of, row0 = self.em, self.of, part.row0
        with em.loop(self.first_row(part.end) - row0, "r") as r:
            target = self.held(r * of["lda"], "target")
            if self.nest.gathered:
                gather(em, self, self.window, row0 + r, k0, depth, target)
            else:
                self.copy((row0 + r) * of["k"] + k0, target, depth)

    def variants(self, rows: int, at: Tile, first: Expr, more: Expr) -> None:
        """The product of a block: the ``first`` of a part, or one behind which is ``more``."""
        ahead = partial(self.product, rows, at, ahead=True)
        self.arriving(rows, first, ahead, partial(self.either, rows, at, more))

    def either(self, rows: int, at: Tile, more: Expr) -> None:
        """The product of a block, which prefetches the rows of the next one if there is ``more``.
        They follow each other, and no hardware prefetcher sees so many short runs as one. Where no
        rows are, looking for their pages takes long. Many blocks have about the most rows.
        """
        if not self.nest.direct or self.row.vectors > NARROW or rows < self.row.rows - 1:
            self.product(rows, at)
            return
        follows = partial(self.product, rows, at, follows=True)
        self.em.branch(more, follows, lambda: self.product(rows, at))

    def product(
        self, rows: int, at: Tile, ahead: bool = False, follows: bool = False
    ) -> None:
        """C[rows, columns] of a block and a panel, for one block of k. ``ahead``, ``follows``: as
        in :meth:`prefetches`.
        """
        em, of, row = self.em, self.of, self.row
        lanes, columns = row.lanes, row.columns
        column = em.let(at.panel * columns, "column")
        target = em.let(at.start * of["n"] + column, "c")
        left = em.let(of["n"] - column, "left")

        def place(i: int, j: int) -> Expr:
            return target + i * of["n"] + j

        def load(i: int, j: int) -> Expr:
            where = tirx.address_of(self.out.buffer[place(i, j)])
            return tirx.call_extern(f"float32x{lanes}", LOAD, where, self.count(left - j))

        sums: list[tuple[int, int, Expr]] = []
        runs, steps = self.runs(at.depth)
        first = em.let(at.panel * row.vectors * of["k"] + at.k0, "b_step")
        apart = of["k"] * lanes  # the panels of B
        b = Operand(self.b.buffer, first * lanes, lanes, vector=apart)
        tile = replace(row, rows=rows)
        fma_tile(
            em,
            tile,
            steps,
            self.rows_of_a(at),
            b,
            lambda i, j, vector: sums.append((i, j, vector)),
            load=load,
            first=at.k0 == 0,
            step=self.prefetches(rows, at, b, ahead, follows),
            runs=runs,
            rolled=rolled(tile),
        )

        # Masked stores take longer, so only the last columns have them.
        for first in range(0, columns, lanes):
            mine = [(place(i, j), vector) for i, j, vector in sums if j == first]
            here = left - first
            whole, part = partial(self.store_whole, mine), partial(self.store, mine, here)
            em.branch(here >= lanes, whole, part)

    def store_whole(self, vectors: Sequence[tuple[Expr, Expr]]) -> None:
        """Stores whole vectors at places in C, if asked past the caches: those of a C that is
        larger than they are would be fetched before they are written.
        """
        def past() -> None:
            for place, vector in vectors:
                where = tirx.address_of(self.out.buffer[place])
                T.evaluate(tirx.call_extern("int32", PAST, where, vector))

        self.em.branch(self.of["past"] > 0, past, partial(self.store, vectors))

    def store(self, vectors: Sequence[tuple[Expr, Expr]], left: Expr | None = None) -> None:
        """Stores vectors at places in C: whole ones, or the columns that are ``left``."""
        lanes = self.row.lanes
        for place, vector in vectors:
            if left is None:
                T.buffer_store(self.out.buffer, vector, [tirx.Ramp(place, 1, lanes)])
                continue
            where = tirx.address_of(self.out.buffer[place])
            T.evaluate(tirx.call_extern("int32", STORE, where, vector, self.count(left)))

    def place_of_row(self, row: Expr, row0: Expr, k0: Expr) -> Expr:
        """The place of A[row, k0], where ``row0`` is the first row of the part."""
        if self.nest.packed:
            return (row - row0) * self.of["lda"]
        return row * self.of["k"] + k0

    def rows_of_a(self, at: Tile) -> Operand:
        if self.nest.packed:
            return Operand(self.args.workspace.buffer, at.a_row, self.of["lda"])
        return Operand(self.a.buffer, at.a_row, self.of["k"])

    def runs(self, depth: Expr) -> tuple[Expr, Expr]:
        """Of a block of k so deep: how many runs A lies in, and the steps of each."""
        return 1, depth

    def prefetches(
        self, rows: int, at: Tile, b: Operand, ahead: bool, follows: bool
    ) -> Callable[[Expr], None]:
        """What each step of k prefetches. ``ahead``: what the tile will read of B some steps later.
        If another block of A ``follows``, each step prefetches a share of its rows.
        """
        em, of = self.em, self.of
        after = em.let((at.start + rows) * of["k"] + at.k0, "next_rows") if follows else 0


        def step(k: Expr) -> None:
            if ahead:
                self.prefetch_panels(b, self.row.vectors, k)
            if follows:
                em.prefetch_value(self.a.buffer[after + k * rows])

        return step
