"""Histograms and the ranges that observers read from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis.extra.numpy import arrays

from gtco.quantization.observers import (
    BINS,
    OBSERVERS,
    Histogram,
    Range,
    minmax,
    mse,
    percentile,
    rounded,
)
from gtco.support.errors import InputError

VALUES = arrays(
    np.float32,
    strategies.integers(1, 300),
    elements=strategies.floats(-(2.0**127), 2.0**127, width=32),
)


def seen(*parts: np.ndarray) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part)
    return found


@given(VALUES, strategies.lists(strategies.integers(0, 300), max_size=4), strategies.booleans())
def test_order_and_batches_do_not_matter(x: np.ndarray, cuts: list[int], back: bool) -> None:
    whole = seen(x)
    parts = np.split(x, sorted(min(cut, len(x)) for cut in cuts))
    other = seen(*(parts[::-1] if back else parts))
    assert (whole.first, whole.exponent) == (other.first, other.exponent)
    np.testing.assert_array_equal(whole.counts, other.counts)
    assert (whole.low, whole.high) == (other.low, other.high) == (x.min(), x.max())


@given(VALUES)
def test_every_value_is_in_its_bin(x: np.ndarray) -> None:
    found = seen(x)
    assert found.counts.sum() == len(x) and len(found.counts) <= BINS
    index = np.floor(x.astype(np.float64) / found.width).astype(int) - found.first
    np.testing.assert_array_equal(found.counts, np.bincount(index, minlength=len(found.counts)))


@given(VALUES, strategies.sampled_from(sorted(OBSERVERS)))
def test_a_range_is_inside_what_was_seen_and_has_zero(x: np.ndarray, observer: str) -> None:
    chosen = OBSERVERS[observer](seen(x))
    slack = 1e-6 * max(abs(float(x.min())), abs(float(x.max())))
    assert min(0.0, float(x.min())) - slack <= chosen.low <= 0 <= chosen.high
    assert chosen.high <= max(0.0, float(x.max())) + slack
    assert np.isfinite(np.float32(chosen.scale)) and chosen.scale > 0
    assert 0 <= chosen.zero <= 255
    assert rounded(np.zeros(1), chosen)[0] == 0


@given(VALUES)
def test_minmax_is_off_by_half_a_step_at_most(x: np.ndarray) -> None:
    chosen = OBSERVERS["minmax"](seen(x))
    wide = x.astype(np.float64)
    # the zero point is rounded, which moves the ends by up to half a step; and float32's own digits
    bound = 1.001 * chosen.scale + 1e-6 * np.abs(wide)
    if chosen.high - chosen.low > 1e-30:
        assert (np.abs(rounded(wide, chosen) - wide) <= bound).all()


def test_mse_is_the_least_square_error() -> None:
    """Of all observers, on data with few values far out; and no range nearby is better."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(200_000).astype(np.float32)
    x[:10] *= 20
    found = seen(x)

    def error(chosen: Range) -> float:
        return float(((rounded(x.astype(np.float64), chosen) - x) ** 2).mean())

    best = error(mse(found))
    others = {name: error(observe(found)) for name, observe in OBSERVERS.items()}
    assert best == min(others.values()) < 0.7 * others["minmax"]
    chosen = mse(found)
    for low in (0.8, 1.2):
        for high in (0.8, 1.2):
            assert error(Range(low * chosen.low, high * chosen.high)) > 0.98 * best


def test_all_percents_are_everything() -> None:
    found = seen(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    assert percentile(found, 100.0) == minmax(found)


def test_percentile_and_entropy_leave_out_what_is_rare() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1_000_000).astype(np.float32)
    x[:5] = 1000
    found = seen(*np.array_split(x, 7))
    for name in ("percentile", "entropy"):
        chosen = OBSERVERS[name](found)
        assert 3 < chosen.high < 40 and -6 < chosen.low < -2, name
    assert OBSERVERS["minmax"](found).high == 1000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(InputError):
        seen(np.array([1.0, value], np.float32))


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_constants_have_a_range(observer: str, value: float) -> None:
    chosen = OBSERVERS[observer](seen(np.full(9, value, np.float32)))
    np.testing.assert_allclose(rounded(np.array([value]), chosen), value, rtol=1e-6)
