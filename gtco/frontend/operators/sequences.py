"""Sequences of tensors, which are tuples of Relax."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tvm import relax

from gtco.frontend.operators.arguments import Attributes, Refused, constant_of, padded, shape_of


def sequence_insert(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """SequenceInsert: TVM takes a negative position for one place behind it."""
    sequence, item, place = padded(inputs, 3)
    at = len(sequence) if place is None else constant_of(place)
    if at is None:
        raise Refused("its position is known only at run time: make it a constant")
    position = int(at) + (len(sequence) if int(at) < 0 else 0)
    parts = list(sequence)
    parts.insert(position, item)
    return relax.Tuple(parts)


def split_to_sequence(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """SplitToSequence: parts of one size, the last of which may be smaller, or of given sizes. TVM
    makes as many parts of one size, but of another size.
    """
    x, split = padded(inputs, 2)
    axis = int(attrs.get("axis", 0)) % len(x.ty.shape)
    whole = shape_of(x)[axis]
    given = None if split is None else constant_of(split)
    if split is not None and given is None:
        raise Refused("its sizes are known only at run time: make them constants")
    if given is not None and given.ndim:
        sizes = [int(size) for size in given]
    else:
        each = 1 if given is None else int(given)
        if each < 1:
            raise Refused(f"it splits in parts of {each}: the size of a part is positive")
        sizes = [min(each, whole - first) for first in range(0, whole, each)]
    if len(sizes) == 1:
        parts = [x]
    else:
        places = list(accumulate(sizes))[:-1]
        every = builder.emit(relax.op.split(x, places, axis=axis))
        parts = [builder.emit(relax.TupleGetItem(every, n)) for n in range(len(sizes))]
    if split is None and not attrs.get("keepdims", 1):
        parts = [builder.emit(relax.op.squeeze(part, axis=[axis])) for part in parts]
    return relax.Tuple(parts)
