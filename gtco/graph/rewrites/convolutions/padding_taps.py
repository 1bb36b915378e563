"""Taps of a convolution that read only padding, at every output, are left out.

before: y = conv2d(x, w) {padding=(24, 24, 24, 24), dilation=(24, 24)}    # x has 16 x 16 pixels
after:  y = conv2d(x, w[:, :, 1:2, 1:2]) {padding=(0, 0, 0, 0)}           # the middle alone reads

These are filters wider than the image: dilated ones on small maps (DeepLab), large ones in the last
stages of a network, and any on a map of one pixel.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.stage import Operator

# Taps that are kept (first, behind the last), padding before and after, dilation.
_Kept = tuple[int, int, int, int, int]


def padding_taps(graph: Graph) -> Graph:
    """For convolutions of floats by constants, at one size of the image."""
    return apply_rule(graph, {"conv2d"}, _rule)


def _rule(graph: Graph, op: Operator) -> str | None:
    x, w = op.inputs[:2]
    if len(op.inputs) > 2 or not graph.is_constant(w) or graph.types[x].dtype != "float32":
        return None
    image, made, kernel = (graph.types[t].sizes for t in (x, op.output, w))
    first = 1 if op["layout"] == "NHWC" else 2
    pads = op["padding"]
    axes = [
        _kept(*sizes)
        for sizes in zip(
            image[first : first + 2],
            made[first : first + 2],
            kernel[2:],
            op["strides"],
            op["dilation"],
            pads[:2],
            pads[2:],
            strict=True,
        )
    ]
    rows, columns = axes
    if rows is None or columns is None:
        return None
    sizes = (rows[1] - rows[0], columns[1] - columns[0])
    if sizes == kernel[2:]:
        return None

    def cut(weight: numpy.ndarray) -> numpy.ndarray:
        inside = weight[:, :, rows[0] : rows[1], columns[0] : columns[1]]
        return numpy.ascontiguousarray(inside)

    taps = graph.add_constant(graph.constants.mapped(w, cut, (*kernel[:2], *sizes)), w)
    attrs = dict(op.attrs) | {
        "padding": (rows[2], columns[2], rows[3], columns[3]),
        "dilation": (rows[4], columns[4]),
    }
    return graph.add("conv2d", (x, taps), op.type, name=op.name, output=op.output, **attrs)


def _kept(
    size: int, made: int, extent: int, stride: int, spread: int, before: int, after: int
) -> _Kept | None:
    """The taps, the padding and the dilation that a convolution keeps along an axis of ``size``
    inputs, ``made`` outputs and ``extent`` taps. None if no tap reads an input, or if the taps that
    are left would begin or end inside of the image.
    """
    reads = [
        tap
        for tap in range(extent)
        if any(0 <= q * stride + tap * spread - before < size for q in range(made))
    ]
    if not reads:
        return None
    first, end = reads[0], reads[-1] + 1
    front, back = before - first * spread, after - (extent - end) * spread
    if front < 0 or back < 0:
        return None
    return first, end, front, back, spread if end - first > 1 else 1
