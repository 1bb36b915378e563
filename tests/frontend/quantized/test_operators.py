"""Quantized operators against ONNX Runtime: integers to the last bit where the standard defines it,
and within one step where float32's rounding decides.
"""

from __future__ import annotations

import numpy as np
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from tests.frontend.quantized.draws import DRAWS
from tests.frontend.quantized.nodes import Drawing, compare, model_of, wanted
from tests.kernels import fresh_seed

COUNT = 12  # drawn cases of each operator


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("count", [COUNT, pytest.param(40 * COUNT, marks=pytest.mark.scheduled)])
def test_drawn_operators(name: str, count: int) -> None:
    """As they are imported, evaluated in numpy. Cases that ONNX Runtime has no kernel for are left
    out.
    """
    start, apart, total, skipped, compared = fresh_seed(), 0, 0, 0, 0
    for seed in range(start, start + 20 * count):
        if compared == count:
            break
        case = DRAWS[name](Drawing(np.random.default_rng(seed)))
        try:
            want = wanted(case)
        except Exception as error:
            assert "NOT_IMPLEMENTED" in str(error), f"seed {seed}: {error}"
            skipped += 1
            continue
        graph = lower(load_onnx(model_of([case]), simplify=False))
        (got,) = graph.evaluate(case.inputs).values()
        differ, size = compare(case, got, want, f"{name}, seed {seed}")
        apart, total, compared = apart + differ, total + size, compared + 1
    print(f"{name}: {apart} of {total} integers differ by one step, {skipped} cases left out")
    assert compared == count
    assert apart <= 1e-3 * total + 2


def test_windows_behind_the_padding_divide_by_all_their_taps() -> None:
    """Where padding counts: ONNX Runtime's QLinearAveragePool, unlike its AveragePool."""
    case = DRAWS["qlinear_average_pool"](Drawing(np.random.default_rng(0)))
    kind = case.inputs["x"].dtype
    rng = np.random.default_rng()
    case.inputs["x"] = rng.integers(0, 100, (1, 2, 5, 6)).astype(kind)
    case.attrs |= {"kernel_shape": [3, 2], "strides": [3, 3], "pads": [2, 0, 1, 0]}
    case.attrs |= {"channels_last": 0, "count_include_pad": 1, "ceil_mode": 1}
    (got,) = lower(load_onnx(model_of([case]), simplify=False)).evaluate(case.inputs).values()
    want = wanted(case)
    assert got.shape == want.shape == (1, 2, 3, 2)
    compare(case, got, want, "ceil mode")
