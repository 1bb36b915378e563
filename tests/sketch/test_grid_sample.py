"""Sampling images at points, against the reference and, in all corner cases, against ONNX
Runtime.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import gtco
from gtco.machine.target import target
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.grid_sample import cpu as grid_sample
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    build_each,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)

T = TensorType
METHODS, PADDINGS = ("nearest", "linear"), ("zeros", "border", "reflection")
# A coordinate is rounded up to four times, with or without a fused multiply-add, at numbers up to
# the image's size (11 here): it is off by 4 * 11 * 2**-24 = 2.6e-6 at most. Between neighbours an
# image changes by up to twice its largest value, and a point has two coordinates.
SAMPLING_TOLERANCE = 1e-5


def sampling(
    size: tuple[int, int],
    out: tuple[int, int],
    channels: int,
    method: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
    layout: str = "NHWC",
    images: int = 2,
) -> Stage:
    def shape(h: int, w: int) -> tuple[int, ...]:
        return (images, h, w, channels) if layout == "NHWC" else (images, channels, h, w)

    op = Operator(
        "grid_sample",
        ("x", "grid"),
        "y",
        T(shape(*out)),
        make_attrs(method=method, padding=padding, align_corners=align_corners, layout=layout),
    )
    return make_stage([op], {"x": T(shape(*size)), "grid": T((images, *out, 2))}, [])


def points(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Points that are mostly inside the image; some are far outside, and some exactly on its
    edges.
    """
    rng = np.random.default_rng(seed)
    grid = rng.uniform(-1.3, 1.3, shape)
    chosen = rng.random(shape)
    grid = np.where(chosen < 0.05, rng.choice([-1.0, 1.0, 0.0, -40.5, 77.0], shape), grid)
    return grid.astype(np.float32)


def check(stage: Stage, name: str, every: bool = False) -> None:
    """Compares with the reference, which finds the points in float32, as the kernel does: in
    float64 the nearest pixel may be another one.
    """
    machine = runnable(name)
    sketch = grid_sample.match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    inputs = random_inputs(stage, seed)
    k = [i.name for i in stage.inputs].index("grid")
    inputs[k] = points(inputs[k].shape, seed)
    wanted = reference(stage, inputs, precise=False)
    each = [kernel for _, kernel in build_each(sketch, configs(sketch), machine)] if every else []
    for built in each or some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, SAMPLING_TOLERANCE)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_and_paddings(method: str, padding: str, align: bool) -> None:
    check(sampling((7, 5), (4, 9), 19, method, padding, align), "x86-64-v3")
    check(sampling((1, 6), (3, 3), 8, method, padding, align), "x86-64-v3")


@pytest.mark.parametrize("name", targets())
def test_channels_and_points(name: str) -> None:
    """Widths of less than a vector and of several vectors; blocks that divide the points and blocks
    that do not.
    """
    for channels, out in ((1, (5, 7)), (3, (131, 1)), (32, (60, 4)), (37, (1, 257))):
        check(sampling((9, 11), out, channels), name, every=True)


def test_prologues_and_epilogue() -> None:
    """Deformable attention: heads after pixels, locations turned into a grid, and a weight for each
    point.
    """
    images, heads, h, w, depth, queries, places = 2, 3, 4, 5, 16, 7, 4
    value = (images, h * w, heads * depth)
    stage = make_stage(
        [
            Operator("reshape", ("v",), "v5", T((images, h, w, heads, depth))),
            Operator(
                "permute",
                ("v5",),
                "v6",
                T((images, heads, h, w, depth)),
                make_attrs(axes=(0, 3, 1, 2, 4)),
            ),
            Operator("reshape", ("v6",), "x", T((images * heads, h, w, depth))),
            Operator("multiply", ("at", "two"), "doubled", T((images * heads, queries, places, 2))),
            Operator(
                "subtract", ("doubled", "one"), "grid", T((images * heads, queries, places, 2))
            ),
            *sampling((h, w), (queries, places), depth, images=images * heads).operators,
            Operator("multiply", ("y", "weight"), "z", T((images * heads, queries, places, depth))),
            Operator("reshape", ("z",), "out", T((images, heads, queries * places, depth))),
        ],
        {
            "v": T(value),
            "at": T((images * heads, queries, places, 2)),
            "two": T((1,)),
            "one": T((1,)),
            "weight": T((images * heads, queries, places, 1)),
        },
        [],
    )
    for name in targets():
        machine = runnable(name)
        sketch = grid_sample.match(stage, machine)
        assert sketch is not None and sketch.gathers == (0, 0)
        inputs = random_inputs(stage, fresh_seed())
        wanted = reference(stage, inputs, precise=False)
        for built in some_kernels(sketch, machine):
            assert_close(built(*inputs), wanted, SAMPLING_TOLERANCE)


def onnx_runtime(
    x: np.ndarray, grid: np.ndarray, mode: str, padding: str, align: bool
) -> np.ndarray:
    n, c, _, _ = x.shape
    node = helper.make_node(
        "GridSample", ["x", "g"], ["y"], mode=mode, padding_mode=padding, align_corners=int(align)
    )
    shapes = {"x": x.shape, "g": grid.shape, "y": (n, c, *grid.shape[1:3])}
    x_, g_, y_ = (helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in shapes.items())
    model = helper.make_model(
        helper.make_graph([node], "g", [x_, g_], [y_]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x, "g": grid})[0]


STRANGE = np.array(
    [np.nan, np.inf, -np.inf, 3e5, -7e4, 1e20, -1e30, -1, 1, 0, 5.3, -7.7, 1.25], np.float32
)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_as_onnx_runtime(method: str, padding: str, align: bool) -> None:
    """Kernel and fallback for points that are not numbers or far away, and pixels that are NaN or
    infinite.

    If ONNX Runtime's weights cancel (beyond 2^24 pixels, border and reflection) it gives 0, and
    gtco gives the pixel: such points are left out.
    """
    x = np.arange(1, 3 * 4 * 16 + 1, dtype=np.float32).reshape(1, 16, 3, 4)
    x[0, ::3, 1, 1], x[0, 1::3, 0, 0], x[0, 2::3, 2, 3] = np.nan, np.inf, -np.inf
    ys, xs = np.meshgrid(STRANGE, STRANGE)
    grid = np.stack([xs, ys], -1)[None].astype(np.float32)
    wanted = onnx_runtime(x, grid, method, padding, align)
    machine = runnable("x86-64-v3")
    out = grid.shape[1:3]
    stage = sampling((3, 4), (out[0], out[1]), 16, method, padding, align, images=1)
    sketch = grid_sample.match(stage, machine)
    assert sketch is not None
    got = build(sketch, first_config(sketch), machine)(x.transpose(0, 2, 3, 1), grid)
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), wanted, rtol=2e-5)
    for layout in ("NCHW", "NHWC"):
        stage = sampling((3, 4), (out[0], out[1]), 16, method, padding, align, layout, 1)
        slow = fallback.match(stage, machine)
        assert slow is not None
        image = x if layout == "NCHW" else x.transpose(0, 2, 3, 1)
        got = build(slow, first_config(slow), machine)(image, grid)
        got = got if layout == "NCHW" else got.transpose(0, 3, 1, 2)
        np.testing.assert_allclose(got, wanted, rtol=2e-5)


def test_not_its_business() -> None:
    machine = target("x86-64-v3")
    assert grid_sample.match(sampling((4, 4), (2, 2), 3, layout="NCHW"), machine) is None
    relu = make_stage([Operator("relu", ("x",), "y", T((2, 3)))], {"x": T((2, 3))}, [])
    assert grid_sample.match(relu, machine) is None


def test_a_float64_grid_is_sampled_by_the_kernel() -> None:
    """TorchScript exports deformable attention with such a grid. ONNX Runtime has no kernel for
    these two dtypes, so it gets the same grid in float32.
    """
    rng = np.random.default_rng(fresh_seed())
    x = rng.standard_normal((2, 16, 5, 7)).astype(np.float32)
    grid = rng.uniform(-1.2, 1.2, (2, 6, 9, 2)).astype(np.float32)
    node = helper.make_node("GridSample", ["x", "g"], ["y"], mode="linear")
    float32, float64 = TensorProto.FLOAT, TensorProto.DOUBLE
    given = [
        helper.make_tensor_value_info("x", float32, x.shape),
        helper.make_tensor_value_info("g", float64, grid.shape),
    ]
    out = [helper.make_tensor_value_info("y", float32, (2, 16, 6, 9))]
    model = helper.make_model(
        helper.make_graph([node], "g", given, out),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    compiled = gtco.compile_model(model, threads=1)
    sketches = {stage["schedule"]["sketch"] for stage in compiled.stages}
    assert "grid_sample" in sketches and "fallback" not in sketches
    got = compiled(x, grid.astype(np.float64))
    wanted = onnx_runtime(x, grid, "linear", "zeros", False)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
