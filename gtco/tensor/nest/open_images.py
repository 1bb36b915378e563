"""Convolutions of any size as products whose rows are gathered from images (implicit GEMM).

::

    A[pixel of the output, (ky, kx, channel)] = image[y0 + ky, x0 + kx, channel], or 0 outside

Images lie as [batch, height, width, channels], so for one ``ky`` the elements of a row of A are a
run of neighbours: kernel_w x channels. Elements beside the image are zeros, and so is a whole run
above or below it. A block of k may begin and end inside a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Protocol

import numpy as np
from tvm import tirx

from gtco.tensor.emit.emitter import Emitter, Expr


@dataclass(frozen=True)
class Window:
    """The numbers of a convolution, in the order in which a kernel reads them: sizes of its images
    and its output, and the window's width, stride and padding. They are the same along both axes,
    and the window's height follows from k.
    """

    image_h: int
    image_w: int
    channels: int
    kernel_w: int
    stride: int
    padding: int
    out_h: int
    out_w: int

    @property
    def array(self) -> np.ndarray:
        """What a kernel reads behind the numbers of a cut."""
        return np.array(astuple(self), np.int64)


WINDOW = tuple(field.name for field in fields(Window))


class Copies(Protocol):
    """Loops that copy."""

    def held(self, value: Expr, name: str) -> Expr:
        """The value, read from a register."""

    def copy(self, source: Expr | None, target: Expr, count: Expr) -> None:
        """Copies so many elements, zeros if there is no source."""


def gather(
    em: Emitter,
    loops: Copies,
    of: Mapping[str, Expr],
    row: Expr,
    k0: Expr,
    depth: Expr,
    target: Expr,
) -> None:
    """Copies A[row, k0:k0 + depth] to ``target``. ``of`` has the numbers of a :class:`Window`."""
    held = loops.held
    above = em.let(tirx.truncdiv(row, of["out_w"]), "above")
    image = em.let(tirx.truncdiv(above, of["out_h"]), "image")
    y0 = held((above - image * of["out_h"]) * of["stride"] - of["padding"], "y0")
    x0 = (row - above * of["out_w"]) * of["stride"] - of["padding"]
    first_channel = held(x0 * of["channels"], "first_channel")
    first_line = held(image * of["image_h"] + y0, "first_line")
    run = held(of["kernel_w"] * of["channels"], "run")
    line = held(of["image_w"] * of["channels"], "line")
    end = held(k0 + depth, "end")
    with em.range(tirx.truncdiv(k0, run), tirx.truncdiv(end - 1, run) + 1, "ky") as ky:
        begin = held(tirx.max(ky * run, k0), "begin")
        count = held(tirx.min((ky + 1) * run, end) - begin, "count")
        into = held(target + (begin - k0), "into")
        # where the run begins in a line of the image
        at = held(begin - ky * run + first_channel, "at")
        there = tirx.all(y0 + ky >= 0, y0 + ky < of["image_h"])
        copy_run(em, loops, there, (first_line + ky) * line, line, at, count, into)


def copy_run(
    em: Emitter,
    loops: Copies,
    there: Expr,
    start: Expr,
    line: Expr,
    at: Expr,
    count: Expr,
    into: Expr,
) -> None:
    """Copies ``count`` neighbours of a line of an image from element ``at`` on, with zeros before
    the line and behind it, and everywhere unless the line is ``there``. It begins at ``start`` and
    has ``line`` elements.
    """
    zero = tirx.const(0, "int64")
    left = tirx.Select(there, tirx.min(tirx.max(zero - at, zero), count), count)
    left = loops.held(left, "left")
    right = loops.held(tirx.max(tirx.min(line - at, count), left), "right")
    with em.when(left > 0):
        loops.copy(None, into, left)
    with em.when(right < count):
        loops.copy(None, into + right, count - right)
    loops.copy(start + at + left, into + left, right - left)
