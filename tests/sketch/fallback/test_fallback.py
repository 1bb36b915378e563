"""The fallback: every operator of the table as its own stage, against numpy; Relax operators; and
what the fallback leaves undefined.

Tolerance: 1e-5 of the largest magnitude against float64 (the sums have a few hundred terms).
Integers and booleans must be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gtco.machine.target import V4, detect
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.operators import INJECTIVE, OPERATORS
from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.space import Config, Program
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build_all,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
)

T = TensorType
MACHINE = "x86-64-v3"
WIDE = "x86-64-v4"
# LLVM orders and unrolls code in another way for each, so both run where they can.
MACHINES = [MACHINE, WIDE] if set(V4) <= set(detect().features) else [MACHINE]


def single(kind: str, types: list[TensorType], out: TensorType, **attrs: Any) -> Stage:
    names = tuple(f"x{i}" for i in range(len(types)))
    return make_stage(
        [Operator(kind, names, "y", out, make_attrs(**attrs))],
        dict(zip(names, types, strict=True)),
        [],
    )


Case = tuple[Stage, Sequence[np.ndarray], float]  # its inputs and the tolerance


def run(stage: Stage, arrays: Sequence[np.ndarray], name: str = MACHINE) -> np.ndarray:
    return run_each([(stage, arrays, 0.0)], name)[0]


def run_each(cases: Sequence[Case], name: str) -> list[np.ndarray]:
    """The output of each case, of kernels in one object."""
    machine = runnable(name)
    found = [fallback.match(stage, machine) for stage, _, _ in cases]
    chosen = [(sketch, Config(sketch.name)) for sketch in found if sketch is not None]
    assert len(chosen) == len(cases)
    kernels = build_all(chosen, machine)
    return [kernel(*arrays) for kernel, (_, arrays, _) in zip(kernels, cases, strict=True)]


def case(stage: Stage, *arrays: np.ndarray, tolerance: float = 1e-5) -> Case:
    return stage, list(arrays) or random_inputs(stage, fresh_seed()), tolerance


def check(stage: Stage, *arrays: np.ndarray, tolerance: float = 1e-5) -> None:
    check_each([case(stage, *arrays, tolerance=tolerance)])


def check_each(cases: Sequence[Case]) -> None:
    with np.errstate(all="ignore"):
        wanted = [reference(stage, arrays) for stage, arrays, _ in cases]
    for name in MACHINES:
        for (stage, _, tolerance), want, got in zip(
            cases, wanted, run_each(cases, name), strict=True
        ):
            if got.dtype.kind in "biu":
                np.testing.assert_array_equal(got, want, err_msg=str(stage))
            else:
                assert_close(got, want, tolerance)


# element-wise -------------------------------------------------------------------------------------
DOMAIN = {
    **dict.fromkeys(("log", "sqrt", "rsqrt"), (0.1, 9.0)),
    **dict.fromkeys(("asin", "acos", "atanh"), (-0.95, 0.95)),
    "acosh": (1.1, 9.0),
}
UNARY_ATTRS = {
    "clip": {"min": -0.5, "max": 0.7},
    "leaky_relu": {"alpha": 0.1},
    "elu": {"alpha": 0.8},
    "quantize": {"min": -5.0, "max": 6.0},
}


# functions of a byte have a test of their own (tests/sketch/test_byte_functions.py)
@pytest.mark.parametrize("kind", [k for k in ELEMENTWISE_OPERATORS if k != "byte_function"])
def test_elementwise(kind: str) -> None:
    """float32, int64 and bool, if the operator has a meaning for them; the second operand is
    broadcast.
    """
    rng = np.random.default_rng(fresh_seed())
    row, cases = ELEMENTWISE_OPERATORS[kind], []
    for letter in row.dtypes.replace("u", ""):
        dtype = {"f": "float32", "i": "int64", "b": "bool"}[letter]
        shapes = [(3, 7, 5), (7, 1), (5,), (1,)][: row.inputs]
        types = [
            T(s, "bool" if kind == "where" and i == 0 else dtype) for i, s in enumerate(shapes)
        ]
        out = T((3, 7, 5), "int32" if kind == "cast" else "bool" if row.tests else dtype)
        stage = single(kind, types, out, **UNARY_ATTRS.get(kind, {}))
        if dtype == "float32" and kind != "where":
            low, high = DOMAIN.get(kind, (0.3, 3.0) if kind == "power" else (-3.0, 3.0))
            arrays = [rng.uniform(low, high, s).astype("float32") for s in shapes]
        else:
            arrays = random_inputs(stage, fresh_seed())
        if kind == "quantize":  # exact, so that no rounding is near a middle in float32 alone
            arrays[1] = np.exp2(np.rint(arrays[1])).astype("float32")
            arrays[2:] = np.zeros_like(arrays[2]), np.rint(arrays[3])
        if dtype == "int64" and kind in ("divide", "mod", "floor_mod", "floor_divide"):
            arrays[1][arrays[1] == 0] = 7
        if kind.endswith("shift") or (kind == "power" and dtype == "int64"):
            arrays = [np.abs(a) for a in arrays]
        cases.append(case(stage, *arrays))
    check_each(cases)


# data movement ------------------------------------------------------------------------------------
MOVEMENT: list[tuple[str, list[tuple[int, ...]], tuple[int, ...], dict[str, Any]]] = [
    ("identity", [(3, 5)], (3, 5), {}),
    ("identity", [()], (), {}),
    ("reshape", [(3, 4, 5)], (2, 30), {}),
    ("reshape", [(1, 1)], (), {}),
    ("permute", [(3, 4, 5)], (5, 3, 4), {"axes": (2, 0, 1)}),
    ("slice", [(9, 7)], (4, 3), {"begin": (8, 1), "strides": (-2, 2)}),
    ("concat", [(3, 2), (3, 5), (3, 1)], (3, 8), {"axis": 1}),
    ("broadcast", [(3, 1)], (2, 3, 4), {}),
    ("broadcast", [()], (3,), {}),
    ("pad", [(3, 4)], (6, 5), {"before": (1, 0), "after": (2, 1), "value": 2.0}),
    ("roll", [(5, 6)], (5, 6), {"shifts": (2, -1)}),
]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize(("kind", "shapes", "out", "attrs"), MOVEMENT)
def test_movement(kind: str, shapes: list, out: tuple, attrs: dict, dtype: str) -> None:
    if kind == "pad":
        attrs = {**attrs, "value": {"bool": True, "int64": 2}.get(dtype, 2.0)}
    check(single(kind, [T(s, dtype) for s in shapes], T(out, dtype), **attrs))


@pytest.mark.parametrize("index_shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_gather(index_shape: tuple[int, ...], dtype: str) -> None:
    stage = single(
        "gather",
        [T((4, 6, 3), dtype), T(index_shape, "int64")],
        T((4, *index_shape, 3), dtype),
        axis=1,
    )
    rng = np.random.default_rng(fresh_seed())
    check(
        stage, random_inputs(stage, fresh_seed())[0], np.asarray(rng.integers(-6, 6, index_shape))
    )


# reductions ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((4, 5, 6), (1,)), ((4, 5, 6), (0, 2)), ((7,), (0,)), ((2, 3), (0, 1)), ((), ())],
)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(
    kind: str, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool
) -> None:
    kept = tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)
    cases = []
    for dtype in ("float32", "int64"):
        if not (kind == "mean" and dtype == "int64"):
            stage = single(kind, [T(shape, dtype)], T(kept, dtype), axes=axes, keepdims=keepdims)
            (x,) = random_inputs(stage, fresh_seed())
            tolerance = 1e-5
            if kind in ("sum", "mean") and dtype == "float32":  # its terms may nearly cancel
                terms, sums = np.abs(x).sum(axes), np.abs(x.sum(axes))
                tolerance = max(tolerance, 2e-6 * terms.max() / sums.max())
            cases.append(case(stage, x, tolerance=tolerance))
    check_each(cases)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_places(kind: str, dtype: str) -> None:
    check(single(kind, [T((4, 5, 6), dtype)], T((4, 6), "int64"), axis=1, keepdims=False))
    check(single(kind, [T((7,), dtype)], T((1,), "int64"), axis=0, keepdims=True))


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "int8", "uint8", "bool"])
def test_places_among_equal_extremes(kind: str, dtype: str) -> None:
    """Nothing exceeds the value that a search begins with."""
    low, high = {"f": (-np.inf, np.inf), "b": (False, True)}.get(np.dtype(dtype).kind) or (
        np.iinfo(dtype).min,
        np.iinfo(dtype).max,
    )
    for value in (low, high):
        x = np.full((3, 5), value, dtype)
        x[1, 2:] = high if value == low else low
        check(single(kind, [T(x.shape, dtype)], T((3,), "int64"), axis=1, keepdims=False), x)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_of_booleans_and_nan(kind: str) -> None:
    check(single(kind, [T((4, 5), "bool")], T((4,), "bool"), axes=(1,), keepdims=False))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
    x[0, 0], x[1, 3], x[2, 1] = np.nan, np.nan, -np.inf
    check(single(kind, [T((3, 4))], T((3,)), axes=(1,), keepdims=False), x)


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 17), 1), ((3, 5, 2), 1), ((9,), 0), ((4, 1), 1)])
def test_softmax(kind: str, shape: tuple[int, ...], axis: int) -> None:
    stage = single(kind, [T(shape)], T(shape), axis=axis)
    check_each([case(stage), case(stage, *random_inputs(stage, fresh_seed(), 100.0))])


def test_norms() -> None:
    for shape in ((2, 3, 33), (1,), (5, 1)):
        d = shape[-1]
        stage = single("layer_norm", [T(shape), T((d,)), T((d,))], T(shape), epsilon=1e-5)
        check(stage, tolerance=1e-4 if d == 1 else 1e-5)
        check(single("rms_norm", [T(shape), T((d,))], T(shape), epsilon=1e-6))
    for axis, shape in ((1, (2, 6, 3, 5)), (3, (2, 3, 5, 6))):
        attrs = {"groups": 3, "epsilon": 1e-5, "axis": axis}
        check(single("group_norm", [T(shape), T((6,)), T((6,))], T(shape), **attrs))
    check(single("moments", [T((2, 7, 5))], T((2, 2, 5))))
    merged = single("merged_moments", [T((2, 3, 2, 6))], T((2, 2, 6)), groups=2, epsilon=1e-5)
    check(merged, *(abs(x) for x in random_inputs(merged, fresh_seed())))
    x, g, b = random_inputs(
        single("layer_norm", [T((4, 64)), T((64,)), T((64,))], T((4, 64)), epsilon=1e-5),
        fresh_seed(),
    )
    check(
        single("layer_norm", [T((4, 64)), T((64,)), T((64,))], T((4, 64)), epsilon=1e-5),
        x + 300,
        g,
        b,
        tolerance=1e-4,
    )


# sampled shapes ---------------------------------------------------------------------------------
def sampled(rng: np.random.Generator) -> Stage:
    """A random stage of an operator that has its own loops; some dimensions are 1."""

    def size(most: int = 9) -> int:
        return int(rng.choice([1, *range(1, most + 1)]))

    batch = tuple(size(3) for _ in range(rng.integers(0, 3)))
    m, k, n = size(), size(), size()
    match rng.integers(0, 6):
        case 0:
            shared = tuple(int(rng.choice([1, d])) for d in batch)
            return single("matmul", [T((*batch, m, k)), T((*shared, k, n))], T((*batch, m, n)))
        case 1:
            types = [T((*batch, m, k)), T((*batch, n, k)), T((*batch, n, size()))]
            out = (*batch, m, types[2].shape[-1])
            return single("attention", types, T(out), scale=0.5)
        case 2:
            kind = str(rng.choice(["softmax", "log_softmax"]))
            shape = (*batch, m, k)
            return single(kind, [T(shape)], T(shape), axis=int(rng.integers(0, len(shape))))
        case 3:
            shape = (*batch, m, k)
            axes = tuple(i for i in range(len(shape)) if rng.integers(0, 2))
            kept = tuple(d for i, d in enumerate(shape) if i not in axes)
            kind = str(rng.choice(["sum", "mean", "max", "min", "prod"]))
            return single(kind, [T(shape)], T(kept), axes=axes, keepdims=False)
        case 4:
            types = [T((*batch, m, k)), T((k,)), T((k,))]
            return single("layer_norm", types, T((*batch, m, k)), epsilon=1e-2)
    groups, kh, kw = size(3), size(3), size(3)
    strides, dilation = (size(2), size(2)), (size(2), size(2))
    padding = tuple(int(p) for p in rng.integers(0, 3, 4))
    c, o = groups * size(3), groups * size(5)
    h, w = kh * dilation[0] + size(), kw * dilation[1] + size()
    oh = (h + padding[0] + padding[2] - (kh - 1) * dilation[0] - 1) // strides[0] + 1
    ow = (w + padding[1] + padding[3] - (kw - 1) * dilation[1] - 1) // strides[1] + 1
    layout = str(rng.choice(["NCHW", "NHWC"]))
    x, y = ((1, c, h, w), (1, o, oh, ow)) if layout == "NCHW" else ((1, h, w, c), (1, oh, ow, o))
    weight = T((o, c // groups, kh, kw))
    attrs = dict(strides=strides, padding=padding, dilation=dilation, groups=groups, layout=layout)
    return single("conv2d", [T(x), weight], T(y), **attrs)


def test_sampled_shapes() -> None:
    seed = fresh_seed()
    print(f"stages of seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(25):
        stage = sampled(rng)
        print(stage.label, [str(i.type) for i in stage.inputs], stage.output.attrs)
        check(stage)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float16", 4e-3)])
def test_other_floats(dtype: str, tolerance: float) -> None:
    """float16 is computed in float16 or in float32; the bound is four units of its last place."""
    x, w, v = T((5, 7), dtype), T((7, 6), dtype), T((7,), dtype)
    stages = [
        single("matmul", [x, w], T((5, 6), dtype)),
        single("softmax", [x], T((5, 7), dtype), axis=1),
        single("layer_norm", [x, v, v], T((5, 7), dtype), epsilon=1e-3),
        single("sum", [x], T((7,), dtype), axes=(0,), keepdims=False),
        single("max", [x], T((5,), dtype), axes=(1,), keepdims=False),
        single("gelu", [x], T((5, 7), dtype)),
        single("cast", [x], T((5, 7), "int32")),
    ]
    for stage in stages:
        check(stage, tolerance=tolerance)


def of_nothing() -> list[Stage]:
    """Operators that combine no elements."""
    made = [single("matmul", [T((4, 0)), T((0, 8))], T((4, 8)))]
    made += [single("matmul", [T((4, 0), "int8"), T((0, 8), "int8")], T((4, 8), "int32"))]
    for kind in ("sum", "prod", "mean", "max", "min"):
        made.append(single(kind, [T((2, 0))], T((2,)), axes=(1,), keepdims=False))
    for kind, dtype in (("max", "bool"), ("min", "bool"), ("max", "int32"), ("sum", "int64")):
        made.append(single(kind, [T((2, 0), dtype)], T((2,), dtype), axes=(1,), keepdims=False))
    return made


def test_empty_tensors() -> None:
    check(single("add", [T((0, 3)), T((3,))], T((0, 3))))
    check(single("concat", [T((0, 3)), T((2, 3))], T((2, 3)), axis=0))
    for stage in of_nothing():
        check(stage)


CONVOLUTION = {"strides": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "layout": "NHWC"}


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attrs"),
    [
        ("conv2d", [(0, 8, 8, 16), (16, 1, 3, 3)], (0, 8, 8, 16), CONVOLUTION | {"groups": 16}),
        ("conv2d", [(1, 0, 8, 16), (16, 2, 3, 3)], (1, 0, 8, 16), CONVOLUTION | {"groups": 8}),
        ("conv2d", [(1, 8, 0, 16), (16, 1, 3, 3)], (1, 8, 0, 16), CONVOLUTION | {"groups": 16}),
        ("moments", [(1, 2, 4, 0)], (1, 2, 2, 0), {}),
        ("moments", [(0, 2, 4, 8)], (0, 2, 2, 8), {}),
        ("merged_moments", [(1, 2, 2, 0)], (1, 2, 0), {"groups": 1, "epsilon": 1e-5}),
        ("argmax", [(2, 3, 0, 5)], (2, 0, 5), {"axis": 1, "keepdims": False}),
    ],
)
def test_an_empty_stage_is_the_fallbacks_alone(
    kind: str, inputs: list, output: tuple[int, ...], attrs: dict
) -> None:
    """Every other sketch declines it without failing."""
    dtype = "int64" if kind == "argmax" else "float32"
    made = single(kind, [T(shape) for shape in inputs], T(output, dtype), **attrs)

    def failed(rule: str, error: Exception) -> None:
        raise AssertionError(f"{rule} raised") from error

    (found,) = sketches(made, runnable("x86-64-v3"), failed)
    assert found.name == "fallback"
    program = found.build(first_config(found), "k")
    assert isinstance(program, Program)


def test_every_kind_is_covered() -> None:
    """A new row of the table must be built by the fallback and tested, either here, as
    spatial, or beside its sketch's tests.
    """
    tested = (
        set(ELEMENTWISE_OPERATORS)
        | {kind for kind, *_ in MOVEMENT}
        | {
            "gather",
            "sum",
            "mean",
            "max",
            "min",
            "prod",
            "argmax",
            "argmin",
            "softmax",
            "log_softmax",
            "cumsum",
            "layer_norm",
            "rms_norm",
            "group_norm",
            "moments",
            "merged_moments",
            "matmul",
            "conv2d",
            "conv_transpose2d",
            "attention",
            "max_pool2d",
            "avg_pool2d",
            "resize2d",
            "grid_sample",
            "scatter",
            "topk",
            "relax",
        }
    )
    assert tested == set(OPERATORS)
    assert {k for k, info in OPERATORS.items() if info.pattern == INJECTIVE} <= tested
