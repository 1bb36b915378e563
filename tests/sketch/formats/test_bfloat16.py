"""Contractions of bfloat16 operands, by every kind of row, against float64 of the same operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gtco.machine.target import Target, detect
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import assert_close, build, build_each, fresh_seed, reference, runnable

T = TensorType
# rounding of up to 300 float32 sums of exact products; the largest sums are in the middle
TOLERANCE = 2e-6
DEEP = 1e-5  # and of up to 4608
ROUNDED = 2.0**-8  # of a result that is stored as bfloat16: half a unit of its last place


def half(*shape: int) -> TensorType:
    return T(shape, "bfloat16")


def chain(types: dict[str, TensorType], *rows: tuple[str, str, str, TensorType, Any]) -> Stage:
    """Operators given as (kind, inputs, output, type, attributes); tensors called w... are
    constants.
    """
    operators = [Operator(k, tuple(i.split()), o, t, make_attrs(**a)) for k, i, o, t, a in rows]
    known = {**types, **{o.output: o.type for o in operators}}
    return make_stage(operators, known, [n for n in types if n.startswith("w")])


def dense(m: int, n: int, k: int, *, constant: bool = True, out: str = "float32") -> Stage:
    b = "w" if constant else "b"
    rows: list[tuple[str, str, str, TensorType, Any]] = [
        ("matmul", f"x {b}", "c", T((m, n)), {}),
        ("add", "c bias", "y", T((m, n)), {}),
    ]
    if out != "float32":
        rows.append(("cast", "y", "z", T((m, n), out), {}))
    return chain({"x": half(m, k), b: half(k, n), "bias": T((n,))}, *rows)


def window(pad: int, **attrs: Any) -> dict[str, Any]:
    given = {"layout": "NHWC", "groups": 1, "strides": (1, 1), "dilation": (1, 1), **attrs}
    return {"padding": (pad,) * 4, **given}


def conv(size: int, channels: int, n: int, taps: int, layout: str = "NHWC", **attrs: Any) -> Stage:
    image = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    attrs = window(taps // 2, layout=layout, **attrs)
    (top, left, *_), strides, dilation = attrs["padding"], attrs["strides"], attrs["dilation"]
    out = tuple(
        (size + 2 * p - (taps - 1) * d - 1) // s + 1
        for p, s, d in zip((top, left), strides, dilation, strict=True)
    )
    shape = (2, *out, n) if layout == "NHWC" else (2, n, *out)
    weights = half(n, channels // attrs["groups"], taps, taps)
    row = ("conv2d", "x w", "y", T(shape), attrs)
    return chain({"x": half(*image), "w": weights}, row)


STAGES = {
    "dense": dense(29, 72, 48),
    "odd": dense(13, 37, 33),
    "deep": dense(7, 40, 301),
    "one_row": dense(1, 50, 130),
    "computed": dense(19, 35, 47, constant=False),
    "computed_blocks": dense(5, 64, 260, constant=False),
    "stored_rounded": dense(13, 37, 33, out="bfloat16"),
    "rounded_in_front": chain(
        {"x": T((11, 45)), "w": half(45, 33)},
        ("cast", "x", "h", half(11, 45), {}),
        ("matmul", "h w", "y", T((11, 33)), {}),
    ),
    "normalised_in_front": chain(
        {"x": T((9, 40)), "g": T((40,)), "s": T((40,)), "w": half(40, 33)},
        ("layer_norm", "x g s", "l", T((9, 40)), {"epsilon": 1e-5}),
        ("cast", "l", "h", half(9, 40), {}),
        ("matmul", "h w", "y", T((9, 33)), {}),
    ),
    "batches": chain(
        {"x": half(3, 10, 21), "b": half(3, 21, 18)}, ("matmul", "x b", "y", T((3, 10, 18)), {})
    ),
    "transposed": chain(
        {"x": half(10, 21), "b": half(18, 21)},
        ("permute", "b", "t", half(21, 18), {"axes": (1, 0)}),
        ("matmul", "x t", "y", T((10, 18)), {}),
    ),
    "one_step": chain(  # half a pair, which the pieces of a concat hold
        {"x": half(9, 1), "b": half(7), "d": half(11)},
        ("concat", "b d", "e", half(18), {"axis": 0}),
        ("reshape", "e", "f", half(1, 18), {}),
        ("matmul", "x f", "y", T((9, 18)), {}),
    ),
    "conv3x3": conv(9, 12, 20, 3),
    "conv3x3_odd": conv(7, 5, 11, 3),
    "stem": conv(19, 3, 20, 7, "NCHW", strides=(2, 2)),
    "patches": conv(16, 3, 20, 4, "NCHW", strides=(4, 4), padding=(0,) * 4),
    "grouped": conv(6, 10, 8, 3, groups=2),
    "conv1x1": conv(6, 13, 20, 1),
}


def inputs(stage: Stage, seed: int) -> list[np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    return [
        rng.standard_normal([int(d) for d in i.type.shape]).astype(dtypes[i.type.dtype])
        for i in stage.inputs
    ]


def few(sketch: Sketch, count: int) -> Iterable[Config]:
    """The first config, the last one and some between, for every kind of row."""
    every = list(configs(sketch))
    for kind in dict.fromkeys(str(c["tile"]).partition(":")[0] for c in every):
        mine = [c for c in every if str(c["tile"]).startswith(kind)]
        yield from {mine[i * (len(mine) - 1) // (count - 1)] for i in range(count)}


def machines() -> list[str]:
    """8 lanes, and this machine with every kind of row that it has."""
    return ["x86-64-v3", "native"]


def check(
    match: Callable[[Stage, Target], Sketch | None], stage: Stage, name: str, tolerance: float
) -> None:
    """Runs a few configs of every kind of row, and compares them with float64 of the same
    operands.
    """
    machine = runnable(name)
    sketch = match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, fresh_seed())
    wanted = reference(stage, arrays).astype(np.float64)
    for config, kernel in build_each(sketch, few(sketch, 3), machine):
        print(config.to_json())
        got = kernel(*arrays)
        assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_products(stage: Stage, name: str) -> None:
    # One unit of difference: a float32 may lie on the other side of the middle of two bfloat16.
    rounds = stage.output.type.dtype == "bfloat16" or stage.operators[0].kind == "layer_norm"
    check(gemm.match, stage, name, 2 * ROUNDED if rounds else TOLERANCE)


WINDOWS = {
    "conv3x3": conv(9, 12, 20, 3),
    "strided": conv(11, 6, 33, 3, strides=(2, 1)),
    "dilated": conv(9, 8, 17, 3, dilation=(2, 2), padding=(2,) * 4),
    "grouped": conv(8, 20, 24, 5, groups=2),
    "wide": conv(4, 512, 20, 3),  # pixels of 1 KiB, with gaps between them
    "channels_first": conv(9, 6, 20, 4, "NCHW", padding=(2, 2, 2, 2)),
    "dressed": chain(
        {"x": T((2, 7, 9, 12)), "w": half(19, 12, 3, 3), "b": T((19,)), "r": T((2, 7, 9, 19))},
        ("silu", "x", "s", T((2, 7, 9, 12)), {}),
        ("cast", "s", "h", half(2, 7, 9, 12), {}),
        ("conv2d", "h w", "c", T((2, 7, 9, 19)), window(1)),
        ("add", "c b", "d", T((2, 7, 9, 19)), {}),
        ("add", "d r", "e", T((2, 7, 9, 19)), {}),
        ("cast", "e", "y", half(2, 7, 9, 19), {}),
    ),
}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", WINDOWS.values(), ids=WINDOWS)
def test_windows_read_in_place(stage: Stage, name: str) -> None:
    """By every kind of row; a rounded result may be off by one unit."""
    rounds = stage.output.type.dtype == "bfloat16"
    check(convolution.match, stage, name, 2 * ROUNDED if rounds else DEEP)


@pytest.mark.parametrize(
    "stage",
    [
        conv(7, 5, 11, 3),  # 15 steps of k lie side by side, and no pair may span two runs
        conv(9, 5, 11, 3, dilation=(2, 2), padding=(2,) * 4),
        conv(19, 3, 20, 7, "NCHW", strides=(2, 2)),
    ],
    ids=["odd", "odd, dilated", "odd, channels first"],
)
@pytest.mark.parametrize("name", machines())
def test_runs_that_end_in_half_a_pair_are_left_to_the_product(stage: Stage, name: str) -> None:
    assert convolution.match(stage, runnable(name)) is None
    assert gemm.match(stage, runnable(name)) is not None


def heads(m: int, n: int, d: int, e: int, *, bias: bool = False, **attrs: Any) -> Stage:
    types = {"q": half(2, 3, m, d), "k": half(2, 3, n, d), "v": half(2, 3, n, e)}
    names = "q k v"
    if bias:
        types["mask"] = T((m, n))
        names = "q k v mask"
    return chain(types, ("attention", names, "y", T((2, 3, m, e)), {"scale": 0.3, **attrs}))


ATTENTIONS = {
    "even": heads(17, 32, 16, 16),
    "odd": heads(13, 37, 33, 21),
    "narrow": heads(5, 3, 7, 5),
    "wide": heads(9, 50, 72, 40),
    "wider_than_unrolled": heads(3, 19, 300, 530),
    "biased": heads(11, 19, 8, 12, bias=True),
    "merged": chain(  # heads side by side again, stored rounded
        {"q": half(1, 2, 9, 8), "k": half(1, 2, 9, 8), "v": half(1, 2, 9, 8)},
        ("attention", "q k v", "a", T((1, 2, 9, 8)), {"scale": 0.3}),
        ("permute", "a", "p", T((1, 9, 2, 8)), {"axes": (0, 2, 1, 3)}),
        ("reshape", "p", "r", T((1, 9, 16)), {}),
        ("cast", "r", "y", half(1, 9, 16), {}),
    ),
}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention(stage: Stage, name: str) -> None:
    """A weight in the middle of two bfloat16 may round to either, which is half a unit of one of
    them.
    """
    machine = runnable(name)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, fresh_seed())
    wanted = reference(stage, arrays).astype(np.float64)
    got = []
    for config, kernel in build_each(sketch, few(sketch, 2), machine):
        print(config.to_json())
        got.append(kernel(*arrays).astype(np.float64))
        assert_close(got[-1], wanted, 2 * ROUNDED)
        assert np.abs(got[-1] - wanted).mean() <= ROUNDED / 16 * np.abs(wanted).max()
    for other in got:
        assert_close(other, got[0], 2 * ROUNDED)


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize(
    "stage", [heads(61, 131, 24, 40), heads(43, 69, 33, 17, bias=True)], ids=["even", "odd"]
)
def test_blocks_of_rows_share_passes(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LARGE", 0)
    machine = runnable(name)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    shared = [config for config in configs(sketch) if config["mc"] > 1]
    kinds = {MicroKernel.parse(c["tile"], machine.lanes).kind.name: c for c in shared}
    arrays = inputs(stage, fresh_seed())
    wanted = reference(stage, arrays).astype(np.float64)
    for config, kernel in build_each(sketch, [*kinds.values()], machine):
        got = kernel(*arrays).astype(np.float64)
        assert_close(got, wanted, 2 * ROUNDED), config.to_json()


def test_attention_of_rows_that_a_mask_hides() -> None:
    """With a guard after the softmax, rows without a key are 0, and a NaN in q stays in its row."""
    machine = detect()
    stage = heads(6, 21, 8, 8, bias=True, guarded=True)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    q, k, v, mask = inputs(stage, 5)
    mask[2] = -np.inf
    wanted = reference(stage, [q, k, v, mask]).astype(np.float64)
    assert (wanted[:, :, 2] == 0).all()
    for config in few(sketch, 2):
        got = build(sketch, config, machine)(q, k, v, mask)
        assert (got[:, :, 2] == 0).all()
        assert_close(got, wanted, 2 * ROUNDED)
