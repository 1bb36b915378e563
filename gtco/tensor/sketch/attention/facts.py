"""The facts of a fused attention: its operands and extents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.shape import TaskShape, cut
from gtco.tensor.space import Config
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage


def together_of(config: Config) -> int:
    """How many blocks of rows share a pass over the keys, and one over the values."""
    return int(config.by_name.get("mc", 1))


@dataclass(frozen=True)
class AttentionFacts:
    """softmax(scale * q k^T + bias) v over the batch axes."""

    stage: Stage
    target: Target
    tail: Epilogue

    @property
    def operand(self) -> str:
        """The dtype of q, k and v."""
        return self.stage.types[self.op.inputs[0]].dtype

    def _shape(self, operand: int) -> tuple[int, ...]:
        return tuple(int(d) for d in self.stage.types[self.op.inputs[operand]].shape)

    @cached_property
    def op(self) -> Operator:
        return self.stage.producers[self.tail.anchor]

    def shape(self, config: Config) -> TaskShape:
        """The cut of the queries of every head into tasks and blocks."""
        batch, m, *_ = self.extents
        tile = MicroKernel.parse(config["tile"], self.target.lanes)
        return cut(batch, m, 1, tile.rows, 1, config["chunks_m"], 1, tile.kind.in_tiles)

    @property
    def side_by_side(self) -> int:
        """The heads of a sample, whose queries lie in the same rows."""
        return int(([1, *self.op.type.shape])[-3])

    def foreign(self, chunks: int) -> float:
        """The share of what tasks read or write that lies with other cores, if all heads of a
        sample are cut into so many chunks of rows.
        """
        samples = self.extents[0] // self.side_by_side
        return max(0.0, 1.0 - samples * chunks / self.target.cores)

    @cached_property
    def next_fits(self) -> bool:
        """True if L2 holds K and V of a head in scratch and q, k and v of the next one, if any."""
        b, m, n, d, e = self.extents
        item = ITEM_BYTES[self.operand]
        needed = 4 * n * (d + e) + item * (m * d + n * (d + e))
        return b > 1 and needed <= self.target.level("L2").capacity

    @cached_property
    def extents(self) -> tuple[int, int, int, int, int]:
        """(batch, queries m, keys n, width of keys d, width of values e)."""
        q, v = self._shape(0), self._shape(2)
        return prod(int(d) for d in self.op.type.shape[:-2]), q[-2], v[-2], q[-1], v[-1]
