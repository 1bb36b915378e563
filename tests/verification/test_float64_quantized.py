"""The meanings of quantized operators by which ``--verify`` decides, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.verification.float64.evaluator import Evaluator, Limits
from gtco.verification.float64.operators import Arithmetic
from tests.frontend.quantized.draws import DRAWS
from tests.frontend.quantized.nodes import Drawing, model_of, wanted
from tests.kernels import fresh_seed


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_drawn_operators(name: str, dtype: type) -> None:
    """Integers within one step, few of them, where float64 rounds otherwise than float32."""
    start = fresh_seed()
    counts: list[tuple[int, int]] = []  # of each case: those that are apart, and all
    for seed in range(start, start + 12):
        case = DRAWS[name](Drawing(np.random.default_rng(seed)))
        try:
            want = wanted(case)
        except Exception as error:
            assert "NOT_IMPLEMENTED" in str(error)
            continue
        evaluator = Evaluator(model_of([case]), Limits(60.0, 2**30))
        (got,) = evaluator.run(case.inputs, Arithmetic(dtype))
        assert got.shape == want.shape, seed
        if want.dtype.kind == "f":
            assert got.dtype == dtype
            size = np.abs(want).max(initial=1e-30)
            rtol = 1e-3 if want.dtype == np.float16 else 1e-5
            if name == "dynamic_quantize_matmul":
                # An activation in the middle of two steps may become either: its row changes a
                # little. In float32 such values are moved on purpose, so there are more of them.
                changed = ~np.isclose(got, want, rtol, 1e-5 * size).all(axis=-1)
                counts.append((int(changed.sum()) if dtype == np.float64 else 0, 0))
                np.testing.assert_allclose(got, want, rtol, 0.05 * size, err_msg=str(seed))
                continue
            np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5 * size, err_msg=str(seed))
            continue
        assert got.dtype == want.dtype
        pairs = np.stack([got.astype(np.int64), want.astype(np.int64)]).reshape(2, -1)
        if name == "qlinear_where":  # one value may be broadcast to most of the result
            pairs = np.unique(pairs, axis=1)
        steps = np.abs(pairs[0] - pairs[1])
        assert steps.max(initial=0) <= (name not in ("matmul_integer", "conv_integer")), seed
        counts.append((int((steps > 0).sum()), steps.size))
    # Bytes have few values: one of them in the middle of two steps is many elements. If the scales
    # happen to make a product of 1 a step of 1/32, one product in 32 is in the middle of two. So
    # the two worst cases do not count.
    apart, total = np.array([*sorted(counts)[:-2], (0, 0)]).sum(axis=0)
    assert apart <= (0.01 if dtype == np.float64 else 0.05) * total + 3, (start, counts)
