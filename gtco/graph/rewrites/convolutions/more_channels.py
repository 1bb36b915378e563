"""A convolution with some channels of zeros behind its own."""

from __future__ import annotations

from dataclasses import replace

import numpy

from gtco.graph.graph import Graph
from gtco.tensor.stage import Operator


def with_more_channels(graph: Graph, op: Operator, more: int) -> str:
    """Adds ``more`` channels of zeros to a convolution by constant weights, channels last. The new
    convolution takes the place of ``op``.
    """
    x, weights = op.inputs[:2]
    image = graph.types[x]
    padded = graph.add(
        "pad",
        (x,),
        replace(image, shape=(*image.shape[:-1], int(image.shape[-1]) + more)),
        name=op.name,
        before=(0, 0, 0, 0),
        after=(0, 0, 0, more),
        value=0,
    )
    wide = numpy.pad(graph.constants[weights], ((0, 0), (0, more), (0, 0), (0, 0)))
    inputs = (padded, graph.add_constant(wide, weights), *op.inputs[2:])
    return graph.add(op.kind, inputs, op.type, name=op.name, output=op.output, **dict(op.attrs))
