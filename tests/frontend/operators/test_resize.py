"""Resize as the importer writes it out. The graphs are evaluated with numpy; other tests check the
kernels.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError
from tests.frontend.operators.one_node import check, node_model

HALF = Fraction(1, 2)

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "asymmetric",
    "align_corners",
)

SIZES = {
    "size": st.tuples(st.integers(2, 13), st.integers(2, 13)),
    "out": st.tuples(st.integers(2, 17), st.integers(2, 17)),
    "by_axes": st.booleans(),
}

ROUNDINGS = {
    "floor": floor,
    "ceil": ceil,
    "round_prefer_floor": lambda at: ceil(at - HALF),
    "round_prefer_ceil": lambda at: floor(at + HALF),
}


def resize_model(x, out, by_axes, **attrs):
    sizes = np.array(out if by_axes else (1, 2, *out), np.int64)
    if by_axes:
        attrs["axes"] = [2, 3]
    return node_model("Resize", {"x": x}, {"sizes": sizes}, ["x", "", "", "sizes"], 1, **attrs)


@settings(max_examples=40)
@given(
    mode=st.sampled_from(["linear", "cubic"]),
    coordinates=st.sampled_from(COORDINATES),
    antialias=st.booleans(),
    exclude=st.booleans(),
    **SIZES,
)
def test_resize_to_sizes(mode, coordinates, size, out, antialias, exclude, by_axes):
    x = np.random.default_rng(0).normal(size=(1, 2, *size)).astype(np.float32)
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": antialias}
    attrs |= {"exclude_outside": exclude and mode == "cubic", "cubic_coeff_a": -0.5}
    check(resize_model(x, out, by_axes, **attrs), {"x": x})


def exact_positions(coordinates: str, size: int, out: int) -> list[Fraction]:
    """ONNX's coordinate transformations, for a resize to more than one element, without rounding.
    The three that take the middle of an element differ only for scales that make no whole size.
    """
    if coordinates == "align_corners":
        return [Fraction(i * (size - 1), out - 1) for i in range(out)]
    if coordinates == "asymmetric":
        return [Fraction(i * size, out) for i in range(out)]
    return [(i + HALF) * size / out - HALF for i in range(out)]


@settings(max_examples=60)
@given(
    coordinates=st.sampled_from(COORDINATES),
    nearest=st.sampled_from(sorted(ROUNDINGS)),
    **SIZES,
)
@example("half_pixel_symmetric", "floor", (2, 5), (2, 3), False)  # ONNX Runtime takes 1 for 2
def test_nearest_to_sizes(coordinates, nearest, size, out, by_axes):
    """ONNX Runtime finds positions in float32. It takes the neighbour where it misses a position
    that is a whole or a half number, so exact positions decide.
    """
    x = np.arange(2 * size[0] * size[1], dtype=np.float32).reshape(1, 2, *size)
    attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    model = resize_model(x, out, by_axes, mode="nearest", **attrs)
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y0", TensorProto.FLOAT, (1, 2, *out))
    )
    (got,) = lower(load_onnx(model, simplify=False)).evaluate({"x": x}).values()
    exact = [exact_positions(coordinates, *axis) for axis in zip(size, out, strict=True)]
    rows, columns = (
        [min(max(ROUNDINGS[nearest](at), 0), n - 1) for at in axis]
        for axis, n in zip(exact, size, strict=True)
    )
    np.testing.assert_array_equal(got, x[:, :, rows][..., columns])
    if all((2 * at).denominator > 1 for axis in exact for at in axis):
        check(model, {"x": x})


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_resize_keeps_the_aspect(policy):
    x = {"x": np.random.default_rng(0).normal(size=(1, 2, 5, 9)).astype(np.float32)}
    model = node_model(
        "Resize",
        x,
        {"sizes": np.array([7, 8], np.int64)},
        ["x", "", "", "sizes"],
        1,
        mode="linear",
        axes=[2, 3],
        keep_aspect_ratio_policy=policy,
    )
    check(model, x)


@pytest.mark.parametrize("shape, scales", [((1, 2, 5), (1, 1, 1.7)), ((2, 5, 3), (1, 0.7, 2.5))])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_by_scales_that_make_no_whole_size(shape, scales, mode):
    x = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    constants = {"scales": np.array(scales, np.float32)}
    check(node_model("Resize", x, constants, ["x", "", "scales"], 1, mode=mode), x)


def test_resize_to_a_whole_position_that_float64_misses():
    """The middle of 7 -> 17 is 8.5 / (17 / 7) - 0.5, which in float64 is a little more than 3."""
    x = {"x": np.arange(7, dtype=np.float32)[None, None]}
    attrs = {"mode": "nearest", "nearest_mode": "ceil", "axes": [2]}
    sizes = {"sizes": np.array([17], np.int64)}
    (got,) = check(node_model("Resize", x, sizes, ["x", "", "", "sizes"], 1, **attrs), x)
    assert got[0, 0, 8] == 3


@pytest.mark.parametrize("nearest_mode", ["floor", "ceil"])
@pytest.mark.parametrize("scale", [0.6, 0.7, 1.4])
def test_a_whole_position_that_a_scale_in_float32_misses(nearest_mode, scale):
    """3 / 0.6 is 5, but less than that if 0.6 is rounded to a float32 first."""
    x = {"x": np.arange(50, dtype=np.float32)[None, None]}
    attrs = {"nearest_mode": nearest_mode, "coordinate_transformation_mode": "asymmetric"}
    scales = {"scales": np.array([1, 1, scale], np.float32)}
    model = node_model("Resize", x, scales, ["x", "", "scales"], 1, mode="nearest", **attrs)
    size = floor(50 * float(scales["scales"][2]))
    wanted = [getattr(np, nearest_mode)(round(i / scale, 6)) for i in range(size)]
    (got,) = lower(load_onnx(model, simplify=False)).evaluate(x).values()
    np.testing.assert_array_equal(got[0, 0], np.minimum(wanted, 49))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_a_resize_to_the_same_size_is_the_identity(mode, coordinates):
    """A NaN stays where it is: no neighbour is added times 0."""
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 6)).astype(np.float32)
    x[0, 0, 2, 3], x[0, 1, 0, 0] = np.nan, np.inf
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    model = resize_model(x, (5, 6), False, **attrs)
    (got,) = check(model, {"x": x})
    np.testing.assert_array_equal(got, x)


def test_resize_crops():
    x = {"x": np.random.default_rng(0).normal(size=(1, 1, 6, 7)).astype(np.float32)}
    constants = {
        "roi": np.array([0, 0, 0.3, -0.2, 1, 1, 0.7, 1.1], np.float32),
        "sizes": np.array([1, 1, 4, 9], np.int64),
    }
    attrs = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.5}
    model = node_model("Resize", x, constants, ["x", "roi", "", "sizes"], 1, mode="linear", **attrs)
    (got,) = check(model, x)
    assert (got == 3.5).any()


def test_a_size_known_only_at_run_time_is_refused():
    x = np.zeros((1, 1, 4, 4), np.float32)
    inputs = {"x": x, "sizes": np.array([1, 1, 2, 2], np.int64)}
    model = node_model("Resize", inputs, {}, ["x", "", "", "sizes"], 1, mode="linear")
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y0", TensorProto.FLOAT, (1, 1, 2, 2))
    )
    with pytest.raises(UnsupportedError, match="known only at run time"):
        load_onnx(model, simplify=False)


def of_opset(model, opset):
    model.opset_import[0].version = opset
    return model


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 1.5, 0.6), (1, 1, 0.5, 0.5)])
def test_a_resize_of_opset_10(mode, scales):
    """It has no region of interest: its second input is the scales."""
    x = {"x": np.random.default_rng(0).normal(size=(1, 2, 10, 10)).astype(np.float32)}
    scaled = {"scales": np.array(scales, np.float32)}
    check(of_opset(node_model("Resize", x, scaled, ["x", "scales"], 1, mode=mode), 10), x)


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_sizes_beside_empty_scales(opset, mode):
    """Inputs that are not given may be tensors without elements, as exporters for opset 11 wrote
    them.
    """
    x = {"x": np.random.default_rng(0).normal(size=(1, 2, 9, 10)).astype(np.float32)}
    empty = np.zeros(0, np.float32)
    given = {"roi": empty, "scales": empty, "sizes": np.array([1, 2, 13, 7], np.int64)}
    model = node_model("Resize", x, given, ["x", "roi", "scales", "sizes"], 1, mode=mode)
    check(of_opset(model, opset), x)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [2.0, 1.7, 0.5])
def test_middles_as_tensorflow_takes_them_for_neighbours(mode, scale):
    """Until opset 12: the middle of an element is not moved back by half of one."""
    x = {"x": np.random.default_rng(0).normal(size=(1, 2, 9, 10)).astype(np.float32)}
    given = {"scales": np.array([1, 1, scale, scale], np.float32), "roi": np.zeros(0, np.float32)}
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
    model = node_model("Resize", x, given, ["x", "roi", "scales"], 1, **attrs)
    check(of_opset(model, 11), x)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "bilinear"},
        {"coordinate_transformation_mode": "tf_half_pixel"},
        {"nearest_mode": "round"},
    ],
)
def test_a_value_that_onnx_lacks_is_named(wrong):
    x = {"x": np.zeros((1, 1, 4, 4), np.float32)}
    scales = {"scales": np.array([1, 1, 1.7, 2], np.float32)}
    (name, value), *_ = wrong.items()
    with pytest.raises(UnsupportedError, match=f"ONNX has no {name} '{value}'"):
        load_onnx(node_model("Resize", x, scales, ["x", "", "scales"], 1, **wrong), simplify=False)
