"""Weights that are whole steps of a scale are found by their values alone."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.grids import TOLERANCE, grid
from tests.kernels import fresh_seed


def drawn(k: int, columns: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of up to ``most``, and scales of many sizes."""
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    steps = rng.integers(-most, most + 1, (k, columns)).astype(np.int8)
    scale = np.exp(rng.uniform(-20, 5, columns)).astype(np.float32)
    return steps, scale


@pytest.mark.parametrize("most", [1, 2, 7, 15, 64, 127])
def test_steps_are_found_to_the_last_bit(most: int) -> None:
    steps, scale = drawn(61, 37, most)
    weights = steps * scale
    found = grid(weights)
    assert found is not None
    assert found.steps.dtype == np.int8 and found.scale.dtype == np.float32
    np.testing.assert_array_equal(found.steps * found.scale, weights)


def test_the_least_step_is_one_of_128() -> None:
    steps, scale = drawn(50, 9, 127)
    steps[3] = -128
    found = grid(steps * scale)
    assert found is not None
    np.testing.assert_array_equal(found.steps, steps)


def test_a_scale_may_be_negative() -> None:
    """A largest value of 128 steps is one of -128 by a negative scale."""
    steps, scale = drawn(50, 9, 127)
    steps[3] = -128
    weights = steps * -scale
    found = grid(weights)
    assert found is not None and (found.scale < 0).all()
    np.testing.assert_array_equal(found.steps * found.scale, weights)


def test_a_scale_that_was_folded_in_costs_one_rounding() -> None:
    steps, scale = drawn(64, 20, 127)
    steps[0] = 127  # so that the scale is not a multiple of it
    factor = np.linspace(0.3, 7, 20, dtype=np.float32)
    weights = (steps * scale) * factor
    found = grid(weights)
    assert found is not None
    np.testing.assert_array_equal(found.steps, steps)
    wide = found.steps.astype(np.float64) * found.scale
    np.testing.assert_allclose(wide, weights, rtol=2 * TOLERANCE)


def test_columns_of_zeros_and_of_one_value() -> None:
    weights = np.zeros((16, 3), np.float32)
    weights[:, 1] = -0.3
    found = grid(weights)
    assert found is not None
    np.testing.assert_array_equal(found.steps * found.scale, weights)


@pytest.mark.parametrize("fault", ["random", "nan", "infinite", "one", "beyond", "both", "tiny"])
def test_what_is_on_no_grid(fault: str) -> None:
    steps, scale = drawn(40, 12, 127)
    weights = steps * scale
    rng = np.random.default_rng(3)
    match fault:
        case "random":
            weights = rng.standard_normal(weights.shape).astype(np.float32)
        case "nan":
            weights[7, 11] = np.nan
        case "infinite":
            weights[7, 11] = -np.inf
        case "one":  # of all
            weights[:, 11] = np.arange(40) - 20
            weights[7, 11] += 0.01
        case "beyond":  # steps of uint8 beside a zero point of 0
            weights = (np.arange(480).reshape(40, 12) % 256 * scale).astype(np.float32)
        case "tiny":  # float32 holds such scales with a few bits
            weights = (steps * np.float64(3.3e-44)).astype(np.float32)
            weights[0] = 1e-41
        case "both":  # 128 and -128
            weights[:, 11] = 1 - 2 * (np.arange(40) % 2)
            weights[7:9, 11] = -1 / 128, 1
    assert grid(weights) is None
