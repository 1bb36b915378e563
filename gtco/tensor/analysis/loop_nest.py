"""The loops of contractions, and the loops that index each of their tensors."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from gtco.tensor.analysis.mapping import Axis, LoopNest, axis
from gtco.tensor.stage import Operator


@lru_cache(maxsize=256)
def loop_nest(op: Operator, a: tuple[int, ...], b: tuple[int, ...]) -> LoopNest:
    """The loops of one of ``CONTRACTIONS`` on operands of these shapes, in the order in which its
    view counts through them, and the loops that index each tensor.
    """
    return (_matmul_nest if op.kind == "matmul" else _convolution_nest)(op, a, b)


def _matmul_nest(op: Operator, a: tuple[int, ...], b: tuple[int, ...]) -> LoopNest:
    out = tuple(int(d) for d in op.type.shape)
    lead = out[:-2]
    extents, c, indices = [], [], {"A": list[Axis](), "B": list[Axis]()}
    for i, extent in enumerate(lead):
        has = {
            name: len(shape) - len(out) + i >= 0 and shape[len(shape) - len(out) + i] != 1
            for name, shape in (("A", a), ("B", b))
        }
        loop = f"batch of {'B' if has['B'] and not has['A'] else 'both' if has['B'] else 'A'} {i}"
        extents.append((loop, extent))
        c.append(axis(loop))
        for name in indices:
            indices[name] += [axis(loop)] if has[name] else []
    extents += [("row", out[-2]), ("column", out[-1]), ("depth", a[-1])]
    return LoopNest(
        tuple(extents),
        (*c, axis("row"), axis("column")),
        (*indices["A"], axis("row"), axis("depth")),
        (*indices["B"], axis("depth"), axis("column")),
    )


def _convolution_nest(op: Operator, a: tuple[int, ...], b: tuple[int, ...]) -> LoopNest:
    """The loops of a convolution. An output pixel adds taps to its place in the input. In a
    transposed convolution the phase is a part of this place everywhere.
    """
    out = tuple(int(d) for d in op.type.shape)
    height, width = out[1:3] if op["layout"] == "NHWC" else out[2:]
    groups, (sh, sw) = int(op["groups"]), (1, 1)
    taps, channels, features = b[2:], b[1], b[0] // groups
    if op.kind == "conv_transpose2d":
        sh, sw = op["strides"]
        taps, channels, features = (ceil(b[2] / sh), ceil(b[3] / sw)), b[0] // groups, b[1]
    extents = (
        *(("group", groups), ("phase row", sh), ("phase column", sw)),
        *(("image", out[0]), ("row", height // sh), ("column", width // sw)),
        ("feature", features),
        *(("tap row", taps[0]), ("tap column", taps[1]), ("channel", channels)),
    )
    y, x = ("row", "phase row"), ("column", "phase column")
    return LoopNest(
        extents,
        (axis("image"), axis(*y), axis(*x), axis("group", "feature")),
        (axis("image"), axis(*y, "tap row"), axis(*x, "tap column"), axis("group", "channel")),
        (
            axis("group", "feature"),
            axis("channel"),
            axis("tap row", "phase row"),
            axis("tap column", "phase column"),
        ),
    )
