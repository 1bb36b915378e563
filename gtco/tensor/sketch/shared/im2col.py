"""Rows of a convolution's A, which are windows of an image (im2col).

In a block of k, k runs over whole groups of neighbours: (kh, kw) x channels, or channels x (kh, kw)
of an image that lies channels first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from gtco.tensor.analysis.contraction import ConvView
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import literal
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.runs import copy_run, put

UNROLLED = 8  # rows of a window, at most, whose copies are written out


@dataclass(frozen=True)
class Im2col:
    """Copies windows of the image that ``view`` reads to the rows of ``packed``."""

    reader: Reader
    view: ConvView
    packed: Array
    batch: Expr

    @cached_property
    def em(self) -> Emitter:
        return self.reader.emitter

    def pack(self, row0: Expr, rows: Expr, kb: Expr, kc: int) -> None:
        """packed[r, k] = A[row0 + r, kb * kc + k]."""
        em, view = self.em, self.view
        height, width = view.kernel
        group = height * width if view.channels_first else view.channels
        groups, per_block = view.k // group, kc // group
        with em.loop(rows, "r", rolled=not isinstance(rows, int)) as r:
            m = em.let_index(row0 + r, "m")
            pixel = [em.let_index(p, "p") for p in view.pixel(m)]
            first = em.let_index(kb * per_block, "first")
            count = (
                per_block
                if groups % per_block == 0
                else em.let_index(tirx.min(per_block, groups - first), "count")
            )
            if view.channels_first:
                self.channels(r, pixel, first, count, int(self.packed.shape[-1]) - kc)
            else:
                self.pixels(r, pixel, first, count)

    # channels last --------------------------------------------------------------------------------
    def pixels(self, r: Expr, pixel: Sequence[Expr], first: Expr, count: Expr) -> None:
        """The channels of each pixel of a window are a run."""
        em, view = self.em, self.view
        (_, width), channels = view.kernel, view.channels
        breaks = run_breaks(self.reader.stage, view)
        with em.loop(count, "g") as g:
            position = em.let_index(first + g, "position")
            kh, kw = em.let_index(position // width, "kh"), em.let_index(position % width, "kw")
            row, column = (em.let_index(x, "x") for x in view.source(self.batch, pixel, kh, kw))

            def copy() -> None:
                copy_run(
                    em,
                    channels,
                    lambda c: self.value(pixel[0], row, column, c),
                    lambda c, value: self.put(r, g * channels + c, value),
                    breaks,
                )

            def zero() -> None:
                copy_run(
                    em,
                    channels,
                    lambda c: literal(0.0, self.packed.dtype),
                    lambda c, value: em.store(self.packed, [r, g * channels + c], value),
                )

            em.branch(self.inside(row, column, row, column), copy, zero)

    # channels first -------------------------------------------------------------------------------
    def channels(
        self, r: Expr, pixel: Sequence[Expr], first: Expr, count: Expr, room: int
    ) -> None:
        """The elements of each row of a channel's window are a run.

        Vectors of 2, 4, 8 ... elements are one instruction each, and those of 3 or 7 are several.
        So further elements are copied too where the image has them. The next run replaces them, or
        zeros do, or they stay in the ``room`` behind a packed row, which nobody reads.
        """
        em, view = self.em, self.view
        (height, width), (down, right) = view.kernel, view.op["dilation"]
        wide = 1 << (width - 1).bit_length()
        if right > 1 or wide > min(em.lanes, width + room):
            wide = width
        top, left = (em.let_index(x, "corner") for x in view.source(self.batch, pixel, 0, 0))

        def window(g: Expr, kh: Expr) -> None:
            at, row = (g * height + kh) * width, top + kh * down
            self.neighbours(r, at, pixel[0], row, left, first + g, wide)

        def whole() -> None:
            with em.loop(count, "g") as g:
                if height <= UNROLLED:
                    for kh in range(height):
                        window(g, kh)
                else:
                    with em.loop(height, "kh") as kh:
                        window(g, kh)

        def parts() -> None:
            with em.loop(count, "g") as g, em.loop(height, "kh") as kh:
                c, row = em.let_index(first + g, "c"), em.let_index(top + kh * down, "row")
                self.run(r, (g * height + kh) * width, pixel[0], row, left, c)

        ends = self.inside(top, left, top + (height - 1) * down, left + (width - 1) * right)
        if wide > width:
            ends = tirx.all(ends, left + wide <= view.image[1])
        em.branch(ends, whole, parts)

    def run(self, r: Expr, at: Expr, image: Expr, row: Expr, column: Expr, c: Expr) -> None:
        """One row of a channel's window: as a vector inside the image, element by element at the
        border.
        """
        em, (_, width), (_, right) = self.em, self.view.kernel, self.view.op["dilation"]

        def whole() -> None:
            self.neighbours(r, at, image, row, column, c, width)

        def border() -> None:
            with em.loop(width, "kw") as kw:
                x = em.let_index(column + kw * right, "x")
                em.branch(
                    self.inside(row, x, row, x),
                    lambda: self.put(r, at + kw, self.value(image, row, x, c)),
                    lambda: em.store(self.packed, [r, at + kw], literal(0.0, self.packed.dtype)),
                )

        em.branch(self.inside(row, column, row, column + (width - 1) * right), whole, border)

    def neighbours(
        self, r: Expr, at: Expr, image: Expr, row: Expr, column: Expr, c: Expr, width: int
    ) -> None:
        """``width`` elements of a row of a channel's window, all inside the image."""
        right = self.view.op["dilation"][1]
        with self.em.vector(width, "kw") as kw:
            self.put(r, at + kw, self.value(image, row, column + kw * right, c))

    # elements -------------------------------------------------------------------------------------
    def value(self, image: Expr, row: Expr, column: Expr, c: Expr) -> Expr:
        """The image's element."""
        where = self.view.x_index(self.batch, image, row, column, c)
        return self.reader.value(self.view.op.inputs[0], where)

    def put(self, r: Expr, k: Expr, value: Expr) -> None:
        put(self.reader, self.view, self.packed, [r, k], value)

    def inside(self, top: Expr, left: Expr, bottom: Expr, right: Expr) -> Expr:
        """True if the image has the pixels between these two."""
        if not self.view.padded:
            return True
        height, width = self.view.image
        return tirx.all(top >= 0, bottom < height, left >= 0, right < width)
