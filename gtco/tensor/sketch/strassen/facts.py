"""The facts of a product by Strassen's algorithm: its halves, its seven products, and the way a
config cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gtco.tensor.analysis.contraction import MatmulView
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.nest import Nest, Placed
from gtco.tensor.nest.shape import TaskShape, cut
from gtco.tensor.sketch.shared.of_gemm import OfGemm
from gtco.tensor.space import Config

PRODUCTS, QUARTERS = 7, 4
# The factors of the quarters (11, 12, 21, 22) of A and of B in the seven products, and those of
# the products in the quarters of C (Strassen 1969, I to VII).
OF_A = (
    (1, 0, 0, 1),
    (0, 0, 1, 1),
    (1, 0, 0, 0),
    (0, 0, 0, 1),
    (1, 1, 0, 0),
    (-1, 0, 1, 0),
    (0, 1, 0, -1),
)
OF_B = (
    (1, 0, 0, 1),
    (1, 0, 0, 0),
    (0, 1, 0, -1),
    (-1, 0, 1, 0),
    (0, 0, 0, 1),
    (1, 1, 0, 0),
    (0, 0, 1, 1),
)
OF_C = (
    (1, 0, 0, 1, -1, 0, 1),
    (0, 0, 1, 0, 1, 0, 0),
    (0, 1, 0, 1, 0, 0, 0),
    (1, -1, 1, 0, 0, 1, 0),
)


@dataclass(frozen=True)
class StrassenFacts(OfGemm):
    """A row of the seven products is a pair of neighbouring rows of one sample. The first axis of A
    is that of samples. So no sample depends on another one, not even by its NaNs and roundings.
    """

    @property
    def view(self) -> MatmulView:
        view = self.product.view
        assert isinstance(view, MatmulView)
        return view

    @property
    def sample(self) -> int:
        """Rows of a sample."""
        return self.view.m // self.view.a_shape[0]

    @property
    def pairs(self) -> int:
        """Pairs of a sample. Of an odd number of rows the last one is alone."""
        return ceil(self.sample / 2)

    @property
    def rows(self) -> int:
        """Pairs of all samples."""
        return self.view.a_shape[0] * self.pairs

    @property
    def columns(self) -> int:
        """Columns of a half."""
        return self.view.n // 2

    @property
    def depth(self) -> int:
        """Steps of k of a half."""
        return self.view.k // 2

    def shape(self, tile: MicroKernel, chunks_m: int, chunks_n: int) -> TaskShape:
        """The cut of one of the seven products."""
        return cut(1, self.rows, self.columns, tile.rows, tile.columns, chunks_m, chunks_n)

    def nest(self, config: Config) -> Nest:
        """The loops that a config makes of the seven products."""
        operand = self.product.operand
        return Nest(
            (1, self.rows, self.columns, self.depth),
            self.row(config),
            (int(config["chunks_m"]), int(config["chunks_n"])),
            self.depth,
            int(config["mc"]),
            "panels",
            Placed("packed", operand),
            Placed("panels", operand),
            self.stage.output.type.dtype,
            str(config["prefetch"]),
            transform=(PRODUCTS, QUARTERS),
            by_block=True,
        )
