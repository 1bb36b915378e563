"""Windows and samples of images on a GPU, emulated, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.codegen.cuda import gpu_code
from gtco.codegen.nvrtc import compile_cuda
from gtco.machine.gpu import ARCHITECTURES
from gtco.tensor.sketch.depthwise import cuda as depthwise
from gtco.tensor.sketch.grid_sample import cuda as grid_sample
from gtco.tensor.sketch.pool import cuda as pool
from gtco.tensor.sketch.resize import cuda as resize
from gtco.tensor.space import Rejection, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.sketches import TOLERANCE, check, compiles, matched, program
from tests.kernels import fresh_seed, random_inputs, reference
from tests.sketch.test_depthwise import CASES, conv
from tests.sketch.test_grid_sample import METHODS, PADDINGS, SAMPLING_TOLERANCE, points, sampling
from tests.sketch.test_pool import pooling
from tests.sketch.test_resize import COORDINATES, resizing


def convolution(name: str, constant: bool = True) -> Stage:
    op, types = CASES[name]
    return make_stage([op], types, ["w"] if constant else [])


@pytest.mark.parametrize("name", [n for n in CASES if n != "several chunks"])
def test_depthwise(name: str) -> None:
    check(depthwise.match, convolution(name), 2)


def test_depthwise_with_weights_that_are_inputs_and_channels_first() -> None:
    check(depthwise.match, convolution("odd channels", constant=False), 2)
    op, types = conv(6, (9, 11), strides=(2, 1), layout="NCHW")
    check(depthwise.match, make_stage([op], types, ["w"]))


@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_depthwise_between_its_neighbours(out: str) -> None:
    """A prologue, a bias and an activation, and a narrow result."""
    op, types = conv(24, (7, 9))
    operators = [
        Operator("relu", ("x",), "r", types["x"]),
        Operator(op.kind, ("r", "w"), op.output, op.type, op.attrs),
        Operator("add", ("c", "b"), "d", op.type),
        Operator("silu", ("d",), "e", op.type),
        Operator("cast", ("e",), "f", TensorType(op.type.shape, out)),
    ]
    types = {**types, "b": TensorType((24,))}
    check(depthwise.match, make_stage(operators, types, ["w", "b"]), 2, TOLERANCE[out])


@pytest.mark.parametrize("group", [(1, 3), (4, 2), (3, 5)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_narrow_groups_of_several_channels(group: tuple[int, int], layout: str) -> None:
    inputs, outputs = group
    groups, size = 4, (5, 6)

    def shape(channels: int) -> tuple[int, ...]:
        return (2, *size, channels) if layout == "NHWC" else (2, channels, *size)

    attrs = make_attrs(strides=(1, 1), padding=(1, 1, 1, 1), dilation=(1, 1), groups=groups,
                       layout=layout)  # fmt: skip
    op = Operator("conv2d", ("x", "w"), "c", TensorType(shape(groups * outputs)), attrs)
    weight = TensorType((groups * outputs, inputs, 3, 3))
    types = {"x": TensorType(shape(groups * inputs)), "w": weight}
    check(depthwise.match, make_stage([op], types, ["w"]), 2)


POOLS = {
    "3x3": pooling("max_pool2d", 12, (9, 11), (3, 3), (2, 2), (1, 1, 1, 1)),
    "channels first": pooling("max_pool2d", 5, (9, 11), (3, 2), (2, 1), (1, 0, 1, 1), "NCHW"),
    "dilated": pooling("max_pool2d", 7, (9, 11), (3, 3), (1, 2), dilation=(2, 2)),
    "ceil": pooling("max_pool2d", 8, (8, 8), (3, 3), (2, 2), ceil_mode=True),
    "mean": pooling("avg_pool2d", 12, (9, 10), (3, 3), (2, 2), (1, 1, 1, 1)),
    "mean with padding": pooling(
        "avg_pool2d", 8, (8, 7), (3, 3), (2, 2), (1, 1, 1, 1), include=True, ceil_mode=True
    ),
    "mean, channels first": pooling("avg_pool2d", 3, (7, 9), (2, 3), (2, 2), layout="NCHW"),
    "whole image": pooling("avg_pool2d", 20, (40, 7), (40, 7), (1, 1)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str) -> None:
    check(pool.match, POOLS[name], 2)


def test_every_config_of_a_small_pool() -> None:
    check(pool.match, pooling("max_pool2d", 4, (5, 4), (2, 2), (1, 1)), 1000)


def test_nan_wins_a_maximum_and_padding_never() -> None:
    stage = POOLS["3x3"]
    (x,) = random_inputs(stage, fresh_seed())
    x[0, 3, 4, 5], x[1, :, :, 2] = np.nan, -np.inf
    check(pool.match, stage, 2, arrays=[x])


def test_pooling_of_narrow_images() -> None:
    for dtype in ("float16", "bfloat16"):
        (op,) = POOLS["mean"].operators
        x = POOLS["mean"].inputs[0].type
        made = Operator(op.kind, ("x",), "y", TensorType(op.type.shape, dtype), op.attrs)
        stage = make_stage([made], {"x": TensorType(x.shape, dtype)}, [])
        given = random_inputs(POOLS["mean"], fresh_seed())[0].astype(np.dtype(dtype))
        wanted = reference(POOLS["mean"], [given.astype(np.float32)])
        check(pool.match, stage, 1, TOLERANCE[dtype], [given], wanted)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
def test_resizing(method: str, coordinates: str) -> None:
    check(resize.match, resizing((5, 7), (10, 13), method, coordinates, channels=9), 1)
    check(resize.match, resizing((8, 9), (3, 4), method, coordinates, channels=8), 1)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_ceil"])
def test_resizing_to_the_nearest_pixel_is_exact(rounding: str) -> None:
    for size, out in (((7, 3), (3, 7)), ((1, 1), (4, 5))):
        stage = resizing(size, out, "nearest", "asymmetric", rounding, "NCHW", channels=3)
        check(resize.match, stage, 1, 0)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_resizing_between_its_neighbours(layout: str) -> None:
    """A feature pyramid, in a narrow format: the coarse map is resized and added to the fine
    one.
    """
    stage = resizing((5, 6), (10, 12), layout=layout, channels=24)
    x, y = stage.types["x"], stage.output.type
    operators = [
        Operator("relu", ("t",), "x", x),
        *stage.operators,
        Operator("add", ("y", "f"), "z", y),
        Operator("cast", ("z",), "o", TensorType(y.shape, "float16")),
    ]
    made = make_stage(operators, {"t": x, "f": y}, [])
    check(resize.match, made, 4, TOLERANCE["float16"])


def check_samples(stage: Stage, most: int = 1) -> None:
    """Compares with the reference in float32, because the kernel finds its points in float32: in
    float64 the nearest pixel may be another one.
    """
    seed = fresh_seed()
    arrays = random_inputs(stage, seed)
    k = [i.name for i in stage.inputs].index("grid")
    arrays[k] = points(arrays[k].shape, seed)
    wanted = reference(stage, arrays, precise=False)
    check(grid_sample.match, stage, most, SAMPLING_TOLERANCE, arrays, wanted)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_sampling(method: str, padding: str, align: bool) -> None:
    check_samples(sampling((7, 5), (4, 9), 8, method, padding, align))


def test_sampling_of_odd_channels_and_of_channels_first() -> None:
    check_samples(sampling((9, 11), (1, 57), 5), 2)
    check_samples(sampling((9, 11), (5, 7), 4, layout="NCHW"), 2)


def test_points_that_are_no_points_read_the_first_edge() -> None:
    stage = sampling((3, 4), (1, 5), 8, padding="border", images=1)
    x = random_inputs(stage, fresh_seed())[0]
    grid = np.zeros((1, 1, 5, 2), np.float32)
    grid[0, 0] = [(np.nan, np.nan), (np.inf, -np.inf), (1e30, 1e30), (-1e30, 0), (1, 1)]
    wanted = reference(stage, [x, grid], precise=False)
    check(grid_sample.match, stage, 2, SAMPLING_TOLERANCE, [x, grid], wanted)


def test_deformable_attention() -> None:
    """Heads after pixels, locations turned into a grid, and a weight for each point."""
    images, heads, h, w, depth, queries, places = 1, 3, 4, 5, 16, 7, 4
    many = images * heads
    image, result = TensorType((many, h, w, depth)), TensorType((many, queries, places, depth))
    grid, weight = TensorType((many, queries, places, 2)), TensorType((many, queries, places, 1))
    split = TensorType((images, h, w, heads, depth))
    moved = TensorType((images, heads, h, w, depth))
    attrs = make_attrs(method="linear", padding="zeros", align_corners=False, layout="NHWC")
    operators = [
        Operator("reshape", ("v",), "v5", split),
        Operator("permute", ("v5",), "v6", moved, make_attrs(axes=(0, 3, 1, 2, 4))),
        Operator("reshape", ("v6",), "x", image),
        Operator("add", ("g", "g"), "twice", grid),
        Operator("subtract", ("twice", "one"), "grid", grid),
        Operator("grid_sample", ("x", "grid"), "y", result, attrs),
        Operator("multiply", ("y", "a"), "z", result),
    ]
    value = TensorType((images, h * w, heads * depth))
    types = {"v": value, "g": grid, "a": weight, "one": TensorType((1,))}
    stage = make_stage(operators, types, [])
    arrays = random_inputs(stage, fresh_seed())
    named = dict(zip((i.name for i in stage.inputs), arrays, strict=True))
    named["g"][:] = np.random.default_rng(fresh_seed()).uniform(-0.1, 1.1, grid.sizes)
    named["one"][:] = 1
    wanted = reference(stage, arrays, precise=False)
    check(grid_sample.match, stage, 4, SAMPLING_TOLERANCE, arrays, wanted)
    text = program(matched(grid_sample.match, stage)).source
    assert text.count("gtco::load<4>") == 4 and "gtco::store<4>" in text


def test_channels_and_weights_are_read_at_once() -> None:
    text = program(matched(depthwise.match, convolution("3x3"))).source
    assert text.count("gtco::load<4>") == 2 and "gtco::store<4>" in text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    compiles(matched(depthwise.match, convolution("7x7")), arch)
    compiles(matched(pool.match, POOLS["3x3"]), arch)
    compiles(matched(resize.match, resizing((20, 30), (40, 60), "cubic", channels=64)), arch)
    compiles(matched(grid_sample.match, sampling((20, 30), (300, 4), 32)), arch)


def test_few_spills_are_compiled_away() -> None:
    """If the compiler is only told the threads, it gives this kernel 48 registers and spills a few
    bytes.
    """
    op, types = conv(96, (56, 56), kernel=(7, 7), padding=(3, 3, 3, 3), images=1)
    add = Operator("add", ("c", "b"), "d", op.type)
    stage = make_stage([op, add], {**types, "b": TensorType((96,))}, ["w", "b"])
    sketch, wanted = matched(depthwise.match, stage), {"vector": 4, "strip": 2, "threads": 64}
    made = program(sketch, next(c for c in configs(sketch) if c.by_name == wanted))
    images = gpu_code(made, sketch.target)
    assert not isinstance(images, Rejection)
    assert 0 < compile_cuda(made.source, "sm_80").spills <= 64 and not images["sm_80"].spills
    assert images["sm_80"].registers <= 72  # as reckoned: 68, given out in eights
