"""Convolutions of overlapping windows against float64: odd sizes, strides, dilation, one-sided
padding, groups, several images, prologues and epilogues.

Tolerance: 2e-6 x sqrt(k) of the largest magnitude, which float32 sums of k products in any order
stay well inside.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.stage import Stage, TensorType, make_stage
from tests.kernels import runnable, targets
from tests.sketch.test_contractions import check, grouped, op

T = TensorType

# groups, input and output channels of one, size, kernel, stride,
# padding (top, left, bottom, right), dilation
CASES = [
    (1, 16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (1, 3, 40, (23, 21), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
    (1, 5, 7, (12, 10), (3, 2), (2, 1), (0, 1, 2, 0), (1, 2)),
    (1, 20, 33, (7, 8), (2, 5), (1, 3), (0, 0, 0, 0), (1, 1)),
    (1, 9, 17, (9, 9), (3, 5), (1, 1), (4, 4, 4, 4), (2, 2)),
    (1, 4, 1, (5, 6), (5, 5), (1, 1), (4, 0, 0, 4), (1, 1)),
    (1, 256, 20, (3, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (2, 16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (3, 5, 20, (8, 9), (5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    (1, 6, 12, (2, 3), (3, 5), (1, 1), (2, 5, 2, 5), (1, 1)),  # some windows are all zeros
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_channels_last(case: tuple, name: str) -> None:
    check(grouped(case), name, rule=convolution.match)


@pytest.mark.parametrize("case", [c for c in CASES if c[4][1] >= convolution.LEAST_STEPS])
def test_channels_first(case: tuple) -> None:
    """The input lies as in the model, before a transpose: a run is a row of a channel's window."""
    stage = grouped(case, from_nchw=True)
    sketch = convolution.match(stage, runnable("x86-64-v3"))
    assert sketch is not None and sketch.view.channels_first
    check(stage, "x86-64-v3", rule=convolution.match)


@pytest.mark.parametrize("name", targets())
def test_every_config(name: str) -> None:
    check(
        grouped((1, 3, 20, (6, 7), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))),
        name,
        12,
        convolution.match,
    )
    check(
        grouped((1, 64, 9, (3, 6), (3, 3), (2, 1), (1, 1, 1, 1), (1, 1))),
        name,
        12,
        convolution.match,
    )


def window(x: tuple[int, ...], n: int, **attrs: object) -> dict[str, object]:
    given = {"strides": (1, 1), "padding": (1,) * 4, "dilation": (1, 1), "groups": 1}
    return {**given, "layout": "NHWC", **attrs}


def dressed(channels: int = 12, n: int = 19) -> Stage:
    """silu(concat(x, z) + gate) -> conv -> + bias -> gelu -> + residual, stored channels first."""
    size = (2, 7, 9)
    inner, out = T((*size, channels)), T((*size, n))
    parts = T((*size, channels - 5)), T((*size, 5))
    stored = T((2, n, 7, 9))
    operators = [
        op("concat", ("x", "z"), "s", inner, axis=3),
        op("add", ("s", "gate"), "g", inner),
        op("silu", ("g",), "a", inner),
        op("conv2d", ("a", "w"), "c", out, **window(inner.shape, n)),  # type: ignore[arg-type]
        op("add", ("c", "b"), "d", out),
        op("gelu", ("d",), "e", out),
        op("add", ("e", "r"), "f", out),
        op("permute", ("f",), "y", stored, axes=(0, 3, 1, 2)),
    ]
    types = {"x": parts[0], "z": parts[1], "gate": T((2, 1, 1, channels)), "b": T((n,)), "r": out}
    return make_stage(operators, types | {"w": T((n, channels, 3, 3))}, ["w", "b"])


@pytest.mark.parametrize("name", targets())
def test_prologue_and_epilogue(name: str) -> None:
    check(dressed(), name, 3, convolution.match)


def test_borders_are_zeros_behind_a_prologue() -> None:
    """exp(0) is 1, but the padding of the image is 0."""
    size, out = T((1, 5, 6, 8)), T((1, 5, 6, 16))
    operators = [
        op("exp", ("x",), "e", size),
        op("conv2d", ("e", "w"), "y", out, **window(size.shape, 16)),  # type: ignore[arg-type]
    ]
    stage = make_stage(operators, {"x": size, "w": T((16, 8, 3, 3))}, ["w"])
    check(stage, "x86-64-v3", 3, convolution.match)


@pytest.mark.parametrize(
    "case",
    [
        (1, 16, 24, (9, 11), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
        (1, 3, 48, (32, 32), (16, 16), (16, 16), (0, 0, 0, 0), (1, 1)),
        (7, 1, 1, (8, 9), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (1, 4096, 8, (4, 64), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ],
    ids=["1x1", "windows side by side", "depthwise", "rows larger than L2"],
)
def test_not_its_business(case: tuple) -> None:
    assert convolution.match(grouped(case), target("x86-64-v3")) is None


def test_variable_weights_are_left_to_others() -> None:
    stage = grouped(CASES[0], constant=False)
    assert convolution.match(stage, target("x86-64-v3")) is None


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(
    "case",
    [
        (1, 64, 64, (56, 56), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (1, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
    ],
)
def test_is_priced_below_copying_for_every_tap(case: tuple, name: str) -> None:
    machine = target(name)
    policy = AnalyticPolicy(replace(machine, cores=2))
    stage = grouped(case, from_nchw=case[1] == 3)
    rules = gemm.match, convolution.match
    (copied,), (once,) = (policy.picks(rule(stage, machine)) for rule in rules)  # type: ignore[arg-type]
    assert once.seconds < copied.seconds
