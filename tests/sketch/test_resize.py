"""Resizing against the reference: methods, coordinates, rounding, layouts, fused operators."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import ceil, floor

import numpy as np
import pytest

from gtco.graph.fusion.patterns import stage_allowed
from gtco.machine.target import target
from gtco.tensor.analysis.resizing import nearest
from gtco.tensor.sketch.resize import cpu as resize
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    some_kernels_of,
    targets,
)


def resizing(
    size: tuple[int, int],
    out: tuple[int, int],
    method: str = "linear",
    coordinates: str = "half_pixel",
    rounding: str = "round_prefer_floor",
    layout: str = "NHWC",
    channels: int = 37,
    alpha: float = -0.75,
) -> Stage:
    def shape(h: int, w: int) -> tuple[int, ...]:
        return (2, h, w, channels) if layout == "NHWC" else (2, channels, h, w)

    op = Operator(
        "resize2d",
        ("x",),
        "y",
        TensorType(shape(*out)),
        make_attrs(
            method=method,
            coordinates=coordinates,
            rounding=rounding,
            cubic_alpha=alpha,
            layout=layout,
        ),
    )
    return make_stage([op], {"x": TensorType(shape(*size))}, [])


def check(stage: Stage, name: str, tolerance: float = 2e-6) -> None:
    check_each([stage], name, tolerance)


def check_each(stages: Sequence[Stage], name: str, tolerance: float = 2e-6) -> None:
    machine = runnable(name)
    found = [sketch for stage in stages if (sketch := resize.match(stage, machine)) is not None]
    assert len(found) == len(stages)
    inputs = [random_inputs(stage, fresh_seed()) for stage in stages]
    wanted = [reference(stage, given) for stage, given in zip(stages, inputs, strict=True)]
    for n, built in some_kernels_of(found, machine):
        assert_close(built(*inputs[n], unaligned=True), wanted[n], tolerance)


SIZES = [
    ((5, 7), (10, 14)),
    ((8, 9), (3, 4)),
    ((7, 3), (3, 7)),
    ((4, 4), (1, 1)),
    ((1, 1), (4, 5)),
    ((6, 6), (6, 6)),
]
COORDINATES = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_interpolation(method: str, coordinates: str, layout: str) -> None:
    stages = [
        resizing(size, out, method, coordinates, layout=layout, channels=9) for size, out in SIZES
    ]
    check_each(stages, "x86-64-v3")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_nearest(rounding: str, layout: str) -> None:
    for coordinates in COORDINATES:
        stages = [
            resizing(size, out, "nearest", coordinates, rounding, layout, channels=5)
            for size, out in SIZES
        ]
        check_each(stages, "x86-64-v3", 0)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_nearest_positions_are_exact(rounding: str, coordinates: str) -> None:
    """They are compared with rational numbers. Some are ties or whole positions, which floats
    miss.
    """
    rounded = {
        "floor": floor,
        "ceil": ceil,
        "round_prefer_floor": lambda at: ceil(at - Fraction(1, 2)),
        "round_prefer_ceil": lambda at: floor(at + Fraction(1, 2)),
    }[rounding]
    for size, out in product(range(1, 20), range(1, 30)):
        times, plus, over = nearest(size, out, coordinates, rounding)
        for i in range(out):
            if coordinates == "align_corners":
                at = Fraction(i * (size - 1), max(1, out - 1))
            elif coordinates == "asymmetric":
                at = Fraction(i * size, out)
            elif coordinates == "pytorch_half_pixel" and out == 1:
                at = Fraction(0)
            else:
                at = (i + Fraction(1, 2)) * Fraction(size, out) - Fraction(1, 2)
            assert (i * times + plus) // over == rounded(at)


def test_nearest_half_way_between_two() -> None:
    """2 -> 75: the middle lies at 0.5, and a fused multiply-add once made it a little more. The
    second case has positions beyond 2^31 before the division.
    """
    for size, out in (((2, 7), (75, 17)), ((1, 40000), (1, 40001))):
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "ceil"):
            wide = resizing(size, out, "nearest", "half_pixel", rounding, "NCHW", channels=1)
            check(wide, "x86-64-v3", 0)


@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("name", targets())
def test_channels(name: str, method: str) -> None:
    for channels in (1, 3, 16, 37, 150):
        check(resizing((9, 11), (18, 33), method, channels=channels), name)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_prologue_and_epilogue(layout: str) -> None:
    """A feature pyramid: the coarse map is resized and added to the fine one."""
    stage = resizing((5, 6), (10, 12), layout=layout)
    x, y = stage.types["x"], stage.output.type
    operators = [
        Operator("relu", ("t",), "x", x),
        *stage.operators,
        Operator("add", ("y", "f"), "z", y),
    ]
    check(make_stage(operators, {"t": x, "f": y}, []), "x86-64-v3")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", ["x86-64-v3", "icelake-server"])
def test_8_bits_in_and_out(name: str, layout: str) -> None:
    """A quantized file rounds before and behind an upsampling."""
    stage = resizing((9, 20), (18, 40), layout=layout)
    x, y = stage.types["x"], stage.output.type
    operators = [
        Operator("dequantize", ("q", "s", "z"), "x", x),
        *stage.operators,
        Operator(
            "quantize", ("y", "h", "l", "z"), "o", TensorType(y.shape, "uint8"),
            make_attrs(min=0.0, max=255.0),
        ),
    ]  # fmt: skip
    constants = {"s": 0.037, "z": 100.0, "h": 10.0, "l": 0.0}
    types = {c: TensorType(()) for c in constants} | {"q": TensorType(x.shape, "uint8")}
    whole = make_stage(operators, types, [])
    assert stage_allowed(whole.operators)
    machine = runnable(name)
    sketch = resize.match(whole, machine)
    assert sketch is not None
    inputs = random_inputs(whole, fresh_seed())
    for position, tensor in enumerate(i.name for i in whole.inputs):
        if tensor in constants:
            inputs[position] = np.array(constants[tensor], np.float32)
    wanted = reference(whole, inputs)
    for built in some_kernels(sketch, machine):
        got = built(*inputs, unaligned=True)
        # a step where a value lies in the middle of two
        away = np.abs(got.astype(int) - wanted.astype(int))
        assert away.max() <= 1 and (away > 0).mean() < 0.001


def test_not_its_business() -> None:
    stage = make_stage(
        [Operator("relu", ("x",), "y", TensorType((2, 3)))], {"x": TensorType((2, 3))}, []
    )
    assert resize.match(stage, target("x86-64-v3")) is None


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_nearest_positions_beyond_32_bits(layout: str) -> None:
    """The product that a position is the quotient of leaves int32, though no tensor is large."""
    stage = resizing((1, 1_000_003), (1, 1_000_033), "nearest", layout=layout, channels=1)
    check(stage, "x86-64-v3", 0)
