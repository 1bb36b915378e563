"""The facts of a convolution: the product of one output row, from which tiles are cut, and the
scratch of a task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from gtco.tensor.emit.scratch import ALIGN
from gtco.tensor.intrinsics.table import Kind
from gtco.tensor.nest.nest import Nest, Placed, Windows
from gtco.tensor.sketch.gemm.cpu import Gemm
from gtco.tensor.sketch.shared.image_product import ImageProduct
from gtco.tensor.space import Config

CONFLICTS = 1024  # bytes: pixels this far apart share cache sets, so a cache line separates them


@dataclass(frozen=True)
class Halo:
    """The copy of a task: ``rows`` input rows of ``width`` pixels, borders included. A kind of
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

    def nest(self, config: Config) -> Nest:
        """The loops that a config makes of the convolution. A line is a row of the output."""
        v, product, row = self.view, self.product, self.product.row(config)
        images, height, width = v.result
        rows, kc, (sh, sw) = int(config["rows"]), int(config["kc"]), v.op["strides"]
        halo = self.halo(rows, row.kind)
        taps, apart = v.kernel[1], not v.channels_first and halo.runs > v.kernel[0]
        if apart:  # each tap is a run, and neighbouring rows share runs of one block of k
            taps = min(taps, kc // halo.depth)
        new, fresh = min(1.0, rows * sh / halo.rows), min(1.0, sw / taps)
        windows = Windows(halo.elements, new, fresh, prod(v.a_shape))
        return Nest(
            (v.batch * images, height * width, v.n, v.k),
            row,
            (1, int(config["chunks_n"])),
            kc,
            None,
            "k",
            Placed("windows", product.operand_a, sw * halo.pixel, windows),
            Placed("panels", product.operand, batches=images),
            self.stage.output.type.dtype,
            str(config["prefetch"]),
            (height, rows),
        )
