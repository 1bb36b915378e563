"""The moments of parts and the merging of them, against the reference, for 8 and 16 lanes."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor import space
from gtco.tensor.sketch.moments import cpu as moments
from gtco.tensor.space import Program
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)


def op(kind: str, inputs: str, output: str, shape: tuple[int, ...], **attrs: object) -> Operator:
    return Operator(kind, tuple(inputs.split()), output, TensorType(shape), make_attrs(**attrs))


def check(made: Stage, name: str, inputs: list[np.ndarray], tolerance: float = 1e-5) -> None:
    machine = runnable(name)
    sketch = moments.match(made, machine)
    assert sketch is not None
    wanted = reference(made, inputs)
    for built in some_kernels(sketch, machine):
        got = built(*inputs, unaligned=True)
        for k in range(2):  # the magnitudes of means and variances differ
            assert_close(got[..., k, :], wanted[..., k, :], tolerance)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("shape", [(2, 3, 7, 64), (1, 5, 49, 100), (1, 2, 33, 3), (1, 1, 1, 17)])
def test_moments(shape: tuple[int, ...], name: str) -> None:
    made = make_stage(
        [op("moments", "x", "y", (*shape[:-2], 2, shape[-1]))], {"x": TensorType(shape)}, []
    )
    check(made, name, random_inputs(made, fresh_seed()))


@pytest.mark.parametrize("name", targets())
def test_moments_of_what_a_prologue_computes(name: str) -> None:
    made = make_stage(
        [
            op("add", "x r", "s", (1, 6, 7, 40)),
            op("relu", "s", "t", (1, 6, 7, 40)),
            op("reshape", "t", "u", (1, 3, 14, 40)),
            op("moments", "u", "y", (1, 3, 2, 40)),
        ],
        {"x": TensorType((1, 6, 7, 40)), "r": TensorType((40,))},
        [],
    )
    check(made, name, random_inputs(made, fresh_seed()))


def test_columns_through_a_reshape_have_no_address_a_lane() -> None:
    """The rows of a GroupNorm as a matrix: its columns lie together. This also holds if they begin
    at 8 * lanes, and in a separate part.
    """
    made = make_stage(
        [
            op("reshape", "x", "v", (1, 12, 64, 256)),
            op("moments", "v", "y", (1, 12, 2, 256)),
        ],
        {"x": TensorType((1, 64, 48, 64))},
        [],
    )
    machine = target("x86-64-v4")
    sketch = moments.match(made, machine)
    assert sketch is not None
    program = space.build(sketch, first_config(sketch), "k")
    assert isinstance(program, Program)
    assert "Div(T.Ramp" not in str(program.function.script())


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 5, 2, 64), 8), ((1, 7, 2, 70), 70), ((1, 3, 2, 96), 1), ((2, 1, 2, 21), 3),
     ((1, 4, 2, 320), 32), ((1, 2, 2, 5), 5)],
)  # fmt: skip
def test_merged_moments(shape: tuple[int, ...], groups: int, name: str) -> None:
    made = make_stage(
        [op("merged_moments", "x", "y", (shape[0], 2, shape[3]), groups=groups, epsilon=1e-5)],
        {"x": TensorType(shape)},
        [],
    )
    (x,) = random_inputs(made, fresh_seed())
    x[:, :, 1] = np.abs(x[:, :, 1])
    check(made, name, [x])


@pytest.mark.parametrize("name", targets())
def test_a_mean_far_from_zero(name: str) -> None:
    """Mean 10^4 and deviation 1: float32 sums of squares would lose the variance entirely."""
    made = make_stage(
        [op("moments", "x", "y", (1, 4, 2, 33))], {"x": TensorType((1, 4, 50, 33))}, []
    )
    (x,) = random_inputs(made, fresh_seed())
    x = (x + np.float32(1e4)).astype(np.float32)
    check(made, name, [x], 1e-5)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("far", [1e6, -1e18])
def test_a_first_row_far_from_the_others(name: str, far: float) -> None:
    """All values are taken about the first row. The variance must keep its digits, and the mean
    must keep those that a normalisation can see.
    """
    made = make_stage(
        [op("moments", "x", "y", (1, 1, 2, 33))], {"x": TensorType((1, 1, 203, 33))}, []
    )
    (x,) = random_inputs(made, fresh_seed())
    x[0, 0, 0, ::3] = far
    check(made, name, [x], 1e-4)


def test_nan_reaches_its_group_alone() -> None:
    machine = runnable("x86-64-v3")
    made = make_stage(
        [op("merged_moments", "x", "y", (1, 2, 6), groups=3, epsilon=1e-5)],
        {"x": TensorType((1, 2, 2, 6))},
        [],
    )
    x = np.ones((1, 2, 2, 6), np.float32)
    x[0, 1, 0, 2] = np.nan
    sketch = moments.match(made, machine)
    assert sketch is not None
    got = build(sketch, first_config(sketch), machine)(x)
    assert np.isnan(got[0, :, 2:4]).all() and np.isfinite(got[0, :, [0, 1, 4, 5]]).all()
