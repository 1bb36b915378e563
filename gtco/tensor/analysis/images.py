"""The axes of images, in either layout."""

from __future__ import annotations

from collections.abc import Sequence

from gtco.tensor.analysis.scope import Expr


def spatial_axes(layout: str) -> tuple[int, int, int]:
    """The axes of height, width and channels."""
    return (2, 3, 1) if layout == "NCHW" else (1, 2, 3)


def nhwc(shape: Sequence[int | str], layout: str) -> tuple[int, int, int, int]:
    """(images, height, width, channels) of a shape."""
    sizes = [int(d) for d in shape]
    h, w, c = (sizes[axis] for axis in spatial_axes(layout))
    return sizes[0], h, w, c


def place(layout: str, n: Expr, y: Expr, x: Expr, c: Expr) -> list[Expr]:
    """The index, in the order of the layout."""
    return [n, y, x, c] if layout == "NHWC" else [n, c, y, x]
