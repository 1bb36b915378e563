"""Rows that are so few and so long that all threads share their statistics. They are compared with
float64, also with elements that are not numbers.
"""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import gtco

LENGTH = 157_500  # 2^2 3^2 5^4 7: no part of it consists of whole vectors

MODEL = f"""
<ir_version: 10, opset_import: ["": 21]>
long (float[2,{LENGTH}] x, float[{LENGTH}] g, float[{LENGTH}] b)
  => (float[2,{LENGTH}] y, float[2,{LENGTH}] z)
{{
  two = Constant<value_float=2.0>()
  twice = Mul(x, two)
  y = Softmax<axis=-1>(twice)
  n = LayerNormalization<axis=-1, epsilon=1e-5>(twice, g, b)
  z = Add(n, x)
}}
"""


@pytest.fixture(scope="module")
def compiled() -> gtco.runtime.module.Model:
    return gtco.compile_model(onnx.parser.parse_model(MODEL), threads=8)


def normalised(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, by definition."""
    wide = 2.0 * x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        e = np.exp(wide - wide.max(-1, keepdims=True))
        d = wide - wide.mean(-1, keepdims=True)
        n = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
        return e / e.sum(-1, keepdims=True), n * g + b + x


@pytest.mark.parametrize("centre", [0.0, -40.0, 1000.0])
def test_values(compiled: gtco.runtime.module.Model, centre: float) -> None:
    assert {"softmax", "layer_norm"}.isdisjoint(
        op for stage in compiled.stages for op in stage["operators"]
    )
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((2, LENGTH)) * [[0.5], [20.0]] + centre).astype(np.float32)
    g, b = (rng.standard_normal(LENGTH).astype(np.float32) for _ in range(2))
    for ours, wanted in zip(compiled(x, g, b), normalised(x, g, b), strict=True):
        assert np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert np.isfinite(ours).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, LENGTH // 2 + 3, LENGTH - 1])
def test_what_is_no_number(compiled: gtco.runtime.module.Model, odd: float, where: int) -> None:
    """It stays in its row; -inf is an element that a mask hides."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((2, LENGTH)).astype(np.float32)
    x[0, where] = odd
    one = np.ones(LENGTH, np.float32)
    for ours, wanted in zip(compiled(x, one, one), normalised(x, one, one), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min) / 2])
def test_masked_rows(compiled: gtco.runtime.module.Model, hidden: float) -> None:
    """A row that -inf hides entirely is NaN; a row that a finite mask hides is the mean."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2, LENGTH)).astype(np.float32)
    x[0] = hidden
    x[1, ::3] = hidden
    one = np.ones(LENGTH, np.float32)
    ours, wanted = compiled(x, one, one)[0], normalised(x, one, one)[0]
    np.testing.assert_allclose(ours, wanted, rtol=3e-5)
