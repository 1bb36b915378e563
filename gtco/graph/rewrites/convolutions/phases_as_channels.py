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

A depthwise one has no product. Each of its phases becomes a depthwise convolution by its own taps:

before: y = conv_transpose2d(x, w)                  # a group for each channel
after:  z_f = conv2d(x, v_f)                        # [n, h, w, c], for each phase
        y = reshape(concat(z_f))                    # [n, h, fh, w, fw, c]
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

    def alone(self, phase: int) -> _Axis | None:
        """What one phase reads; None if that is nothing."""
        read = [a for a, place in enumerate(self.taps[phase]) if place >= 0]
        if not read:
            return None
        return _Axis(self.first + read[0], (self.taps[phase][read[0] : read[-1] + 1],))


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
    if not graph.is_constant(w) or op["layout"] != "NHWC":
        return None
    image, made, kernel = (graph.types[t].sizes for t in (x, op.output, w))
    if 0 in (*image, *made, *kernel) or op["groups"] not in (1, kernel[0]):
        return None
    fronts = op["padding"][:2]
    axes = [
        _axis(*sizes)
        for sizes in zip(image[1:3], made[1:3], kernel[2:], op["strides"], fronts, strict=True)
    ]
    if op["groups"] > 1:
        return _depthwise(graph, op, *axes) if kernel[1] == 1 else None
    rows, columns = axes
    alone = [ceil(k / s) for k, s in zip(kernel[2:], op["strides"], strict=True)]
    if rows.reach * columns.reach > alone[0] * alone[1]:
        return None
    z = _convolution(graph, op, rows, columns)
    if z is None:
        return None
    n, h, v = graph.types[z].sizes[:3]
    apart = TensorType((n, h, v, rows.phases, columns.phases, kernel[1]), op.type.dtype)
    split = graph.add("reshape", (z,), apart, name=op.name)
    moved = graph.add("permute", (split,), name=op.name, axes=(0, 1, 3, 2, 4, 5))
    return graph.add("reshape", (moved,), op.type, name=op.name, output=op.output)


def _depthwise(graph: Graph, op: Operator, rows: _Axis, columns: _Axis) -> str | None:
    downs, acrosses = ([axis.alone(f) for f in range(axis.phases)] for axis in (rows, columns))
    joined = []
    for down in downs:
        line = []
        for across in acrosses:
            if down is None or across is None:  # a phase that is 0
                return None
            z = _convolution(graph, op, down, across, (rows.phases, columns.phases))
            if z is None:
                return None
            n, h, v, c = graph.types[z].sizes
            apart = TensorType((n, h, 1, v, 1, c), op.type.dtype)
            line.append(graph.add("reshape", (z,), apart, name=op.name))
        joined.append(graph.add("concat", line, name=op.name, axis=4) if line[1:] else line[0])
    whole = graph.add("concat", joined, name=op.name, axis=2) if joined[1:] else joined[0]
    return graph.add("reshape", (whole,), op.type, name=op.name, output=op.output)


def _convolution(
    graph: Graph,
    op: Operator,
    rows: _Axis,
    columns: _Axis,
    strides: tuple[int, int] | None = None,
) -> str | None:
    """The convolution that makes all phases of two axes, [n, h, w, phases * outputs]; None if it
    does not read inputs at the border, or the outputs are not whole steps. ``strides``: the phases
    of a step, if the axes have only one of them.
    """
    x, w = op.inputs
    image, made, kernel = (graph.types[t].sizes for t in (x, op.output, w))
    before, after = [], []
    around = strides or (rows.phases, columns.phases)
    for size, whole, axis, step in zip(
        image[1:3], made[1:3], (rows, columns), around, strict=True
    ):
        before.append(-axis.first)
        after.append(whole // step - 1 + axis.first + axis.reach - size)
        if whole % step:
            return None
    if min(*before, *after) < 0:
        return None
    groups = op["groups"]
    channels = rows.phases * columns.phases * kernel[1] * groups
    shape = (channels, kernel[0] // groups, rows.reach, columns.reach)
    laid = partial(_weights, rows=rows, columns=columns, groups=groups)
    return graph.add(
        "conv2d",
        (x, graph.add_constant(graph.constants.mapped(w, laid, shape), w)),
        name=op.name,
        strides=(1, 1),
        padding=(*before, *after),
        dilation=(1, 1),
        groups=groups,
        layout="NHWC",
    )


def _weights(w: numpy.ndarray, rows: _Axis, columns: _Axis, groups: int) -> numpy.ndarray:
    """[channels, outputs, kh, kw] -> [groups * phases of rows * phases of columns * outputs,
    channels of a group, taps of rows, taps of columns], with zeros where a phase reads nothing.
    """
    padded = numpy.pad(w, ((0, 0), (0, 0), (0, 1), (0, 1)))  # the last place is what -1 reads
    down, across = (numpy.array(axis.taps) for axis in (rows, columns))
    taken = padded[:, :, down[:, None, :, None], across[None, :, None, :]]
    split = taken.reshape(groups, -1, *taken.shape[1:])
    laid = split.transpose(0, 3, 4, 2, 1, 5, 6)
    return numpy.ascontiguousarray(laid.reshape(-1, *laid.shape[4:]))
