"""The vector functions against float64, over all of float32."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor import math
from tests.kernels import elementwise_kernel, fresh_seed, runnable, targets

SIZE = 1 << 18
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, 1.0, -1.0, 88.72283,
                    88.72284, -87.0, -87.4, -103.9, -104.1, 9.1, -9.1, 4.0, -4.0, 1000.0, -1000.0], np.float32)


def samples(low: float, high: float, seed: int) -> np.ndarray:
    """Special values, any bit pattern, and a dense uniform sample of [low, high]."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):
        patterns = rng.integers(0, 1 << 32, SIZE // 4, dtype=np.uint32).view(np.float32)
    dense = rng.uniform(low, high, SIZE - SIZE // 4 - SPECIAL.size).astype(np.float32)
    return np.concatenate([SPECIAL, patterns, dense])


def ulps(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the float32 nearest to ``wanted``; NaN and infinities must agree."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = wanted.astype(np.float32)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(got[~finite], rounded[~finite])
        spacing = np.spacing(np.abs(rounded[finite])).astype(np.float64)
        return np.abs(got[finite].astype(np.float64) - wanted[finite]) / spacing


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_exp(name: str, explicit: bool) -> None:
    x = samples(-110, 95, fresh_seed())
    got = elementwise_kernel(math.exp, SIZE, runnable(name), explicit)(x)
    with np.errstate(over="ignore", invalid="ignore"):
        assert ulps(got, np.exp(x.astype(np.float64))).max() <= 1.1


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_exp_nonpositive(name: str, explicit: bool) -> None:
    x = -np.abs(samples(-95, 0, fresh_seed()))
    x[np.isnan(x)] = np.nan  # the payload of a NaN may be lost here, but not the quiet NaN that arithmetic makes
    got = elementwise_kernel(math.exp_nonpositive, SIZE, runnable(name), explicit)(x)
    wanted = np.exp(x.astype(np.float64))
    assert (got[x < -87] == 0).all()
    assert ulps(got[~(x < -87)], wanted[~(x < -87)]).max() <= 2.2
    assert got[x == 0].tolist() == [1.0] * int((x == 0).sum())
