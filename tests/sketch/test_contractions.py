"""Contractions beyond the dense ones, against float64: groups, transposed convolutions, products
whose batches broadcast axis by axis, and constants that are packed for each batch.

Tolerance: that of :mod:`tests.sketch.gemm.test_gemm`, 2e-6 x sqrt(k) of the largest magnitude.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from gtco.graph.infer import infer_type
from gtco.tensor.sketch import Rule
from gtco.tensor.sketch.dot import cpu as dot
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import build_each, fresh_seed, reference, runnable, targets

T = TensorType


def op(kind: str, inputs: tuple[str, ...], output: str, type_: TensorType, **attrs: object):
    return Operator(kind, inputs, output, type_, make_attrs(**attrs))


def check(
    stage: Stage,
    name: str,
    most: int | None = 2,
    rule: Rule = gemm.match,
    choice: tuple[str, object] | None = None,
) -> None:
    """Runs the stage under ``most`` random configs, or under all configs if ``most`` is None. If
    ``choice`` is given, only configs that have it count.
    """
    machine = runnable(name)
    sketch = rule(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    want = reference(stage, arrays)
    found = [c for c in configs(sketch) if choice is None or choice in c.choices]
    assert found
    chosen = found if most is None else random.Random(seed).sample(found, min(most, len(found)))
    for config, kernel in build_each(sketch, chosen, machine):
        got = kernel(*arrays)
        error = np.abs(got - want).max() / (np.abs(want).max() + 1e-30)
        depth = getattr(getattr(sketch, "view", None), "k", 1)
        assert error < 2e-6 * depth**0.5, f"{config.to_json()}: {error:.1e}"


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("constant", [True, False])
def test_every_config_of_a_strided_convolution_with_padding(name: str, constant: bool) -> None:
    """The rows are cut into chunks, so a row's number has no known bound, and the guards of the
    border must not be decided as if it had one.
    """
    attrs: dict = dict(
        strides=(2, 2), padding=(1, 1, 1, 1), dilation=(1, 1), groups=1, layout="NHWC"
    )
    x, w = T((1, 7, 5, 1)), T((1, 1, 3, 3))
    y = infer_type("conv2d", [x, w], attrs)
    conv = op("conv2d", ("x", "w"), "y", y, **attrs)
    stage = make_stage([conv], {"x": x, "w": w, "y": y}, ["w"] if constant else [])
    check(stage, name, most=None)


# -- convolutions ----------------------------------------------------------------------------------

# groups, input and output channels of one, size, kernel, stride, padding, dilation
GROUPED = [
    (2, 16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (5, 3, 7, (12, 10), (3, 2), (2, 1), (0, 1, 2, 0), (1, 2)),
    (4, 20, 33, (6, 7), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    (3, 1, 20, (8, 9), (5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    (7, 1, 3, (8, 9), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (3, 5, 1, (7, 6), (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
]


def windowed(kind: str, x: tuple, w: tuple, constant: bool, from_nchw: bool, attrs: dict) -> Stage:
    """silu -> convolution -> + bias -> gelu -> + residual, in NHWC."""
    nhwc = (x[0], x[2], x[3], x[1])
    out = infer_type(kind, (T(nhwc), T(w)), attrs | {"layout": "NHWC"})
    source = "p" if from_nchw else "x"
    ops = [op("permute", ("x",), "p", T(nhwc), axes=(0, 2, 3, 1))] if from_nchw else []
    ops += [
        op("silu", (source,), "s", T(nhwc)),
        op(kind, ("s", "w"), "c", out, layout="NHWC", **attrs),
        op("add", ("c", "b"), "d", out),
        op("gelu", ("d",), "e", out),
        op("add", ("e", "y"), "f", out),
    ]
    types = {"x": T(x if from_nchw else nhwc), "w": T(w), "b": T((out.shape[-1],)), "y": out}
    return make_stage(ops, types, ["w", "b"] if constant else [])


def grouped(case: tuple, constant: bool = True, from_nchw: bool = False) -> Stage:
    groups, inputs, outputs, size, kernel, strides, padding, dilation = case
    return windowed(
        "conv2d",
        (2, groups * inputs, *size),
        (groups * outputs, inputs, *kernel),
        constant,
        from_nchw,
        dict(strides=strides, padding=padding, dilation=dilation, groups=groups),
    )


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", GROUPED)
def test_groups_are_batches(case: tuple, name: str) -> None:
    check(grouped(case), name)


@pytest.mark.parametrize("case", GROUPED[:2])
def test_groups_with_channels_first_and_with_variable_weights(case: tuple) -> None:
    check(grouped(case, from_nchw=True), "x86-64-v3", 1)
    check(grouped(case, constant=False), "x86-64-v3", 1)


def test_every_config_of_a_grouped_convolution() -> None:
    check(grouped((2, 3, 7, (2, 3), (2, 2), (1, 1), (1, 0, 0, 1), (1, 1))), "x86-64-v3", None)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("width", [2, 3, 5, 7, 9])
def test_drawn_windows_of_channels_first(width: int, name: str) -> None:
    """Rows of a window are copied with their neighbours, which no product may see: a NaN comes out
    where a window has it, and nowhere else.
    """
    machine, seed = runnable(name), fresh_seed()
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    kernel, strides = (draw.randint(1, 9), width), (draw.randint(1, 2), draw.randint(1, 3))
    size = kernel[0] + draw.randint(0, 5), width + draw.randint(0, 20)
    channels, n = draw.randint(1, 4), draw.randint(1, 20)
    pads = [draw.choice([0, k // 2]) for k in kernel]
    attrs = {"strides": strides, "padding": (*pads, *pads), "dilation": (1, 1), "groups": 1}
    image, weights = (1, channels, *size), (n, channels, *kernel)
    stage = windowed("conv2d", image, weights, constant=True, from_nchw=True, attrs=attrs)
    print(f"seed {seed}: {stage}")
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    x = arrays[[i.name for i in stage.inputs].index("x")]
    x.flat[rng.integers(x.size)] = np.nan
    want = reference(stage, arrays)
    found = list(configs(sketch))
    for config, run in build_each(sketch, draw.sample(found, min(3, len(found))), machine):
        np.testing.assert_allclose(run(*arrays), want, 1e-4, 1e-4, err_msg=str(config.to_json()))


def test_a_depthwise_convolution_is_no_contraction() -> None:
    case = (4, 1, 1, (5, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    assert gemm.match(grouped(case), runnable("x86-64-v3")) is None


# groups, input and output channels of one, size, kernel, stride, padding, output padding
TRANSPOSED = [
    (1, 20, 24, (5, 7), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0)),
    (1, 16, 5, (6, 5), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0)),
    (1, 9, 17, (4, 5), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    (3, 4, 6, (4, 3), (5, 3), (1, 1), (2, 0, 1, 2), (0, 0)),
    (2, 3, 33, (3, 4), (2, 5), (3, 4), (0, 2, 1, 1), (2, 2)),
    (1, 8, 1, (9, 9), (4, 4), (4, 4), (0, 0, 0, 0), (0, 0)),
    (1, 6, 8, (4, 4), (2, 2), (3, 3), (0, 0, 0, 0), (1, 1)),
]


def transposed(case: tuple, from_nchw: bool = False) -> Stage:
    groups, inputs, outputs, size, kernel, strides, padding, output_padding = case
    return windowed(
        "conv_transpose2d",
        (2, groups * inputs, *size),
        (groups * inputs, outputs, *kernel),
        True,
        from_nchw,
        dict(strides=strides, padding=padding, output_padding=output_padding, groups=groups),
    )


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", TRANSPOSED)
def test_phases_of_a_transposed_convolution(case: tuple, name: str) -> None:
    check(transposed(case), name)


@pytest.mark.parametrize("case", TRANSPOSED[:3])
def test_transposed_convolution_of_channels_first(case: tuple) -> None:
    check(transposed(case, from_nchw=True), "x86-64-v3", 1)


def test_every_config_of_a_transposed_convolution() -> None:
    check(transposed((1, 3, 7, (2, 1), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1))), "x86-64-v3", None)


def test_a_transposed_convolution_wastes_no_zeros() -> None:
    """Inserting zeros would cost twice the multiply-adds of the output."""
    stage = transposed((1, 16, 8, (6, 6), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0)))
    view = gemm.match(stage, runnable("x86-64-v3")).view
    assert view.flops == 2 * (2 * 12 * 12) * 8 * 16 * 4  # an output has 2 x 2 of the 4 x 4 taps


# -- products --------------------------------------------------------------------------------------

# shapes of A and of B
PRODUCTS = [
    ((2, 3, 7, 20), (3, 20, 18)),  # B broadcast along the first axis
    ((2, 3, 7, 20), (2, 1, 20, 18)),  # along the second
    ((4, 1, 7, 20), (5, 20, 33)),  # A along the second, B along the first
    ((7, 20), (3, 2, 20, 18)),  # A along both
    ((2, 3, 1, 20), (2, 3, 20, 18)),  # a vector times matrices
    ((2, 3, 19, 20), (2, 3, 20, 1)),  # matrices times a vector
    ((6, 1, 9), (9, 1)),
    ((2, 1, 5, 1, 7), (1, 3, 5, 7, 40)),
]


def product(a: tuple, b: tuple, constant: bool) -> Stage:
    """silu -> matmul -> gelu -> + residual."""
    out = infer_type("matmul", (T(a), T(b)), {})
    ops = [
        op("silu", ("x",), "s", T(a)),
        op("matmul", ("s", "w"), "c", out),
        op("gelu", ("c",), "g", out),
        op("add", ("g", "y"), "d", out),
    ]
    return make_stage(ops, {"x": T(a), "w": T(b), "y": out}, ["w"] if constant else [])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("a", "b"), PRODUCTS)
def test_batches_broadcast_axis_by_axis(a: tuple, b: tuple, constant: bool, name: str) -> None:
    check(product(a, b, constant), name, 1)


def test_every_config_of_a_product_with_constant_batches() -> None:
    check(product((2, 2, 3, 7), (2, 7, 7), True), "x86-64-v3", None)


def test_axes_along_which_b_is_the_same_are_rows() -> None:
    """SAM's decomposed positions: one product for each row of the image, with all heads in its
    rows.
    """
    view = gemm.match(product((12, 14, 14, 64), (14, 64, 14), True), runnable("x86-64-v3")).view
    assert (view.batch, view.m, view.n, view.k) == (14, 12 * 14, 14, 64)


# -- rows that overflow L2 -------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("depth", [40, 300])
def test_rows_are_worked_on_as_many_at_once_as_l2_holds(depth: int, constant: bool) -> None:
    """A machine with a tiny L2; the last task and the last pass are smaller than the others."""
    full = runnable("x86-64-v3")
    levels = tuple(replace(m, capacity=40 * 4 * 64) if m.name == "L2" else m for m in full.memory)
    machine = replace(full, memory=levels)
    stage = product((2, 83, depth), (depth, 37), constant)
    sketch = gemm.match(stage, machine)
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    want = reference(stage, arrays)
    found = [c for c in configs(sketch) if "mc" in dict(c.choices) and c["chunks_m"] < 4]
    assert found
    for config, kernel in build_each(sketch, random.Random(seed).sample(found, 5), machine):
        assert sketch.nest(config).held < sketch.shape(config).task_blocks
        got = kernel(*arrays)
        assert np.abs(got - want).max() < 2e-6 * depth**0.5 * np.abs(want).max()


# -- few columns -----------------------------------------------------------------------------------

FEW = [
    grouped((1, 20, 1, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))),
    grouped((3, 17, 2, (5, 6), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1))),
    grouped((1, 9, 4, (5, 6), (2, 3), (2, 1), (0, 1, 1, 0), (1, 2)), from_nchw=True),
    grouped((1, 20, 3, (5, 7), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)), constant=False),
    transposed((1, 8, 1, (9, 9), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0))),
    transposed((2, 5, 2, (3, 4), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1))),
    product((2, 3, 19, 40), (2, 3, 40, 1), True),
    product((2, 3, 19, 21), (2, 3, 21, 2), False),
    product((4, 1, 23), (23, 1), True),
    product((3, 50), (50, 3), False),
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("stage", FEW, ids=range(len(FEW)))
def test_vectors_along_k_where_columns_are_few(stage: Stage, name: str) -> None:
    check(stage, name, 2, dot.match)


@pytest.mark.parametrize("name", targets())
def test_rows_of_an_input_are_read_where_they_lie(name: str) -> None:
    """Every config of a 1x1 convolution to one channel, without a prologue."""
    x, w = T((1, 7, 9, 37)), T((1, 37, 1, 1))
    attrs = dict(strides=(1, 1), padding=(0,) * 4, dilation=(1, 1), groups=1, layout="NHWC")
    out = infer_type("conv2d", (x, w), attrs)
    stage = make_stage([op("conv2d", ("x", "w"), "y", out, **attrs)], {"x": x, "w": w}, ["w"])
    assert dot.match(stage, runnable(name)).direct_rows == 37
    check(stage, name, None, dot.match)


def test_many_columns_or_few_products_are_no_dots() -> None:
    machine = runnable("x86-64-v3")
    for a, b in (((5, 40), (40, 5)), ((5, 3), (3, 1))):
        assert gemm.match(product(a, b, True), machine) is not None
        assert dot.match(product(a, b, True), machine) is None


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_transposed_convolution_with_variable_weights_goes_to_the_fallback(layout: str) -> None:
    x, w = T((2, 5, 4, 6) if layout == "NHWC" else (2, 6, 5, 4)), T((6, 3, 3, 3))
    attrs = dict(strides=(2, 2), padding=(1,) * 4, output_padding=(1, 0), groups=2, layout=layout)
    out = infer_type("conv_transpose2d", (x, w), attrs)
    stage = make_stage(
        [op("conv_transpose2d", ("x", "w"), "y", out, **attrs)], {"x": x, "w": w}, []
    )
    machine = runnable("x86-64-v3")
    assert gemm.match(stage, machine) is None
    check(stage, "x86-64-v3", 1, fallback.match)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("a", "b"), [((5, 1, 21), (5, 21, 48)), ((2, 3, 40), (40, 64)), ((1, 3, 600), (600, 32))]
)
def test_columns_of_an_input_are_read_where_they_lie(a: tuple, b: tuple, name: str) -> None:
    """A product with few rows uses each element of B too seldom to copy it first."""
    stage = product(a, b, constant=False)
    sketch = gemm.match(stage, runnable(name))
    assert sketch is not None and sketch.direct_columns == b[-1]
    check(stage, name, 4, choice=("b", "direct"))


def test_columns_that_lie_elsewhere_are_copied() -> None:
    """After a transpose, neighbours in n are not neighbours in memory; exp must be computed."""
    machine = runnable("x86-64-v3")
    out, x = T((3, 16)), {"a": T((3, 20)), "b": T((16, 20)), "e": T((20, 16))}
    turned = op("permute", ("b",), "t", T((20, 16)), axes=(1, 0))
    computed = op("exp", ("e",), "t", T((20, 16)))
    for before in (turned, computed):
        stage = make_stage([before, op("matmul", ("a", "t"), "y", out)], x, [])
        sketch = gemm.match(stage, machine)
        assert sketch is not None and sketch.direct_columns is None
        assert all("b" not in dict(c.choices) for c in configs(sketch))
