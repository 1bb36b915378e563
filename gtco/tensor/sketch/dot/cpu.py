"""Sketch rule for contractions of few columns (a head of one channel, a product with a vector),
structure SSR. Vectors run along k, because n would leave most of their lanes empty.

::

    for task in batch x row chunks:                    # parallel
      rows of B, one a column                          # packed, or copied if B is not constant
      for block of mr (or mr - 1) rows of the task:
        pack rows of A (prologue, im2col)              # unless they lie in an input; stays in L1
        for k in vectors:  sums[mr, n] += A[mr, k] * B[n, k]
        epilogue(each sum's lanes added up) -> output  # vectors along m
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import Epilogue, ancestors, anchor
from gtco.tensor.analysis.contraction import CONTRACTIONS, Contraction, contraction
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.shape import TaskShape, task_shape
from gtco.tensor.packing import Packing
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.shared.pack import pack_rows, row_vectors
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import vector_runs
from gtco.tensor.sketch.shared.tiling import chunk_options
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Extra, Layer, Stream, Workload

COLUMNS = 4  # with more, vectors along n cost less than adding up the lanes of sums
ALIGN = 16  # floats: every row and column in scratch begins on a cache line
SUMS = 8  # independent sums that hide the latency of FMA on two ports


def match(stage: Stage, target: Target) -> Dot | None:
    """A stage that the rule ``gemm`` matches, if it has few columns and k fills vectors; else
    None.
    """
    op = anchor(stage, *CONTRACTIONS)
    view = contraction(stage, op) if op else None
    if view is None or view.n > COLUMNS or view.k < target.lanes:
        return None
    found = gemm.match(stage, target)
    if found is None or found.norm is not None or found.operand != "float32":
        return None
    return Dot(stage, target, found.view, found.tail, found.direct_rows)


@dataclass(frozen=True)
class Dot:
    """A contraction of few columns on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    view: Contraction
    tail: Epilogue
    direct_rows: int | None  # the row stride if A's rows lie in an input

    name = "dot"
    structure = "SSR"

    @cached_property
    def tile(self) -> MicroKernel:
        """The rows that are computed at once; all columns are one panel."""
        return MicroKernel(min(ceil(SUMS / self.view.n), self.view.m), 1, self.target.lanes)

    @cached_property
    def packings(self) -> Mapping[str, Packing]:
        name = self.view.op.inputs[1]
        return {name: self.view.row_packing()} if name in self.stage.constants else {}

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "chunks_m" not in chosen:
            blocks = ceil(self.view.m / self.tile.rows)
            return Decision("chunks_m", "parallel", chunk_options(blocks, self.target.cores))
        return None

    def shape(self, config: Config) -> TaskShape:
        return task_shape(self.view, self.tile, config["chunks_m"], 1)

    def workload(self, config: Config) -> Workload:
        v, shape, lanes = self.view, self.shape(config), self.target.lanes
        height = shape.task_rows / shape.task_blocks
        steps = ceil(v.k / lanes)
        # a vector of A and a share of B's are loaded for n multiply-adds
        units = steps * (v.n * height + 0.5 * (height + v.n))
        units += v.n * height * (2 * (lanes - 1).bit_length() + 2)
        if self.direct_rows is None:
            each = 2 + vectors(self.stage, ancestors(self.stage, v.op.inputs[0]), lanes).total
            units += height * row_vectors(v, each, lanes)
        if not self.packings:
            units += 2 * v.n * steps / shape.task_blocks
        image = 4.0 * self.stage.types[v.op.inputs[0]].size
        away = self.target.elsewhere
        block = Layer(
            shape.task_blocks,
            (Stream(image / (shape.tasks * shape.task_blocks), image, handed=away),),
            (Stream(4.0 * height * v.n, 4.0 * v.batch * v.m * v.n, handed=away),),
        )
        behind, results = epilogue_vectors(self.tail, lanes), v.n * height / lanes
        beside = (Extra("vector", results, behind.vector), Extra("exp", results, behind.exp))
        layers = (block, Layer(1, (), (), shape.tasks))
        return Workload("fma", units, layers, v.flops, beside=beside)

    def layouts(self, config: Config) -> Mapping[str, Packing]:
        """Of the constant inputs, by name."""
        return self.packings

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = DotLoops(self, config)
        tasks, scratch = loops.shape.tasks, loops.scratch
        return program(symbol, self.stage, self.target, tasks, loops.emit, scratch, self.packings)


class DotLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: Dot, config: Config) -> None:
        self.sketch, self.view, self.shape = sketch, sketch.view, sketch.shape(config)
        self.lanes = sketch.target.lanes
        rows, v = self.shape.rows(1), self.view
        lda = ceil(v.k / ALIGN) * ALIGN
        pieces = [Piece("sums", (v.n, rows))]
        if sketch.direct_rows is None:
            pieces.insert(0, Piece("rows", (rows, lda)))
        if not sketch.packings:
            pieces.append(Piece("columns", (v.n, lda)))
        self.scratch = Scratch(tuple(pieces))

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        shape = self.shape
        self.em, self.args = em, args
        self.reader = Reader(self.sketch.stage, em, args.inputs)
        self.arrays = self.scratch.arrays(args)
        with em.range(args.begin, args.end, "task") as number:
            task = shape.task(em, number)
            if not self.sketch.packings:
                self.copy_columns(task.batch)
            with em.loop(task.blocks, "block") as block:
                this = em.let_index(task.first_block + block, "this_block")
                start = em.let_index(shape.first_row(this), "start")
                shape.by_height(em, this, partial(self.block, task.batch, start))

    def copy_columns(self, batch: Expr) -> None:
        """Copies the columns of B as rows."""
        em, view = self.em, self.view
        into = self.arrays["columns"]
        for j in range(view.n):
            for begin, count, width in vector_runs(view.k, self.lanes):
                with em.loop(count, "v") as v, em.vector(width, "l") as lane:
                    k = begin + v * width + lane
                    value = self.reader.value(view.op.inputs[1], view.b_index(batch, k, j))
                    em.store(into, [j, k], value)

    def column(self, batch: Expr, j: int) -> Array:
        """Column j of B as a run of k."""
        if self.sketch.packings:
            packed = self.args.inputs[self.view.op.inputs[1]].buffer
            at = (self.view.packed_batch(batch) * self.view.n + j) * self.view.k
            return Array(packed, (self.view.k,), "float32", self.em.let_index(at, "column"))
        return self.arrays["columns"].part(j)

    def row(self, batch: Expr, start: Expr, i: int) -> Array:
        """Row i of a block of A as a run of k."""
        em, view = self.em, self.view
        if self.sketch.direct_rows is None:
            return self.arrays["rows"].part(i)
        origin = self.reader.value(view.op.inputs[0], view.a_index(batch, start, 0))
        at = em.let_index(origin.indices[0] + i * self.sketch.direct_rows, "row")
        return Array(origin.source, (view.k,), "float32", at)

    def block(self, batch: Expr, start: Expr, rows: int) -> None:
        """Emits ``rows`` rows of the product from ``start`` on."""
        em, view, n = self.em, self.view, self.view.n
        if self.sketch.direct_rows is None:
            packed = self.arrays["rows"]
            pack_rows(self.reader, view, packed, batch, start, rows, 0, view.k)
        a = [self.row(batch, start, i) for i in range(rows)]
        b = [self.column(batch, j) for j in range(n)]
        acc = self.products(a, b)
        sums = self.arrays["sums"]
        for i in range(rows):
            for j in range(n):
                vector = em.let(em.load_vector(acc, [(i * n + j) * self.lanes]), "sum")
                em.store(sums, [j, i], em.reduce_vector(vector, lambda x, y: x + y))
        for j in range(n):
            with em.vector(rows) as v:
                index = view.c_index(batch, start + v, j)
                value = em.let(em.load(sums, [j, v]))
                self.reader.finish(self.sketch.tail, index, value, self.args.output)

    def products(self, a: Sequence[Array], b: Sequence[Array]) -> Array:
        """Vectors whose lanes, added up, are each row of A times each column of B."""
        em, view, lanes, rows, n = self.em, self.view, self.lanes, len(a), len(b)
        acc = em.registers(rows * n * lanes)
        for cell in range(rows * n):
            em.store_vector(acc, [cell * lanes], em.splat(0.0))
        whole = view.k // lanes
        if whole:
            with em.loop(whole, "kv") as kv:
                k = kv * lanes
                columns = [em.let(em.load_vector(c, [k]), "b") for c in b]
                for i in range(rows):
                    value = em.let(em.load_vector(a[i], [k]), "a")
                    for j in range(n):
                        at = (i * n + j) * lanes
                        total = em.load_vector(acc, [at]) + value * columns[j]
                        em.store_vector(acc, [at], total)
        if view.k % lanes:
            with em.vector(view.k % lanes, "l") as lane:
                k = whole * lanes + lane
                for i in range(rows):
                    for j in range(n):
                        at = (i * n + j) * lanes + lane
                        product = em.load(a[i], [k]) * em.load(b[j], [k])
                        em.store(acc, [at], em.load(acc, [at]) + product)
        return acc
