"""The facts of a contraction: the layout of its operands, and the way a config cuts it. The
decisions, price and loops of the CPU read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

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
from gtco.tensor.intrinsics.table import WEIGHTS, Kind, MicroKernel, kinds
from gtco.tensor.nest.nest import Nest, Placed
from gtco.tensor.nest.shape import TaskShape, task_shape
from gtco.tensor.space import Config, Option
from gtco.tensor.stage import INT4, Operator, Stage

# The dtypes of A and B of which B has to be constant.
_WEIGHTS = (
    ("float32", "float16"),
    ("float32", "int8"),
    ("float32", INT4),
    ("uint8", "int8"),
    ("int8", "int8"),
)


def operand_dtype(stage: Stage, op: Operator) -> str:
    """The dtype of both operands, or that of constant weights beside another A: float16 or int4
    beside float32, int8 beside float32, uint8 or int8. Empty if they are a pair that no row
    multiplies.
    """
    a, b = (stage.types[x].dtype for x in op.inputs[:2])
    if (a, b) in _WEIGHTS:
        return b if op.inputs[1] in stage.constants else ""
    return b if a == b else ""


def rows_for(a: str, b: str) -> str:
    """The :attr:`Kind.operand` of the rows that multiply A of dtype ``a`` by B of ``b``."""
    return WEIGHTS if (a, b) == ("float32", "int8") else b


@dataclass(frozen=True)
class GemmFacts:
    """A contraction: its view, its prologue and epilogue, and the way a config cuts it."""

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

    @property
    def scales(self) -> str | None:
        """The tensor with a scale for each block of k and column of B, if there is one."""
        return self.view.op.inputs[2] if len(self.view.op.inputs) > 2 else None

    @property
    def zeros(self) -> str | None:
        """The tensor with a zero point for each block of k and column of B, if there is one."""
        return self.view.op.inputs[3] if len(self.view.op.inputs) > 3 else None

    @property
    def blocks(self) -> int:
        """The blocks of k that have scales."""
        return ceil(self.view.k / self.view.op["block"])

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of rows that multiply its operands."""
        return kinds(self.target, rows_for(self.operand_a, self.operand))

    def row(self, chosen: Config | Mapping[str, Option]) -> MicroKernel:
        """The micro-kernel that was chosen."""
        return MicroKernel.parse(str(chosen["tile"]), self.target.lanes)

    @cached_property
    def constant_b(self) -> bool:
        """True if B is known at compile time; then it is laid out in panels."""
        return self.view.op.inputs[1] in self.stage.constants

    @cached_property
    def direct_rows(self) -> int | None:
        """The row stride, in elements, if A's rows lie in an input unchanged; then they are not
        packed.
        """
        if self.norm is not None:
            return None
        if isinstance(self.view, ConvView) and (self.view.padded or self.view.kernel != (1, 1)):
            return None
        return row_stride(self.stage, self.view)

    @cached_property
    def direct_columns(self) -> int | None:
        """The row stride, in elements, if rows of a B that is not constant lie in an input
        unchanged; then a vector of it can be read in place.
        """
        if self.constant_b or isinstance(self.view, ConvView):
            return None
        return column_stride(self.stage, self.view)

    def reads_columns(self, tile: MicroKernel) -> bool:
        """True if panels of B may be read in place: they are whole, no step of k takes several
        neighbours, and one block of rows uses them. If more blocks do, a copy pays, because rows of
        B that lie far apart share cache sets.
        """
        if tile.kind.b.step > 1:
            return False
        if self.view.n % tile.columns or self.view.m > tile.rows:
            return False
        return self.direct_columns is not None

    def reads_rows(self, tile: MicroKernel) -> bool:
        """True if rows of A may be read in place: they have the layout that the row reads, in whole
        steps.
        """
        kind = tile.kind
        if kind.a.dtype != self.operand_a or self.view.k % kind.step:
            return False
        return self.direct_rows is not None

    def widens(self, tile: MicroKernel) -> bool:
        """True if a panel of the weights is copied to scratch in the form that the row reads. Rows
        that widen weights themselves do so again for each block of rows; a copy is made once for
        many.
        """
        return self.constant_b and tile.kind.b.dtype != self.operand

    def packs_columns(self, config: Config) -> bool:
        return not self.constant_b and dict(config.choices).get("b") != "direct"

    @cached_property
    def stores_columns(self) -> bool:
        """True if rows of C, not columns, lie side by side in the output (a transposed store)."""
        return stores_columns(self.view, self.tail)

    def shape(self, config: Config) -> TaskShape:
        return task_shape(self.view, self.row(config), config["chunks_m"], config["chunks_n"])

    def nest(self, config: Config) -> Nest:
        """The loops that a config makes of the contraction."""
        v, row, chosen = self.view, self.row(config), config.by_name
        b = "packed" if self.packs_columns(config) else "direct"
        if self.constant_b:
            b = "widened" if self.widens(row) else "panels"
        return Nest(
            (v.batch, v.m, v.n, v.k),
            row,
            (int(config["chunks_m"]), int(config["chunks_n"])),
            int(config["kc"]),
            int(chosen["mc"]) if "mc" in chosen else None,
            str(chosen.get("order", "panels")),
            Placed(str(config["a"]), self.operand_a, self.direct_rows or 0),
            Placed(b, self.operand, self.direct_columns or 0),
            self.stage.output.type.dtype,
            str(config["prefetch"]),
        )
