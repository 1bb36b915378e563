"""Copies of neighbours, which a kernel makes on the way to scratch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from gtco.tensor.analysis.contraction import Contraction
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader


def put(
    reader: Reader, view: Contraction, packed: Array, index: Sequence[Expr], value: Expr
) -> None:
    """Stores a value of A in the dtype in which it is multiplied."""
    em, dtype = reader.emitter, reader.stage.types[view.op.inputs[0]].dtype
    em.store(packed, index, convert(em, value, dtype, packed.dtype))


def copy_run(
    em: Emitter,
    length: int,
    read: Callable[[Expr], Expr],
    write: Callable[[Expr, Expr], None],
    breaks: Sequence[int] = (),
) -> None:
    """Copies ``length`` neighbours: whole vectors in a loop, then the rest as a shorter vector.

    ``breaks`` cut the run into pieces that are copied one after the other.
    """
    if breaks:
        for begin, end in itertools.pairwise([0, *breaks, length]):
            copy_run(
                em,
                end - begin,
                lambda k, begin=begin: read(begin + k),  # type: ignore[misc]
                lambda k, value, begin=begin: write(begin + k, value),  # type: ignore[misc]
            )
        return
    whole = length // em.lanes * em.lanes
    if whole:
        with em.loop(whole // em.lanes, "v") as v, em.vector(em.lanes, "l") as lane:
            write(v * em.lanes + lane, read(v * em.lanes + lane))
    if length > whole:
        with em.vector(length - whole, "l") as lane:
            write(whole + lane, read(whole + lane))
