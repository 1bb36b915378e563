"""Depthwise convolution against the reference: layouts, borders, strides, dilation, prologues and
epilogues.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.depthwise import cpu as depthwise
from gtco.tensor.sketch.shared.window import band_height
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    fresh_seed,
    reference,
    runnable,
    some_kernels,
    targets,
)
from tests.sketch.formats.widened import drawn


def conv(
    channels: int,
    size: tuple[int, int],
    kernel: tuple[int, int] = (3, 3),
    strides: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (1, 1, 1, 1),
    dilation: tuple[int, int] = (1, 1),
    layout: str = "NHWC",
    images: int = 2,
) -> tuple[Operator, dict[str, TensorType]]:
    out = [
        (size[i] + padding[i] + padding[i + 2] - (kernel[i] - 1) * dilation[i] - 1) // strides[i]
        + 1
        for i in (0, 1)
    ]

    def shape(h: int, w: int) -> tuple[int, ...]:
        return (images, h, w, channels) if layout == "NHWC" else (images, channels, h, w)

    op = Operator(
        "conv2d",
        ("x", "w"),
        "c",
        TensorType(shape(*out)),
        make_attrs(
            strides=strides, padding=padding, dilation=dilation, groups=channels, layout=layout
        ),
    )
    return op, {"x": TensorType(shape(*size)), "w": TensorType((channels, 1, *kernel))}


def check(stage: Stage, name: str, cores: int = 0) -> None:
    machine = runnable(name)
    machine = replace(machine, cores=cores or machine.cores)
    sketch = depthwise.match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    inputs = [drawn(rng, i.type) for i in stage.inputs]
    wanted = reference(stage, inputs)
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, 1e-5)


CASES = {
    "3x3": conv(40, (9, 11)),
    "odd channels": conv(37, (6, 5)),
    "few channels": conv(3, (12, 12)),
    "several chunks": conv(300, (5, 6), images=1),
    "stride 2": conv(24, (11, 13), strides=(2, 2)),
    "stride 3, no padding": conv(16, (13, 14), strides=(3, 3), padding=(0, 0, 0, 0)),
    "dilation": conv(16, (12, 15), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "dilation and stride": conv(
        16, (13, 17), padding=(3, 2, 1, 4), dilation=(3, 2), strides=(2, 3)
    ),
    "7x7": conv(32, (14, 14), (7, 7), padding=(3, 3, 3, 3)),
    "1x5": conv(8, (6, 20), (1, 5), padding=(0, 2, 0, 2)),
    "kernel larger than the image": conv(16, (2, 3), (5, 5), padding=(2, 2, 2, 2)),
    "padding beyond the kernel": conv(16, (4, 4), (2, 2), padding=(3, 3, 3, 3)),
    "one column": conv(16, (8, 1), (3, 1), padding=(1, 0, 1, 0)),
}


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_channels_last(case: str, name: str) -> None:
    op, types = CASES[case]
    check(make_stage([op], types, ["w"]), name)


@pytest.mark.parametrize(
    "case", ["3x3", "stride 2", "dilation and stride", "kernel larger than the image"]
)
def test_channels_first(case: str) -> None:
    op, types = CASES[case]
    moved = {
        k: TensorType((t.shape[0], t.shape[3], *t.shape[1:3])) if k == "x" else t
        for k, t in types.items()
    }
    n, h, w, c = op.type.shape
    attrs = make_attrs(**{**dict(op.attrs), "layout": "NCHW"})
    first = Operator("conv2d", ("x", "w"), "c", TensorType((n, c, h, w)), attrs)
    stage = make_stage([first], moved, ["w"])
    check(stage, "x86-64-v3")
    check(in_bytes(stage, True), "x86-64-v3")


def in_bytes(stage: Stage, zeros: bool) -> Stage:
    """The stage with weights of 8 bits, the scale of each channel and, if wanted, its zero point
    beside them.
    """
    types = {i.name: i.type for i in stage.inputs}
    types |= {"w": TensorType(types["w"].shape, "int8"), "ws": TensorType(types["w"].shape[:1])}
    beside = ["ws", "wz"] if zeros else ["ws"]
    if zeros:
        types["wz"] = TensorType(types["ws"].shape, "int8")
    operators = [
        replace(op, inputs=(*op.inputs, *beside)) if op.kind == "conv2d" else op
        for op in stage.operators
    ]
    return make_stage(operators, types, [*stage.constants, *beside])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_weights_of_8_bits(case: str, name: str) -> None:
    op, types = CASES[case]
    for zeros in (False, True):
        check(in_bytes(make_stage([op], types, ["w"]), zeros), name)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("images", [1, 2])
def test_bands_of_rows(images: int, cores: int) -> None:
    """Chunks of channels, the last one narrow, of bands that can be dealt out to the cores."""
    op, types = conv(150, (12, 5), images=images)
    stage = make_stage([op], types, ["w"])
    sketch = depthwise.match(stage, target("x86-64-v3"))
    assert sketch is not None
    height = band_height(sketch.geometry, 64, cores)
    assert height == {(1, 2): 6, (1, 3): 4, (2, 3): 4, (2, 4): 6}.get((images, cores), 12)
    assert band_height(sketch.geometry, 150, cores) == 12, "one chunk has the rows in order"
    check(stage, "x86-64-v3", cores)
    check(in_bytes(stage, True), "x86-64-v3", cores)


def test_weights_of_8_bits_are_the_same_as_floats() -> None:
    """To the last bit: they are multiplied by their scales before."""
    op, types = conv(72, (13, 14), images=3)
    machine = runnable("x86-64-v3")
    wide = make_stage([op], types, ["w"])
    x, steps, scales, zeros = (
        drawn(np.random.default_rng(fresh_seed()), i.type) for i in in_bytes(wide, True).inputs
    )
    weights = (steps.astype(np.float32) - zeros[:, None, None, None]) * scales[:, None, None, None]
    results = []
    for stage, arrays in (
        (wide, (x, weights)), (in_bytes(wide, True), (x, steps, scales, zeros)),
    ):  # fmt: skip
        sketch = depthwise.match(stage, machine)
        assert sketch is not None
        results += [kernel(*arrays).tobytes() for kernel in some_kernels(sketch, machine)]
    assert len(set(results)) == 1


def test_scales_that_are_no_constants_are_not_its_business() -> None:
    op, types = conv(24, (6, 7))
    stage = in_bytes(make_stage([op], types, ["w"]), True)
    types = {i.name: i.type for i in stage.inputs}
    for constants in (["w"], ["w", "ws"], []):
        made = make_stage(stage.operators, types, constants)
        assert space_of(made, target("x86-64-v3")).sketches == ()


@pytest.mark.parametrize("name", targets())
def test_segformer_mlp(name: str) -> None:
    """Tokens as an image, a 3 x 3 convolution of each channel, bias and gelu, then tokens again."""
    op, types = conv(72, (8, 7), images=1)
    operators = [
        Operator("reshape", ("t",), "x", types["x"]),
        op,
        Operator("add", ("c", "b"), "s", op.type),
        Operator("gelu", ("s",), "g", op.type),
        Operator("reshape", ("g",), "y", TensorType((1, 56, 72))),
    ]
    types = {"t": TensorType((1, 56, 72)), "w": types["w"], "b": TensorType((72,))}
    stage = make_stage(operators, types, ["w", "b"])
    check(stage, name)
    check(in_bytes(stage, False), name)


def test_prologue_and_residual() -> None:
    op, types = conv(24, (6, 7))
    operators = [
        Operator("relu", ("t",), "x", types["x"]),
        op,
        Operator("add", ("c", "t"), "y", op.type),
    ]
    check(make_stage(operators, {"t": types["x"], "w": types["w"]}, ["w"]), "x86-64-v3")


def test_behind_a_concat_of_which_only_the_border_is_read() -> None:
    """The branch that reads the image never runs, and there an index is known to lie in no part."""
    op, types = conv(3, (1, 2), (1, 1), (3, 1), (1, 0, 1, 0), (2, 1), images=108)
    half, whole = TensorType((108, 3, 1)), TensorType((108, 3, 2))
    operators = [
        Operator("concat", ("a", "b"), "t", whole, make_attrs(axis=2)),
        Operator("multiply", ("t", "s"), "u", whole),
        Operator("reshape", ("u",), "r", TensorType((108, 3, 1, 2))),
        Operator("permute", ("r",), "x", types["x"], make_attrs(axes=(0, 2, 3, 1))),
        op,
    ]
    inputs = {"a": half, "b": half, "s": TensorType((3, 2)), "w": types["w"]}
    check(make_stage(operators, inputs, ["s", "w"]), "x86-64-v4")


def test_weights_that_are_no_constant() -> None:
    op, types = conv(24, (6, 7))
    check(make_stage([op], types, []), "x86-64-v3")


def test_not_its_business() -> None:
    machine = target("x86-64-v3")
    op, types = conv(6, (5, 5))
    dense = Operator(
        op.kind, op.inputs, op.output, op.type, make_attrs(**{**dict(op.attrs), "groups": 1})
    )
    assert (
        depthwise.match(
            make_stage([dense], {**types, "w": TensorType((6, 6, 3, 3))}, ["w"]), machine
        )
        is None
    )
    grouped = Operator(
        op.kind, op.inputs, op.output, op.type, make_attrs(**{**dict(op.attrs), "groups": 2})
    )
    assert (  # a vector is not a multiple of three channels a group
        depthwise.match(
            make_stage([grouped], {**types, "w": TensorType((6, 3, 3, 3))}, ["w"]), machine
        )
        is None
    )


# groups, input and output channels of one, size, kernel, strides, padding, dilation
NARROW = [
    (5, 4, 4, (9, 13), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (9, 2, 2, (7, 6), (3, 2), (2, 1), (0, 1, 2, 0), (1, 2)),
    (3, 8, 8, (6, 7), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    (12, 1, 2, (11, 12), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),  # FastViT: two filters a channel
    (5, 1, 8, (5, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (7, 3, 4, (5, 6), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (17, 5, 1, (5, 6), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1)),
]


def narrow(case: tuple, constant: bool = True) -> Stage:
    """silu -> convolution in narrow groups -> + bias -> gelu."""
    groups, inputs, outputs, size, kernel, strides, padding, dilation = case
    channels = groups * outputs
    made, types = conv(channels, size, kernel, strides, padding, dilation)
    attrs = dict(made.attrs) | {"groups": groups}
    x, out = TensorType((2, *size, groups * inputs)), made.type
    operators = [
        Operator("silu", ("x",), "s", x),
        Operator("conv2d", ("s", "w"), "c", out, make_attrs(**attrs)),
        Operator("add", ("c", "b"), "d", out),
        Operator("gelu", ("d",), "y", out),
    ]
    types |= {"x": x, "w": TensorType((channels, inputs, *kernel)), "b": TensorType((channels,))}
    return make_stage(operators, types, ["w", "b"] if constant else [])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", NARROW)
def test_narrow_groups_and_several_filters_a_channel(case: tuple, name: str) -> None:
    check(narrow(case), name)
    check(in_bytes(narrow(case), True), name)


def test_narrow_groups_with_variable_weights() -> None:
    check(narrow(NARROW[0], constant=False), "x86-64-v3")


def test_groups_that_do_not_divide_a_vector_are_left_to_others() -> None:
    case = (5, 3, 3, (9, 13), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    assert depthwise.match(narrow(case), runnable("x86-64-v3")) is None
