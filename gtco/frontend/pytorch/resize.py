"""Sizes of torch's images after ``interpolate`` by a factor.

torch's exporter writes a Resize with scales. ONNX takes them as float32 and rounds the size down in
exact arithmetic, so 10 times 0.7 is 6, where torch has 7. With ``align_corners`` ONNX's positions
follow from the size before it is rounded down, and torch's from the size itself. The exported file
states the sizes that torch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import numpy
import onnx
from onnx import numpy_helper

_STEPS = 4  # of the last place of a scale, by which it may be off


def keep_sizes(model: onnx.ModelProto) -> None:
    """Gives each Resize by constant scales the output's size that the file states. Changes the
    model. Where a size is open, the node stays.
    """
    graph = model.graph
    shapes = {v.name: _shape(v) for v in (*graph.input, *graph.value_info, *graph.output)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Resize" or len(node.input) != 3 or node.input[2] not in constants:
            continue
        x, y = shapes.get(node.input[0]), shapes.get(node.output[0])
        scales = numpy_helper.to_array(constants[node.input[2]])
        if x is None or y is None or not len(scales) == len(x) == len(y):
            continue
        name = f"{node.output[0]}.resized"
        if b"align_corners" in [a.s for a in node.attribute]:
            node.input[2:] = ["", name]
            graph.initializer.append(numpy_helper.from_array(numpy.array(y, numpy.int64), name))
        else:
            fitting = [fit(*given) for given in zip(x, y, scales, strict=True)]
            node.input[2] = name
            graph.initializer.append(
                numpy_helper.from_array(numpy.array(fitting, numpy.float32), name)
            )


def fit(size: int, out: int, scale: numpy.float32) -> numpy.float32:
    """The scale itself, or the next one that makes ``out`` of ``size``."""
    fitted = scale
    for _ in range(_STEPS):
        made = floor(size * float(fitted))
        if made == out:
            return fitted
        fitted = numpy.nextafter(fitted, numpy.float32(numpy.inf if made < out else 0))
    return scale


def _shape(value: onnx.ValueInfoProto) -> Sequence[int] | None:
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return sizes if sizes and all(sizes) else None
