"""Reductions on a GPU: the rows sketch's kernels, emulated, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.gpu import ARCHITECTURES, gpu_target
from gtco.graph.infer import infer_type
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch.cuda import rows
from gtco.tensor.space import Config, build, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.emulate import run_stage
from tests.kernels import assert_close, fresh_seed, random_inputs, reference

A100 = gpu_target("cuda:sm_80")
NARROW = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the output's rounding


def sketch_of(stage: Stage) -> Any:
    found = rows.match(stage, A100)
    assert found is not None
    return found


def some(sketch: Any, most: int) -> list[Config]:
    """Configs from the whole space, evenly spread."""
    every = list(configs(sketch))
    return every[:: max(1, -(-len(every) // most))]


def check(stage: Stage, most: int = 3, tolerance: float = 1e-5) -> None:
    sketch, arrays = sketch_of(stage), random_inputs(stage, fresh_seed())
    wanted = reference(stage, arrays)
    for config in some(sketch, most):
        print(config.to_json())
        assert_close(run_stage(sketch, config, arrays), wanted, tolerance)


def alone(kind: str, shape: tuple[int, ...], dtype: str = "float32", **attrs: Any) -> Stage:
    x = TensorType(shape, dtype)
    made = Operator(kind, ("x",), "y", infer_type(kind, [x], attrs, None), make_attrs(**attrs))
    return make_stage([made], {"x": x}, [])


def normalised(kind: str, shape: tuple[int, ...], out: str = "float32") -> Stage:
    """act(norm(a + b)) where that is what a transformer's block does, in a narrow format."""
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
@pytest.mark.parametrize("out", NARROW)
def test_norms_between_their_neighbours(kind: str, out: str) -> None:
    check(normalised(kind, (2, 5, 68), out), 2, NARROW[out])


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
    """A row of -inf alone, one with NaN, one with infinity are NaN; -inf beside numbers is 0."""
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
            assert_close(run_stage(sketch, config, narrow), wanted, NARROW[dtype])


def test_rows_that_lie_in_pieces_and_leave_in_others() -> None:
    """A prologue that merges heads, and an epilogue that transposes."""
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


def test_neighbours_are_read_and_stored_at_once() -> None:
    sketch = sketch_of(normalised("layer_norm", (2, 5, 768), "float16"))
    text = program(sketch, next(iter(configs(sketch)))).source
    assert text.count("gtco::load<4>") == 4 and "gtco::store<4>(&out[row * 768 + q * 4]" in text


def test_a_team_has_no_more_threads_than_a_row_has_work_and_blocks_fit() -> None:
    for shape in ((197, 768), (2364, 197), (4, 3), (1, 50000), (3, 1)):
        sketch = sketch_of(alone("softmax", shape, axis=-1))
        for config in configs(sketch):
            launch, made = sketch.workload(config), program(sketch, config)
            assert launch.threads == made.threads <= 1024 and made.threads % 32 == 0
            assert launch.threads * launch.registers <= A100.registers_sm
            assert launch.blocks == made.grid[0] and launch.shared == made.shared


def program(sketch: Any, config: Config) -> CudaProgram:
    made = build(sketch, config, "kernel_under_test")
    assert isinstance(made, CudaProgram), made
    return made


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    for stage in (
        normalised("layer_norm", (197, 768), "bfloat16"),
        alone("softmax", (64, 30, 12), axis=1),
        alone("argmax", (150, 640), axis=-1, keepdims=False),
    ):
        sketch = sketch_of(stage)
        image = compile_cuda(program(sketch, next(iter(configs(sketch)))).source, arch)
        assert image.cubin[:4] == b"\x7fELF" and image.local == 0 and image.spills == 0
