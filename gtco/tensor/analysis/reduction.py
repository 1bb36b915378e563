"""Reductions, normalisations and softmax as rows of positions that are folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.stage import Operator, Stage

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
PLACES = ("argmax", "argmin")
NORMALISATIONS = ("layer_norm", "rms_norm", "softmax", "log_softmax")


@dataclass(frozen=True)
class Reduction:
    """``op``, one of the kinds above, in its stage. By rows, the trailing axes are folded. By
    columns, other axes are, and the last one is kept.
    """

    stage: Stage
    op: Operator

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the reduced tensor."""
        return shape_of(self.stage, self.op.inputs[0])

    @cached_property
    def folded(self) -> frozenset[int]:
        """The axes that the operator names."""
        rank = len(self.shape)
        if self.op.kind in REDUCTIONS:
            return frozenset(a % rank for a in self.op["axes"]) or frozenset(range(rank))
        if self.op.kind in ("softmax", "log_softmax", *PLACES):
            return frozenset({self.op["axis"] % rank})
        return frozenset({rank - 1})

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The reduced axes; axes of extent 1 do not count."""
        return tuple(sorted(a for a in self.folded if self.shape[a] > 1))

    @property
    def count(self) -> int:
        """The number of elements that become one."""
        return prod(self.shape[a] for a in self.axes)

    def result_index(self, index: Sequence[Expr]) -> list[Expr]:
        """The index at which a sum, mean, product or extreme puts the result for the elements
        around ``index``.
        """
        if self.op["keepdims"]:
            return [0 if a in self.folded else i for a, i in enumerate(index)]
        return [i for a, i in enumerate(index) if a not in self.folded]

    @cached_property
    def trailing(self) -> int:
        """The first of the trailing axes that are all reduced; vectors run along their product."""
        cut = len(self.shape)
        while cut > 0 and (cut - 1 in self.axes or self.shape[cut - 1] == 1):
            cut -= 1
        return cut

    @property
    def by_rows(self) -> bool:
        """True if vectors run along the reduction. It is also true if nothing is reduced, and for a
        last axis of extent 1.
        """
        return any(a >= self.trailing for a in self.axes) or not self.axes

    @property
    def length(self) -> int:
        """The positions that one vector loop reduces."""
        return prod(self.shape[self.trailing :])

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The extents of the axes that count rows. They are neither reduced nor, by columns, the
        last one; the other axes are 1.
        """
        last = len(self.shape) if self.by_rows else len(self.shape) - 1
        return tuple(1 if a in self.axes or a >= last else n for a, n in enumerate(self.shape))

    def piece(self, lanes: int, tail: Epilogue | None) -> int:
        """The longest piece of a row in which neighbours are neighbours in everything that is read
        and written: vector loops run over it. The whole row if no piece is long enough.
        """
        if not self.by_rows:
            return self.length
        sizes = {self.length}
        for known in self.stage.types.values():
            shape = [int(d) for d in known.shape]
            sizes |= {prod(shape[k:]) for k in range(len(shape))}
        fitting = sorted(
            (n for n in sizes if n and self.length % n == 0 and n >= lanes), reverse=True
        )
        return next((n for n in fitting if not self.scattered(n, tail)), self.length)

    def scattered(self, piece: int, tail: Epilogue | None) -> int:
        """The number of loads, and of stores of ``tail``, that are not vectors in a piece of
        ``piece`` positions.
        """
        probe = Probe(self.stage)
        i, p = probe.scope.variables((piece, self.length // piece))
        kept = self.kept[: self.trailing]
        axes = probe.scope.variables(kept)
        outer = [axis if extent > 1 else 0 for axis, extent in zip(axes, kept, strict=True)]
        j = i if piece == self.length else p * piece + i
        index = [*outer, *split_flat(j, self.shape[self.trailing :])]
        probe.follow(self.op.inputs[0], index)
        if tail is not None:
            probe.through(tail, index)
        return probe.apart(i) + probe.decided_by(i)
