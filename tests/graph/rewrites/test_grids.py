"""Weights that are whole steps of a scale are found by their values alone."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.grids import TOLERANCE, grid, in_bits
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
    assert found.steps.dtype == np.int16 and found.scale.dtype == np.float32
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
    stored = found and in_bits(found, 8)
    assert stored and stored.steps.dtype == np.int8 and stored.zero is None
    assert (stored.scale < 0).all()
    np.testing.assert_array_equal(stored.steps * stored.scale, weights)


@pytest.mark.parametrize(
    ("least", "most", "bits", "zero"),
    [
        (-8, 7, 4, False),
        (-7, 8, 4, False),
        (0, 15, 4, True),
        (-15, 0, 4, True),
        (100, 115, 4, True),
        (-130, -120, 4, True),
        (-128, 127, 8, False),
        (-127, 128, 8, False),
        (0, 255, 8, True),
        (-255, 0, 8, True),
        (-30, 225, 8, True),
    ],
)
def test_steps_far_from_zero(least: int, most: int, bits: int, zero: bool) -> None:
    rng = np.random.default_rng(most - least)
    steps = rng.integers(least, most + 1, (60, 5))
    steps[:2], steps[2] = np.reshape((least, most), (2, 1)), most - 1  # no common divisor
    scale = np.exp(rng.uniform(-20, 5, 5)).astype(np.float32)
    weights = steps.astype(np.float32) * scale
    found = grid(weights)
    assert found is not None
    stored = in_bits(found, bits)
    assert stored is not None and (stored.zero is not None) == zero
    whole = stored.steps.astype(np.float32)
    wide = (whole if stored.zero is None else whole - stored.zero) * stored.scale
    np.testing.assert_array_equal(wide, weights)
    if bits == 8:
        assert in_bits(found, 4) is None


@pytest.mark.parametrize("level", [90, 120, 128, 210, 255])
@pytest.mark.parametrize("divisor", [2, 3, 5])
def test_one_step_has_no_divisor_in_common_with_the_others(level: int, divisor: int) -> None:
    """The number of steps does not follow from the values that are looked at first."""
    rng = np.random.default_rng(level)
    steps = rng.integers(-(level // divisor), level // divisor + 1, (400, 7)) * divisor
    steps[0], steps[1:3] = level, 0
    steps[211] = 1
    weights = steps.astype(np.float32) * np.exp(rng.uniform(-20, 5, 7)).astype(np.float32)
    found = grid(weights)
    assert found is not None
    np.testing.assert_array_equal(found.steps, steps)
    np.testing.assert_array_equal(found.steps * found.scale, weights)


def test_steps_too_far_apart() -> None:
    """Their grid is found, and 8 bits do not hold it."""
    weights = np.arange(-128, 129, dtype=np.float32)[:, None]
    found = grid(weights)
    assert found is not None and in_bits(found, 8) is None
    found = grid(weights[120:140])  # -8 to 11
    assert found is not None and in_bits(found, 4) is None and in_bits(found, 8) is not None


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


@pytest.mark.parametrize("fault", ["random", "nan", "infinite", "one", "beyond", "tiny"])
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
        case "beyond":  # steps of 9 bits
            weights = (np.arange(480).reshape(40, 12) * scale).astype(np.float32)
        case "tiny":  # float32 holds such scales with a few bits
            weights = (steps * np.float64(3.3e-44)).astype(np.float32)
            weights[0] = 1e-41
    assert grid(weights) is None
