"""Convolutions of any size as products whose rows lie in lines of images.

::

    for part of lines of the output:
      scratch[line] = the lines of images under the part's windows, with zeros around them
      for panel, for block of a line:
        C[height, columns] = sum over ky: scratch[line + ky, windows of the block] x B[ky]

A row of A is a window: for each ``ky`` a run of kernel_w x channels neighbours in a line. Windows
of neighbouring pixels lie stride x channels apart, so a tile reads them where the lines are, and
scratch holds each element of the images once. Gathered windows
(:mod:`gtco.tensor.nest.open_images`) hold it once for each tap, in short runs if there are few
channels.

Each line of the output is cut into blocks of two neighbouring heights. A part is whole lines, of
one image or several.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.nest.open import FIELDS, OpenNest
from gtco.tensor.nest.open_images import WINDOW, copy_run
from gtco.tensor.nest.open_loops import Part, ProductLoops, Tile, any_size


def lines_kernel(nest: OpenNest, symbol: str) -> Any:
    """The kernel ``symbol(a, b, numbers, out, workspace, begin, end)`` of a nest: the images, B in
    panels, the numbers of a cut and of a window, and the output. In the cut, ``height`` and
    ``taller`` are of the blocks of one line, tasks and parts are whole lines, ``kc`` is whole runs,
    and ``lda`` is the stride of lines in scratch.
    """
    numbers = len(FIELDS) + len(WINDOW)
    return any_size(symbol, numbers, nest.row.lanes, lambda em, args: _Loops(nest, em, args).emit())


class _Loops(ProductLoops):
    def __init__(self, nest: OpenNest, em: Emitter, args: KernelArguments) -> None:
        super().__init__(nest, em, args)
        self.window = of = self.more(WINDOW)
        self.line_blocks = self.held(self.up(of["out_w"], nest.row.rows), "line_blocks")
        self.run = self.held(of["kernel_w"] * of["channels"], "run")
        self.taps = self.held(tirx.truncdiv(self.of["k"], self.run), "taps")
        # Lines of images that the windows of a next line of the output begin later.
        self.later = self.held(tirx.min(of["stride"], self.taps), "later")
        self.pixel = self.held(of["stride"] * of["channels"], "pixel")

    def among_neighbours(self, block: Expr) -> Expr:
        return block - tirx.truncdiv(block, self.line_blocks) * self.line_blocks

    def first_row(self, block: Expr) -> Expr:
        line = self.held(tirx.truncdiv(block, self.line_blocks), "line")
        return line * self.window["out_w"] + super().first_row(block - line * self.line_blocks)

    def place_of_line(self, line: Expr, first: Expr) -> Expr:
        """The line of scratch in which the windows of a line of the output begin, where ``first``
        is that of the part. Lines that follow each other in an image share lines of it.
        """
        images = tirx.truncdiv(line, self.window["out_h"])
        images -= tirx.truncdiv(first, self.window["out_h"])
        return (line - first) * self.later + images * (self.taps - self.later)

    def prepare(self, part: Part, k0: Expr, depth: Expr) -> None:
        """Copies the lines of images under the part, before its first block of k."""
        em, of = self.em, self.window
        first = self.held(tirx.truncdiv(part.row0, of["out_w"]), "first")
        end = self.held(tirx.truncdiv(part.end, self.line_blocks), "end_line")
        pixels = (of["out_w"] - 1) * of["stride"] + of["kernel_w"]
        length = self.held(pixels * of["channels"], "length")
        line_of_image = self.held(of["image_w"] * of["channels"], "line_of_image")
        zero = tirx.const(0, "int64")
        with em.when(k0 == 0), em.range(first, end, "line") as line:
            image = self.held(tirx.truncdiv(line, of["out_h"]), "image")
            row = self.held(line - image * of["out_h"], "row")
            known = self.taps - self.later  # lines that the one before has in common with this one
            fresh = self.held(tirx.Select(tirx.Or(line == first, row == 0), zero, known), "fresh")
            into = self.held(self.place_of_line(line, first), "into")
            y0 = self.held(row * of["stride"] - of["padding"], "y0")
            with em.range(fresh, self.taps, "ky") as ky:
                y = self.held(y0 + ky, "y")
                there = tirx.all(y >= 0, y < of["image_h"])
                start = self.held((image * of["image_h"] + y) * line_of_image, "start")
                at = self.held(zero - of["padding"] * of["channels"], "at")
                target = self.held((into + ky) * self.of["lda"], "target")
                copy_run(em, self, there, start, line_of_image, at, length, target)

    def place_of_row(self, row: Expr, row0: Expr, k0: Expr) -> Expr:
        of = self.window
        line = self.held(tirx.truncdiv(row, of["out_w"]), "line")
        first = self.held(tirx.truncdiv(row0, of["out_w"]), "first")
        tap = self.place_of_line(line, first) + tirx.truncdiv(k0, self.run)
        return tap * self.of["lda"] + (row - line * of["out_w"]) * self.pixel

    def rows_of_a(self, at: Tile) -> Operand:
        scratch = self.args.workspace.buffer
        return Operand(scratch, at.a_row, self.pixel, apart=self.of["lda"])

    def runs(self, depth: Expr) -> tuple[Expr, Expr]:
        return self.held(tirx.truncdiv(depth, self.run), "runs"), self.run
