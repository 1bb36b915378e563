"""The convolutions that minimal filtering computes with fewer products, and the number it saves
(Lavin and Gray 2016; the kernels are :mod:`gtco.tensor.sketch.winograd`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gtco.tensor.stage import Operator

TAPS = 3  # taps of a window along either axis
SIZES = (2, 4)  # outputs of a tile along either axis


def applicable(op: Operator, weights: Sequence[int | str]) -> bool:
    """True for a 3x3 convolution of stride 1 without groups, unless its sums are integers or have
    to be exact; ``weights`` is the shape of its weights. The transformed values of 8 bits would
    need more.
    """
    return (
        op.kind == "conv2d"
        and tuple(weights[2:]) == (TAPS, TAPS)
        and op["groups"] == 1
        and not op.get("exact")
        and op.type.dtype != "int32"
        and all(tuple(op[name]) == (1, 1) for name in ("strides", "dilation"))
    )


def least_products(op: Operator, weights: Sequence[int | str]) -> float:
    """The smallest share of a convolution's products that a tile size needs."""
    if not applicable(op, weights):
        return 1.0
    return min(((size + TAPS - 1) / (size * TAPS)) ** 2 for size in SIZES)
