"""The phases of a transposed convolution become channels of a convolution.

before: y = conv_transpose2d(x, w)                  # [n, h * sh, w * sw, o], strides sh and sw
after:  z = conv2d(x, v)                            # [n, h, w, sh * sw * o], a stride of 1
        y = reshape(permute(reshape(z)))            # channel (fh, fw, o) at pixel (q, r) goes to
                                                    # channel o at (q * sh + fh, r * sw + fw)

A phase is a pixel's place among the sh * sw that one step of the strides makes. As a product for
each phase, the phases would pack x once each, and tasks that write neighbouring pixels would take
cache lines from each other. This is done where the phases together read no more pixels of x than
each alone reads with its zeros: a kernel as large as its stride, or of 3 with a stride of 2 and a
padding of 1, or any with a stride of 1. A single row or column of x gives each output pixel a
phase of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.stage import Operator, TensorType


def phases_as_channels(graph: Graph) -> Graph:
    """For convolutions by constants, channels last."""
    return apply_rule(graph, {"conv_transpose2d"}, _rule)


@dataclass(frozen=True)
class _Axis:
    """What the outputs of one step read along an axis. ``taps[f][a]`` is the place in the kernel
    that phase ``f`` multiplies the input at ``step + first + a`` by; -1 if it does not read it.
    """

    first: int
    taps: tuple[tuple[int, ...], ...]

    @property
    def phases(self) -> int:
        return len(self.taps)

    @property
    def reach(self) -> int:
        """Inputs that one step reads."""
        return len(self.taps[0])


def _axis(size: int, made: int, extent: int, stride: int, padding: int) -> _Axis:
    """The axis of ``size`` inputs and ``made`` outputs.

    Output ``s * q + f`` sums ``x[q + (f + p) // s - t] * w[s * t + (f + p) % s]`` over t.
    """
    if size == 1:  # output j is x[0] * w[j + p]
        places = [j + padding for j in range(made)]
        return _Axis(0, tuple((place if place < extent else -1,) for place in places))
    reads: list[dict[int, int]] = []
    for phase in range(stride):
        shift, rest = divmod(phase + padding, stride)
        reads.append({shift - t: k for t, k in enumerate(range(rest, extent, stride))})
    offsets = sorted({offset for read in reads for offset in read})
    around = range(offsets[0], offsets[-1] + 1) if offsets else range(1)
    return _Axis(around[0], tuple(tuple(read.get(a, -1) for a in around) for read in reads))


def _rule(graph: Graph, op: Operator) -> str | None:
    x, w = op.inputs
    if not graph.is_constant(w) or op["layout"] != "NHWC" or op["groups"] != 1:
        return None
    image, made, kernel = (graph.types[t].sizes for t in (x, op.output, w))
    if 0 in (*image, *made, *kernel):
        return None
    fronts = op["padding"][:2]
    axes = [
        _axis(*sizes)
        for sizes in zip(image[1:3], made[1:3], kernel[2:], op["strides"], fronts, strict=True)
    ]
    rows, columns = axes
    alone = [ceil(k / s) for k, s in zip(kernel[2:], op["strides"], strict=True)]
    if rows.reach * columns.reach > alone[0] * alone[1]:
        return None
    steps = [size // axis.phases for size, axis in zip(made[1:3], axes, strict=True)]
    if any(size % axis.phases for size, axis in zip(made[1:3], axes, strict=True)):
        return None
    before = [-axis.first for axis in axes]
    after = [
        count - 1 + axis.first + axis.reach - size
        for count, axis, size in zip(steps, axes, image[1:3], strict=True)
    ]
    if min(*before, *after) < 0:
        return None  # inputs at the border that no output reads
    outputs = kernel[1]
    channels = rows.phases * columns.phases * outputs
    shape = (channels, kernel[0], rows.reach, columns.reach)
    weights = graph.constants.mapped(w, partial(_weights, rows=rows, columns=columns), shape)
    z = graph.add(
        "conv2d",
        (x, graph.add_constant(weights, w)),
        name=op.name,
        strides=(1, 1),
        padding=(*before, *after),
        dilation=(1, 1),
        groups=1,
        layout="NHWC",
    )
    n, (h, v), dtype = image[0], steps, op.type.dtype
    apart = TensorType((n, h, v, rows.phases, columns.phases, outputs), dtype)
    split = graph.add("reshape", (z,), apart, name=op.name)
    moved = graph.add("permute", (split,), name=op.name, axes=(0, 1, 3, 2, 4, 5))
    return graph.add("reshape", (moved,), op.type, name=op.name, output=op.output)


def _weights(w: numpy.ndarray, rows: _Axis, columns: _Axis) -> numpy.ndarray:
    """[channels, outputs, kh, kw] -> [phases of rows * phases of columns * outputs, channels, taps
    of rows, taps of columns], with zeros where a phase reads nothing.
    """
    padded = numpy.pad(w, ((0, 0), (0, 0), (0, 1), (0, 1)))  # the last place is what -1 reads
    down, across = (numpy.array(axis.taps) for axis in (rows, columns))
    taken = padded[:, :, down[:, None, :, None], across[None, :, None, :]]
    laid = taken.transpose(2, 3, 1, 0, 4, 5)  # phases of rows and columns, outputs, channels, taps
    return numpy.ascontiguousarray(laid.reshape(-1, *laid.shape[3:]))
