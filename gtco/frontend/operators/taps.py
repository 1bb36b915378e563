"""ONNX's Resize where TVM's ``image.resize2d`` cannot express it: any axes, antialiasing, scales
that give no whole size, cropping, symmetric centres, outside positions left out.

With any attributes, an axis of ``size`` positions becomes ``out`` positions. Each of them is a
weighted sum of a few input positions. Positions and weights are known now::

    y[..., o, ...] = sum over taps t of   weight[o, t] * x[..., index[o, t], ...]

One tap (nearest) is a gather. A few taps are as many gathers, weighted and added. Many taps (an
antialiased reduction) are one product with the matrix of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy
from tvm import relax

MODES = ("nearest", "linear", "cubic")
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "tf_half_pixel_for_nn"),
    *("align_corners", "asymmetric", "tf_crop_and_resize"),
)
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
FIRST = "first"  # the rounding before opset 11: down, and up where an axis shrinks
SLACK = 2e-7  # of a position: what a scale that is a float32 may be off
FEW = 4  # taps that are gathered one by one; more are a matrix product


@dataclass(frozen=True)
class Axis:
    """The resizing of one axis. ``scale`` comes from the node or from its sizes. ``roi`` has the
    ends of the region that ``tf_crop_and_resize`` keeps, as fractions.
    """

    size: int
    out: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class ResizeTaps:
    """The taps of each output position. ``index`` and ``weight`` are [out, taps]. ``inside`` [out]
    is false for a position outside the axis, which gets the extrapolation value.
    """

    index: numpy.ndarray
    weight: numpy.ndarray
    inside: numpy.ndarray


@dataclass(frozen=True)
class Method:
    """The attributes of a node, by their names in ONNX."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation_value: float = 0.0

    @staticmethod
    def of(attrs: Mapping[str, Any]) -> Method:
        def text(name: str, default: str) -> str:
            value = attrs.get(name, default)
            return value.decode() if isinstance(value, bytes) else str(value)

        return Method(
            text("mode", "nearest"),
            text("coordinate_transformation_mode", "half_pixel"),
            text("nearest_mode", "round_prefer_floor"),
            float(attrs.get("cubic_coeff_a", -0.75)),
            bool(attrs.get("exclude_outside", 0)),
            bool(attrs.get("antialias", 0)),
            float(attrs.get("extrapolation_value", 0.0)),
        )

    def unknown(self) -> str:
        """The attribute whose value ONNX does not have, in words; "" if none."""
        given = {
            "mode": (self.mode, MODES),
            "coordinate_transformation_mode": (self.coordinates, COORDINATES),
            "nearest_mode": (self.nearest_mode, ROUNDINGS),
        }
        wrong = [f"{name} '{value}'" for name, (value, of) in given.items() if value not in of]
        return wrong[0] if wrong else ""


def resized_axes(
    shape: Sequence[int],
    roi: numpy.ndarray | None,
    scales: numpy.ndarray | None,
    sizes: numpy.ndarray | None,
    axes: Sequence[int] | None,
    policy: str = "stretch",
) -> dict[int, Axis]:
    """The axes that are resized, from Resize's inputs. ``axes`` and ``policy`` are its attributes.

    ``not_larger`` and ``not_smaller`` keep the aspect: all axes get the least or the greatest of
    the scales that the sizes imply.
    """
    chosen = [a % len(shape) for a in (range(len(shape)) if axes is None else axes)]
    count = len(chosen)
    regions = [(0.0, 1.0)] * count
    if roi is not None and roi.size:
        regions = [(float(roi[i]), float(roi[i + count])) for i in range(count)]
    if scales is not None and scales.size:
        factors = [float(s) for s in scales]
        outs = [floor(shape[a] * s) for a, s in zip(chosen, factors, strict=True)]
    else:
        assert sizes is not None
        wanted = [int(s) for s in sizes]
        factors = [s / shape[a] for a, s in zip(chosen, wanted, strict=True)]
        outs = wanted
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * count
            # halves are rounded up, as ONNX says
            outs = [floor(shape[a] * factor + 0.5) for a in chosen]
    return {
        axis: Axis(shape[axis], out, scale, region)
        for axis, out, scale, region in zip(chosen, outs, factors, regions, strict=True)
    }


def positions(axis: Axis, coordinates: str) -> numpy.ndarray:
    """The place of each output position on the input's axis (ONNX's coordinate transformations)."""
    x = numpy.arange(axis.out, dtype=numpy.float64)
    width = axis.scale * axis.size  # before it was rounded down
    if coordinates == "align_corners":
        return x * (axis.size - 1) / (width - 1) if width != 1 else 0 * x
    if coordinates == "asymmetric":
        return x / axis.scale
    if coordinates == "tf_half_pixel_for_nn":  # until opset 12; other axes stay as they are
        return x if axis.scale == 1 else (x + 0.5) / axis.scale
    if coordinates == "tf_crop_and_resize":
        begin, end = axis.roi
        if width == 1:
            return 0 * x + (begin + end) * (axis.size - 1) / 2
        return x * (end - begin) * (axis.size - 1) / (width - 1) + begin * (axis.size - 1)
    if coordinates == "pytorch_half_pixel" and width == 1:
        return 0 * x
    centre = (x + 0.5) / axis.scale - 0.5
    if coordinates == "half_pixel_symmetric":
        return axis.size / 2 * (1 - axis.out / width) + centre
    return centre


def taps(axis: Axis, method: Method) -> ResizeTaps:
    """Positions and weights for every output position of one axis."""
    at = positions(axis, method.coordinates)
    inside = numpy.ones(axis.out, bool)
    if method.coordinates == "tf_crop_and_resize":
        inside = (at >= 0) & (at <= axis.size - 1)
    if method.mode == "nearest":
        rounding = method.nearest_mode
        if rounding == FIRST:
            rounding = "floor" if axis.scale >= 1 else "ceil"
        by_scale = axis.scale != axis.out / axis.size
        index = _nearest(at, rounding, 1e-9 + (SLACK * at if by_scale else 0 * at))[:, None]
        weight = numpy.ones(index.shape)
    else:
        # antialiasing widens the kernel by as much as the image shrinks
        stretch = min(axis.scale, 1.0) if method.antialias else 1.0
        reach = (1 if method.mode == "linear" else 2) / stretch
        index = numpy.floor(at)[:, None] + numpy.arange(1 - ceil(reach), ceil(reach) + 1)
        distance = numpy.abs(index - at[:, None]) * stretch
        weight = (
            numpy.maximum(1 - distance, 0)
            if method.mode == "linear"
            else _keys(distance, method.cubic_coeff_a)
        )
        if method.exclude_outside:
            weight = numpy.where((index < 0) | (index >= axis.size), 0.0, weight)
        weight = weight / weight.sum(axis=1, keepdims=True)
    return ResizeTaps(numpy.clip(index, 0, axis.size - 1).astype(numpy.int64), weight, inside)


def _nearest(at: numpy.ndarray, mode: str, slack: numpy.ndarray) -> numpy.ndarray:
    # 8.5 / (17 / 7) - 0.5 is exactly 3, but a little more in float64, and 3 / 0.6 is 5, but less if
    # the scale is a float32
    halves = numpy.round(2 * at) / 2
    at = numpy.where(numpy.abs(at - halves) < slack, halves, at)
    if mode == "floor":
        return numpy.floor(at)
    if mode == "ceil":
        return numpy.ceil(at)
    return numpy.floor(at + 0.5) if mode == "round_prefer_ceil" else numpy.ceil(at - 0.5)


def _keys(distance: numpy.ndarray, a: float) -> numpy.ndarray:
    """Keys' cubic convolution kernel (1981); 0 from a distance of 2 on."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return numpy.where(distance <= 1, near, numpy.where(distance < 2, far, 0.0))


def resized(builder: Any, x: Any, axes: Mapping[int, Axis], method: Method) -> Any:
    """Relax for the resized ``x``, one axis after the other. Integers are weighted in float32 and
    cut off, or rounded with ``antialias``, as ONNX Runtime does.
    """
    rank, dtype = len(x.ty.shape), str(x.ty.dtype)
    if method.mode != "nearest" and not dtype.startswith(("float", "bfloat")):
        wide = resized(builder, builder.emit(relax.op.astype(x, "float32")), axes, method)
        if method.antialias:
            wide = builder.emit(relax.op.round(wide))
        limits = numpy.iinfo(dtype)
        wide = builder.emit(relax.op.clip(wide, float(limits.min), float(limits.max)))
        return builder.emit(relax.op.astype(wide, dtype))
    inside = numpy.ones((1,) * rank, bool)
    for number, axis in sorted(axes.items()):
        found = taps(axis, method)
        along = [axis.out if i == number else 1 for i in range(rank)]
        inside = inside & found.inside.reshape(along)
        if axis.size == axis.out and _identity(found):
            continue
        x = _along(builder, x, number, axis.size, found, dtype)
    if inside.all():
        return x
    value = relax.const(method.extrapolation_value, dtype)
    return builder.emit(relax.op.where(relax.const(inside, "bool"), x, value))


def _identity(found: ResizeTaps) -> bool:
    at = numpy.arange(len(found.index))
    own = numpy.where(found.index == at[:, None], found.weight, 0.0).sum(axis=1)
    return bool(numpy.all(own == 1.0))


def _along(builder: Any, x: Any, axis: int, size: int, found: ResizeTaps, dtype: str) -> Any:
    rank = len(x.ty.shape)
    out, count = found.index.shape
    if count > FEW:
        return _product(builder, x, axis, size, found, dtype)
    total = None
    for t in range(count):
        part = builder.emit(relax.op.take(x, relax.const(found.index[:, t], "int64"), axis))
        if count > 1:
            along = [out if i == axis else 1 for i in range(rank)]
            weight = relax.const(found.weight[:, t].reshape(along), dtype)
            part = builder.emit(relax.op.multiply(part, weight))
        total = part if total is None else builder.emit(relax.op.add(total, part))
    return total


def _product(builder: Any, x: Any, axis: int, size: int, found: ResizeTaps, dtype: str) -> Any:
    """Moves the axis to the end, multiplies by the matrix [size, out] of its weights, and moves it
    back.
    """
    rank = len(x.ty.shape)
    matrix = numpy.zeros((size, len(found.index)))
    columns = numpy.broadcast_to(numpy.arange(len(found.index))[:, None], found.index.shape)
    numpy.add.at(matrix, (found.index, columns), found.weight)
    if axis == rank - 2:  # multiply from the left: no axis has to move
        left = relax.const(numpy.ascontiguousarray(matrix.T), dtype)
        return builder.emit(relax.op.matmul(left, x))
    order = [i for i in range(rank) if i != axis] + [axis]
    moved = x if axis == rank - 1 else builder.emit(relax.op.permute_dims(x, order))
    y = builder.emit(relax.op.matmul(moved, relax.const(matrix, dtype)))
    back = [order.index(i) for i in range(rank)]
    return y if axis == rank - 1 else builder.emit(relax.op.permute_dims(y, back))
