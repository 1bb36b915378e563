"""The positions that GridSample reads: positions, weights and validity of an image's rows and
columns, as expressions of scalars or of vectors.

The positions are those of ONNX Runtime: a coordinate that is NaN, infinite or beyond 64 bits counts
as the image's first edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from gtco.tensor.analysis.images import spatial_axes
from gtco.tensor.emit.arithmetic import nearest
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.emit.spatial import Source
from gtco.tensor.emit.vector_math import constant
from gtco.tensor.stage import Operator, TensorType

FARTHEST = 2.0**63  # a position from here on is invalid
CORNERS = {"nearest": 1, "linear": 2}  # positions read along each axis


@dataclass(frozen=True)
class Corner:
    """One of the positions around a point, in floats. ``at`` lies within the image, or is -1 if the
    position lies outside and zero is read. ``weight`` is None for 1.
    """

    at: Expr
    weight: Expr | None


def corners(em: Emitter, op: Operator, coordinate: Expr, size: int) -> list[Corner]:
    """The positions around ``coordinate``, from -1 to 1, on an axis of ``size``."""
    where = em.let(_position(em, op, coordinate, size), "where")
    if op["method"] == "nearest":
        return [Corner(_within(em, op, nearest(where), size), None)]
    base = em.let(tirx.floor(where), "base")
    share = em.let(where - base, "share")
    one = constant(where, 1)
    return [
        Corner(_within(em, op, base, size), em.let(one - share, "weight")),
        Corner(_within(em, op, base + one, size), share),
    ]


def _position(em: Emitter, op: Operator, coordinate: Expr, size: int) -> Expr:
    x = em.let(coordinate, "coordinate")
    one, two = constant(x, 1), constant(x, 2)
    if op["align_corners"]:
        found = (x + one) / two * constant(x, size - 1)
    else:
        found = ((x + one) * constant(x, size) - one) / two
    found = em.let(found, "found")
    edge = constant(x, 0 if op["align_corners"] else -0.5)
    far = constant(x, FARTHEST)
    return tirx.Select(tirx.And(found > -far, found < far), found, edge)


def _within(em: Emitter, op: Operator, at: Expr, size: int) -> Expr:
    """The whole position ``at``, brought into the image, or -1."""
    at = em.let(at, "at")
    last = constant(at, size - 1)
    match op["padding"]:
        case "zeros":
            inside = tirx.And(at >= constant(at, 0), at <= last)
            return em.let(tirx.Select(inside, at, constant(at, -1)), "at")
        case "reflection":
            at = em.let(_reflected(em, at, size, bool(op["align_corners"])), "at")
    return em.let(tirx.max(constant(at, 0), tirx.min(at, last)), "at")


def _reflected(em: Emitter, at: Expr, size: int, align: bool) -> Expr:
    """Mirrored at the first and last pixel (``align``), or at their outer edges."""
    period = 2 * (size - 1) if align else 2 * size
    if period == 0:
        return constant(at, 0)
    there = em.let(at - constant(at, period) * tirx.floor(at / constant(at, period)), "there")
    back = constant(at, period if align else period - 1) - there
    return tirx.min(there, back)


def index_of(em: Emitter, at: Expr) -> Expr:
    """A corner's position as an index."""
    return em.let(tirx.Cast(em.index_dtype, at), "at")


def sampled(
    em: Emitter,
    op: Operator,
    sources: Sequence[Source],
    types: Sequence[TensorType],
    index: Sequence[Expr],
) -> Expr:
    """One element of ``grid_sample``: ``sources`` read the image and the grid."""
    image, grid = sources
    h, w, _ = spatial_axes(op["layout"])
    n, dtype = index[0], types[0].dtype
    computed = dtype if dtype.startswith("float") and dtype != "float16" else "float32"

    def axis(which: int, size: int) -> list[tuple[Expr, Expr | None]]:
        given = grid([n, index[h], index[w], which])
        value = convert(em, given, types[1].dtype, computed)
        return [(index_of(em, c.at), c.weight) for c in corners(em, op, value, size)]

    total: Expr = None
    for y, wy in axis(1, int(types[0].shape[h])):
        for x, wx in axis(0, int(types[0].shape[w])):
            where = list(index)
            where[h], where[w] = tirx.max(y, 0), tirx.max(x, 0)
            value = image(where)
            value = convert(em, value, dtype, computed)
            value = tirx.Select(tirx.And(y >= 0, x >= 0), value, constant(value, 0))
            term = value if wy is None else value * (wy * wx)
            total = term if total is None else total + term
    return convert(em, total, computed, op.type.dtype)
