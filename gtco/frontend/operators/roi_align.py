"""RoiAlign where a box is given by the centres of pixels (half_pixel, the default since opset 16).

TVM's importer moves such boxes by half a pixel before it scales them, and ONNX afterwards. So they
are right there only if the scale is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from gtco.frontend.operators.arguments import Attributes, Refused, text_of


def roi_align(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """x [N, C, H, W], boxes [boxes, 4], image of each box [boxes] -> [boxes, C, height, width].

    ONNX's maximum is that of single pixels times their weights, and TVM's that of sampled values.
    """
    if text_of(attrs.get("mode", b"avg")) != "avg":
        raise Refused("mode max is not supported: use mode avg, or cut the graph before it")
    default = "half_pixel" if attrs["tvm_custom"]["opset"] >= 16 else "output_half_pixel"
    if text_of(attrs.get("coordinate_transformation_mode", default)) != "half_pixel":
        return None
    x, boxes, images = inputs
    scale, dtype = float(attrs.get("spatial_scale", 1.0)), boxes.ty.dtype
    moved = relax.op.subtract(boxes, relax.const(0.5 / scale, dtype))
    image = relax.op.astype(relax.op.expand_dims(images, axis=1), dtype)
    return relax.op.vision.roi_align(
        x,
        builder.emit(relax.op.concat([image, moved], axis=1)),
        pooled_size=(attrs.get("output_height", 1), attrs.get("output_width", 1)),
        spatial_scale=scale,
        sample_ratio=attrs.get("sampling_ratio", 0),
        aligned=True,  # no least size of a box
        layout="NCHW",
        mode=text_of(attrs.get("mode", b"avg")),
    )
