"""The loops of the rows sketch (:mod:`gtco.tensor.sketch.rows`): statistics and reductions."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, prod
from typing import Protocol

from tvm import tirx

from gtco.tensor import vector_math
from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.arithmetic import is_nan
from gtco.tensor.emit import Emitter, Expr, KernelArguments
from gtco.tensor.fold import Combine, Over, add, fold
from gtco.tensor.reader import Reader
from gtco.tensor.scratch import Scratch
from gtco.tensor.sketch.columns import ColumnChunk
from gtco.tensor.sketch.streaming import tasks_of_rows, unflatten, vector_runs
from gtco.tensor.stage import Operator, Stage

REDUCTIONS = ("sum", "mean", "max", "min", "prod")


class Reduced(Protocol):
    """What the loops ask of the sketch; see :class:`gtco.tensor.sketch.rows.Rows`."""

    @property
    def stage(self) -> Stage: ...
    @property
    def op(self) -> Operator: ...
    @property
    def tail(self) -> Epilogue: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[int, ...]: ...
    @property
    def trailing(self) -> int: ...
    @property
    def by_rows(self) -> bool: ...
    @property
    def length(self) -> int: ...
    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def plain(self) -> bool: ...
    @property
    def piece(self) -> int: ...
    @property
    def scratch(self) -> Scratch: ...


class RowsLoops:
    """One config of one stage, being emitted."""

    def __init__(self, sketch: Reduced, rows: int) -> None:
        self.sketch, self.rows = sketch, rows

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        sketch = self.sketch
        self.em, self.args = em, args
        self.reader = Reader(sketch.stage, em, args.inputs)
        self.kept = sketch.scratch.arrays(args).get("row")
        with tasks_of_rows(em, args, sketch.units, self.rows) as unit:
            if not sketch.by_rows:
                self.columns(unit)
                return
            outer = unflatten(em, unit, sketch.kept)
            match sketch.op.kind:
                case "softmax":
                    self.softmax(outer)
                case "log_softmax":
                    self.log_softmax(outer)
                case "layer_norm" | "rms_norm":
                    self.normalise(outer)
                case _:
                    self.reduce(outer)

    # rows -----------------------------------------------------------------------------------------
    def index(self, outer: list[Expr], j: Expr) -> list[Expr]:
        """The reduced tensor's index at position ``j`` of the row."""
        cut = self.sketch.trailing
        return [*outer[:cut], *split_flat(j, self.sketch.shape[cut:])]

    def source(self, outer: list[Expr]) -> Callable[[Expr], Expr]:
        """x[j], from the input itself."""
        return lambda j: self.reader.value(self.sketch.op.inputs[0], self.index(outer, j))

    def held(self, outer: list[Expr]) -> Callable[[Expr], Expr]:
        """x[j] to be read several times: a prologue's values are computed once, into scratch."""
        if self.sketch.plain:
            return self.source(outer)
        source, kept = self.source(outer), self.kept
        assert kept is not None
        self.each(lambda j: self.em.store(kept, [j], source(j)))
        return lambda j: self.em.load(kept, [j])

    def each(self, body: Callable[[Expr], None]) -> None:
        """``body(j)`` for every position of the row, in vectors."""
        em, piece = self.em, self.sketch.piece
        with em.loop(self.sketch.length // piece, "piece") as p:
            for begin, count, lanes in vector_runs(piece, em.lanes):
                with em.loop(count, "block") as block, em.vector(lanes) as lane:
                    body(p * piece + begin + block * lanes + lane)

    def fold(
        self,
        value: Callable[[Expr], Expr],
        combine: Combine,
        start: float,
        over: Over | None = None,
    ) -> Expr:
        return fold(self.em, self.sketch.length, value, combine, start, over)

    def write(self, outer: list[Expr], value: Callable[[Expr], Expr]) -> None:
        """The epilogue of every position of the row, stored where it sends it."""

        def element(j: Expr) -> None:
            self.reader.finish(
                self.sketch.tail, self.index(outer, j), value(j), self.args.output
            )

        self.each(element)

    def softmax(self, outer: list[Expr]) -> None:
        em, kept = self.em, self.kept
        assert kept is not None
        x = self.held(outer)
        top = self.fold(x, _maximum, -inf)

        def exponential(j: Expr) -> Expr:
            e = vector_math.exp_nonpositive(em, x(j) - top)
            em.store(kept, [j], e)
            return e

        total = self.fold(exponential, add, 0.0)
        scale = em.let(tirx.const(1.0, "float32") / total, "scale")
        self.write(outer, lambda j: em.load(kept, [j]) * scale)

    def log_softmax(self, outer: list[Expr]) -> None:
        em = self.em
        x = self.held(outer)
        top = self.fold(x, _maximum, -inf)
        total = self.fold(lambda j: vector_math.exp_nonpositive(em, x(j) - top), add, 0.0)
        shift = vector_math.log(em, total)
        self.write(outer, lambda j: (x(j) - top) - shift)

    def normalise(self, outer: list[Expr]) -> None:
        em, op, length = self.em, self.sketch.op, self.sketch.length
        x = self.held(outer)
        share = tirx.const(1.0 / length, "float32")
        centred = op.kind == "layer_norm"
        mean = em.let(self.fold(x, add, 0.0) * share, "mean") if centred else None

        def square(j: Expr) -> Expr:
            d = em.let(x(j) - mean if centred else x(j), "d")
            return d * d

        variance = self.fold(square, add, 0.0) * share
        epsilon = tirx.const(float(op["epsilon"]), "float32")
        scale = em.let(tirx.const(1.0, "float32") / tirx.sqrt(variance + epsilon), "scale")

        def value(j: Expr) -> Expr:
            at = self.index([0] * self.sketch.trailing, j)[-1:]
            d = (x(j) - mean if centred else x(j)) * scale * self.reader.value(op.inputs[1], at)
            return d + self.reader.value(op.inputs[2], at) if centred else d

        self.write(outer, value)

    def reduce(self, outer: list[Expr]) -> None:
        """A sum, mean, product or extreme over the trailing axes and any further ones."""
        em, sketch = self.em, self.sketch
        inner = [a for a in sketch.axes if a < sketch.trailing]
        position = list(outer)

        def over(run: Callable[[Expr], None]) -> None:
            extents = [sketch.shape[a] for a in inner]
            with em.loop(prod(extents), "r") as r:
                for axis, i in zip(inner, unflatten(em, r, extents), strict=True):
                    position[axis] = i
                run(r)

        combine, start = _combination(em, sketch.op.kind)
        value = self.fold(
            lambda j: self.reader.value(sketch.op.inputs[0], self.index(position, j)),
            combine,
            start,
            over,
        )
        self.finish(outer, value)

    def finish(self, outer: list[Expr], value: Expr) -> None:
        """One reduced element through the epilogue."""
        sketch, op = self.sketch, self.sketch.op
        if op.kind == "mean":
            value = value * tirx.const(1.0 / prod(sketch.shape[a] for a in sketch.axes), "float32")
        reduced = {a % len(sketch.shape) for a in op["axes"]} or set(range(len(sketch.shape)))
        at = [0 if a in reduced else i for a, i in enumerate(outer)]
        if not op["keepdims"]:
            at = [i for a, i in enumerate(at) if a not in reduced]
        self.reader.finish(sketch.tail, at, self.em.let(value), self.args.output)

    # columns --------------------------------------------------------------------------------------
    def columns(self, unit: Expr) -> None:
        em, sketch = self.em, self.sketch
        width, last = sketch.chunk, sketch.shape[-1]
        chunks = ceil(last / width)
        chunk = em.let_index(unit % chunks, "chunk") if chunks > 1 else 0
        outer = unflatten(
            em, em.let_index(unit // chunks, "outer") if chunks > 1 else unit, sketch.kept
        )
        if last % width == 0:
            self.chunk(outer, chunk * width, width)
            return
        em.branch(
            chunk < chunks - 1 if chunks > 1 else False,
            lambda: self.chunk(list(outer), chunk * width, width),
            lambda: self.chunk(list(outer), (chunks - 1) * width, last % width),
        )

    def chunk(self, outer: list[Expr], first: Expr, width: int) -> None:
        """``width`` neighbouring columns from ``first``, reduced side by side."""
        em, sketch = self.em, self.sketch
        kind = sketch.op.kind
        columns = ColumnChunk(em, sketch.shape, sketch.axes, outer, first, width)

        def read(index: list[Expr], begin: int, lane: Expr) -> Expr:
            return self.reader.value(sketch.op.inputs[0], index)

        if kind in REDUCTIONS:
            acc = columns.fold(read, *_combination(em, kind))
            columns.each(
                lambda begin, lane: self.finish(
                    [*outer[:-1], first + begin + lane], em.load(acc, [begin + lane])
                )
            )
            return
        assert kind in ("softmax", "log_softmax"), kind
        soft = kind == "softmax"
        top = columns.fold(read, _maximum, -inf)
        keep = soft and self.sketch.stage.output.type.dtype == "float32"

        def exponential(index: list[Expr], begin: int, lane: Expr) -> Expr:
            e = vector_math.exp_nonpositive(
                em, read(index, begin, lane) - em.load(top, [begin + lane])
            )
            if keep:  # where the result will be: exp is dearer than storing twice
                where = sketch.tail.positions([em.index(i) for i in index])
                em.store(self.args.output, where[sketch.stage.output.output], e)
            return e

        total = columns.fold(exponential, add, 0.0)

        def invert(begin: int, lane: Expr) -> None:
            s = em.load(total, [begin + lane])
            value = tirx.const(1.0, "float32") / s if soft else vector_math.log(em, s)
            em.store(total, [begin + lane], value)

        columns.each(invert)

        def element(index: list[Expr], begin: int, lane: Expr) -> None:
            s = em.load(total, [begin + lane])
            if keep:
                where = sketch.tail.positions([em.index(i) for i in index])
                value = em.load(self.args.output, where[sketch.stage.output.output]) * s
            else:
                shifted = read(index, begin, lane) - em.load(top, [begin + lane])
                value = vector_math.exp_nonpositive(em, shifted) * s if soft else shifted - s
            self.reader.finish(sketch.tail, index, em.let(value), self.args.output)

        columns.across(element)


def _maximum(a: Expr, b: Expr) -> Expr:
    return tirx.max(a, b)


def _combination(em: Emitter, kind: str) -> tuple[Combine, float]:
    """How two elements become one, and what changes nothing; NaN propagates through extremes as in
    numpy.
    """
    if kind in ("sum", "mean"):
        return add, 0.0
    if kind == "prod":
        return (lambda a, b: a * b), 1.0
    choose = tirx.max if kind == "max" else tirx.min

    def extreme(a: Expr, b: Expr) -> Expr:
        a = em.let(a)
        return tirx.Select(is_nan(a), a, choose(a, b))

    return extreme, -inf if kind == "max" else inf
