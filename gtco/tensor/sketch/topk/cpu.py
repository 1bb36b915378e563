"""Sketch rule for the places of a row's largest or least elements, in order (TopK, Sort).

::

    for task in rows:                                # parallel
      keys[i] = an integer with the same order as the element        # vectors
      if few are wanted:
        for i: if keys[i] is better than the k-th so far: put (key, index) in its place  # vectors
      else if not all are:
        count the keys by their first 8 bits; take those down to the bits of the k-th best
        for 8 bits more, three times:                # radix selection among these
          count the keys that agree so far; take the 8 bits of the k-th best
        take all better keys, and the first of the equal ones
      sort (key, index): few by merging, bottom up, many by 8 bits at a time, the lowest first
      output = indices

Key and index lie in one int64, so of equal elements the lower index comes first. NaN is the
largest, as in PyTorch and numpy. If few elements are wanted, the time depends on their order: of n
elements in random order k (1 + ln(n / k)) are put in their place, of rising elements all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log, log2

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import is_static, shape_of
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.scratch import Piece, Scratch
from gtco.tensor.emit.vector_math import bits
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    each_vector,
    grain,
    streaming_workload,
    tasks_of_rows,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import NARROW_INDICES, Operator, Stage
from gtco.tensor.workload import Workload

SORTED = ("float32", "int32", "int16", "uint16", "int8", "uint8")  # their keys have 32 bits
DIGIT = 8  # bits
LAST = 2**31 - 1
INSERTED = 64  # most pairs that are kept in order while the row is read
MERGED = 64  # most pairs that are sorted by merging
# instructions to select an element, to merge or move a pair, and to count
SELECTING, MERGING, MOVING, SCANNING = 6.0, 12.0, 6.0, 2.0
INSERTING = 6.0  # instructions for 8 pairs that a new one may move


def match(stage: Stage, target: Target) -> TopK | None:
    """The stage as one ``topk`` of a dtype that 32 bits can order, else None."""
    op = stage.output
    if len(stage.operators) != 1 or op.kind != "topk" or not is_static(stage):
        return None
    if stage.types[op.inputs[0]].dtype not in SORTED or op.type.size == 0:
        return None
    if shape_of(stage, op.inputs[0])[-1] > NARROW_INDICES:
        return None
    return TopK(stage, target)


@dataclass(frozen=True)
class TopK:
    """Selection and sorting of rows on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target

    name = "topk"
    structure = "SR"

    @property
    def op(self) -> Operator:
        return self.stage.output

    @property
    def n(self) -> int:
        """The elements of a row."""
        return shape_of(self.stage, self.op.inputs[0])[-1]

    @property
    def k(self) -> int:
        return int(self.op["k"])

    @property
    def units(self) -> int:
        return self.op.type.size // self.k

    @property
    def selects(self) -> bool:
        return self.k < self.n

    @property
    def inserts(self) -> bool:
        return self.selects and self.k <= INSERTED

    @property
    def merges(self) -> bool:
        """True if the selected elements are sorted by merging."""
        return self.k <= MERGED

    @property
    def levels(self) -> int:
        """Passes of the sort."""
        if not self.merges:
            return 32 // DIGIT
        return ceil(log2(self.k)) if self.k > 1 else 0

    @property
    def scratch(self) -> Scratch:
        # every pair is stored behind those taken; one that is not taken is overwritten
        chooses = self.selects and not self.inserts
        pool = (Piece("pool", (self.n + 1,), "int64"),) if chooses else ()
        wanted = self.k + 1
        return Scratch(
            (
                Piece("keys", (self.n,), "int32"),
                Piece("counts", (1 << DIGIT,), "int32"),
                Piece("wanted", (wanted,), "int64"),
                Piece("sorted", (wanted,), "int64"),
                *pool,
            )
        )

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, 8 * self.n, self.target)

    def workload(self, config: Config) -> Workload:
        tasks = ceil(self.units / config["rows"])
        if self.inserts:
            often = self.k * (1 + log(self.n / self.k))
            steps = SCANNING * self.n + often * INSERTING * ceil(self.k / 8)
            passes = steps * self.target.lanes / self.n
            return streaming_workload(self.stage, self.target, tasks, passes)
        counts = SCANNING * (1 << DIGIT)
        steps = MERGING * self.k * self.levels
        if not self.merges:
            steps = (MOVING * self.k + counts) * self.levels
        if self.selects:
            steps += 2 * SELECTING * self.n + 32 // DIGIT * counts
        passes = steps * self.target.lanes / self.n
        return streaming_workload(self.stage, self.target, tasks, passes)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        def body(em: Emitter, args: KernelArguments) -> None:
            row = _Row(self, em, args)
            with tasks_of_rows(em, args, self.units, config["rows"]) as unit:
                row.emit(unit)

        tasks = ceil(self.units / config["rows"])
        return program(symbol, self.stage, self.target, tasks, body, self.scratch)


class _Row:
    """The emitter of the loops of one row."""

    def __init__(self, sketch: TopK, em: Emitter, args: KernelArguments) -> None:
        self.sketch, self.em = sketch, em
        self.n, self.k = sketch.n, sketch.k
        held = sketch.scratch.arrays(args)
        self.keys, self.counts = held["keys"], held["counts"]
        self.wanted, self.sorted = held["wanted"], held["sorted"]
        self.pool = held.get("pool", self.wanted)
        name = sketch.op.inputs[0]
        source = args.inputs[name]
        self.source = Array(source.buffer, (sketch.stage.types[name].size,), source.dtype)
        self.output = Array(args.output.buffer, (sketch.op.type.size,), "int64")

    def emit(self, row: Expr) -> None:
        each_vector(self.em, self.n, lambda begin, lanes: self.ordered(row, begin, lanes))
        if self.sketch.inserts:
            self.inserted()
            self.give(row, Array(self.wanted.buffer, (self.k,), "int64", self.wanted.offset + 1))
            return
        if self.sketch.selects:
            self.chosen(*self.selected())
        else:
            with self.em.loop(self.n, "i") as i:
                self.em.store(self.wanted, [i], self.pair(self.em.load(self.keys, [i]), i))
        self.give(row, self.sort())

    def give(self, row: Expr, found: Array) -> None:
        """Stores the indices of the pairs that were found."""
        with self.em.loop(self.k, "i") as i:
            low = tirx.bitwise_and(self.em.load(found, [i]), tirx.const(LAST, "int64"))
            self.em.store(self.output, [row * self.k + i], tirx.const(LAST, "int64") - low)

    def ordered(self, row: Expr, begin: Expr, lanes: int) -> None:
        """The keys of ``lanes`` neighbours: int32 that order as the elements do, NaN last; reversed
        if the least elements are wanted.
        """
        em = self.em
        with em.vector(lanes) as lane:
            x = em.let(em.load(self.source, [row * self.n + begin + lane]), "x")
            if self.source.dtype == "float32":
                zero = tirx.const(0.0, "float32")
                b = em.let(bits(tirx.Select(tirx.EQ(x, zero), zero, x), "int32"), "b")
                magnitude = tirx.bitwise_and(tirx.shift_right(b, 31), LAST)
                nan = tirx.Not(tirx.EQ(x, x))
                key = tirx.Select(nan, LAST, tirx.bitwise_xor(b, magnitude))
            else:
                key = tirx.Cast("int32", x) if self.source.dtype != "int32" else x
            if not self.sketch.op["largest"]:
                key = tirx.bitwise_xor(key, -1)
            em.store(self.keys, [begin + lane], key)

    def pair(self, key: Expr, index: Expr) -> Expr:
        """Key and index in one number. The larger number comes first."""
        high = tirx.shift_left(tirx.Cast("int64", key), tirx.const(32, "int64"))
        return tirx.bitwise_or(high, tirx.Cast("int64", LAST - index))

    # insertion ------------------------------------------------------------------------------------
    def inserted(self) -> None:
        """Keeps the best pairs so far, in order, after one that is better than any."""
        em, k = self.em, self.k
        em.store(self.wanted, [0], tirx.max_value("int64"))
        with em.loop(k, "i") as i:
            em.store(self.wanted, [i + 1], tirx.min_value("int64"))
        last = em.registers(1, "int32")  # the key of the last pair
        em.store(last, [0], 0)
        with em.loop(self.n, "i") as i:
            key = em.let(em.load(self.keys, [i]), "key")
            with em.when(tirx.any(i < k, key > em.load(last, [0]))):
                pair = em.let(self.pair(key, i), "pair")
                for begin, lanes in reversed(self.vectors()):
                    with em.vector(lanes) as lane:
                        at = begin + lane
                        before, here = (em.load(self.wanted, [at + n]) for n in (0, 1))
                        em.store(self.wanted, [at + 1], tirx.max(here, tirx.min(before, pair)))
                em.store(last, [0], self.key(em.load(self.wanted, [k])))

    def vectors(self) -> list[tuple[int, int]]:
        """The begin of each vector of those that cover the pairs, and its number of pairs."""
        lanes = max(self.em.lanes // 2, 1)
        return [(b, min(lanes, self.k - b)) for b in range(0, self.k, lanes)]

    # selection ------------------------------------------------------------------------------------
    def selected(self) -> tuple[Expr, Expr, Expr]:
        """The number of pairs in the pool, the k-th largest key, and the number of elements equal
        to it that are wanted.
        """
        em = self.em
        state = em.registers(2, "int32")  # the bits so far, and the rank among their keys
        em.store(state, [0], 0)
        em.store(state, [1], self.k)
        self.clear()
        with em.loop(self.n, "i") as i:
            self.count(em.load(self.keys, [i]), 32 - DIGIT)
        self.digit(state, 32 - DIGIT)
        size = self.pooled(em.let(em.load(state, [0]), "high"))
        for shift in range(32 - 2 * DIGIT, -1, -DIGIT):
            self.clear()
            high = em.let(em.load(state, [0]), "high")
            with em.loop(size, "i") as i:
                key = em.let(self.key(em.load(self.pool, [i])), "key")
                with em.when(tirx.EQ(tirx.shift_right(key, shift + DIGIT), high)):
                    self.count(key, shift)
            self.digit(state, shift)
        return size, em.let(em.load(state, [0]), "kth"), em.let(em.load(state, [1]), "equals")

    def clear(self) -> None:
        with self.em.loop(1 << DIGIT, "d") as d:
            self.em.store(self.counts, [d], 0)

    def count(self, key: Expr, shift: int) -> None:
        place = self.place(key, shift)
        self.em.store(self.counts, [place], self.em.load(self.counts, [place]) + 1)

    def place(self, key: Expr, shift: int) -> Expr:
        """8 bits of a key, from 0 on. The highest 8 bits contain the sign."""
        digit = tirx.shift_right(key, shift)
        if shift + DIGIT == 32:
            digit = digit + (1 << (DIGIT - 1))
        bound = self.em.let(tirx.bitwise_and(digit, (1 << DIGIT) - 1), "digit")
        self.em.bind(bound, 1 << DIGIT)
        return bound

    def digit(self, state: Array, shift: int) -> None:
        """Finds the next 8 bits of the wanted rank's key, from the largest down."""
        em = self.em
        found = em.registers(2, "int32")
        em.store(found, [0], -1)
        em.store(found, [1], em.load(state, [1]))
        with em.loop(1 << DIGIT, "d") as d:
            place = (1 << DIGIT) - 1 - d
            here = em.let(em.load(self.counts, [place]), "here")
            rank, known = em.let(em.load(found, [1]), "rank"), em.let(em.load(found, [0]), "known")
            lies = tirx.all(known < 0, rank <= here)
            passed = tirx.all(known < 0, rank > here)
            em.store(found, [0], tirx.Select(lies, tirx.Cast("int32", place), known))
            em.store(found, [1], tirx.Select(passed, rank - here, rank))
        digit = em.load(found, [0])
        if shift + DIGIT == 32:
            em.store(state, [0], digit - (1 << (DIGIT - 1)))
        else:
            high = tirx.shift_left(em.load(state, [0]), DIGIT)
            em.store(state, [0], tirx.bitwise_or(high, digit))
        em.store(state, [1], em.load(found, [1]))

    def pooled(self, high: Expr) -> Expr:
        """Puts the pairs of all keys whose first bits are at least ``high`` into the pool."""
        em = self.em
        size = em.registers(1, "int32")
        em.store(size, [0], 0)
        with em.loop(self.n, "i") as i:
            key = em.let(em.load(self.keys, [i]), "key")
            at = em.let(em.load(size, [0]), "at")
            em.bind(at, self.n + 1)
            em.store(self.pool, [at], self.pair(key, i))
            taken = tirx.shift_right(key, 32 - DIGIT) >= high
            em.store(size, [0], at + tirx.Cast("int32", taken))
        return em.let(em.load(size, [0]), "size")

    def key(self, pair: Expr) -> Expr:
        return tirx.Cast("int32", tirx.shift_right(pair, tirx.const(32, "int64")))

    def chosen(self, size: Expr, kth: Expr, equals: Expr) -> None:
        """Takes the pairs of all keys above the k-th, and the first ones equal to it."""
        em = self.em
        place = em.registers(2, "int32")  # the next pair's place, and the number of equals taken
        em.store(place, [0], 0)
        em.store(place, [1], 0)
        with em.loop(size, "i") as i:
            pair = em.let(em.load(self.pool, [i]), "pair")
            key = em.let(self.key(pair), "key")
            at, gone = em.let(em.load(place, [0]), "at"), em.let(em.load(place, [1]), "gone")
            em.bind(at, self.k + 1)
            takes = tirx.any(key > kth, tirx.all(tirx.EQ(key, kth), gone < equals))
            em.store(self.wanted, [at], pair)
            em.store(place, [0], at + tirx.Cast("int32", takes))
            em.store(place, [1], gone + tirx.Cast("int32", tirx.EQ(key, kth)))

    # sorting --------------------------------------------------------------------------------------
    def sort(self) -> Array:
        """Sorts the pairs, the largest first. Returns the array that then holds them."""
        source, target = self.wanted, self.sorted
        for level in range(self.sketch.levels):
            if self.sketch.merges:
                self.merge(source, target, 1 << level)
            else:
                self.deal(source, target, level * DIGIT)
            source, target = target, source
        return source

    def deal(self, source: Array, target: Array, shift: int) -> None:
        """Sorts the pairs by 8 bits of their keys, the largest first. Pairs with equal bits keep
        their order.
        """
        em = self.em
        self.clear()
        with em.loop(self.k, "i") as i:
            self.count(self.key(em.load(source, [i])), shift)
        begin = em.registers(1, "int32")
        em.store(begin, [0], 0)
        with em.loop(1 << DIGIT, "d") as d:
            place = (1 << DIGIT) - 1 - d
            here = em.let(em.load(self.counts, [place]), "here")
            first = em.let(em.load(begin, [0]), "first")
            em.store(self.counts, [place], first)
            em.store(begin, [0], first + here)
        with em.loop(self.k, "i") as i:
            pair = em.let(em.load(source, [i]), "pair")
            place = self.place(self.key(pair), shift)
            at = em.let(em.load(self.counts, [place]), "at")
            em.bind(at, self.k)
            em.store(target, [at], pair)
            em.store(self.counts, [place], at + 1)

    def merge(self, source: Array, target: Array, width: int) -> None:
        """Merges neighbouring runs of ``width`` pairs."""
        em, k = self.em, self.k
        heads = em.registers(2, "int32")
        with em.loop(ceil(k / (2 * width)), "runs") as runs:
            low = em.let_index(runs * (2 * width), "low")
            middle = em.let_index(tirx.min(low + width, k), "middle")
            high = em.let_index(tirx.min(low + 2 * width, k), "high")
            em.store(heads, [0], tirx.Cast("int32", low) if em.wide else low)
            em.store(heads, [1], tirx.Cast("int32", middle) if em.wide else middle)
            with em.range(low, high, "at") as at:
                i, j = em.let(em.load(heads, [0]), "i"), em.let(em.load(heads, [1]), "j")
                a = em.let(source.buffer[source.offset + tirx.min(i, k)], "a")
                b = em.let(source.buffer[source.offset + tirx.min(j, k)], "b")
                first = tirx.all(i < middle, tirx.any(j >= high, a > b))
                step = em.let(tirx.Cast("int32", first), "step")
                em.store(target, [at], tirx.Select(tirx.NE(step, 0), a, b))
                em.store(heads, [0], i + step)
                em.store(heads, [1], j + (1 - step))
