"""The loops of the rows sketch (:mod:`gtco.tensor.sketch.rows.cpu`) for reductions over axes that
are not the last: neighbouring columns are reduced side by side.
"""

from __future__ import annotations

from math import ceil, inf

from tvm import tirx

from gtco.tensor.analysis.reduction import PLACES, REDUCTIONS
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.fold import add, combination, maximum
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.rows.facts import RowsFacts
from gtco.tensor.sketch.rows.places import places
from gtco.tensor.sketch.shared.columns import ColumnChunk
from gtco.tensor.sketch.shared.streaming import tasks_of_rows, unflatten


class ColumnLoops:
    """The emitter of one config of one stage."""

    def __init__(self, sketch: RowsFacts, rows: int) -> None:
        self.sketch, self.view, self.rows = sketch, sketch.view, rows

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        self.em, self.args = em, args
        self.reader = Reader(self.sketch.stage, em, args.inputs)
        with tasks_of_rows(em, args, self.sketch.units, self.rows) as unit:
            self.task(unit)

    def task(self, unit: Expr) -> None:
        """Emits one chunk of columns, for the rows that are made side by side."""
        em, sketch = self.em, self.sketch
        width, last = sketch.chunk, self.view.shape[-1]
        chunks = ceil(last / width)
        chunk = em.let_index(unit % chunks, "chunk") if chunks > 1 else 0
        group = em.let_index(unit // chunks, "outer") if chunks > 1 else unit
        rows = [*sketch.beside.rows(em, unflatten(em, group, sketch.beside.counted))]

        def one(first: Expr, width: int) -> None:
            if sketch.op.kind in PLACES:
                self.places(rows, first, width)
            else:
                (outer,) = rows
                self.chunk(list(outer), first, width)

        if last % width == 0:
            one(chunk * width, width)
            return
        em.branch(
            chunk < chunks - 1 if chunks > 1 else False,
            lambda: one(chunk * width, width),
            lambda: one((chunks - 1) * width, last % width),
        )

    def places(self, rows: list[list[Expr]], first: Expr, width: int) -> None:
        """Emits the places of the extremes of ``width`` neighbouring columns, in several rows."""
        em, view, op = self.em, self.view, self.sketch.op
        groups = [ColumnChunk(em, view.shape, view.axes, row, first, width) for row in rows]

        def read(index: list[Expr]) -> Expr:
            return self.reader.value(op.inputs[0], index)

        found = places(em, groups, view.count, read, op.kind == "argmax")
        for row, group, place in zip(rows, groups, found, strict=True):
            group.each(
                lambda begin, lane, row=row, place=place: self.finish(  # type: ignore[misc]
                    [*row[:-1], first + begin + lane], em.load(place, [begin + lane])
                )
            )

    def chunk(self, outer: list[Expr], first: Expr, width: int) -> None:
        """Emits ``width`` neighbouring columns from ``first``, reduced side by side."""
        em, sketch = self.em, self.sketch
        kind = sketch.op.kind
        columns = ColumnChunk(em, self.view.shape, self.view.axes, outer, first, width)

        def read(index: list[Expr], begin: int, lane: Expr) -> Expr:
            return self.reader.value(sketch.op.inputs[0], index)

        if kind in REDUCTIONS:
            acc = columns.fold(read, *combination(em, kind))
            columns.each(
                lambda begin, lane: self.finish(
                    [*outer[:-1], first + begin + lane], em.load(acc, [begin + lane])
                )
            )
            return
        assert kind in ("softmax", "log_softmax"), kind
        soft = kind == "softmax"
        top = columns.fold(read, maximum, -inf)
        keep = soft and self.sketch.stage.output.type.dtype == "float32"

        def exponential(index: list[Expr], begin: int, lane: Expr) -> Expr:
            e = vector_math.exp_nonpositive(
                em, read(index, begin, lane) - em.load(top, [begin + lane])
            )
            if keep:  # kept in the place of the result: exp costs more than storing twice
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

    def finish(self, outer: list[Expr], value: Expr) -> None:
        self.sketch.finish(self.reader, outer, value, self.args.output)
