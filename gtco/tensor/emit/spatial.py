"""The positions that pooling windows and resizing read: index and weight expressions, and one
output element as scalar code.

The positions are those of ONNX's Resize, in float64 as in ``gtco.tensor.reference_spatial``; there
a small error of a position is a small error of a weight. Nearest positions are computed in whole
numbers: any rounding, or a fused multiply-add, would put a position half way between two on the
wrong side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.images import spatial_axes
from gtco.tensor.analysis.resizing import nearest
from gtco.tensor.analysis.window import geometry
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.stage import Operator, TensorType

Source = Callable[[Sequence[Expr]], Expr]  # an input's element at an index


def wide(value: float) -> Any:
    return tirx.const(value, "float64")


TAPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}  # offsets from the first one


@dataclass(frozen=True)
class ResizedAxis:
    """One axis of a ``resize2d``: ``size`` input positions become ``out``."""

    op: Operator
    size: int
    out: int

    @property
    def step(self) -> float:
        """The distance in the input between neighbouring output positions."""
        if self.op["coordinates"] == "align_corners":
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return self.size / self.out

    def position(self, i: Expr) -> Expr:
        """The place of output position ``i`` on the input axis, in float64."""
        out, coordinates = self.out, self.op["coordinates"]
        x = tirx.Cast("float64", i) if not isinstance(i, int) else wide(i)
        if coordinates == "align_corners":
            return x * wide(self.step) if out > 1 else wide(0)
        if coordinates == "asymmetric":
            return x * wide(self.step)
        if coordinates == "pytorch_half_pixel" and out == 1:
            return wide(0)
        return (x + wide(0.5)) * wide(self.step) - wide(0.5)

    def clipped(self, em: Emitter, i: Expr) -> Expr:
        """The index, cut to the axis and bound with its range."""
        return em.let_index(tirx.max(0, tirx.min(i, self.size - 1)), "at")

    def nearest(self, em: Emitter, i: Expr) -> Expr:
        """The input index that output position ``i`` copies."""
        if self.size == self.out and self.op["coordinates"] != "align_corners":
            return i
        times, plus, over = nearest(
            self.size, self.out, self.op["coordinates"], self.op["rounding"]
        )
        # 1 more before the division and 1 less after it, so that no number is negative
        below = int(plus < 0)
        large = times * self.out + plus + over >= 1 << 31 and not isinstance(i, int)
        at = tirx.Cast("int64", i) if large else i
        index = (at * times + (plus + below * over)) // over - below
        if large:
            index = tirx.Cast(em.index_dtype, index)
        return self.clipped(em, em.let_index(index, "nearest"))

    def located(self, em: Emitter, i: Expr, dtype: str = "float32") -> tuple[Expr, list[Expr]]:
        """The start of the taps of output position ``i`` (from -1 on, not cut to the axis), and the
        weights of their offsets, the ``TAPS`` of the method: linear, or cubic (Keys 1981).
        """
        where = em.let(self.position(i), "where")
        base = em.let(tirx.floor(where), "base")
        first = em.let(tirx.Cast(em.index_dtype, base), "first")
        fraction = em.let(where - base, "fraction")
        if self.op["method"] == "linear":
            weights = [wide(1) - fraction, fraction]
        else:
            alpha = self.op["cubic_alpha"]
            weights = [
                _keys(fraction + wide(1), alpha, True),
                _keys(fraction, alpha, False),
                _keys(wide(1) - fraction, alpha, False),
                _keys(wide(2) - fraction, alpha, True),
            ]
        narrow = [w if dtype == "float64" else tirx.Cast(dtype, w) for w in weights]
        return first, [em.let(w, "weight") for w in narrow]

    def taps(self, em: Emitter, i: Expr, dtype: str = "float32") -> list[tuple[Expr, Expr]]:
        """Indices (cut to the axis) and weights of an interpolation at output position ``i``."""
        first, weights = self.located(em, i, dtype)
        offsets = TAPS[self.op["method"]]
        return [(self.clipped(em, first + o), w) for o, w in zip(offsets, weights, strict=True)]


def _keys(d: Expr, a: float, outer: bool) -> Expr:
    """The cubic kernel at a distance below 1, or between 1 and 2."""
    if outer:
        return ((wide(a) * d - wide(5 * a)) * d + wide(8 * a)) * d - wide(4 * a)
    return (wide(a + 2) * d - wide(a + 3)) * d * d + wide(1)


def resized(
    em: Emitter, op: Operator, source: Source, type_: TensorType, index: Sequence[Expr]
) -> Expr:
    """One element of ``resize2d``: ``source`` reads the input, whose type is ``type_``."""
    h, w, _ = spatial_axes(op["layout"])
    rows, columns = (
        ResizedAxis(op, int(type_.shape[a]), int(op.type.shape[a])) for a in (h, w)
    )

    def at(y: Expr, x: Expr) -> Expr:
        where = list(index)
        where[h], where[w] = y, x
        return source(where)

    if op["method"] == "nearest":
        y = rows.nearest(em, index[h])
        return at(y, columns.nearest(em, index[w]))
    computed = "float64" if type_.dtype == "float64" else "float32"
    ys = rows.taps(em, index[h], computed)
    xs = columns.taps(em, index[w], computed)
    total: Expr = None
    for x, wx in xs:
        column: Expr = None
        for y, wy in ys:
            value = at(y, x)
            term = convert(em, value, type_.dtype, computed) * wy
            column = term if column is None else column + term
        total = column * wx if total is None else total + column * wx
    return convert(em, total, computed, op.type.dtype)


def lowest(dtype: str) -> Any:
    """The value from which a maximum starts."""
    kind = np.dtype(dtype).kind
    return tirx.const(
        -np.inf if kind == "f" else False if kind == "b" else int(np.iinfo(dtype).min), dtype
    )


def larger(a: Expr, b: Expr, dtype: str) -> Expr:
    """max(a, b), or NaN if one is NaN. Both must be bound."""
    if dtype == "bool":
        return tirx.Or(a, b)
    if not dtype.startswith("float"):
        return T.max(a, b)
    return tirx.Select(tirx.Or(a > b, tirx.Not(tirx.EQ(a, a))), a, b)


def pooled(
    em: Emitter, op: Operator, source: Source, type_: TensorType, index: Sequence[Expr]
) -> Expr:
    """One element of ``max_pool2d`` or ``avg_pool2d``."""
    g = geometry(op, type_.shape, op["kernel"])
    axes = spatial_axes(op["layout"])[:2]
    height, width = g.source[1:3]
    starts = [
        em.let_index(index[a] * s - p, "start")
        for a, s, p in zip(axes, g.strides, g.padding[:2], strict=True)
    ]
    maximum = op.kind == "max_pool2d"
    kept = (maximum and type_.dtype != "bfloat16") or type_.dtype == "float64"
    dtype = type_.dtype if kept else "float32"
    total = em.registers(1, dtype)
    em.store(total, [0], lowest(dtype) if maximum else tirx.const(0, dtype))
    with em.loop(g.kernel[0], "kh") as kh, em.loop(g.kernel[1], "kw") as kw:
        y, x = (em.index(s + k * d) for s, k, d in zip(starts, (kh, kw), g.dilation, strict=True))
        inside = tirx.all(y >= 0, y < height, x >= 0, x < width)
        with em.when(inside):
            where = list(index)
            where[axes[0]], where[axes[1]] = y, x
            value = source(where)
            value = em.let(convert(em, value, type_.dtype, dtype))
            old = em.let(em.load(total, [0]))
            em.store(total, [0], larger(value, old, dtype) if maximum else old + value)
    result = em.load(total, [0])
    if not maximum:
        include = bool(op["count_include_pad"])
        high, wide = (
            em.let_index(g.counted(em, start, axis, include), "count")
            for axis, start in enumerate(starts)
        )
        count = em.index(high * wide)
        result = result / (
            tirx.const(count, dtype) if isinstance(count, int) else tirx.Cast(dtype, count)
        )
    return convert(em, result, dtype, op.type.dtype)
