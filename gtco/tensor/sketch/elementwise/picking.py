"""Rows in which a gather reads another place at each position (GatherElements, take along a row).

Neighbours lie anywhere, so they are loaded one by one; everything else runs in vectors::

    for block of a row:
      for gather, those that another one's indices need first:
        places[j] = its indices, made positive and kept inside          # vectors
        values[j] = data[places[j]], with what the data goes through    # one by one
      output[row, j] = expression of the values                         # vectors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gtco.tensor.analysis.chains import shape_of
from gtco.tensor.analysis.probe import Picked, Probe
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.sketch.shared.interleaving import SteppedReader
from gtco.tensor.sketch.shared.streaming import vector_runs

BLOCK = 256  # positions whose places and values are kept in L1
UNROLLED = 8  # positions that are loaded one after the other without a jump


def picked_apart(probe: Probe) -> tuple[Picked, ...] | None:
    """The gathers that a probe of a stage met on the way to the output, those that another one's
    indices need first. None if one of them is also read at another index, because its values are
    kept for one.
    """
    outside = tuple(p for p in probe.picked if not p.inside)
    names = [p.op.output for p in probe.picked]
    return outside if all(names.count(p.op.output) == 1 for p in outside) else None


def emit_picked(
    em: Emitter,
    reader: SteppedReader,
    index: Sequence[Expr],
    first: Expr,
    length: int,
    output: Array,
    row: Expr,
) -> bool:
    """Emits ``length`` positions of a row from ``first`` on. ``index`` is the output's at the
    reader's ``at``; the first position is stored at ``row`` in the flat ``output``. False, and
    nothing is emitted, if the gathers are not apart, or if the row decides which of them are read:
    the indices of another one may lie outside of their tensor.
    """
    probe = Probe(reader.stage, em)
    probe.follow(reader.stage.output.output, index)
    gathers = picked_apart(probe)
    if gathers is None or probe.conditions:
        return False
    for begin, count, size in vector_runs(length, BLOCK):
        with em.loop(count, "block") as block:
            run = _Block(em, reader, first + (begin + block * size), size)
            run.emit(gathers, index, output, row + (begin + block * size))
    return True


class _Block:
    """The emitter of ``size`` positions of a row, from the reader's position ``first`` on."""

    def __init__(self, em: Emitter, reader: SteppedReader, first: Expr, size: int) -> None:
        self.em, self.reader, self.first, self.size = em, reader, first, size
        self.at: Expr = 0  # the position in the block

    def emit(
        self, gathers: Sequence[Picked], index: Sequence[Expr], output: Array, row: Expr
    ) -> None:
        em, reader = self.em, self.reader
        for gather in gathers:
            values = self.values(gather)
            reader.known[gather.op.output] = partial(self.kept, values)
        made = reader.stage.output.output
        self.in_vectors(lambda: em.store(output, [row + self.at], reader.value(made, index)))
        for gather in gathers:
            del reader.known[gather.op.output]

    def kept(self, values: Array, index: Sequence[Expr]) -> Expr:
        """The value of a gather at the position of the loop around."""
        return self.em.load(values, [self.at])

    def values(self, gather: Picked) -> Array:
        """Emits the values of a gather, which are kept on the stack."""
        em, reader, op = self.em, self.reader, gather.op
        stop = op["axis"] + len(shape_of(reader.stage, op.inputs[1]))
        places = em.registers(self.size, em.index_dtype)
        values = em.registers(self.size, op.type.dtype)

        def one() -> None:
            place = reader.inside(em.load(places, [self.at]), op)
            source = [*gather.index[: op["axis"]], place, *gather.index[stop:]]
            em.store(values, [self.at], reader.value(op.inputs[0], source))

        self.in_vectors(lambda: em.store(places, [self.at], reader.place(op, gather.index)))
        self.one_by_one(one)
        return values

    def in_vectors(self, body: Callable[[], None]) -> None:
        """``body()`` for each position of the block, in vectors."""
        em, reader = self.em, self.reader
        for begin, count, lanes in vector_runs(self.size, em.lanes):
            with em.loop(count, "v") as v, em.vector(lanes) as reader.lane:
                reader.first = self.first + (begin + v * lanes)
                self.at = begin + v * lanes + reader.lane
                body()

    def one_by_one(self, body: Callable[[], None]) -> None:
        """``body()`` for each position of the block, a few without a jump between them."""
        reader = self.reader
        for begin, count, some in vector_runs(self.size, UNROLLED):
            with self.em.loop(count, "i") as i:
                for k in range(some):
                    self.at = begin + i * some + k
                    reader.first, reader.lane = self.first + self.at, 0
                    body()
