"""The loops of the scan sketch (:mod:`gtco.tensor.sketch.scan.cpu`)."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.scan.facts import ScanFacts
from gtco.tensor.sketch.shared.streaming import tasks_of_rows, unflatten, vector_runs

SIDE = 4  # rows that are taken at a time where chunks are wide


class ScanLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: ScanFacts, rows: int) -> None:
        self.sketch, self.rows = sketch, rows
        # Adding -0 changes no number, also not -0. An exclusive sum begins with 0.
        first = 0.0 if sketch.exclusive else -0.0
        self.nothing = tirx.const(first if "float" in sketch.dtype else 0, sketch.dtype)

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        sketch = self.sketch
        self.em, self.args = em, args
        self.reader = Reader(sketch.stage, em, args.inputs)
        self.held = sketch.scratch.arrays(args)
        with tasks_of_rows(em, args, sketch.units, self.rows) as unit:
            outer = unflatten(em, unit, sketch.counted)
            if sketch.by_rows:
                self.row(outer)
            else:
                self.chunk(outer)

    def source(self, index: list[Expr]) -> Expr:
        return self.reader.value(self.sketch.op.inputs[0], index)

    def finish(self, index: list[Expr], value: Expr) -> None:
        self.reader.finish(self.sketch.tail, index, self.em.let(value), self.args.output)

    # rows -----------------------------------------------------------------------------------------
    def row(self, outer: list[Expr]) -> None:
        """Emits a row, a vector at a time. Only the sum before it waits for the vector before."""
        em, sketch = self.em, self.sketch
        lanes = sketch.lanes
        carried = em.registers(lanes, sketch.dtype)
        em.store_vector(carried, [0], em.splat(self.nothing, lanes), lanes)
        whole, rest = divmod(sketch.length, lanes)

        def vectors() -> None:
            with em.loop(whole, "block") as block:
                at = whole - 1 - block if sketch.reverse else block
                self.vector(outer, at * lanes, lanes, carried)

        def remaining() -> None:
            if rest:
                self.vector(outer, whole * lanes, rest, carried)

        for part in (remaining, vectors) if sketch.reverse else (vectors, remaining):
            part()

    def vector(self, outer: list[Expr], begin: Expr, count: int, carried: Array) -> None:
        """Emits ``count`` positions of a row. ``carried`` has the sums that they begin with."""
        em, sketch = self.em, self.sketch
        lanes = sketch.lanes
        zeros = em.splat(self.nothing, lanes)
        held = em.registers(lanes, sketch.dtype)
        if count < lanes:
            em.store_vector(held, [0], zeros, lanes)

        def index(lane: Expr) -> list[Expr]:
            return [*outer, *split_flat(begin + lane, sketch.shape[sketch.axis :])]

        with em.vector(count) as lane:
            em.store(held, [lane], self.source(index(lane)))
        sums = em.let(em.load_vector(held, [0], lanes), "sums")
        for step in sketch.steps:
            sums = em.let(sums + tirx.Shuffle([sums, zeros], list(step)), "sums")
        before = em.let(em.load_vector(carried, [0], lanes), "before")
        last = tirx.Shuffle([sums], list(sketch.last))
        em.store_vector(carried, [0], before + last, lanes)
        made = em.let(sums + before, "made")
        if sketch.exclusive:
            made = em.let(tirx.Shuffle([before, made], list(sketch.before)), "made")
        em.store_vector(held, [0], made, lanes)
        with em.vector(count) as lane:
            self.finish(index(lane), em.load(held, [lane]))

    # columns --------------------------------------------------------------------------------------
    def chunk(self, outer: list[Expr]) -> None:
        """Emits a chunk of neighbouring columns."""
        em, sketch = self.em, self.sketch
        *others, chunk = outer
        width, columns = sketch.chunk, sketch.columns
        chunks = ceil(columns / width)
        if columns % width == 0:
            self.columns(others, chunk * width, width)
            return
        em.branch(
            chunk < chunks - 1 if chunks > 1 else False,
            lambda: self.columns(others, chunk * width, width),
            lambda: self.columns(others, (chunks - 1) * width, columns % width),
        )

    def columns(self, others: list[Expr], first: Expr, width: int) -> None:
        """Emits ``width`` columns from ``first`` on. ``others`` is the index along the axes that
        count chunks.
        """
        em, sketch = self.em, self.sketch
        count = sketch.shape[sketch.axis]
        wide = sketch.wide
        sums = self.held["sums"] if wide else em.registers(width, sketch.dtype)

        def each(body: Callable[[Expr, int], None]) -> None:
            for begin, many, lanes in vector_runs(width, sketch.full):
                if wide:
                    with em.loop(many, "j") as j:
                        body(begin + j * lanes, lanes)
                else:
                    for k in range(many):
                        body(begin + k * lanes, lanes)

        def clear(begin: Expr, lanes: int) -> None:
            with em.vector(lanes) as lane:
                em.store(sums, [begin + lane], self.nothing)

        def add(r: Expr, side: int) -> Callable[[Expr, int], None]:
            def body(begin: Expr, lanes: int) -> None:
                with em.vector(lanes) as lane:
                    column = first + begin + lane
                    before = em.let(em.load(sums, [begin + lane]), "before")
                    for k in range(side):
                        along = count - 1 - (r + k) if sketch.reverse else r + k
                        place = split_flat(column, sketch.shape[sketch.cut :])
                        index = [*others[: sketch.axis], along, *others[sketch.axis :], *place]
                        now = em.let(before + self.source(index), "now")
                        self.finish(index, before if sketch.exclusive else now)
                        before = now
                    em.store(sums, [begin + lane], before)

            return body

        each(clear)
        side = min(SIDE, count) if wide else 1
        with em.loop(count // side, "r") as r:
            each(add(r * side, side))
        if count % side:
            each(add(count - count % side, count % side))
