"""Contractions with int8 weights and float32 inputs, against float64 of the same operands. The
weights are widened by the micro-kernel or in scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gtco.machine.target import TARGETS, Target
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.kernels import assert_close, build_each, fresh_seed, reference, runnable
from tests.sketch.test_bfloat16 import chain, machines, window

T = TensorType
TOLERANCE = 2e-6  # float32 sums of products, whose last bits float32 does not hold


def byte(*shape: int) -> TensorType:
    return T(shape, "int8")


def dense(m: int, n: int, k: int, batch: tuple[int, ...] = ()) -> Stage:
    """With the scale of each column and a bias behind the product."""
    made = T((*batch, m, n))
    return chain(
        {"x": T((*batch, m, k)), "w": byte(*batch, k, n), "scale": T((n,)), "bias": T((n,))},
        ("matmul", "x w", "c", made, {}),
        ("multiply", "c scale", "d", made, {}),
        ("add", "d bias", "y", made, {}),
    )


def blocks(m: int, n: int, k: int, block: int) -> Stage:
    """With the scales of blocks of k."""
    made, scales = T((m, n)), T((-(-k // block), n))
    return chain(
        {"x": T((m, k)), "w": byte(k, n), "wscales": scales, "bias": T((n,))},
        ("matmul", "x w wscales", "c", made, {"block": block}),
        ("add", "c bias", "y", made, {}),
    )


def conv(
    size: int, channels: int, n: int, taps: int, layout: str = "NHWC", groups: int = 1
) -> Stage:
    shape = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    out = (2, size, size, n) if layout == "NHWC" else (2, n, size, size)
    attrs = window(taps // 2, layout=layout, groups=groups)
    weights = byte(n, channels // groups, taps, taps)
    return chain({"x": T(shape), "w": weights}, ("conv2d", "x w", "y", T(out), attrs))


STAGES = {
    "dense": dense(29, 72, 48),
    "odd": dense(13, 37, 33),
    "deep": dense(37, 40, 301),  # several blocks of k
    "one_row": dense(1, 50, 130),
    "batches": dense(5, 19, 21, (3,)),
    "normalised_in_front": chain(
        {"x": T((9, 40)), "g": T((40,)), "s": T((40,)), "w": byte(40, 33)},
        ("layer_norm", "x g s", "l", T((9, 40)), {"epsilon": 1e-5}),
        ("matmul", "l w", "y", T((9, 33)), {}),
    ),
    "conv3x3": conv(9, 12, 20, 3),
    "conv_odd": conv(7, 5, 11, 3),
    "stem": conv(13, 3, 20, 5, "NCHW"),
    "grouped": conv(6, 10, 8, 3, groups=2),
    "conv1x1": conv(6, 13, 20, 1),
    "transposed": chain(
        {"x": T((1, 5, 7, 9)), "w": byte(9, 6, 3, 3)},
        (
            "conv_transpose2d",
            "x w",
            "y",
            T((1, 10, 14, 6)),
            {
                "layout": "NHWC",
                "groups": 1,
                "strides": (2, 2),
                "padding": (1,) * 4,
                "output_padding": (1, 1),
            },
        ),
    ),
}


BLOCKS = {
    "whole": blocks(29, 72, 64, 16),
    "odd": blocks(13, 37, 77, 32),
    "deep": blocks(37, 40, 1100, 128),  # several blocks of k, that are not those of the scales
    "one_row": blocks(1, 50, 130, 64),
}


def few(sketch: Sketch) -> Iterator[Config]:
    """The first config, the last one and one between, both of rows that widen and of rows that do
    not.
    """
    every = list(configs(sketch))
    for widens in (False, True):
        mine = [c for c in every if str(c["tile"]).startswith("byte:") == widens]
        yield from {mine[i * (len(mine) - 1) // 2] for i in range(3)} if mine else ()


def check(match: Callable[[Stage, Target], Sketch | None], stage: Stage, name: str) -> set[bool]:
    """Checks the stage's results. Gives True if it has configs of rows that widen, False if it has
    others, or both.
    """
    machine = runnable(name)
    sketch = match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays = [
        rng.integers(-128, 128, i.type.sizes, np.int8)
        if i.type.dtype == "int8"
        else rng.standard_normal(i.type.sizes).astype(np.float32)
        for i in stage.inputs
    ]
    wanted = reference(stage, arrays).astype(np.float64)
    kinds = set()
    for config, kernel in build_each(sketch, few(sketch), machine):
        print(config.to_json())
        kinds.add(str(config["tile"]).startswith("byte:"))
        assert_close(kernel(*arrays), wanted, TOLERANCE)
    return kinds


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES)
def test_products(stage: str, name: str) -> None:
    assert check(gemm.match, STAGES[stage], name) == {False, True}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", BLOCKS)
def test_scales_of_blocks(stage: str, name: str) -> None:
    """Panels are widened and scaled in scratch."""
    assert check(gemm.match, BLOCKS[stage], name) == {False}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", ["conv3x3", "conv_odd", "stem", "grouped"])
def test_windows_read_in_place(stage: str, name: str) -> None:
    assert check(convolution.match, STAGES[stage], name) == {True}


def test_what_no_kernel_is_for() -> None:
    """Winograd's transform would round the weights, and a computed B has no panels."""
    assert winograd.match(STAGES["conv3x3"], TARGETS["x86-64-v3"]) is None
    computed = chain({"x": T((5, 7)), "b": byte(7, 9)}, ("matmul", "x b", "y", T((5, 9)), {}))
    assert gemm.match(computed, TARGETS["x86-64-v3"]) is None
    # nor has TVM a product with the scales of blocks
    alone = chain(
        {"x": T((3, 32)), "w": byte(32, 5), "wscales": T((2, 5))},
        ("matmul", "x w wscales", "y", T((3, 5)), {"block": 16}),
    )
    assert [s.name for s in space_of(alone, TARGETS["x86-64-v3"]).sketches] == ["gemm"]
