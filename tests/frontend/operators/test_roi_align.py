"""RoiAlign beside ONNX Runtime, whatever the boxes count from."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.frontend.operators.one_node import check, node_model
from tests.kernels import fresh_seed


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.25])
@pytest.mark.parametrize(
    ("opset", "mode"), [(10, None), (16, None), (16, "half_pixel"), (16, "output_half_pixel")]
)
def test_boxes_are_scaled_before_they_are_moved(
    opset: int, mode: str | None, scale: float
) -> None:
    rng = np.random.default_rng(fresh_seed())
    corners = rng.uniform(0, 24, (5, 2, 2)).astype(np.float32)
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1) + 2], axis=1)
    inputs = {"x": rng.standard_normal((2, 3, 16, 13), np.float32), "boxes": boxes}
    images = {"images": np.array([0, 1, 1, 0, 1])}
    given = {} if mode is None else {"coordinate_transformation_mode": mode}
    sizes = {"output_height": 5, "output_width": 3, "sampling_ratio": int(rng.integers(0, 3))}
    order = ["x", "boxes", "images"]
    model = node_model(
        "RoiAlign", inputs, images, order, 1, spatial_scale=scale, **sizes, **given
    )
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    check(model, inputs)
