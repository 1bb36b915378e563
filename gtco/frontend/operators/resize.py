"""Resize and Upsample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from gtco.frontend.operators.taps import FIRST, Axis, Method, resized, resized_axes


def resize(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """TVM's resize2d if it means the same, and :mod:`gtco.frontend.operators.taps` otherwise."""
    if len(inputs) == 2:  # opset 10 has no region: x and scales
        return upsample(builder, inputs, attrs)
    x, *rest = padded(inputs, 4)
    roi, scales, sizes = (None if t is None else constant_of(t) for t in rest)
    if scales is not None and not scales.size:
        scales = None
    if scales is None and sizes is None:
        raise Refused("its scales or sizes are known only at run time: make them constants")
    method = Method.of(attrs)
    if unknown := method.unknown():
        raise Refused(f"ONNX has no {unknown}")
    if method.coordinates == "tf_crop_and_resize" and roi is None:
        raise Refused("its region of interest is known only at run time: make it a constant")
    axes = attrs.get("axes")
    policy = text_of(attrs.get("keep_aspect_ratio_policy", b"stretch"))
    wanted = resized_axes(shape_of(x), roi, scales, sizes, axes, policy)
    if axes is None and policy == "stretch" and _is_resize2d(wanted, method):
        return relax.op.image.resize2d(
            x,
            size=relax.ShapeExpr([wanted[2].out, wanted[3].out]),
            roi=[0.0] * 4,
            layout="NCHW",
            method="nearest_neighbor" if method.mode == "nearest" else method.mode,
            coordinate_transformation_mode=method.coordinates,
            rounding_method=method.nearest_mode,
            cubic_alpha=method.cubic_coeff_a,
            cubic_exclude=0,
            extrapolation_value=0.0,
        )
    return resized(builder, x, wanted, method)


def upsample(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Upsample, and Resize of opset 10: positions are scaled from the first one."""
    x, given = padded(inputs, 2)
    scales = numpy.asarray(attrs["scales"]) if given is None else constant_of(given)
    if scales is None:
        raise Refused("its scales are known only at run time: make them constants")
    mode = text_of(attrs.get("mode", b"nearest"))
    method = Method(mode if mode == "nearest" else "linear", "asymmetric", FIRST)
    return resized(builder, x, resized_axes(shape_of(x), None, scales, None, None), method)


def _is_resize2d(axes: Mapping[int, Axis], method: Method) -> bool:
    """True if TVM's operator, and gtco's kernel for it, mean the same: height and width, by whole
    scales. Where no size changes, TVM's would add its neighbours times 0, and a NaN would spread.
    """
    whole = all(abs(a.size * a.scale - a.out) <= 1e-3 for a in axes.values())
    kept = all(axes[i].size == axes[i].out for i in (0, 1) if i in axes)
    return (
        len(axes) == 4
        and any(a.size != a.out for a in axes.values())
        and whole
        and kept
        and not method.antialias
        and not (method.mode == "cubic" and method.exclude_outside)
        and method.coordinates
        in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
    )
