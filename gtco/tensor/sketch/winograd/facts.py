"""The facts of a convolution by Winograd's filtering: its tiles, and the way a config cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from gtco.tensor.analysis.filtering import TAPS
from gtco.tensor.emit.filtering import TRANSFORMS
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.nest import Nest, Placed
from gtco.tensor.nest.shape import TaskShape, task_shape
from gtco.tensor.sketch.gemm.cpu import Gemm
from gtco.tensor.sketch.shared.image_product import ImageProduct
from gtco.tensor.space import Config


@dataclass(frozen=True)
class WinogradFacts(ImageProduct):
    """A 3x3 convolution: its tiles, and the way a config cuts them."""

    @property
    def widens(self) -> bool:
        """True if the weights are stored as int8, and panels of them are transformed to scratch."""
        return self.product.operand == "int8"

    @property
    def operand(self) -> str:
        """The dtype of what is transformed and multiplied."""
        return self.product.operand_a if self.widens else self.product.operand

    def grid(self, size: int) -> tuple[int, int, int]:
        """The number of images, and of rows and columns of tiles of ``size`` x ``size`` outputs."""
        images, height, width = self.view.result
        return images, ceil(height / size), ceil(width / size)

    def tiles(self, size: int) -> int:
        return prod(self.grid(size))

    def widths(self, size: int) -> tuple[int, ...]:
        """The numbers of outputs that tiles have along a row, the largest first."""
        width = self.view.result[2]
        return tuple(dict.fromkeys((min(size, width), width % size or min(size, width))))

    @cached_property
    def borders(self) -> Mapping[int, float]:
        """By the size of tiles, the share of them that read beyond the image."""
        return {size: self._border(size) for size in TRANSFORMS}

    def _border(self, size: int) -> float:
        inner = 1.0
        ends = self.view.op["padding"][:2]
        for before, extent, count in zip(ends, self.view.image, self.grid(size)[1:], strict=True):
            starts = (i * size - before for i in range(count))
            inner *= sum(0 <= s <= extent - size - (TAPS - 1) for s in starts) / count
        return 1.0 - inner

    def line(self, size: int) -> Gemm:
        """The product of one position."""
        view = replace(self.view, m=self.tiles(size), k=self.view.channels, batch=1)
        return replace(self.product, view=view)

    def shape(self, size: int, tile: MicroKernel, chunks_m: int, chunks_n: int) -> TaskShape:
        """The cut of the tiles (as rows) and of the columns."""
        return task_shape(self.line(size).view, tile, chunks_m, chunks_n)

    def nest(self, config: Config) -> Nest:
        """The loops that a config makes of the products. Rows are tiles."""
        v, size, operand = self.view, int(config["m"]), self.operand
        return Nest(
            (1, self.tiles(size), v.n, v.channels),
            self.row(config),
            (int(config["chunks_m"]), int(config["chunks_n"])),
            v.channels,
            int(config["mc"]),
            "panels",
            Placed("packed", operand),
            Placed("widened" if self.widens else "panels", self.product.operand),
            self.stage.output.type.dtype,
            str(config["prefetch"]),
            transform=(TRANSFORMS[size].positions, size * size),
            taps=TAPS**2 if self.widens else 0,
        )
