"""Contractions against float64: dense, batched and convolution, odd sizes, every fused form, and
random configs.

Tolerance: 2e-6 x sqrt(k) of the largest magnitude. Float32 sums of k products in any order stay
well below it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor.operators import ELEMENTWISE, OPERATORS
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Program, Sketch, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    build_each,
    config_with,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    targets,
)

T = TensorType


def op(
    kind: str, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], **attrs: object
) -> Operator:
    return Operator(kind, inputs, output, T(shape), make_attrs(**attrs))


def dense(m: int, k: int, n: int, lead: tuple[int, ...] = (1,)) -> Stage:
    shape = (*lead, m, n)
    return make_stage(
        [op("matmul", ("x", "w"), "c", shape), op("add", ("c", "b"), "d", shape)],
        {"x": T((*lead, m, k)), "w": T((k, n)), "b": T((n,))},
        ["w", "b"],
    )


def check(stage: Stage, name: str, most: int = 3) -> None:
    """Runs the stage under a few random configs."""
    machine = runnable(name)
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    want = reference(stage, arrays)
    chosen = random.Random(seed).sample(distinct(sketch), most)
    for config, kernel in build_each(sketch, chosen, machine):
        got = kernel(*arrays)
        scale = np.abs(want).max() + 1e-30
        error = np.abs(got - want).max() / scale
        assert error < 2e-6 * sketch.view.k**0.5, f"{config.to_json()}: {error:.1e}"


def distinct(sketch: Sketch) -> list:
    found = list(configs(sketch))
    assert len({c.choices for c in found}) == len(found)
    return found


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(197, 64, 96), (49, 33, 70), (1, 100, 37), (7, 1, 5), (13, 300, 130), (98, 17, 1)],
)
def test_dense(m: int, k: int, n: int, name: str) -> None:
    check(dense(m, k, n), name)


@pytest.mark.parametrize("name", targets())
def test_large_depth_is_blocked(name: str) -> None:
    stage = dense(30, 1100, 48)
    options = {c["kc"] for c in distinct(gemm.match(stage, runnable(name)))}
    assert len(options) > 2
    check(stage, name, 6)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("order", ["panels", "rows"])
@pytest.mark.parametrize("how", ["next", "none", "both"])
@pytest.mark.parametrize(("kc", "a"), [(333, "direct"), (112, "packed"), (333, "packed")])
def test_orders_and_prefetching(kc: int, a: str, how: str, order: str, name: str) -> None:
    """Prefetching past the last panel and the last row is not a fault. The loops take one block of
    rows at a time, or one panel.
    """
    stage, machine = dense(35, 333, 75), runnable(name)
    sketch = gemm.match(stage, machine)
    arrays = random_inputs(stage, fresh_seed())
    config = config_with(sketch, tile="6x2", kc=kc, a=a, order=order, prefetch=how)
    assert sketch.nest(config).held == (1 if order == "rows" else 6)
    assert_close(build(sketch, config, machine)(*arrays), reference(stage, arrays), 1e-5)


@pytest.mark.parametrize("name", targets())
def test_rows_outside_of_a_product_that_packs_both(name: str) -> None:
    """B is computed; the first pass packs it, and all others use it."""
    stage = make_stage(
        [
            op("permute", ("b",), "t", (45, 70), axes=(1, 0)),
            op("matmul", ("a", "t"), "c", (33, 70)),
        ],
        {"a": T((33, 45)), "b": T((70, 45))},
        [],
    )
    machine = runnable(name)
    sketch = gemm.match(stage, machine)
    arrays = random_inputs(stage, fresh_seed())
    found = [c for c in distinct(sketch) if c.by_name.get("order") == "rows"]
    assert found and all(c["kc"] == 45 for c in found)
    for _, kernel in build_each(sketch, random.Random(fresh_seed()).sample(found, 3), machine):
        assert_close(kernel(*arrays), reference(stage, arrays), 1e-5)


def test_what_is_packed_of_a_by_rows_stays_in_l1() -> None:
    """A thread's scratch holds one block of rows, not all rows of a task."""
    sketch = gemm.match(dense(197, 192, 576), target("x86-64-v4"))
    sizes = []
    for order in ("panels", "rows"):
        program = sketch.build(config_with(sketch, a="packed", kc=192, order=order), "k")
        assert isinstance(program, Program)
        sizes.append(program.workspace)
    assert sizes[0] > 197 * 192 * 4 and sizes[1] < 16 << 10


@pytest.mark.parametrize("name", targets())
def test_batches_are_folded_into_rows(name: str) -> None:
    check(dense(10, 24, 40, (3, 2)), name)


@pytest.mark.parametrize("name", targets())
def test_batched_product(name: str) -> None:
    check(
        make_stage(
            [op("matmul", ("a", "b"), "c", (2, 3, 21, 50))],
            {"a": T((2, 3, 21, 19)), "b": T((1, 3, 19, 50))},
            [],
        ),
        name,
        4,
    )


@pytest.mark.parametrize("name", targets())
def test_variable_right_operand_is_packed(name: str) -> None:
    stage = make_stage(
        [
            op("permute", ("b",), "t", (20, 45), axes=(1, 0)),
            op("matmul", ("a", "t"), "c", (33, 45)),
        ],
        {"a": T((33, 20)), "b": T((45, 20))},
        [],
    )
    check(stage, name, 4)


@pytest.mark.parametrize("name", targets())
def test_prologue_and_epilogue(name: str) -> None:
    """(x + r)[window rows] @ w + b -> gelu -> + residual, stored transposed by heads."""
    shape = (2, 30, 64)
    stage = make_stage(
        [
            op("add", ("x", "r"), "s", (2, 30, 40)),
            op("roll", ("s",), "p", (2, 30, 40), shifts=(0, 7, 0)),
            op("matmul", ("p", "w"), "c", shape),
            op("add", ("c", "b"), "d", shape),
            op("gelu", ("d",), "e", shape),
            op("add", ("e", "y"), "f", shape),
            op("reshape", ("f",), "h", (2, 30, 4, 16)),
            op("permute", ("h",), "o", (2, 4, 30, 16), axes=(0, 2, 1, 3)),
        ],
        {"x": T((2, 30, 40)), "r": T((2, 30, 40)), "w": T((40, 64)), "b": T((64,)), "y": T(shape)},
        ["w", "b"],
    )
    check(stage, name, 4)


def test_rejects_what_it_cannot_do() -> None:
    machine = runnable("x86-64-v3")
    two = make_stage(
        [op("matmul", ("x", "w"), "c", (4, 4)), op("matmul", ("c", "w"), "d", (4, 4))],
        {"x": T((4, 4)), "w": T((4, 4))},
        ["w"],
    )
    mixed = make_stage(
        [
            op("matmul", ("x", "w"), "c", (4, 4)),
            op("permute", ("c",), "p", (4, 4), axes=(1, 0)),
            op("add", ("c", "p"), "d", (4, 4)),
        ],
        {"x": T((4, 4)), "w": T((4, 4))},
        ["w"],
    )
    symbolic = make_stage(
        [Operator("matmul", ("x", "w"), "c", T(("n", 4)))],
        {"x": T(("n", 4)), "w": T((4, 4))},
        ["w"],
    )
    assert all(gemm.match(stage, machine) is None for stage in (two, mixed, symbolic))


CONVOLUTIONS = [
    # channels, outputs, size, kernel, stride, padding (top, left, bottom, right), dilation
    (16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (3, 40, (23, 21), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
    (20, 16, (8, 7), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    (8, 16, (9, 9), (1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
    (5, 7, (12, 10), (3, 2), (2, 1), (0, 1, 2, 0), (1, 2)),
    (3, 48, (32, 32), (16, 16), (16, 16), (0, 0, 0, 0), (1, 1)),
]


def conv(case: tuple, layout: str, from_nchw: bool = False) -> Stage:
    channels, outputs, (h, w), (kh, kw), (sh, sw), (top, left, bottom, right), (dh, dw) = case
    oh, ow = (
        (h + top + bottom - (kh - 1) * dh - 1) // sh + 1,
        (w + left + right - (kw - 1) * dw - 1) // sw + 1,
    )
    nhwc, nchw = (2, h, w, channels), (2, channels, h, w)
    out = (2, oh, ow, outputs) if layout == "NHWC" else (2, outputs, oh, ow)
    attrs = dict(
        strides=(sh, sw),
        padding=(top, left, bottom, right),
        dilation=(dh, dw),
        groups=1,
        layout=layout,
    )
    ops = [op("permute", ("x",), "p", nhwc, axes=(0, 2, 3, 1))] if from_nchw else []
    ops += [
        op("conv2d", ("p" if from_nchw else "x", "w"), "c", out, **attrs),
        op("relu", ("c",), "r", out),
    ]
    x = nchw if from_nchw or layout == "NCHW" else nhwc
    return make_stage(ops, {"x": T(x), "w": T((outputs, channels, kh, kw))}, ["w"])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: tuple, name: str) -> None:
    check(conv(case, "NHWC"), name, 2)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_channels_first(case: tuple) -> None:
    check(conv(case, "NCHW"), "x86-64-v3", 1)
    check(conv(case, "NHWC", from_nchw=True), "x86-64-v3", 1)


def behind(kind: str, layout: str, **attrs: object) -> Stage:
    """A 3x3 convolution of kind(x), or of kind(gate, x) with one gate for each channel."""
    x, gate = ((2, 9, 8, 16), (2, 1, 1, 16)) if layout == "NHWC" else ((2, 16, 9, 8), (2, 16, 1, 1))
    out = (2, 9, 8, 5) if layout == "NHWC" else (2, 5, 9, 8)
    inputs = ("gate", "x") if OPERATORS[kind].inputs[0] == 2 else ("x",)
    window = {"strides": (1, 1), "padding": (1,) * 4, "dilation": (1, 1), "groups": 1}
    ops = [
        op(kind, inputs, "a", x, **attrs),
        op("conv2d", ("a", "w"), "c", out, layout=layout, **window),
    ]
    types = {"gate": T(gate), "x": T(x), "w": T((5, 16, 3, 3))}
    return make_stage(ops, {n: types[n] for n in types if n in (*inputs, "w")}, ["w"])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_element_wise_operators_in_front_of_a_convolution(layout: str) -> None:
    """The analysis finds runs of memory through each of these operators before there is a kernel.
    It evaluates none of them: a division would divide by the 0 that a probe reads.
    """
    machine = runnable("x86-64-v3")
    attrs = {"clip": {"min": -1.0, "max": 1.0}, "leaky_relu": {"alpha": 0.1}, "elu": {"alpha": 1.0}}
    floats = [
        kind
        for kind, info in OPERATORS.items()
        if info.pattern == ELEMENTWISE
        and info.inputs[0] <= 2
        and not kind.startswith(("logical", "bitwise", "is"))
        and kind not in ("cast", "equal", "not_equal", "left_shift", "right_shift")
        and not kind.startswith(("less", "greater"))
    ]
    assert {"silu", "sigmoid", "divide", "multiply", "power", "erf"} < set(floats)
    for kind in floats:
        sketch = gemm.match(behind(kind, layout, **attrs.get(kind, {})), machine)
        assert sketch is not None and sketch.view.channels_first == (layout == "NCHW"), kind


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("kind", ["silu", "multiply", "divide"])
def test_gated_convolution(kind: str, layout: str) -> None:
    check(behind(kind, layout), "x86-64-v3", 1)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(("m", "k"), [(21, 64), (13, 77), (40, 300)])
def test_layer_norm_in_front(m: int, k: int, name: str) -> None:
    """LayerNorm's scale and shift are applied while rows are packed; the mean is far from 0."""
    shape = (1, m, k)
    stage = make_stage(
        [
            op("add", ("x", "offset"), "y", shape),
            op("layer_norm", ("y", "gamma", "beta"), "n", shape, epsilon=1e-6),
            op("reshape", ("n",), "r", (m, k)),
            op("matmul", ("r", "w"), "c", (m, 48)),
        ],
        {"x": T(shape), "offset": T((1,)), "gamma": T((k,)), "beta": T((k,)), "w": T((k, 48))},
        ["w", "gamma", "beta"],
    )
    check(stage, name, 4)


@pytest.mark.parametrize("name", ["x-x", "residual", "turned residual"])
def test_a_layer_norm_that_not_only_a_reads_stays_in_front(name: str) -> None:
    """A task knows the statistics of its own rows of A. The rows of B are other rows, and so are
    those that are added after the product.
    """
    shape = (12, 12)
    ops = [
        op("layer_norm", ("x", "gamma", "beta"), "n", shape, epsilon=1e-6),
        op("permute", ("n",), "t", shape, axes=(1, 0)),
    ]
    if name == "x-x":
        ops.append(op("matmul", ("n", "t"), "y", shape))
    else:
        other = "t" if name == "turned residual" else "n"
        ops = ops[: 2 if other == "t" else 1]
        ops += [op("matmul", ("n", "w"), "c", shape), op("add", ("c", other), "y", shape)]
    types = {"x": T(shape), "gamma": T((12,)), "beta": T((12,)), "w": T(shape)}
    assert gemm.match(make_stage(ops, types, ["w"]), runnable("x86-64-v3")) is None


@pytest.mark.parametrize("name", targets())
def test_a_product_that_is_a_scalar(name: str) -> None:
    """Two vectors of ONNX, one of them constant."""
    ops = [op("matmul", ("x", "w"), "c", (1, 1)), op("reshape", ("c",), "y", ())]
    check(make_stage(ops, {"x": T((1, 8)), "w": T((8, 1))}, ["w"]), name)


def test_an_operand_made_of_a_scalar() -> None:
    ops = [
        op("sum", ("x",), "s", (), axes=(0,), keepdims=False),
        op("reshape", ("s",), "r", (1, 1)),
        op("matmul", ("r", "w"), "y", (1, 20)),
    ]
    stage = make_stage(ops, {"x": T((7,)), "w": T((1, 20))}, ["w"])
    assert gemm.match(stage, runnable("x86-64-v3")) is None  # a sum is not a prologue


@pytest.mark.parametrize("name", targets())
def test_concatenated_channels(name: str) -> None:
    """SegFormer's head: a 1x1 convolution of concatenated feature maps."""
    ops = [
        op("concat", ("x", "y", "z"), "c", (1, 5, 6, 44), axis=3),
        op(
            "conv2d",
            ("c", "w"),
            "d",
            (1, 5, 6, 40),
            strides=(1, 1),
            padding=(0,) * 4,
            dilation=(1, 1),
            groups=1,
            layout="NHWC",
        ),
    ]
    types = {"x": T((1, 5, 6, 16)), "y": T((1, 5, 6, 21)), "z": T((1, 5, 6, 7))}
    check(make_stage(ops, {**types, "w": T((40, 44, 1, 1))}, ["w"]), name, 2)
    flat = [
        op("concat", ("a", "b"), "c", (30, 37), axis=1),
        op("matmul", ("c", "w"), "d", (30, 20)),
    ]
    check(make_stage(flat, {"a": T((30, 16)), "b": T((30, 21)), "w": T((37, 20))}, ["w"]), name, 2)


@pytest.mark.parametrize("name", targets())
def test_transposed_store(name: str) -> None:
    """It computes NHWC and stores NCHW: neighbours in m are neighbours in the output."""
    attrs = dict(strides=(1, 1), padding=(0,) * 4, dilation=(1, 1), groups=1, layout="NHWC")
    ops = [
        op("conv2d", ("x", "w"), "c", (2, 7, 9, 37), **attrs),
        op("add", ("c", "b"), "d", (2, 7, 9, 37)),
        op("permute", ("d",), "o", (2, 37, 7, 9), axes=(0, 3, 1, 2)),
    ]
    types = {"x": T((2, 7, 9, 20)), "w": T((37, 20, 1, 1)), "b": T((37,))}
    stage = make_stage(ops, types, ["w", "b"])
    sketch = gemm.match(stage, runnable(name))
    assert not sketch.stores_columns  # two images: rows 62 and 63 are not neighbours
    check(stage, name, 3)
    one = [
        Operator(o.kind, o.inputs, o.output, T((1, *o.type.shape[1:])), o.attrs, o.name)
        for o in ops
    ]
    stage = make_stage(one, {**types, "x": T((1, 7, 9, 20))}, ["w", "b"])
    assert gemm.match(stage, runnable(name)).stores_columns
    check(stage, name, 3)


def merging_stage(channels: int) -> Stage:
    """Swin's patch merging: four maps of every second pixel, concatenated, normalised and
    projected.
    """
    corners = [(0, 0), (1, 0), (0, 1), (1, 1)]
    quarter, wide = (2, 5, 5, channels), (2, 5, 5, 4 * channels)
    operators = [
        *(
            op("slice", ("x",), f"s{n}", quarter, begin=(0, i, j, 0), strides=(1, 2, 2, 1))
            for n, (i, j) in enumerate(corners)
        ),
        op("concat", ("s0", "s1", "s2", "s3"), "joined", wide, axis=3),
        op("layer_norm", ("joined", "g", "b"), "norm", wide, epsilon=1e-5),
        op("matmul", ("norm", "w"), "y", (2, 5, 5, 48)),
    ]
    types = {"x": T((2, 10, 10, channels)), "w": T((4 * channels, 48))}
    types |= {"g": T((4 * channels,)), "b": T((4 * channels,))}
    types |= {o.output: o.type for o in operators}
    return make_stage(operators, types, ["g", "b", "w"])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("channels", [5, 16, 24])
def test_statistics_of_a_concatenation(name: str, channels: int) -> None:
    """Vectors of a row cross the borders of the parts, so each lane may read a different part."""
    check(merging_stage(channels), name)
