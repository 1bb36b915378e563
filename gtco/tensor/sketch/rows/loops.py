"""The loops of the rows sketch (:mod:`gtco.tensor.sketch.rows.cpu`) over rows: statistics and
reductions along the last axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, prod

from tvm import tirx

from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.reduction import NORMALISATIONS
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.arithmetic import is_nan
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.fold import Combine, Over, add, combination, fold_rows, maximum, minimum
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.vector_math import constant
from gtco.tensor.sketch.rows.facts import RowsFacts
from gtco.tensor.sketch.shared.column_moments import long_enough, row_moments
from gtco.tensor.sketch.shared.streaming import tasks_of_panels, unflatten, whole_runs

Value = Callable[[Expr, Expr], Expr]  # (row of the group, a number or a lane; position) -> value
Ahead = Callable[[Expr], None]


class RowsLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: RowsFacts, rows: int) -> None:
        self.sketch, self.view, self.rows = sketch, sketch.view, rows

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        sketch = self.sketch
        self.em, self.args = em, args
        self.reader = Reader(sketch.stage, em, args.inputs)
        side = min(sketch.side, 1 << (self.rows.bit_length() - 1))
        self.panel = sketch.groups * side  # rows
        self.scratch = sketch.scratch.arrays(args).get("rows")
        tasks_of_panels(em, args, sketch.units, self.rows, side, sketch.groups, self.block)

    def block(self, first: Expr, groups: Expr, side: int) -> None:
        """Emits a panel of rows: ``groups`` times ``side`` rows side by side."""
        self.first, self.groups, self.side = first, groups, side
        # positions too few for a vector: those of the rows side by side share one
        whole, rest = divmod(self.view.length, self.em.lanes)
        together = whole and 2 * rest <= side and self.sketch.piece == self.view.length
        self.apart = rest if together else 0
        match self.sketch.op.kind:
            case "softmax":
                self.softmax()
            case "log_softmax":
                self.log_softmax()
            case "layer_norm" | "rms_norm":
                self.normalise()
            case "argmax" | "argmin":
                self.place()
            case _:
                self.reduce()

    @contextmanager
    def each_group(self) -> Iterator[None]:
        """One pass over the panel: a loop over its groups of rows. ``outers`` are their indices in
        the tensor, and ``local`` is the first one's row in the kept panel. A group's values from
        the pass before are long ready, so no group waits.
        """
        em = self.em
        with em.loop(self.groups, "group", rolled=not isinstance(self.groups, int)) as group:
            if not isinstance(self.groups, int):
                em.bind(group, self.panel // self.side)
            self.local = group * self.side
            self.outers = [self.outer(self.local + r) for r in range(self.side)]
            yield

    def outer(self, local: Expr) -> list[Expr]:
        """The tensor's index of the panel's row ``local``."""
        row = self.em.let_index(self.first + local, "row")
        return unflatten(self.em, row, self.view.kept)

    def index(self, outer: list[Expr], j: Expr) -> list[Expr]:
        """The reduced tensor's index at position ``j`` of the row."""
        cut = self.view.trailing
        return [*outer[:cut], *split_flat(j, self.view.shape[cut:])]

    def at(self, r: Expr, j: Expr) -> list[Expr]:
        """The reduced tensor's index at position ``j`` of the group's row ``r``."""
        return self.index(self.outers[r] if isinstance(r, int) else self.outer(self.local + r), j)

    def source(self, r: Expr, j: Expr) -> Expr:
        """x[j] of the block's row ``r``, from the input itself."""
        return self.reader.value(self.sketch.op.inputs[0], self.at(r, j))

    def kept(self, r: Expr, j: Expr) -> Expr:
        """The value in scratch for position ``j`` of row ``r``."""
        assert self.scratch is not None
        return self.em.load(self.scratch, [self.local + r, j])

    def keep(self, r: Expr, j: Expr, value: Expr) -> None:
        assert self.scratch is not None
        self.em.store(self.scratch, [self.local + r, j], value)

    def held(self) -> Value:
        """x[j], for several reads: the values of a prologue are computed once, into scratch."""
        if self.sketch.plain:
            return self.source

        with self.each_group():
            self.each(lambda r, j: self.keep(r, j, self.source(r, j)))
        return self.kept

    def each(self, body: Callable[[Expr, Expr], None], ahead: Ahead | None = None) -> None:
        """``body(r, j)`` for every position of the rows, in vectors; some positions are taken
        twice. ``ahead(j)`` is called before each vector, with its first position.
        """
        em, piece, length = self.em, self.sketch.piece, self.view.length
        with em.loop(length // piece, "piece") as p:
            for begin, count, lanes in whole_runs(piece - self.apart, em.lanes):
                with em.loop(count, "block") as block:
                    at = p * piece + begin + block * lanes
                    if ahead is not None:
                        ahead(at)
                    with em.vector(lanes) as lane:
                        for r in range(self.side):
                            body(r, at + lane)
        for k in range(self.apart):
            with em.vector(self.side) as lane:
                body(lane, length - self.apart + k)

    def fold(
        self,
        value: Value,
        combine: Combine,
        start: float,
        over: Over | None = None,
        ahead: Ahead | None = None,
    ) -> Expr:
        """Each row's values combined; see :func:`gtco.tensor.emit.fold.fold_rows`.

        Rows in scratch are padded, and must be: softmax writes its exponentials to the places that
        it reads, so no position may be read twice.
        """
        padded = not self.sketch.plain and self.scratch is not None
        apart = self.apart if self.sketch.op.kind in NORMALISATIONS else 0
        side, length = self.side, self.view.length
        return self.em.let(
            fold_rows(self.em, side, length, value, combine, start, over, padded, apart, ahead)
        )

    def statistic(self) -> Array:
        """Room for a number of each row of the panel."""
        return self.em.registers(self.panel)

    def note(self, statistic: Array, values: Expr) -> None:
        """Keeps the folded values."""
        if self.side == 1:
            self.em.store(statistic, [self.local], values)
        else:
            self.em.store_vector(statistic, [self.local], values, self.side)

    def noted(self, statistic: Array) -> Callable[[Expr], Expr]:
        """Each row's number, by the row of the group."""
        known = [
            self.em.let(self.em.load(statistic, [self.local + r]), "s") for r in range(self.side)
        ]
        return lambda r: (
            known[r] if isinstance(r, int) else self.em.load(statistic, [self.local + r])
        )

    def write(self, value: Value, ahead: Ahead | None = None) -> None:
        """Stores the epilogue of every position of the rows, at its place in the output."""

        def element(r: Expr, j: Expr) -> None:
            self.reader.finish(self.sketch.tail, self.at(r, j), value(r, j), self.args.output)

        self.each(element, ahead)

    def ahead(self, *, output: bool) -> Ahead | None:
        """Prefetches the next panel's lines, and those of the ``output`` that the last pass over
        this panel will write. The instructions pay in a pass that mostly computes.
        """
        if self.side == 1 or not self.sketch.plain:
            return None
        em, out = self.em, self.args.output
        following = [self.outer(self.local + self.panel + r) for r in range(self.side)]

        def ask(j: Expr) -> None:
            for outer, later in zip(self.outers, following, strict=True):
                load = self.reader.value(self.sketch.op.inputs[0], self.index(later, j))
                em.prefetch_value(load, 1)
                if output:
                    where = out.flat(self.sketch.tail.forward(self.index(outer, j)))
                    em.prefetch_value(out.buffer[em.index(where)], 1, write=True)

        return ask

    def extremes(self, combine: Combine, start: float) -> tuple[Value, Array]:
        """x[j], and each row's elements combined: the first pass of operators whose values are
        relative to the extreme.
        """
        x, tops = self.held(), self.statistic()
        with self.each_group():
            self.note(tops, self.fold(x, combine, start))
        return x, tops

    def softmax(self) -> None:
        em = self.em
        x, tops = self.extremes(maximum, -inf)
        scales = self.statistic()
        with self.each_group():
            top = self.noted(tops)

            def exponential(r: int, j: Expr) -> Expr:
                e = vector_math.exp_nonpositive(em, x(r, j) - top(r))
                self.keep(r, j, e)
                return e

            total = self.fold(exponential, add, 0.0, ahead=self.ahead(output=True))
            self.note(scales, constant(total, 1.0) / total)
        with self.each_group():
            scale = self.noted(scales)
            self.write(lambda r, j: self.kept(r, j) * scale(r))

    def log_softmax(self) -> None:
        em = self.em
        x, tops = self.extremes(maximum, -inf)
        shifts = self.statistic()
        with self.each_group():
            top = self.noted(tops)
            total = self.fold(
                lambda r, j: vector_math.exp_nonpositive(em, x(r, j) - top(r)),
                add,
                0.0,
                ahead=self.ahead(output=True),
            )
            self.note(shifts, vector_math.log(em, total))
        with self.each_group():
            top, shift = self.noted(tops), self.noted(shifts)
            self.write(lambda r, j: (x(r, j) - top(r)) - shift(r))

    def normalise(self) -> None:
        em, op, length = self.em, self.sketch.op, self.view.length
        x = self.held()
        centred = op.kind == "layer_norm"
        means, scales = self.statistic(), self.statistic()
        at_once = centred and self.side == 1 and long_enough(length, em.lanes)
        if centred and not at_once:
            with self.each_group():
                total = self.fold(x, add, 0.0)
                self.note(means, total * constant(total, 1.0 / length))
        with self.each_group():
            if at_once:
                middle, variance = row_moments(em, length, lambda j: x(0, j))
                self.note(means, middle)
            mean = self.noted(means)

            def square(r: Expr, j: Expr) -> Expr:
                d = em.let(x(r, j) - mean(r) if centred else x(r, j), "d")
                return d * d

            if not at_once:
                squares = self.fold(square, add, 0.0)
                variance = squares * constant(squares, 1.0 / length)
            deviation = tirx.sqrt(variance + constant(variance, float(op["epsilon"])))
            self.note(scales, constant(variance, 1.0) / deviation)
        affine: list[Expr] = []

        def value(r: Expr, j: Expr) -> Expr:
            if not isinstance(r, int) or r == 0:  # shared by the rows side by side
                at = self.index([0] * self.view.trailing, j)[-1:]
                affine[:] = [em.let(self.reader.value(p, at), "p") for p in op.inputs[1:]]
            d = (x(r, j) - mean(r) if centred else x(r, j)) * scale(r) * affine[0]
            return d + affine[1] if centred else d

        with self.each_group():
            mean = self.noted(means)
            scale = self.noted(scales)
            self.write(value, self.ahead(output=False))

    def reduce(self) -> None:
        """A sum, mean, product or extreme over the trailing axes and any further ones."""
        em, sketch = self.em, self.sketch
        inner = [a for a in self.view.axes if a < self.view.trailing]

        def over(run: Callable[[Expr], None]) -> None:
            extents = [self.view.shape[a] for a in inner]
            with em.loop(prod(extents), "r") as r:
                for axis, i in zip(inner, unflatten(em, r, extents), strict=True):
                    for outer in self.outers:
                        outer[axis] = i
                run(r)

        combine, start = combination(em, sketch.op.kind)
        with self.each_group():
            outers = [list(outer) for outer in self.outers]
            values = self.fold(self.source, combine, start, over if inner else None)
            for r, outer in enumerate(outers):
                value = values if self.side == 1 else tirx.Shuffle([values], [r])
                self.finish(outer, value)

    def place(self) -> None:
        """The place of a row's extreme: first the extreme, then the first position that has it."""
        em = self.em
        x, tops = self.extremes(*combination(em, self.sketch.op.kind.removeprefix("arg")))
        with self.each_group():
            top = self.noted(tops)
            where = self.fold(lambda r, j: _place(em.let(x(r, j)), top(r), j), minimum, inf)
            for r, outer in enumerate(self.outers):
                self.finish(outer, where if self.side == 1 else tirx.Shuffle([where], [r]))

    def finish(self, outer: list[Expr], value: Expr) -> None:
        self.sketch.finish(self.reader, outer, value, self.args.output)


def _place(x: Expr, top: Expr, at: Expr) -> Expr:
    """``at`` as a float if x is the extreme, or if x is NaN (which then is the extreme); else
    infinity.
    """
    here = tirx.Cast("float32", at) if not isinstance(at, int) else tirx.const(at, "float32")
    return tirx.Select(tirx.Or(x == top, is_nan(x)), here, tirx.const(inf, "float32"))
