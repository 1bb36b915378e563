"""Sketch rule for fused attention, structure SSSR-RSRS (GTCO, Section IV-D): scores never leave the
cache.

::

    for task in (batch, head) x row chunks:                       # parallel
      pack K transposed [n / lanes, d, lanes], V [n, e]           # once a task, stays in L2
      for block of mr (or mr - 1) query rows:
        scores[mr, n] = scale * Q[mr, d] x K^T[d, n]              # micro-kernel, L1
        scores = exp(scores + bias - rowmax); sum                 # softmax of whole rows
        tile[mr, e] = scores[mr, n] x V[n, e]; epilogue(tile / sum) -> output

Whole score rows are kept (mr x n floats): an online softmax would save nothing while they fit the
L1 or L2 cache. A row that a mask hides throughout comes out as the operators say one by one: the
mean of V where the mask is finite, NaN where it is -inf, 0 where a guard stands behind the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, prod

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.target import Target
from gtco.tensor import vector_math
from gtco.tensor.analysis.chains import Epilogue, anchor, epilogue, prologue_readable
from gtco.tensor.analysis.indices import broadcast_index, reshape_index
from gtco.tensor.arithmetic import is_nan
from gtco.tensor.bfloat16 import convert, literal
from gtco.tensor.cost import epilogue_vectors
from gtco.tensor.emit import Array, Emitter, Expr, KernelArguments
from gtco.tensor.fold import add, fold
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels
from gtco.tensor.reader import Reader
from gtco.tensor.scratch import ALIGN, Piece, Scratch
from gtco.tensor.sketch.attention_pairs import pack_key_pairs, pack_value_pairs
from gtco.tensor.sketch.pack import packed_steps
from gtco.tensor.sketch.program import program
from gtco.tensor.sketch.tiling import chunk_options, tile_options
from gtco.tensor.space import (
    Config,
    Decision,
    Extra,
    Layer,
    Option,
    Program,
    Rejection,
    Stream,
    Workload,
)
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage
from gtco.tensor.transpose import transpose

ROUNDING = 8.0  # vector instructions that round a vector of weights to bfloat16


def match(stage: Stage, target: Target) -> Attention | None:
    """One ``attention`` with readable operands and a one-to-one epilogue, or None."""
    op = anchor(stage, "attention")
    if op is None:
        return None
    types = [stage.types[x] for x in op.inputs] + [op.type, stage.output.type]
    if any(isinstance(d, str) or d == 0 for t in types for d in t.shape):
        return None
    products, sums = {t.dtype for t in types[:3]}, {t.dtype for t in types[3:-1]}
    if products not in ({"float32"}, {"bfloat16"}) or sums != {"float32"}:
        return None
    if types[-1].dtype not in ("float32", "bfloat16"):
        return None
    if not prologue_readable(stage, op.inputs):
        return None
    tail = epilogue(stage, op.output)
    return Attention(stage, target, tail) if tail else None


@dataclass(frozen=True)
class Attention:
    """softmax(scale * q k^T + bias) v over the batch axes; see the module's text for the loops."""

    stage: Stage
    target: Target
    tail: Epilogue

    name = "attention"
    structure = "SSSR-RSRS"

    @property
    def operand(self) -> str:
        """The dtype of q, k and v."""
        return self.stage.types[self.op.inputs[0]].dtype

    def _shape(self, operand: int) -> tuple[int, ...]:
        return tuple(int(d) for d in self.stage.types[self.op.inputs[operand]].shape)

    @property
    def op(self) -> Operator:
        return self.stage.producers[self.tail.anchor]

    @property
    def extents(self) -> tuple[int, int, int, int, int]:
        """(batch, queries m, keys n, width of keys d, width of values e)."""
        q, v = self._shape(0), self._shape(2)
        return prod(int(d) for d in self.op.type.shape[:-2]), q[-2], v[-2], q[-1], v[-1]

    @property
    def flops(self) -> float:
        b, m, n, d, e = self.extents
        return 2.0 * b * m * n * (d + e)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        _, m, _, _, e = self.extents
        if "tile" not in chosen:
            tiles = tile_options(micro_kernels(self.target, self.operand), m, e)
            return Decision("tile", "micro-kernel", tuple(t.name for t in tiles))
        if "chunks_m" not in chosen:
            blocks = ceil(m / MicroKernel.parse(str(chosen["tile"]), 1).rows)
            return Decision("chunks_m", "parallel", chunk_options(blocks, self.target.cores))
        return None

    def workload(self, config: Config) -> Workload:
        b, m, n, d, e = self.extents
        tile = MicroKernel.parse(config["tile"], self.target.lanes)
        lanes, chunks = tile.lanes, config["chunks_m"]
        blocks = ceil(m / tile.rows)
        height = m / blocks  # of the blocks' two heights, on average
        keys, values = ceil(n / lanes), ceil(e / lanes)
        item = float(ITEM_BYTES[self.operand])
        item_out = float(ITEM_BYTES[self.stage.output.type.dtype])
        operands = item * n * (d + e)
        block = Layer(
            ceil(blocks / chunks),
            (Stream(operands, operands + 4.0 * height * n),),
            (Stream(item_out * height * e, item_out * m * e),),
        )
        task = Layer(1, (Stream(operands, item * b * n * (d + e)),), (), b * chunks)
        row = replace(tile, rows=ceil(height), vectors=min(tile.vectors, values))
        return Workload(
            row.kernel,
            height * (keys * d + values * n) / tile.kind.products,
            (block, task),
            self.flops,
            self.extra(chunks),
            (Extra("vector", b * m * values, 3.0 + epilogue_vectors(self.tail, lanes)),),
        )

    def extra(self, chunks: int) -> tuple[Extra, ...]:
        """Packing of K and V, softmax."""
        b, m, n, d, e = self.extents
        keys = ceil(n / self.target.lanes)
        bias = keys * 3 if len(self.op.inputs) > 3 else 0
        rounding = keys * ROUNDING if self.operand == "bfloat16" else 0
        return (
            Extra("vector", 3.0 * b * chunks * keys * (d + e)),
            Extra("vector", b * m, keys * 18.0 + bias + rounding + 40),
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """All that the space and the loops' price depend on."""
        return (self.name, self.operand, self.stage.output.type.dtype, *self.extents)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = AttentionLoops(self, config)
        return program(symbol, self.stage, self.target, loops.tasks, loops.emit, loops.scratch)


def _groups(vectors: int, most: int) -> list[tuple[int, int]]:
    """Cut ``vectors`` into groups of at most ``most``, as even as can be: (first, size) of each."""
    count = ceil(vectors / most)
    size, larger = divmod(vectors, count)
    sizes = [size + 1] * larger + [size] * (count - larger)
    return [(sum(sizes[:i]), s) for i, s in enumerate(sizes)]


class AttentionLoops:
    """One config of one stage, being emitted."""

    def __init__(self, sketch: Attention, config: Config) -> None:
        self.sketch, self.stage, self.op = sketch, sketch.stage, sketch.op
        self.batch, self.m, self.n, self.d, self.e = sketch.extents
        self.tile = MicroKernel.parse(config["tile"], sketch.target.lanes)
        lanes, kind = self.tile.lanes, self.tile.kind
        self.lanes, self.kind = lanes, kind
        self.rounds = sketch.operand == "bfloat16"
        self.blocks = ceil(self.m / self.tile.rows)
        self.height, self.taller = divmod(self.m, self.blocks)
        self.task_blocks = ceil(self.blocks / config["chunks_m"])
        self.chunks = ceil(self.blocks / self.task_blocks)
        self.tasks = self.batch * self.chunks
        self.key_vectors, self.value_vectors = ceil(self.n / lanes), ceil(self.e / lanes)
        rows = self.height + (self.taller > 0)
        self.ld_scores = self.key_vectors * lanes + (
            lanes if self.key_vectors * lanes % 256 == 0 else 0
        )
        self.ld_values = self.value_vectors * lanes
        self.depth, packed = packed_steps(self.d, kind.b)
        line = ALIGN // kind.a.nbytes
        pieces = [
            Piece("keys", (self.key_vectors, self.depth, lanes), packed),
            Piece("values", (packed_steps(self.n, kind.b)[0], self.ld_values), packed),
            Piece("query", (rows, -(-self.d // line) * line), kind.a.dtype),
            Piece("scores", (rows, self.ld_scores)),
            Piece("tile", (rows, self.ld_values)),
            Piece("inverse", (16 * ceil(rows / 16),)),
        ]
        if kind.a.dtype != "float32":  # the scores' weights, as they are multiplied
            width = -(-self.key_vectors * lanes // line) * line
            width += line if width * kind.a.nbytes % 1024 == 0 else 0
            pieces.append(Piece("weights", (rows, width), kind.a.dtype))
        self.scratch = Scratch(tuple(pieces))

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        arrays = self.scratch.arrays(args)
        self.keys, self.values, self.query = arrays["keys"], arrays["values"], arrays["query"]
        self.scores, self.tiles, self.inverse = arrays["scores"], arrays["tile"], arrays["inverse"]
        self.weights = arrays.get("weights", self.scores)
        with em.range(args.begin, args.end, "task") as task:
            em.bind(task, self.tasks)
            chunk = em.let_index(task % self.chunks, "chunk")
            flat = em.let_index(task // self.chunks, "batch")
            batch_shape = [int(d) for d in self.op.type.shape[:-2]]
            batch = [em.let_index(i, "b") for i in reshape_index([flat], [self.batch], batch_shape)]
            if self.kind.b.step > 1:
                read = self.operand
                k, v = (lambda r, c, i=i: read(i, batch, r, c) for i in (1, 2))
                pack_key_pairs(em, self.keys, k, self.n, self.d)
                pack_value_pairs(em, self.values, v, self.n, self.e)
            else:
                self.pack_keys(batch)
                self.pack_values(batch)
            first = em.let_index(chunk * self.task_blocks, "first")
            count = (
                self.task_blocks
                if self.blocks % self.task_blocks == 0
                else em.let_index(tirx.min(self.task_blocks, self.blocks - first), "count")
            )
            with em.loop(count, "block") as block:
                this = em.let_index(first + block, "this")
                start = em.let_index(
                    this * self.height + (tirx.min(this, self.taller) if self.taller else 0),
                    "start",
                )

                def rows(n: int, start: Expr = start) -> Callable[[], None]:
                    return lambda: self.row_block(n, batch, start)

                if self.taller:
                    em.branch(this < self.taller, rows(self.height + 1), rows(self.height))
                else:
                    rows(self.height)()

    def operand(self, which: int, batch: list[Expr], row: Expr, column: Expr) -> Expr:
        name = self.op.inputs[which]
        shape = self.reader.shape(name)
        return self.reader.value(name, broadcast_index([*batch, row, column], shape))

    def pack_keys(self, batch: list[Expr]) -> None:
        """keys[p, d, l] = K[p * lanes + l, d], by blocks transposed in registers; zero beyond n."""
        em, lanes = self.em, self.lanes
        rest = self.n % lanes

        def block(p: Expr, d0: Expr, width: int, present: int) -> None:
            cell = em.registers(lanes * lanes)
            for r in range(lanes):
                if r >= present or width < lanes:
                    em.store_vector(cell, [r * lanes], em.splat(0.0))
                if r < present:
                    with em.vector(width) as v:
                        em.store(
                            cell, [r * lanes + v], self.operand(1, batch, p * lanes + r, d0 + v)
                        )
            rows = [em.let(em.load_vector(cell, [r * lanes]), "r") for r in range(lanes)]
            for c, column in enumerate(transpose(em, rows)[:width]):
                em.store_vector(self.keys, [p, d0 + c, 0], column)

        def panel(p: Expr, present: int) -> None:
            whole = self.d // lanes
            if whole:
                with em.loop(whole, "c") as c:
                    block(p, c * lanes, lanes, present)
            if self.d % lanes:
                block(p, whole * lanes, self.d % lanes, present)

        full = self.n // lanes
        if full:
            with em.loop(full, "p") as p:
                panel(p, lanes)
        if rest:
            panel(full, rest)

    def pack_values(self, batch: list[Expr]) -> None:
        em, lanes = self.em, self.lanes
        with em.loop(self.n, "n") as n:
            for j in range(0, self.ld_values, lanes):
                width = min(lanes, self.e - j)
                with em.vector(width) as v:
                    em.store(self.values, [n, j + v], self.operand(2, batch, n, j + v))
                if width < lanes:
                    with em.vector(lanes - width) as v:
                        em.store(self.values, [n, j + width + v], tirx.const(0, "float32"))

    def row_block(self, rows: int, batch: list[Expr], start: Expr) -> None:
        em, lanes = self.em, self.lanes
        scale = tirx.const(self.op["scale"], "float32")
        with em.loop(rows, "i") as i:
            for j in range(0, self.d, lanes):
                with em.vector(min(lanes, self.d - j)) as v:
                    query = self.operand(0, batch, start + i, j + v)
                    if self.rounds:  # as it is: a product with the scale would be rounded again
                        query = convert(em, query, "bfloat16", self.kind.a.dtype)
                    else:
                        query = query * scale
                    em.store(self.query, [i, j + v], query)
            for j in range(self.d, -(-self.d // self.kind.step) * self.kind.step):
                em.store(self.query, [i, j], literal(0.0, self.kind.a.dtype))
        self.products(
            rows,
            self.key_vectors,
            self.d,
            self.query,
            self.scores,
            lambda vector: Operand.of(self.keys, [vector, 0, 0], vector=self.depth * lanes),
            scale if self.rounds else None,
        )
        with em.loop(rows, "i") as i:
            self.softmax_row(i, batch, start)
        self.products(
            rows,
            self.value_vectors,
            self.n,
            self.weights,
            self.tiles,
            lambda vector: Operand.of(self.values, [0, vector * lanes]),
        )
        with em.loop(rows, "i") as i:
            inverse = em.let(em.load(self.inverse, [i]), "inverse")
            for j in range(0, self.e, lanes):
                with em.vector(min(lanes, self.e - j)) as v:
                    value = em.let(em.load(self.tiles, [i, j + v]) * inverse)
                    where = [*batch, start + i, j + v]
                    self.reader.finish(self.sketch.tail, where, value, self.args.output)

    def products(
        self,
        rows: int,
        vectors: int,
        depth: int,
        a: Array,
        c: Array,
        b: Callable[[Expr], Operand],
        scale: Expr | None = None,
    ) -> None:
        """c[rows, vectors * lanes] = a[rows, depth] x b, times ``scale`` where it is given, in
        groups of vectors that fit the registers; ``b(first)`` is the operand from that vector on.
        """
        em, lanes = self.em, self.lanes

        def store(i: int, column: Expr, vector: Expr) -> None:
            scaled = vector if scale is None else vector * em.splat(scale)
            em.store_vector(c, [i, column], scaled)

        groups = _groups(vectors, self.tile.vectors)
        for size in sorted({s for _, s in groups}, reverse=True):
            starts = [first for first, s in groups if s == size]
            with em.loop(len(starts), "g") as g:
                first = starts[0] + g * size
                fma_tile(
                    em,
                    replace(self.tile, rows=rows, vectors=size),
                    depth,
                    Operand.of(a, [0, 0]),
                    b(first),
                    lambda i, j, vector, first=first: store(  # type: ignore[misc]
                        i, first * lanes + j, vector
                    ),
                )

    def softmax_row(self, i: Expr, batch: list[Expr], start: Expr) -> None:
        """weights[i] = exp(scores[i] + bias - max), inverse[i] = 1 / sum: whole vectors, padding
        columns masked; with ``guarded``, both are 0 where they would be NaN. Weights that are
        bfloat16 are rounded, their sum is not.
        """
        em, lanes, n = self.em, self.lanes, self.n
        if len(self.op.inputs) > 3:
            whole = n // lanes
            if whole:
                with em.loop(whole, "p") as p, em.vector(lanes) as v:
                    self.add_bias(batch, start, i, p * lanes + v)
            if n % lanes:
                with em.vector(n % lanes) as v:
                    self.add_bias(batch, start, i, whole * lanes + v)
        if n % lanes:  # less than any score, so that padding is 0 where a single score is not
            with em.vector(lanes - n % lanes) as v:
                em.store(self.scores, [i, n + v], tirx.const(-inf, "float32"))

        # A maximum may lose a NaN: its weight is NaN all the same, and so is the sum.
        length = self.key_vectors * lanes
        top = fold(em, length, lambda j: em.load(self.scores, [i, j]), T.max, -inf)

        def weight(j: Expr) -> Expr:
            value = vector_math.exp_nonpositive(em, em.load(self.scores, [i, j]) - top)
            if self.rounds:
                value = em.let(value, "weight")
            em.store(self.weights, [i, j], self.rounded(value))
            return value

        total = fold(em, length, weight, add, 0.0)
        inverse = tirx.const(1, "float32") / total
        if self.op.get("guarded"):
            lost = is_nan(total)
            with em.when(lost), em.loop(self.key_vectors, "p") as p:
                zero = em.splat(literal(0.0, self.weights.dtype))
                em.store_vector(self.weights, [i, p * lanes], zero)
            inverse = tirx.Select(lost, tirx.const(0, "float32"), inverse)
        em.store(self.inverse, [i], inverse)

    def rounded(self, weight: Expr) -> Expr:
        """A weight as it is multiplied with v."""
        if not self.rounds:
            return weight
        bits = convert(self.em, weight, "float32", "bfloat16")
        return convert(self.em, bits, "bfloat16", self.weights.dtype)

    def add_bias(self, batch: list[Expr], start: Expr, i: Expr, column: Expr) -> None:
        em, hidden = self.em, self.op.get("hidden")
        bias = em.let(self.operand(3, batch, start + i, column), "bias")
        score = em.load(self.scores, [i, column]) + bias
        if hidden is not None:  # whatever the score was, NaN and infinities included
            score = tirx.Select(tirx.EQ(bias, tirx.const(hidden, "float32")), bias, score)
        em.store(self.scores, [i, column], score)
