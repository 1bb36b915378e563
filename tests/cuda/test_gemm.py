"""Contractions on GPUs, emulated: against float64 of the same operands."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from gtco.gpu import GpuTarget, gpu_target
from gtco.tensor.sketch.cuda import gemm
from gtco.tensor.sketch.cuda.gemm import CudaGemm
from gtco.tensor.space import Config, configs
from gtco.tensor.stage import Stage, TensorType
from tests.cuda.emulate import run_reported
from tests.kernels import assert_close, fresh_seed, reference
from tests.unit.test_sketch_bfloat16 import chain, window

# float32 sums of exact products: rounding of up to 400 sums
TOLERANCE = 2e-6
# a result that is stored in 16 bits may be one unit off, where a float32 sum lies on the other side
# of the middle of two
ROUNDED = {"float32": TOLERANCE, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FORMATS = ("float16", "bfloat16", "float32")


def T(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype)


def dense(m: int, n: int, k: int, dtype: str, *, constant: bool = True, out: str = "") -> Stage:
    b = "w" if constant else "b"
    rows: list[tuple[str, str, str, TensorType, Any]] = [
        ("matmul", f"x {b}", "c", T(m, n), {}),
        ("add", "c bias", "y", T(m, n), {}),
    ]
    if out:
        rows.append(("cast", "y", "z", T(m, n, dtype=out), {}))
    return chain({"x": T(m, k, dtype=dtype), b: T(k, n, dtype=dtype), "bias": T(n)}, *rows)


def conv(
    size: int, channels: int, n: int, taps: int, dtype: str, layout: str = "NHWC", **attrs: Any
) -> Stage:
    shape = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    attrs = window(taps // 2, layout=layout, **attrs)
    padding, strides, dilation = attrs["padding"], attrs["strides"], attrs["dilation"]
    h, w = (
        (size + 2 * p - (taps - 1) * d - 1) // s + 1
        for p, s, d in zip(padding[:2], strides, dilation, strict=True)
    )
    result = (2, h, w, n) if layout == "NHWC" else (2, n, h, w)
    weights = T(n, channels // attrs["groups"], taps, taps, dtype=dtype)
    types = {"x": T(*shape, dtype=dtype), "w": weights}
    return chain(types, ("conv2d", "x w", "y", T(*result), attrs))


def inputs(stage: Stage, seed: int) -> list[np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal([int(d) for d in i.type.shape]).astype(np.dtype(i.type.dtype))
        for i in stage.inputs
    ]


def sketch_of(stage: Stage, target: str | GpuTarget = "cuda:sm_80") -> CudaGemm:
    sketch = gemm.match(stage, gpu_target(target) if isinstance(target, str) else target)
    assert sketch is not None
    return sketch


def some(sketch: CudaGemm, count: int, seed: int) -> list[Config]:
    """The first config, and others drawn so that each decision's options take turns."""
    every = list(configs(sketch))
    return [every[0], *Random(seed).sample(every[1:], min(count - 1, len(every) - 1))]


def check(sketch: CudaGemm, config: Config, seed: int) -> Any:
    stage = sketch.stage
    arrays = inputs(stage, seed)
    print(config.to_json())
    got, report = run_reported(sketch, config, arrays, seed=seed)
    assert_close(got, reference(stage, list(map(wide, arrays))), ROUNDED[stage.output.type.dtype])
    return report


def wide(array: np.ndarray) -> np.ndarray:
    """Narrow operands as what they are exactly."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", [(29, 72, 48), (13, 37, 33), (1, 50, 130)], ids=str)
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "computed"])
def test_dense(sizes: tuple[int, int, int], dtype: str, constant: bool) -> None:
    seed = fresh_seed()
    sketch = sketch_of(dense(*sizes, dtype, constant=constant))
    for config in some(sketch, 2, seed):
        check(sketch, config, seed)
