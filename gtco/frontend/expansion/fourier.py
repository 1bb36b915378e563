"""DFT and STFT of a known size: a product with the matrix of the transform.

A complex number is two reals at the end of its shape, so the matrix takes [n * 1 or 2] reals to
[k * 2]::

    (re, im) of y[k] = sum over n of  re[n] * (cos, sin)(a) + im[n] * (-sin, cos)(a),
    a = -2 pi k n / N,  for the inverse a = 2 pi k n / N and all divided by N
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer


def matrix(rows: int, length: int, parts: int, inverse: bool, onesided: bool) -> numpy.ndarray:
    """The transform's matrix [rows * parts, columns * 2 (1 for a real result)], float64.

    ``rows`` values are given. A transform of ``length`` reads the first of them, and zeros after
    them. ``parts`` is 1 for real values. If onesided and forward, the columns are the first length
    // 2 + 1 frequencies. If onesided and inverse, the rows are those, and the result is real.
    """
    count = length // 2 + 1 if onesided and not inverse else length
    given = numpy.arange(rows)
    half = onesided and inverse
    used = (given < (length // 2 + 1 if half else length)).astype(numpy.float64)
    # exact for any size: whole turns of the angle are removed as integers
    turns = numpy.outer(given, numpy.arange(count)) % length / length
    angle = (2 if inverse else -2) * numpy.pi * turns
    if half:  # the missing frequencies are conjugates of the given ones
        used = used * numpy.where((given == 0) | (2 * given == length), 1.0, 2.0)
    scale = used[:, None] / (length if inverse else 1)
    cos, sin = numpy.cos(angle) * scale, numpy.sin(angle) * scale
    result = numpy.empty((rows, parts, count, 2))
    result[:, 0, :, 0], result[:, 0, :, 1] = cos, sin
    if parts == 2:
        result[:, 1, :, 0], result[:, 1, :, 1] = -sin, cos
    if half:
        result = result[..., :1]
    return result.reshape(rows * parts, -1)


def dft(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """DFT since opset 17. Its axis became an input in opset 20."""
    w, attrs = walk.writer, attributes(node)
    x, length, axis_input = (*node.input, "", "")[:3]
    shape = w.shape(x)
    axis = attrs.get("axis", 1) if w.opset < 20 else _number(w, axis_input, -2, "axis")
    axis %= len(shape)
    inverse, onesided = (bool(attrs.get(name, 0)) for name in ("inverse", "onesided"))
    rows, parts = shape[axis], shape[-1]
    if axis == len(shape) - 1 or parts not in (1, 2):
        raise Unsuitable(
            f"the last axis of an input {list(shape)} has to hold real and imaginary parts"
        )
    if onesided and parts != 1 + inverse:
        raise Unsuitable("onesided takes real values forwards, and complex values in the inverse")
    default = 2 * (rows - 1) if onesided and inverse else rows
    size = _number(w, length, default, "dft_length")
    if size < 1:
        raise Unsuitable(f"a transform of length {size} has no elements")
    transform = matrix(rows, size, parts, inverse, onesided)
    return [_transformed(w, x, axis, transform, 1 if onesided and inverse else 2)]


def stft(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """[B, length, 1 or 2] -> [B, frames, frequencies, 2]. The frames are gathered. The window, if
    it is known, is a factor of the matrix.
    """
    w = walk.writer
    x, step_input, window, length_input = (*node.input, "", "")[:4]
    length, parts = w.shape(x)[1:]
    onesided = bool(attributes(node).get("onesided", 1)) and parts == 1
    step = _number(w, step_input, None, "frame_step")
    size = _number(w, length_input, w.shape(window)[0] if window else length, "frame_length")
    if not 0 < size <= length or step < 1:
        raise Unsuitable(f"frames of {size} every {step} do not fit a signal of {length}")
    frames = (length - size) // step + 1
    places = numpy.arange(frames)[:, None] * step + numpy.arange(size)
    transform = matrix(size, size, parts, False, onesided)
    y = w.add("Gather", x, w.integers(places), axis=1)
    if window:
        known = w.values.get(window)
        if known is None:
            y = w.add("Mul", y, w.reshape(window, (size, 1)))
        else:
            transform = transform * numpy.repeat(known.astype(numpy.float64), parts)[:, None]
    return [_transformed(w, y, 2, transform, 2)]


def _transformed(w: Writer, x: str, axis: int, transform: numpy.ndarray, parts: int) -> str:
    """The transform along ``axis``: the axis is moved beside the parts, multiplied by the matrix,
    and moved back.
    """
    rank = len(w.shape(x))
    order = [*(i for i in range(rank - 1) if i != axis), axis, rank - 1]
    moved = w.transpose(x, order)
    outer = w.shape(moved)[:-2]
    flat = w.reshape(moved, (*outer, len(transform)))
    y = w.add("MatMul", flat, w.constant(transform, w.dtype(x), "transform"))
    y = w.reshape(y, (*outer, transform.shape[1] // parts, parts))
    return w.transpose(y, [order.index(i) for i in range(rank)])


def _number(w: Writer, name: str, default: int | None, what: str) -> int:
    if not name:
        assert default is not None
        return default
    value = w.values.get(name)
    if value is None:
        raise Unsuitable(f"its {what} is known only when the model runs: make it a constant")
    return int(value.reshape(()))
