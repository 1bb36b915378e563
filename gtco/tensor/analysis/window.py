"""Windows that slide over images, for depthwise convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from tvm import tirx

from gtco.tensor.analysis.images import nhwc, place
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.stage import Operator

MOST_MIXED = 8  # most inputs of a group: with more, the sums of a vector do not fit the registers


@dataclass(frozen=True)
class Geometry:
    """A window that slides over images. Shapes are (images, height, width, channels) in every
    layout.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    layout: str
    source: tuple[int, int, int, int]
    output: tuple[int, int, int, int]
    group: tuple[int, int] = (1, 1)  # input and output channels of a group of a convolution

    def place(self, n: Expr, y: Expr, x: Expr, c: Expr) -> list[Expr]:
        """The index in the tensor's own layout."""
        return place(self.layout, n, y, x, c)

    @cached_property
    def interior(self) -> tuple[int, int]:
        """Output columns [begin, end) whose taps all lie in the image."""
        (_, k), (_, s), (_, left, _, _), (_, d) = (
            self.kernel,
            self.strides,
            self.padding,
            self.dilation,
        )
        begin = min(ceil(left / s), self.output[2])
        end = (self.source[2] - 1 + left - (k - 1) * d) // s + 1
        return begin, max(begin, min(end, self.output[2]))

    def counted(self, scope: Scope, start: Expr, axis: int, include_pad: bool) -> Expr:
        """The number of positions that count in a mean, for a window from input row (axis 0) or
        column ``start`` on: those of the image and, if ``include_pad``, of its padding, but never
        those that ceil mode adds.
        """
        before, after = (
            (self.padding[axis], self.padding[axis + 2]) if include_pad else (0, 0)
        )
        low, high = -before, self.source[1 + axis] + after
        stop = scope.index(start + self.kernel[axis])
        if scope.known(start >= low) is not True:
            start = tirx.max(start, low)
        if scope.known(stop <= high) is not True:
            stop = tirx.min(stop, high)
        return stop - start

    def taps(self, column: int) -> list[int]:
        """The kw whose input column exists, for one output column."""
        start = column * self.strides[1] - self.padding[1]
        return [
            kw
            for kw in range(self.kernel[1])
            if 0 <= start + kw * self.dilation[1] < self.source[2]
        ]


def geometry(op: Operator, source: Sequence[Any], kernel: Sequence[int]) -> Geometry:
    """The window of a convolution or a pooling operator whose input has the shape ``source``."""
    layout = op["layout"]
    kh, kw = kernel
    images, output = nhwc(source, layout), nhwc(op.type.shape, layout)
    if op.kind == "conv2d":
        groups = int(op["groups"])
        group = images[3] // groups, output[3] // groups
    else:
        group = 1, 1
    return Geometry(
        (kh, kw),
        tuple(op["strides"]),
        tuple(op["padding"]),
        tuple(op.get("dilation", (1, 1))),
        layout,
        images,
        output,
        group,
    )


def narrow_groups(op: Operator, weights: Sequence[Any]) -> bool:
    """True for a convolution whose groups mix so few channels (depthwise ones mix one) that it is
    computed in vectors of channels and not as products. ``weights`` is the shape of its weights.
    """
    return op.kind == "conv2d" and op["groups"] > 1 and int(weights[1]) <= MOST_MIXED
