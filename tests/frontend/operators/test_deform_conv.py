"""DeformConv as a GridSample and a product, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.few_nodes import compare, model, normal, refused


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    group=st.sampled_from([1, 2]),
    parts=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    mask=st.booleans(),
    far=st.sampled_from([0.0, 0.7, 5.0]),
    opset=st.sampled_from([19, 22]),
)
def test_deform_conv(
    batch, size, kernel, strides, dilations, pads, group, parts, bias, mask, far, opset
):
    """Offsets of 0 make it an ordinary convolution; large ones read outside of the image."""
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    whole = [n + pads[i] + pads[i + 2] for i, n in enumerate(size)]
    out = [(n - r) // s + 1 for n, r, s in zip(whole, reach, strides, strict=True)]
    if min(n - r for n, r in zip(whole, reach, strict=True)) < 0:
        return
    taps = kernel[0] * kernel[1]
    arrays = {
        "x": normal(1, batch, 4, *size),
        "offset": normal(2, batch, parts * taps * 2, *out, scale=far),
    }
    constants = {"w": normal(3, 6, 4 // group, *kernel)}
    inputs = ["x", "w", "offset", "", ""]
    if bias:
        constants["b"], inputs[3] = normal(4, 6), "b"
    if mask:
        arrays["mask"], inputs[4] = normal(5, batch, parts * taps, *out), "mask"
    made = helper.make_node(
        "DeformConv",
        inputs,
        ["y"],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=pads,
        group=group,
        offset_group=parts,
    )
    compare(model([made], arrays, constants, opset=opset), arrays, tolerance=2e-5)


def test_volumes_are_refused():
    arrays = {"x": normal(1, 1, 2, 4, 4, 4), "offset": np.zeros((1, 24, 3, 3, 3), np.float32)}
    made = helper.make_node("DeformConv", ["x", "w", "offset"], ["y"], name="deep")
    proto = model([made], arrays, {"w": normal(2, 2, 2, 2, 2, 2)}, opset=19)
    refused(proto, r"node 'deep' \(DeformConv\): an input of 5 axes")
