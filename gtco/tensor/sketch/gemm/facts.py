"""What a contraction is: how its operands lie, and how a config cuts it. Decisions,
price and loops of the CPU ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import (
    Epilogue,
)
from gtco.tensor.analysis.contraction import (
    Contraction,
    ConvView,
)
from gtco.tensor.analysis.placement import (
    column_stride,
    row_stride,
    stores_columns,
)
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.sketch.shared.tiling import (
    TaskShape,
    task_shape,
)
from gtco.tensor.space import Config, Option
from gtco.tensor.stage import Operator, Stage


def operand_dtype(stage: Stage, op: Operator) -> str:
    """The dtype of both operands, or of weights in float16 beside a float32 A; nothing where they
    differ otherwise.
    """
    a, b = (stage.types[x].dtype for x in op.inputs[:2])
    weights = a == "float32" and b == "float16" and op.inputs[1] in stage.constants
    return b if a == b or weights else ""


@dataclass(frozen=True)
class GemmFacts:
    """A contraction: its view, what stands before and behind it, and how a config cuts it."""

    stage: Stage
    target: Target
    view: Contraction
    tail: Epilogue
    norm: Operator | None = None  # a layer_norm that makes A

    @cached_property
    def operand(self) -> str:
        """The dtype of B."""
        return operand_dtype(self.stage, self.view.op)

    @property
    def operand_a(self) -> str:
        """The dtype of A."""
        return self.stage.types[self.view.op.inputs[0]].dtype

    def row(self, chosen: Config | Mapping[str, Option]) -> MicroKernel:
        """The micro-kernel that was chosen."""
        return MicroKernel.parse(str(chosen["tile"]), self.target.lanes)

    @cached_property
    def constant_b(self) -> bool:
        """B is known at compile time and laid out in panels then."""
        return self.view.op.inputs[1] in self.stage.constants

    @cached_property
    def direct_rows(self) -> int | None:
        """The row stride, in elements, where A's rows lie in an input as they are: no packing is
        needed then.
        """
        if self.norm is not None:
            return None
        if isinstance(self.view, ConvView) and (self.view.padded or self.view.kernel != (1, 1)):
            return None
        return row_stride(self.stage, self.view)

    @cached_property
    def direct_columns(self) -> int | None:
        """The row stride, in elements, where rows of a B that is computed lie in an input as they
        are: a vector of it can be read in place.
        """
        if self.constant_b or isinstance(self.view, ConvView):
            return None
        return column_stride(self.stage, self.view)

    def reads_columns(self, tile: MicroKernel) -> bool:
        """May panels of B be read in place? They are whole, no step of k takes several neighbours,
        and one block of rows uses them: where more do, a copy pays, since rows of B far apart share
        cache sets.
        """
        if tile.kind.b.step > 1:
            return False
        if self.view.n % tile.columns or self.view.m > tile.rows:
            return False
        return self.direct_columns is not None

    def reads_rows(self, tile: MicroKernel) -> bool:
        """May rows of A be read in place? They lie as the row reads them, in whole steps."""
        kind = tile.kind
        if kind.a.dtype != self.operand_a or self.view.k % kind.step:
            return False
        return self.direct_rows is not None

    def widens(self, tile: MicroKernel) -> bool:
        """Is a panel of the weights copied to scratch, as the row reads it? Rows that widen float16
        themselves do so for each block of rows; a copy is made once for many.
        """
        return self.constant_b and tile.kind.b.dtype != self.operand

    def packs_columns(self, config: Config) -> bool:
        return not self.constant_b and dict(config.choices).get("b") != "direct"

    @cached_property
    def stores_columns(self) -> bool:
        """Do rows of C, not columns, lie side by side in the output (a transposed store)?"""
        return stores_columns(self.view, self.tail)

    def blocks_at_once(self, config: Config) -> int:
        """Row blocks of a task that one pass over its panels works on."""
        if config.by_name.get("order") == "rows":
            return 1
        return int(config.by_name.get("mc", self.shape(config).task_blocks))

    def shape(self, config: Config) -> TaskShape:
        return task_shape(self.view, self.row(config), config["chunks_m"], config["chunks_n"])
