"""Reductions on a GPU: the rows sketch's kernels, emulated, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.graph.infer import infer_type
from gtco.machine.gpu import ARCHITECTURES
from gtco.tensor.sketch.moments import cuda as moments
from gtco.tensor.sketch.rows import cuda as rows
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda import sketches
from tests.cuda.emulate import run_reported, run_stage
from tests.cuda.sketches import A100, TOLERANCE, compiles, matched, program, some
from tests.kernels import assert_close, fresh_seed, random_inputs, reference


def sketch_of(stage: Stage) -> Any:
    return matched(rows.match, stage)


def check(stage: Stage, most: int = 3, tolerance: float = 1e-5) -> None:
    sketches.check(rows.match, stage, most, tolerance)


def alone(kind: str, shape: tuple[int, ...], dtype: str = "float32", **attrs: Any) -> Stage:
    x = TensorType(shape, dtype)
    made = Operator(kind, ("x",), "y", infer_type(kind, [x], attrs, None), make_attrs(**attrs))
    return make_stage([made], {"x": x}, [])


def normalised(kind: str, shape: tuple[int, ...], out: str = "float32") -> Stage:
    """act(norm(a + b)), as in a transformer's block, in a narrow format."""
    x, channels = TensorType(shape), TensorType(shape[-1:])
    parameters = ("g", "h") if kind == "layer_norm" else ("g",)
    operators = [
        Operator("add", ("a", "b"), "s", x),
        Operator(kind, ("s", *parameters), "n", x, make_attrs(epsilon=1e-5)),
        Operator("relu", ("n",), "r", x),
    ]
    if out != "float32":
        operators.append(Operator("cast", ("r",), "o", TensorType(shape, out)))
    return make_stage(operators, {"a": x, "b": channels, "g": channels, "h": channels}, ["g", "h"])


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [1, -1])
def test_softmax_over_rows_and_over_columns(kind: str, axis: int) -> None:
    check(alone(kind, (2, 7, 21), axis=axis))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("out", TOLERANCE)
def test_norms_between_their_neighbours(kind: str, out: str) -> None:
    check(normalised(kind, (2, 5, 68), out), 2, TOLERANCE[out])


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_reductions_over_rows_and_over_columns(kind: str) -> None:
    check(alone(kind, (3, 5, 33), axes=(0, 2), keepdims=False), 2)
    check(alone(kind, (3, 9, 20), axes=(0, 1), keepdims=True), 2)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [1, -1])
def test_places_of_extremes(kind: str, axis: int) -> None:
    stage = alone(kind, (3, 70, 12), axis=axis, keepdims=False)
    x = random_inputs(stage, fresh_seed())[0].round()  # ties: the first one counts
    x[0, 5, 3], x[1, :, :] = np.nan, -np.inf if kind == "argmax" else np.inf
    sketch = sketch_of(stage)
    for config in some(sketch, 3):
        np.testing.assert_array_equal(run_stage(sketch, config, [x]), reference(stage, [x]))


def test_every_config_of_a_small_case() -> None:
    check(alone("softmax", (3, 6), axis=-1), 1000)


def test_a_row_over_several_warps_and_one_that_no_registers_hold() -> None:
    stage = alone("softmax", (3, 1200), axis=-1)
    sketch, arrays = sketch_of(stage), random_inputs(stage, fresh_seed())
    wanted = reference(stage, arrays)
    for config in configs(sketch):
        if config["threads"] >= 256 and config["vector"] != 2:
            assert_close(run_stage(sketch, config, arrays), wanted)
    long = sketch_of(alone("softmax", (2, 70000), axis=-1))
    assert [c["threads"] for c in configs(long)] == [1024] * 3
    assert all("false>" in program(long, c).source for c in configs(long))


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [0, 1])
def test_masked_rows_and_what_is_not_finite(kind: str, axis: int) -> None:
    """A row of -inf only, a row with NaN and a row with infinity are NaN; -inf beside numbers is
    0.
    """
    x = random_inputs(alone(kind, (6, 36), axis=-1), fresh_seed())[0]
    x[0], x[1, 7], x[2, 8], x[3, 5:30] = -np.inf, np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        wide = x.astype(np.float64)
        e = np.exp(wide - wide.max(-1, keepdims=True))
        wanted = e / e.sum(-1, keepdims=True)
        wanted = np.log(wanted) if kind == "log_softmax" else wanted
    given, expected = (x, wanted) if axis else (x.T.copy(), wanted.T)
    sketch = sketch_of(alone(kind, given.shape, axis=axis))
    for config in some(sketch, 3):
        assert_close(run_stage(sketch, config, [given]), expected)


@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_nan_goes_through_reductions(kind: str) -> None:
    for axes, shape in (((1,), (5, 40)), ((0,), (40, 5))):
        stage = alone(kind, shape, axes=axes, keepdims=False)
        x = random_inputs(stage, fresh_seed())[0]
        x[3, 3], x[4, 4] = np.nan, -np.inf
        sketch = sketch_of(stage)
        for config in some(sketch, 2):
            assert_close(run_stage(sketch, config, [x]), reference(stage, [x]))


def test_operands_and_results_of_either_narrow_format() -> None:
    for dtype in ("float16", "bfloat16"):
        stage = alone("softmax", (5, 36), dtype, axis=-1)
        arrays = [random_inputs(alone("softmax", (5, 36), axis=-1), fresh_seed())[0]]
        narrow = [a.astype(np.dtype(dtype)) for a in arrays]
        wanted = reference(alone("softmax", (5, 36), axis=-1), [narrow[0].astype(np.float32)])
        sketch = sketch_of(stage)
        for config in some(sketch, 2):
            assert_close(run_stage(sketch, config, narrow), wanted, TOLERANCE[dtype])


def test_rows_that_lie_in_pieces_and_leave_in_others() -> None:
    """A prologue merges heads, and an epilogue transposes."""
    x, flat = TensorType((2, 3, 5, 8)), TensorType((2, 5, 24))
    stage = make_stage(
        [
            Operator(
                "permute", ("x",), "p", TensorType((2, 5, 3, 8)), make_attrs(axes=(0, 2, 1, 3))
            ),
            Operator("reshape", ("p",), "r", flat),
            Operator("softmax", ("r",), "s", flat, make_attrs(axis=-1)),
            Operator("permute", ("s",), "t", TensorType((2, 24, 5)), make_attrs(axes=(0, 2, 1))),
        ],
        {"x": x},
        [],
    )
    check(stage)


def moments_of(shape: tuple[int, ...]) -> Stage:
    x = TensorType(shape)
    made = [
        Operator("relu", ("x",), "r", x),
        Operator("moments", ("r",), "y", TensorType((*shape[:-2], 2, shape[-1]))),
    ]
    return make_stage(made, {"x": x}, [])


def merged_moments_of(groups: int) -> Stage:
    attrs, channels = make_attrs(groups=groups, epsilon=1e-5), 3 * groups
    made = Operator("merged_moments", ("x",), "y", TensorType((2, 2, channels)), attrs)
    return make_stage([made], {"x": TensorType((2, 5, 2, channels))}, [])


def check_moments(stage: Stage, arrays: list[np.ndarray]) -> None:
    """Means and variances differ in magnitude, so each has its own tolerance."""
    sketch, wanted = matched(moments.match, stage), reference(stage, arrays)
    for config in some(sketch, 3):
        print(config.to_json())
        got = run_stage(sketch, config, arrays)
        for k in range(2):
            assert_close(got[..., k, :], wanted[..., k, :])


@pytest.mark.parametrize("shape", [(1, 2, 150, 20), (2, 49, 3), (1, 1, 17)])
def test_moments_behind_a_prologue(shape: tuple[int, ...]) -> None:
    """A mean far from zero, positions that do not fill a block of 64, and a single position."""
    stage = moments_of(shape)
    (given,) = random_inputs(stage, fresh_seed())
    check_moments(stage, [given + np.float32(100)])


@pytest.mark.parametrize("groups", [1, 4, 40])
def test_moments_of_parts_are_merged(groups: int) -> None:
    stage = merged_moments_of(groups)
    (given,) = random_inputs(stage, fresh_seed())
    given[:, :, 1] = np.abs(given[:, :, 1])  # variances
    check_moments(stage, [given])


def test_neighbours_are_read_and_stored_at_once() -> None:
    sketch = sketch_of(normalised("layer_norm", (2, 5, 768), "float16"))
    text = program(sketch, next(iter(configs(sketch)))).source
    assert text.count("gtco::load<4>") == 4 and "gtco::store<4>(out + row * 768 + q * 4" in text


def test_a_warp_reads_side_by_side_and_meets_without_conflicts() -> None:
    """No sector of memory is requested twice, and no two threads use the same bank of shared
    memory.
    """
    for stage in (
        alone("softmax", (4, 512), axis=-1),
        alone("sum", (64, 128), axes=(0,), keepdims=False),
    ):
        sketch, arrays = sketch_of(stage), random_inputs(stage, fresh_seed())
        wide = [c for c in configs(sketch) if c["vector"] == 4 and c["rows"] * c["threads"] == 256]
        for config in (wide[0], wide[-1]):
            report = run_reported(sketch, config, arrays)[1]
            assert report.bank_conflicts == 0, report.conflicts
            assert report.sector_ratio == 1


def test_a_team_has_no_more_threads_than_a_row_has_work_and_blocks_fit() -> None:
    for shape in ((197, 768), (2364, 197), (4, 3), (1, 50000), (3, 1)):
        sketch = sketch_of(alone("softmax", shape, axis=-1))
        for config in configs(sketch):
            launch, made = sketch.workload(config), program(sketch, config)
            assert launch.threads == made.threads <= 1024 and made.threads % 32 == 0
            assert launch.threads * launch.registers <= A100.registers_sm
            assert launch.blocks == made.grid[0] and launch.shared == made.shared


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    for stage in (
        normalised("layer_norm", (197, 768), "bfloat16"),
        alone("softmax", (64, 30, 12), axis=1),
        alone("argmax", (150, 640), axis=-1, keepdims=False),
    ):
        compiles(sketch_of(stage), arch)
    for stage in (moments_of((4, 3000, 320)), merged_moments_of(32)):
        compiles(matched(moments.match, stage), arch)
