"""The canonical operators: those that the front end may produce, and that sketches, patterns and
the reference understand.

Each row gives an operator's pattern (GTCO, Section III: injective, element-wise, opaque, reduction,
complex-out-fusable), its number of inputs and the names of its attributes. Broadcasting is numpy's;
the front end makes negative axes positive. An operator without a row here becomes ``relax``: an
opaque operator that carries its own Relax program.
"""

from __future__ import annotations

from dataclasses import dataclass

from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS

ELEMENTWISE, INJECTIVE, REDUCTION, COMPLEX, OPAQUE = (
    "element-wise",
    "injective",
    "reduction",
    "complex-out-fusable",
    "opaque",
)


# With bfloat16 operands (the first two; for attention, three) these give float32: sums are float32,
# and only the code that stores the result can know that it may be rounded again. With float16
# operands they give float32 if their type says so, else float16. matmul and conv2d of uint8 by int8
# give exact int32 sums, and so do those of int8 by int8 if their type says so.
CONTRACTIONS = frozenset(["matmul", "conv2d", "conv_transpose2d", "attention"])

# Operators that may take integers as indices. All others compute with the integers that they take.
INDEXING = frozenset(["gather", "scatter", "relax"])


@dataclass(frozen=True)
class OperatorInfo:
    """Pattern, least and most inputs, attribute names, the meaning in one line, and the names of
    attributes that may be missing.
    """

    pattern: str
    inputs: tuple[int, int]
    attrs: tuple[str, ...] = ()
    meaning: str = ""
    optional: tuple[str, ...] = ()


OPERATORS: dict[str, OperatorInfo] = {
    **{
        row.name: OperatorInfo(ELEMENTWISE, (row.inputs, row.inputs), row.attrs, row.text)
        for row in ELEMENTWISE_OPERATORS.values()
    },
    # data movement: each output element is one input element (or a constant)
    "identity": OperatorInfo(INJECTIVE, (1, 1)),
    "reshape": OperatorInfo(INJECTIVE, (1, 1), (), "row-major; also squeeze, unsqueeze, flatten"),
    "permute": OperatorInfo(INJECTIVE, (1, 1), ("axes",), "output axis i is input axis axes[i]"),
    "slice": OperatorInfo(
        INJECTIVE, (1, 1), ("begin", "strides"), "per axis; the output's shape says how many"
    ),
    "concat": OperatorInfo(INJECTIVE, (1, 1 << 30), ("axis",)),
    "broadcast": OperatorInfo(INJECTIVE, (1, 1), (), "numpy.broadcast_to the output's shape"),
    "pad": OperatorInfo(
        INJECTIVE, (1, 1), ("before", "after", "value"), "constant padding, per axis"
    ),
    "roll": OperatorInfo(
        INJECTIVE, (1, 1), ("shifts",), "per axis: out[i] = in[(i - shift) mod n]"
    ),
    "gather": OperatorInfo(
        INJECTIVE, (2, 2), ("axis",), "numpy.take(x, indices, axis); negative indices count back"
    ),
    # reductions
    **{
        name: OperatorInfo(REDUCTION, (1, 1), ("axes", "keepdims"))
        for name in ("sum", "mean", "max", "min", "prod")
    },
    **{
        name: OperatorInfo(
            REDUCTION, (1, 1), ("axis", "keepdims"), "int64: the place of the first extreme or NaN"
        )
        for name in ("argmax", "argmin")
    },
    "softmax": OperatorInfo(REDUCTION, (1, 1), ("axis",)),
    "log_softmax": OperatorInfo(REDUCTION, (1, 1), ("axis",)),
    "cumsum": OperatorInfo(
        REDUCTION,
        (1, 1),
        ("axis", "exclusive", "reverse"),
        "each element is the sum of those up to it along the axis; exclusive: without itself; "
        "reverse: from the end on",
    ),
    "layer_norm": OperatorInfo(
        REDUCTION,
        (3, 3),
        ("epsilon",),
        "x, gamma, beta over the last axis: (x-mean)/sqrt(var+eps)*g+b",
    ),
    "rms_norm": OperatorInfo(REDUCTION, (2, 2), ("epsilon",), "x, gamma over the last axis"),
    "group_norm": OperatorInfo(
        REDUCTION,
        (3, 3),
        ("groups", "epsilon", "axis"),
        "x, gamma, beta a channel of ``axis``: normalised over all axes but the first, in groups "
        "of channels",
    ),
    "moments": OperatorInfo(
        REDUCTION,
        (1, 1),
        (),
        "x [..., R, C] -> [..., 2, C]: mean and mean squared deviation over R",
    ),
    "merged_moments": OperatorInfo(
        REDUCTION,
        (1, 1),
        ("groups", "epsilon"),
        "moments [N, P, 2, C] of parts of one size -> [N, 2, C]: for each channel its group's mean "
        "and 1/sqrt(variance + epsilon)",
    ),
    # complex; an epilogue can be fused to them
    "matmul": OperatorInfo(
        COMPLEX,
        (2, 4),
        (),
        "numpy.matmul of two tensors with 2 or more axes each, batch axes broadcast; the product "
        "of bfloat16 tensors is float32, as in the other contractions; a third tensor "
        "[blocks, n] has the scales of 'block' rows each of an int8 or int4 matrix [k, n], a "
        "fourth their zero points in int8, which are subtracted before; 'exact': of whole numbers "
        "of so many bits, whose sums float32 holds, so no others are multiplied or summed",
        ("block", "exact"),
    ),
    "conv2d": OperatorInfo(
        COMPLEX,
        (2, 4),
        ("strides", "padding", "dilation", "groups", "layout"),
        "x in layout NCHW or NHWC; weight always OIHW; padding (top, left, bottom, right); a third "
        "tensor [O] has the scales of weights in int8, a fourth their zero points in int8, which "
        "are subtracted before; "
        "'exact' as in matmul",
        ("exact",),
    ),
    "conv_transpose2d": OperatorInfo(
        COMPLEX,
        (2, 2),
        ("strides", "padding", "output_padding", "groups", "layout"),
        "the gradient of conv2d by its input; x in layout NCHW or NHWC; weight [channels, outputs "
        "of a group, KH, KW], a dilation spread into it with zeros; padding (top, left, bottom, "
        "right) is cut off the output, output_padding rows and columns are added at its end",
    ),
    "attention": OperatorInfo(
        COMPLEX,
        (3, 4),
        ("scale",),
        "softmax(scale * q @ k^T + bias) @ v; q [..., M, D], k [..., N, D], v [..., N, E], "
        "bias broadcasts to [..., M, N]; with bfloat16 q, k and v the softmax is float32 and is "
        "rounded for its product with v; a score whose bias is 'hidden' or less is that bias for "
        "any q and k; 'guarded': NaN of the softmax counts as 0",
        ("guarded", "hidden"),
    ),
    "grid_sample": OperatorInfo(
        COMPLEX,
        (2, 2),
        ("method", "padding", "align_corners", "layout"),
        "x in layout NCHW or NHWC, read at the points of a grid [N, OH, OW, 2] of (x, y) from -1 "
        "to 1; method nearest or linear; padding (outside the image) zeros, border or reflection",
    ),
    "resize2d": OperatorInfo(
        COMPLEX,
        (1, 1),
        ("method", "coordinates", "rounding", "cubic_alpha", "layout"),
        "method nearest, linear or cubic; coordinates half_pixel, align_corners, asymmetric or "
        "pytorch_half_pixel; the output's shape gives the size",
    ),
    # opaque: a stage of their own
    "max_pool2d": OperatorInfo(
        REDUCTION, (1, 1), ("kernel", "strides", "padding", "dilation", "layout")
    ),
    "avg_pool2d": OperatorInfo(
        REDUCTION, (1, 1), ("kernel", "strides", "padding", "count_include_pad", "layout")
    ),
    "scatter": OperatorInfo(
        OPAQUE,
        (3, 3),
        ("rows", "reduction"),
        "data of ``rows`` rows in memory's order; rows of updates are put at the indices of rows, "
        "in order, and those outside are ignored. reduction: update, add, mul, max or min. "
        "along (extent, taken, inner): rows are elements, data is [outer, extent, inner], updates "
        "are [outer or fewer, taken, inner], and each stays at its outer and inner index",
        ("along",),
    ),
    "topk": OperatorInfo(
        OPAQUE,
        (1, 1),
        ("k", "largest"),
        "int64: the places of the k largest or least of each row of the last axis, the best first; "
        "of equal ones the lower index first; NaN is the largest",
    ),
    "relax": OperatorInfo(
        OPAQUE,
        (0, 1 << 30),
        ("module", "op", "result"),
        "a Relax module in TVM's JSON whose function 'main' takes the inputs; 'op' names it for "
        "people; 'result' picks a field if it returns a tuple (-1: no tuple)",
    ),
}


def pattern(kind: str) -> str:
    """The operator's pattern; ``KeyError`` for an unknown kind."""
    return OPERATORS[kind].pattern


def is_anchor(kind: str) -> bool:
    """True for the operators of which a stage may have only few: complex ones and reductions."""
    return pattern(kind) in (COMPLEX, REDUCTION)
