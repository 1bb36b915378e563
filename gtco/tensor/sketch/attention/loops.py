"""The loops of attention's kernel; the picture is in :mod:`gtco.tensor.sketch.attention.cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil, inf

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.indices import broadcast_index, reshape_index
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.arithmetic import is_nan
from gtco.tensor.emit.bfloat16 import convert, literal, rounded_weight
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments, lanes_of
from gtco.tensor.emit.fold import add, fold, fold_vectors
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import ALIGN, Piece, Scratch
from gtco.tensor.intrinsics.emission import Operand, fma_tile
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.nest import packed_steps
from gtco.tensor.nest.shape import Task
from gtco.tensor.sketch.attention.facts import AttentionFacts, together_of
from gtco.tensor.sketch.attention.packing import (
    pack_key_pairs,
    pack_keys,
    pack_value_pairs,
    pack_values,
)
from gtco.tensor.sketch.attention.prefetching import ask_for_next_head, ask_for_outputs
from gtco.tensor.sketch.shared.streaming import each_vector
from gtco.tensor.space import Config

# Products of a score that are summed in one accumulator. If all of them have one sign, as in an
# image of one colour, every addition may round the same way, and exp turns the absolute error of a
# large score into a relative error of its weight.
CHAIN = 256
# Most iterations of the innermost loop of a product. With the loop over blocks the product's loops
# are as deep as softmax's. Blocks are long, because the CPU may mispredict the jump at a block's
# end.
BLOCK = 64
# The keys whose values stay in L1 while blocks of rows are multiplied by them
KEYS = 64

# It gets the first query of a block, the block's place in scratch, and its number of rows.
Block = Callable[[Expr, Expr, int], None]
Each = Callable[[Block], None]  # it calls that for every block of rows



def _groups(vectors: int, most: int) -> list[tuple[int, int]]:
    """Cuts ``vectors`` into groups of at most ``most``, as even as possible: (first, size) of
    each.
    """
    count = ceil(vectors / most)
    size, larger = divmod(vectors, count)
    sizes = [size + 1] * larger + [size] * (count - larger)
    return [(sum(sizes[:i]), s) for i, s in enumerate(sizes)]


def _each_group(em: Emitter, vectors: int, most: int) -> Iterator[tuple[Expr, int]]:
    """Emits loops over ``vectors`` in groups of at most ``most``, the larger ones first: (first,
    size) of each.
    """
    groups = _groups(vectors, most)
    for size in sorted({s for _, s in groups}, reverse=True):
        starts = [first for first, s in groups if s == size]
        with em.loop(len(starts), "g") as g:
            yield starts[0] + g * size, size


class AttentionLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: AttentionFacts, config: Config) -> None:
        self.sketch, self.stage, self.op = sketch, sketch.stage, sketch.op
        self.batch, self.m, self.n, self.d, self.e = sketch.extents
        self.tile = MicroKernel.parse(config["tile"], sketch.target.lanes)
        lanes, kind = self.tile.lanes, self.tile.kind
        self.lanes, self.kind = lanes, kind
        self.rounds = sketch.operand == "bfloat16"
        self.biased = len(self.op.inputs) > 3
        # weights are powers of 2: without a bias, the scale contains the factor log2(e)
        self.scale = self.op["scale"] * (1.0 if self.biased else vector_math.LOG2E)
        self.scaled_late = kind.in_tiles and not self.biased and self.scale != 0
        self.shape = sketch.shape(config)
        self.key_vectors, self.value_vectors = ceil(self.n / lanes), ceil(self.e / lanes)
        self.together = together_of(config)
        self.asks_ahead = sketch.next_fits and self.together == 1
        self.height = self.shape.heights[0]
        rows = self.together * self.height
        self.ld_scores = self.key_vectors * lanes + (
            lanes if self.key_vectors * lanes % 256 == 0 else 0
        )
        self.ld_values = self.value_vectors * lanes
        self.depth, packed = packed_steps(self.d, kind)
        line = ALIGN // kind.a.nbytes
        pieces = [
            Piece("keys", (self.key_vectors, self.depth, lanes), packed),
            Piece("values", (packed_steps(self.n, kind)[0], self.ld_values), packed),
            Piece("query", (rows, -(-self.d // line) * line), kind.a.dtype),
            Piece("scores", (rows, self.ld_scores)),
            Piece("tile", (rows, self.ld_values)),
            Piece("top", (16 * ceil(rows / 16),)),
            Piece("inverse", (16 * ceil(rows / 16),)),
        ]
        if kind.a.dtype != "float32":  # the weights of the scores, in the dtype that is multiplied
            width = -(-self.key_vectors * lanes // line) * line
            width += line if width * kind.a.nbytes % 1024 == 0 else 0
            pieces.append(Piece("weights", (rows, width), kind.a.dtype))
        self.scratch = Scratch(tuple(pieces))

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        arrays = self.scratch.arrays(args)
        self.keys, self.values, self.query = arrays["keys"], arrays["values"], arrays["query"]
        self.scores, self.tiles = arrays["scores"], arrays["tile"]
        self.top, self.inverse = arrays["top"], arrays["inverse"]
        self.weights = arrays.get("weights", self.scores)
        shape = self.shape
        with (
            prepared(em, self.tile, shape.heights[0]),
            em.range(args.begin, args.end, "task") as number,
        ):
            heads = [int(d) for d in self.op.type.shape[:-2]]
            task = shape.task(em, self.head_first(number))
            place = reshape_index([task.batch], [self.batch], heads)
            batch = [em.let_index(i, "b") for i in place]
            if self.asks_ahead:
                place = reshape_index([em.index(task.batch + 1)], [self.batch], heads)
                self.next_batch = [em.let_index(i, "next") for i in place]
            pairs = self.kind.b.step > 1
            pack = (pack_key_pairs, pack_value_pairs) if pairs else (pack_keys, pack_values)
            pack[0](em, self.keys, partial(self.operand, 1, batch), self.n, self.d)
            pack[1](em, self.values, partial(self.operand, 2, batch), self.n, self.e)
            if self.together > 1:
                self.passes(batch, task)
                return
            with em.loop(task.blocks, "block") as block:
                this = em.let_index(task.first_block + block, "this")
                start = em.let_index(shape.first_row(this), "start")
                shape.by_height(em, this, partial(self.row_block, batch, start))

    def head_first(self, number: Expr) -> Expr:
        """The number that a task has where chunks of rows count before heads. A thread has all
        heads of its rows, as in the stages before and behind that are cut by rows.
        """
        heads, chunks = self.sketch.side_by_side, self.shape.chunks_m
        if 1 in (heads, chunks):
            return number
        self.em.bind(number, self.shape.tasks)
        head, rest = number % heads, number // heads
        return self.em.let_index((rest // chunks * heads + head) * chunks + rest % chunks, "task")

    def passes(self, batch: list[Expr], task: Task) -> None:
        """The blocks of a task, so many together share a pass over the keys, and one over the
        values.
        """
        em = self.em
        count = em.index((task.blocks + (self.together - 1)) // self.together)
        with em.loop(count, "turn") as turn:
            begin = em.let_index(turn * self.together, "begin")
            blocks = em.let_index(tirx.min(self.together, task.blocks - begin), "blocks")
            first = em.let_index(task.first_block + begin, "first")
            each = partial(self.each_block, first, blocks)
            self.queries(batch, each)
            self.row_products(batch, each)

    def each_block(self, first: Expr, count: Expr, body: Block) -> None:
        """``body`` for ``count`` blocks of rows from ``first`` on."""
        em, shape = self.em, self.shape
        with em.loop(count, "block") as block:
            em.bind(block, self.together)
            this = em.let_index(first + block, "this")
            start = em.let_index(shape.first_row(this), "start")
            base = em.let_index(block * self.height, "base")
            shape.by_height(em, this, partial(body, start, base))

    def operand(self, which: int, batch: list[Expr], row: Expr, column: Expr) -> Expr:
        name = self.op.inputs[which]
        shape = self.reader.shape(name)
        return self.reader.value(name, broadcast_index([*batch, row, column], shape))

    def row_block(self, batch: list[Expr], start: Expr, rows: int) -> None:
        """One block of rows."""

        def each(body: Block) -> None:
            body(start, 0, rows)

        self.queries(batch, each)
        with prepared(self.em, self.tile, rows, self.height):
            self.row_products(batch, each)

    def queries(self, batch: list[Expr], each: Each) -> None:
        """query[rows, d] = Q, scaled, with what fills a step of the products up."""
        em = self.em
        scale = tirx.const(self.scale, "float32")

        def block(start: Expr, base: Expr, rows: int) -> None:
            with em.loop(rows, "i") as i:
                ask_for_outputs(self.reader, self.sketch, self.args.output, [*batch, start + i])

                def scaled(j: Expr, width: int) -> None:
                    with em.vector(width) as v:
                        query = self.operand(0, batch, start + i, j + v)
                        if self.rounds:  # a product with the scale would be rounded again
                            query = convert(em, query, "bfloat16", self.kind.a.dtype)
                        else:
                            query = query * scale
                        em.store(self.query, [base + i, j + v], query)

                each_vector(em, self.d, scaled)
                if rest := -self.d % self.kind.step:
                    with em.vector(rest) as j:
                        zero = literal(0.0, self.kind.a.dtype)
                        em.store(self.query, [base + i, self.d + j], zero)

        each(block)

    def row_products(self, batch: list[Expr], each: Each) -> None:
        em, lanes = self.em, self.lanes

        def softmax(start: Expr, base: Expr, rows: int) -> None:
            with em.loop(rows, "i") as i:  # a loop of its own: the weights wait for the maximum
                if self.asks_ahead:
                    ask_for_next_head(self.reader, self.sketch, [*self.next_batch, start + i])
                self.top_row(base + i, batch, start + i)
            with em.loop(rows, "i") as i:
                self.weights_row(base + i)

        def finish(start: Expr, base: Expr, rows: int) -> None:
            with em.loop(rows, "i") as i:
                inverse = em.let(em.load(self.inverse, [base + i]), "inverse")

                def finished(j: Expr, width: int) -> None:
                    with em.vector(width) as v:
                        value = em.let(em.load(self.tiles, [base + i, j + v]) * inverse)
                        where = [*batch, start + i, j + v]
                        self.reader.finish(self.sketch.tail, where, value, self.args.output)

                each_vector(em, self.e, finished)

        self.products(
            each,
            self.key_vectors,
            self.d,
            self.query,
            self.scores,
            lambda vector, k: Operand.of(
                self.keys, [vector, k // self.kind.b.step, 0], vector=self.depth * lanes
            ),
            tirx.const(self.scale, "float32") if self.rounds else None,
            chain=CHAIN,
        )
        each(softmax)
        if self.together == 1:
            value = self.value_operand
            self.products(each, self.value_vectors, self.n, self.weights, self.tiles, value)
        else:
            self.products_by_keys(each)
        each(finish)

    def value_operand(self, vector: Expr, k: Expr) -> Operand:
        return Operand.of(self.values, [k // self.kind.b.step, vector * self.lanes])

    def products_by_keys(self, each: Each) -> None:
        """tile[rows, e] = weights[rows, n] x V, by blocks of keys, whose values stay in L1."""
        em, lanes = self.em, self.lanes
        with em.loop(ceil(self.n / KEYS), "part") as part:
            k = em.let_index(part * KEYS, "k")
            depth = em.let_index(tirx.min(KEYS, self.n - k), "depth")

            def block(start: Expr, base: Expr, rows: int) -> None:
                for first, size in _each_group(em, self.value_vectors, self.tile.vectors):

                    def load(i: int, j: int, first: Expr = first) -> Expr:
                        return em.load_vector(self.tiles, [base + i, first * lanes + j])

                    def store(i: int, j: int, vector: Expr, first: Expr = first) -> None:
                        em.store_vector(self.tiles, [base + i, first * lanes + j], vector)

                    fma_tile(
                        em,
                        replace(self.tile, rows=rows, vectors=size),
                        depth,
                        Operand.of(self.weights, [base, k]),
                        self.value_operand(first, k),
                        store,
                        load=load,
                        first=part == 0,
                        block=BLOCK,
                    )

            each(block)

    def products(
        self,
        each: Each,
        vectors: int,
        depth: int,
        a: Array,
        c: Array,
        b: Callable[[Expr, Expr], Operand],
        scale: Expr | None = None,
        chain: int = 0,
    ) -> None:
        """c[rows, vectors * lanes] = a[rows, depth] x b, times ``scale`` if it is given, but not in
        the tile unit.

        The vectors are taken in groups that fit the registers. ``b(first, k)`` is the operand from
        vector ``first`` and step ``k`` of the sum on. If ``chain`` is given, a longer sum is cut
        into parts of so many products, and the parts are added up. The tile unit adds only one sum
        of each 32 products to another, so it needs no parts.
        """
        em, lanes = self.em, self.lanes
        chain = 0 if self.kind.in_tiles else chain
        parts = ceil(depth / chain) if chain else 1
        if parts > 1:

            def cleared(start: Expr, base: Expr, rows: int) -> None:
                with em.loop(rows, "i") as i, em.loop(vectors, "p") as p:
                    em.store_vector(c, [base + i, p * lanes], em.splat(0.0))

            each(cleared)

        chained = min(depth, chain) if chain else depth

        def block(first: Expr, size: int, k: Expr, start: Expr, base: Expr, rows: int) -> None:
            def store(i: int, j: Expr, vector: Expr) -> None:
                column = first * lanes + j
                scaled = vector if scale is None else vector * em.splat(scale)
                if parts > 1:
                    scaled = em.load_vector(c, [base + i, column]) + scaled
                em.store_vector(c, [base + i, column], scaled)

            row = replace(self.tile, rows=rows, vectors=size)
            if self.kind.in_tiles:
                into = replace(c, offset=c.offset + first * lanes)
                multiply(em, row, depth, Operand.of(a, [0, 0]), b(first, 0), into)
                return
            fma_tile(
                em,
                row,
                depth if parts == 1 else em.let_index(tirx.min(chain, depth - k), "depth"),
                Operand.of(a, [base, k]),
                b(first, k),
                store,
                block=min(BLOCK, ceil(chained / 2)),  # two loops for every depth
            )

        for first, size in _each_group(em, vectors, self.tile.vectors):
            with em.loop(parts, "part") as part:
                each(partial(block, first, size, part * chain))

    def top_row(self, i: Expr, batch: list[Expr], m: Expr) -> None:
        """scores[i] += bias; top[i] = max(scores[i]). Whole vectors are processed, and padding
        columns are masked. Scores of the tile unit are scaled here if a bias is added; else they
        are read scaled, which saves storing them.
        """
        em, lanes, n = self.em, self.lanes, self.n
        if self.biased:
            whole = n // lanes
            if whole:
                with em.loop(whole, "p") as p, em.vector(lanes) as v:
                    self.add_bias(batch, m, i, p * lanes + v)
            if n % lanes:
                with em.vector(n % lanes) as v:
                    self.add_bias(batch, m, i, whole * lanes + v)
        elif self.kind.in_tiles and not self.scaled_late:
            with em.loop(self.key_vectors, "p") as p:
                nothing = em.load_vector(self.scores, [i, p * lanes]) * em.splat(self.scale)
                em.store_vector(self.scores, [i, p * lanes], nothing)
        if n % lanes:  # so that the weights of padding are 0 if any score is finite
            least = -inf if self.scale > 0 or not self.scaled_late else inf
            with em.vector(lanes - n % lanes) as v:
                em.store(self.scores, [i, n + v], tirx.const(least, "float32"))

        # A maximum may drop a NaN. The weight of that score is NaN all the same, and so is the sum.
        length = self.key_vectors * lanes
        late = self.scaled_late and self.scale > 0  # rounding keeps the order of two products

        def score(j: Expr) -> Expr:
            found = em.load(self.scores, [i, j])
            return found if late else self.scaled(found)

        top = fold(em, length, score, T.max, -inf)
        em.store(self.top, [i], self.scaled(top) if late else top)

    def scaled(self, score: Expr) -> Expr:
        """A score as it is read: times the scale if that was not done before."""
        return score * self.em.splat(self.scale, lanes_of(score)) if self.scaled_late else score

    def weights_row(self, i: Expr) -> None:
        """weights[i] = exp(scores[i] - top[i]), inverse[i] = 1 / sum. With ``guarded``, both are 0
        where they would be NaN. bfloat16 weights are rounded; their sum is not.
        """
        em, lanes = self.em, self.lanes
        top = em.let(em.load(self.top, [i]), "top")

        def weight(p: Expr) -> Expr:
            below = self.scaled(em.load_vector(self.scores, [i, p * lanes])) - em.splat(top)
            if self.biased:
                below = below * em.splat(vector_math.LOG2E)
            value = vector_math.exp2_nonpositive(em, below, 3 if self.rounds else 5)
            em.store_vector(self.weights, [i, p * lanes], self.rounded(value))
            return value

        total = fold_vectors(em, self.key_vectors, weight, add, 0.0)
        width = self.key_vectors * self.lanes
        if rest := -width % self.kind.step:
            zero = em.splat(literal(0.0, self.weights.dtype), rest)
            em.store_vector(self.weights, [i, width], zero, rest)
        inverse = tirx.const(1, "float32") / total
        if self.op.get("guarded"):
            lost = is_nan(total)
            with em.when(lost), em.loop(self.key_vectors, "p") as p:
                zero = em.splat(literal(0.0, self.weights.dtype))
                em.store_vector(self.weights, [i, p * lanes], zero)
            inverse = tirx.Select(lost, tirx.const(0, "float32"), inverse)
        em.store(self.inverse, [i], inverse)

    def rounded(self, weight: Expr) -> Expr:
        """A weight in the precision in which it is multiplied with v."""
        if not self.rounds:
            return weight
        return convert(self.em, rounded_weight(weight), "bfloat16", self.weights.dtype)

    def add_bias(self, batch: list[Expr], m: Expr, i: Expr, column: Expr) -> None:
        em, hidden = self.em, self.op.get("hidden")
        bias = em.let(self.operand(3, batch, m, column), "bias")
        score = em.load(self.scores, [i, column])
        if self.kind.in_tiles:
            score = score * tirx.const(self.scale, "float32")
        score = score + bias
        if hidden is not None:  # such a bias replaces every score, NaN and infinities included
            score = tirx.Select(bias <= tirx.const(hidden, "float32"), bias, score)
        em.store(self.scores, [i, column], score)
