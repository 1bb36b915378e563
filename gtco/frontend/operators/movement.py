"""Operators that move elements, where TVM's importer lacks a form, or writes loops that only the
fallback can compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from tvm import relax

from gtco.frontend.operators.arguments import (
    Attributes,
    Refused,
    constant_of,
    padded,
    shape_of,
    text_of,
)

EXACT = 2**53  # an operator keeps the value of a padding as a double


def pad(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Pad as an operator. TVM's importer writes loops, which only the fallback can compile. A
    negative amount cuts, before the rest is padded.
    """
    x, pads, value, axes = padded(inputs, 4)
    mode = text_of(attrs.get("mode", b"constant"))
    widths = numpy.asarray(attrs["pads"]) if pads is None else constant_of(pads)
    border = numpy.asarray(attrs.get("value", 0.0)) if value is None else constant_of(value)
    rank = len(shape_of(x))
    which = numpy.arange(rank) if axes is None else constant_of(axes)
    if widths is None or which is None:
        raise Refused("its pads or axes are known only at run time: make them constants")
    if border is None or len(widths) != 2 * len(which):
        return None
    if border.dtype.kind in "iu" and abs(int(border.reshape(()))) > EXACT:
        raise Refused(f"its value is beyond {EXACT}, up to which a double has every integer")
    full, kept = [0] * (2 * rank), [(0, size) for size in shape_of(x)]
    for place, axis in enumerate(int(axis) % rank for axis in which):
        before, after = int(widths[place]), int(widths[place + len(which)])
        full[2 * axis], full[2 * axis + 1] = max(before, 0), max(after, 0)
        kept[axis] = max(-before, 0), kept[axis][1] + min(after, 0)
    if (widths < 0).any():
        if any(begin >= end for begin, end in kept):  # no element is left to repeat
            return None
        first, last = zip(*kept, strict=True)
        x = builder.emit(relax.op.strided_slice(x, list(range(rank)), first, last))
    mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    return builder.emit(relax.op.nn.pad(x, full, mode, border.reshape(()).item()))


def tile(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Tile as an operator, for the same reason as :func:`pad`."""
    repeats = constant_of(inputs[1]) if len(inputs) == 2 else None
    return None if repeats is None else builder.emit(relax.op.tile(inputs[0], repeats.tolist()))


def expand(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Expand, also with a result without elements, which TVM refuses. An exporter writes a slice of
    no rows in this way.
    """
    wanted = constant_of(inputs[1])
    if wanted is None or wanted.all():
        return None
    shape = numpy.broadcast_shapes(tuple(shape_of(inputs[0])), tuple(wanted.tolist()))
    return builder.emit(relax.op.zeros(shape, inputs[0].ty.dtype))


def scatter(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """A scatter. If it writes nothing, the result is the tensor that it would write into."""
    return None if all(shape_of(inputs[2])) else inputs[0]


def gather_elements(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """GatherElements, also of no elements, for which TVM's operator makes no kernel."""
    shape = shape_of(inputs[1])
    return None if all(shape) else relax.op.zeros(shape, inputs[0].ty.dtype)


def slice_(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Slice of opsets before 10, whose bounds are attributes. TVM reads the later form alone."""
    if "starts" not in attrs:
        return None
    x, starts, ends = inputs[0], list(attrs["starts"]), list(attrs["ends"])
    if isinstance(x, relax.ShapeExpr):
        values = [int(size) for size in x.values][starts[0] : ends[0]]
        return relax.const(numpy.array(values, "int64"), "int64")
    shape = shape_of(x)
    axes = [axis % len(shape) for axis in attrs.get("axes", range(len(starts)))]
    bounds = [slice(*at).indices(shape[axis]) for axis, *at in zip(axes, starts, ends, strict=True)]
    first = [begin for begin, _, _ in bounds]
    last = [max(begin, end) for begin, end, _ in bounds]
    return builder.emit(relax.op.strided_slice(x, axes, first, last))


def top_k(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """TopK of opset 10, where k became an input: TVM looks for an attribute until opset 11. TopK in
    any order (``sorted`` 0), which the sorted one is too. And TopK of no elements: to Relax's
    ``topk``, 0 means all.
    """
    count = constant_of(inputs[1]) if len(inputs) > 1 else None
    if count is None:
        return None
    along, largest = int(attrs.get("axis", -1)), bool(attrs.get("largest", 1))
    k = int(count.item())
    if k == 0:
        shape = list(shape_of(inputs[0]))
        shape[along] = 0
        dtypes = (inputs[0].ty.dtype, "int64")
        return relax.Tuple([builder.emit(relax.op.zeros(shape, dtype)) for dtype in dtypes])
    if "largest" in attrs and attrs.get("sorted", 1):
        return None
    return relax.op.topk(inputs[0], k, along, ret_type="both", largest=largest, dtype="int64")


def unsqueeze(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Unsqueeze by a single number, as torch's exporter writes it for grouped queries. ONNX Runtime
    takes it too; TVM wants a vector.
    """
    axis = constant_of(inputs[1]) if len(inputs) > 1 else None
    if axis is None or axis.ndim or isinstance(inputs[0], relax.ShapeExpr):
        return None
    return relax.op.expand_dims(inputs[0], axis=int(axis))


def space_to_depth(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    if text_of(attrs.get("mode", b"DCR")) != "CRD":
        return None
    n, c, h, w = shape_of(inputs[0])
    b = attrs["blocksize"]
    x = builder.emit(relax.op.reshape(inputs[0], (n, c, h // b, b, w // b, b)))
    x = builder.emit(relax.op.permute_dims(x, [0, 1, 3, 5, 2, 4]))
    return builder.emit(relax.op.reshape(x, (n, c * b * b, h // b, w // b)))
