"""The facts of a convolution: the product of one output row, from which tiles are cut, and the
scratch of a task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from gtco.tensor.emit.scratch import ALIGN
from gtco.tensor.intrinsics.table import Kind
from gtco.tensor.nest.shape import TaskShape, task_shape
from gtco.tensor.sketch.gemm.cpu import Gemm
from gtco.tensor.sketch.shared.image_product import ImageProduct
from gtco.tensor.space import Config

CONFLICTS = 1024  # bytes: pixels this far apart share cache sets, so a cache line separates them


@dataclass(frozen=True)
class Halo:
    """The scratch of a task: ``rows`` input rows of ``width`` pixels, borders included. A kind of
    micro-kernel decides the layout of the elements.

    Channels last, it is [row, pixel, channel] with ``pixel`` elements a pixel; channels first, it
    is [channel, row, pixel]. k is cut into ``runs`` of ``depth`` steps. Along a run, a window is
    one stretch of the scratch, with elements ``step`` apart.
    """

    rows: int
    width: int
    pixel: int
    channels: int
    runs: int
    depth: int
    step: int

    @property
    def elements(self) -> int:
        planes = self.channels if self.pixel == 1 else 1
        return planes * self.rows * self.width * self.pixel


@dataclass(frozen=True)
class ConvolutionFacts(ImageProduct):
    """A convolution: its product, the scratch of its tasks, and how a config cuts it."""

    @cached_property
    def line(self) -> Gemm:
        """The product of one output row, from which tiles are cut."""
        return replace(self.product, view=replace(self.view, m=self.view.result[2], batch=1))

    def halo(self, rows: int, kind: Kind) -> Halo:
        """The scratch that ``rows`` output rows need."""
        v = self.view
        (kh, kw), (sh, sw), (dh, dw) = v.kernel, v.op["strides"], v.op["dilation"]
        height = (rows - 1) * sh + (kh - 1) * dh + 1
        width = (v.result[2] - 1) * sw + (kw - 1) * dw + 1
        if v.channels_first:
            return Halo(height, width, 1, v.channels, v.channels * kh, kw, dw)
        if v.channels * kind.a.nbytes % CONFLICTS == 0:
            pixel = v.channels + ALIGN // kind.a.nbytes
            return Halo(height, width, pixel, v.channels, kh * kw, v.channels, 1)
        if dw > 1:
            return Halo(height, width, v.channels, v.channels, kh * kw, v.channels, 1)
        return Halo(height, width, v.channels, v.channels, kh, kw * v.channels, 1)

    def shape(self, config: Config) -> TaskShape:
        """How one output row is cut."""
        tile = self.product.row(config)
        return task_shape(self.line.view, tile, 1, config["chunks_n"])

    def row_groups(self, config: Config) -> int:
        return ceil(self.view.result[1] / config["rows"])

    def tasks(self, config: Config) -> int:
        images = self.view.result[0]
        return self.view.batch * images * self.row_groups(config) * self.shape(config).chunks_n
