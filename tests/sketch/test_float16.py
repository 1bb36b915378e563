"""Contractions with float16 weights and float32 inputs, against float64 of the same operands. The
weights are widened by the micro-kernel or in scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gtco.machine.target import TARGETS, Target
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.kernels import assert_close, build_each, fresh_seed, reference, runnable
from tests.sketch.test_bfloat16 import chain, machines, window

T = TensorType
TOLERANCE = 2e-6  # float32 sums of products, whose last bits float32 does not hold


def half(*shape: int) -> TensorType:
    return T(shape, "float16")


def dense(m: int, n: int, k: int) -> Stage:
    return chain(
        {"x": T((m, k)), "w": half(k, n), "bias": T((n,))},
        ("matmul", "x w", "c", T((m, n)), {}),
        ("add", "c bias", "y", T((m, n)), {}),
    )


def conv(
    size: int, channels: int, n: int, taps: int, layout: str = "NHWC", groups: int = 1
) -> Stage:
    shape = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    out = (2, size, size, n) if layout == "NHWC" else (2, n, size, size)
    attrs = window(taps // 2, layout=layout, groups=groups)
    weights = half(n, channels // groups, taps, taps)
    return chain({"x": T(shape), "w": weights}, ("conv2d", "x w", "y", T(out), attrs))


STAGES = {
    "dense": dense(29, 72, 48),
    "odd": dense(13, 37, 33),
    "deep": dense(37, 40, 301),  # several blocks of k
    "one_row": dense(1, 50, 130),
    "both": chain({"x": half(13, 33), "w": half(33, 37)}, ("matmul", "x w", "y", T((13, 37)), {})),
    "normalised_in_front": chain(
        {"x": T((9, 40)), "g": T((40,)), "s": T((40,)), "w": half(40, 33)},
        ("layer_norm", "x g s", "l", T((9, 40)), {"epsilon": 1e-5}),
        ("matmul", "l w", "y", T((9, 33)), {}),
    ),
    "conv3x3": conv(9, 12, 20, 3),
    "conv_odd": conv(7, 5, 11, 3),
    "stem": conv(13, 3, 20, 5, "NCHW"),
    "grouped": conv(6, 10, 8, 3, groups=2),
    "conv1x1": conv(6, 13, 20, 1),
    "transposed": chain(
        {"x": T((1, 5, 7, 9)), "w": half(9, 6, 3, 3)},
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


def few(sketch: Sketch) -> Iterator[Config]:
    """The first config, the last one and one between, both of rows that widen and of rows that do
    not.
    """
    every = list(configs(sketch))
    for widens in (False, True):
        mine = [c for c in every if str(c["tile"]).startswith("half:") == widens]
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
    arrays = [rng.standard_normal(i.type.sizes).astype(i.type.dtype) for i in stage.inputs]
    wanted = reference(stage, arrays).astype(np.float64)
    kinds = set()
    for config, kernel in build_each(sketch, few(sketch), machine):
        print(config.to_json())
        kinds.add(str(config["tile"]).startswith("half:"))
        assert_close(kernel(*arrays), wanted, TOLERANCE)
    return kinds


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES)
def test_products(stage: str, name: str) -> None:
    assert check(gemm.match, STAGES[stage], name) == {False, True}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", ["conv3x3", "conv_odd", "stem", "grouped"])
def test_windows_read_in_place(stage: str, name: str) -> None:
    assert check(convolution.match, STAGES[stage], name) == {True}


def test_what_no_kernel_is_for() -> None:
    """Winograd's transform would round the weights again, and a computed B has no panels."""
    assert winograd.match(STAGES["conv3x3"], TARGETS["x86-64-v3"]) is None
    computed = chain({"x": T((5, 7)), "b": half(7, 9)}, ("matmul", "x b", "y", T((5, 9)), {}))
    assert gemm.match(computed, TARGETS["x86-64-v3"]) is None
