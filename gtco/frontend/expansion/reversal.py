"""ReverseSequence: the first steps of each sample in reverse, the others as they are.

It is a flip where every sample is as long as the tensor (what tf2onnx makes of ``tf.reverse``, in
the backward half of a bidirectional layer). Otherwise elements are gathered::

    y[t, b] = x[length[b] - 1 - t, b] if t < length[b] else x[t, b]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.walk import Unsuitable, Walk

_BEFORE_ALL = -(2**63) + 1  # the end of a slice that goes down to the first element


def reverse_sequence(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    x, lengths = node.input
    shape = w.shape(x)
    time, batch = attrs.get("time_axis", 0), attrs.get("batch_axis", 1)
    if {time, batch} != {0, 1} or len(shape) < 2:
        raise Unsuitable(
            f"its time_axis {time} and batch_axis {batch} have to be the first two axes of a "
            f"tensor of at least two, and its input has {len(shape)}"
        )
    steps = shape[time]
    known = w.values.get(lengths)
    if known is not None and (known == steps).all():
        ends = ([-1], [_BEFORE_ALL], [time], [-1])
        return [w.add("Slice", x, *map(w.integers, ends))]
    if w.opset < 11:
        raise Unsuitable("samples of several lengths need GatherElements, of opset 11")
    place = [1] * len(shape)
    place[time] = steps
    t = w.integers(numpy.arange(steps).reshape(place))
    each = [1] * len(shape)
    each[batch] = shape[batch]
    length = w.reshape(w.cast(lengths, onnx.TensorProto.INT64), each)
    behind = w.add("Sub", w.add("Sub", length, t), w.integers(1))
    index = w.add("Where", w.add("Less", t, length), behind, t)
    whole = w.add("Expand", index, w.integers(list(shape)))
    return [w.add("GatherElements", x, whole, axis=time)]
