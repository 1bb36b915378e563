"""Pooling against the reference: layouts, borders, ceil mode, divisors, NaN, fused operators."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.pool import cpu as pool
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)


def pooling(
    kind: str,
    channels: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    layout: str = "NHWC",
    dilation: tuple[int, int] = (1, 1),
    include: bool = False,
    ceil_mode: bool = False,
) -> Stage:
    out = []
    for i in (0, 1):
        room = size[i] + padding[i] + padding[i + 2] - (kernel[i] - 1) * dilation[i] - 1
        steps = -(-room // strides[i]) if ceil_mode else room // strides[i]
        if ceil_mode and steps * strides[i] >= size[i] + padding[i]:
            steps -= 1  # the last window must start inside
        out.append(steps + 1)

    def shape(h: int, w: int) -> tuple[int, ...]:
        return (2, h, w, channels) if layout == "NHWC" else (2, channels, h, w)

    extra = {"dilation": dilation} if kind == "max_pool2d" else {"count_include_pad": include}
    op = Operator(
        kind,
        ("x",),
        "y",
        TensorType(shape(*out)),
        make_attrs(kernel=kernel, strides=strides, padding=padding, layout=layout, **extra),
    )
    return make_stage([op], {"x": TensorType(shape(*size))}, [])


def check(stage: Stage, name: str) -> None:
    machine = runnable(name)
    sketch = pool.match(stage, machine)
    assert sketch is not None
    inputs = random_inputs(stage, fresh_seed())
    wanted = reference(stage, inputs)
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, 1e-6)


CASES = {
    "resnet's stem": dict(
        channels=40, size=(12, 15), kernel=(3, 3), strides=(2, 2), padding=(1, 1, 1, 1)
    ),
    "2x2": dict(channels=19, size=(8, 10), kernel=(2, 2), strides=(2, 2)),
    "overlapping": dict(
        channels=5, size=(9, 9), kernel=(5, 3), strides=(1, 2), padding=(2, 1, 2, 1)
    ),
    "ceil mode": dict(channels=16, size=(7, 10), kernel=(3, 3), strides=(2, 2), ceil_mode=True),
    "ceil mode, padded": dict(
        channels=16,
        size=(8, 9),
        kernel=(3, 3),
        strides=(2, 2),
        padding=(1, 1, 1, 1),
        ceil_mode=True,
    ),
    "stride 3": dict(channels=3, size=(9, 70), kernel=(3, 5), strides=(2, 3), padding=(1, 2, 1, 1)),
    "long strides": dict(channels=3, size=(20, 90), kernel=(9, 10), strides=(8, 5)),
    "wide": dict(channels=2, size=(5, 41), kernel=(3, 3), strides=(1, 1), padding=(1, 1, 1, 1)),
    "global": dict(channels=33, size=(7, 6), kernel=(7, 6), strides=(1, 1)),
    "one channel": dict(
        channels=1, size=(12, 37), kernel=(9, 9), strides=(1, 1), padding=(4, 4, 4, 4)
    ),
    "one channel, strided": dict(channels=1, size=(9, 70), kernel=(3, 5), strides=(2, 3)),
    "one channel, one column": dict(channels=1, size=(20, 1), kernel=(3, 1), strides=(1, 1)),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_max(case: str, name: str, layout: str) -> None:
    check(pooling("max_pool2d", layout=layout, **CASES[case]), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("include", [False, True], ids=["inside", "padding counts"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("case", CASES)
def test_mean(case: str, layout: str, include: bool) -> None:
    name = "x86-64-v3" if include else ("x86-64-v4" if target().lanes == 16 else "x86-64-v3")
    check(pooling("avg_pool2d", layout=layout, include=include, **CASES[case]), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_dilated_maximum(layout: str) -> None:
    check(
        pooling("max_pool2d", 16, (11, 42), (3, 3), (1, 2), (2, 2, 2, 2), layout, (2, 2)),
        "x86-64-v3",
    )


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("strides", [(3, 3), (2, 2), (1, 1), (2, 7)], ids=str)
def test_nan_wins_and_infinities_count(
    strides: tuple[int, int], name: str, layout: str
) -> None:
    """At every place of a window, also beside other NaN and infinities."""
    machine = runnable(name)
    stage = pooling("max_pool2d", 8, (7, 40), (3, 3), strides, (1, 1, 1, 1), layout)
    own, fallback = sketches(stage, machine)
    (x,) = random_inputs(stage, fresh_seed())
    special = np.random.default_rng(fresh_seed()).integers(0, 12, x.shape)
    x[special == 0], x[special == 1], x[special == 2] = np.nan, np.inf, -np.inf
    for sketch in (own, fallback):
        got = build(sketch, next(iter(configs(sketch))), machine)(x)
        np.testing.assert_array_equal(got, reference(stage, [x]))


def test_one_channel_is_pooled_in_vectors() -> None:
    """Channels last, one channel has the bytes of channels first, and the same loops."""
    machine = runnable("x86-64-v3")
    window = dict(kernel=(9, 9), strides=(1, 1), padding=(4, 4, 4, 4))
    found = [
        pool.match(pooling("max_pool2d", 1, (64, 64), layout=layout, **window), machine)  # type: ignore[arg-type]
        for layout in ("NHWC", "NCHW")
    ]
    last, first = (next(iter(configs(sketch))) for sketch in found if sketch is not None)
    assert last == first
    last, first = (sketch.workload(last) for sketch in found if sketch is not None)
    assert last == first


def test_prologue_and_epilogue_channels_first() -> None:
    """relu(x) is pooled, multiplied by a factor for each channel, and stored channels last."""
    stage = pooling("max_pool2d", 5, (8, 38), (3, 3), (2, 2), (1, 1, 1, 1), "NCHW")
    n, c, h, w = (int(d) for d in stage.output.type.shape)
    before = Operator("relu", ("t",), "x", TensorType((2, 5, 8, 38)))
    after = [
        Operator("multiply", ("y", "s"), "m", TensorType((n, c, h, w))),
        Operator("permute", ("m",), "o", TensorType((n, h, w, c)), make_attrs(axes=(0, 2, 3, 1))),
    ]
    inputs = {"t": TensorType((2, 5, 8, 38)), "s": TensorType((5, 1, 1))}
    check(make_stage([before, *stage.operators, *after], inputs, []), "x86-64-v3")


def test_prologue_and_epilogue() -> None:
    stage = pooling("avg_pool2d", 24, (8, 8), (2, 2), (2, 2))
    shape = stage.output.type.shape
    before = Operator("relu", ("t",), "x", TensorType((2, 8, 8, 24)))
    after = [
        Operator("multiply", ("y", "s"), "m", TensorType(shape)),
        Operator("reshape", ("m",), "o", TensorType((2, 16, 24))),
    ]
    check(
        make_stage(
            [before, *stage.operators, *after],
            {"t": TensorType((2, 8, 8, 24)), "s": TensorType((24,))},
            [],
        ),
        "x86-64-v3",
    )


def test_not_its_business() -> None:
    stage = make_stage(
        [Operator("relu", ("x",), "y", TensorType((2, 3)))], {"x": TensorType((2, 3))}, []
    )
    assert pool.match(stage, target("x86-64-v3")) is None
