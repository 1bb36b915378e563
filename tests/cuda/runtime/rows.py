"""A model for GPUs of several numbers of rows, whose kernels are C."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.plan import ALIGNMENT, BufferRef, Cover, TensorSpec, Variant, round_up
from gtco.support.sizes import Range
from tests.cuda.device_tensor import Tensor
from tests.cuda.fake_driver import FakeDriver, image, step_info
from tests.runtime.test_models import COLUMNS, SCALE
from tests.runtime.test_variants import ROWS, inputs

NAMES = ("scale_rows", "mask_relu", "counted")


def variant(rows: int, scratch: int) -> Variant:
    """y = relu(x * scale + mask), for so many rows. Of one row it is done in a step more. The last
    step adds a counter behind ``scratch`` bytes of the arena, which stays 0.
    """
    x, mask, y = BufferRef("input", 0), BufferRef("input", 1), BufferRef("output", 0)
    scaled, counter = BufferRef("arena", 0), BufferRef("arena", scratch)
    again = BufferRef("arena", round_up(rows * COLUMNS * 4))
    relu = GpuStep("mask_relu", (scaled, mask, again), (rows, 1, 1), 128, 0, step_info("add"))
    return Variant(
        (TensorSpec("x", "float32", (rows, COLUMNS)), TensorSpec("mask", "int8", (rows,))),
        (TensorSpec("y", "float32", (rows, COLUMNS)),),
        (
            GpuStep(
                "scale_rows",
                (x, BufferRef("weight", 64), scaled),
                *((rows, 1, 1), 64, 60000, step_info("multiply")),
            ),
            *((relu, relu) if rows == 1 else (relu,)),
            GpuStep("counted", (again, counter, y), (rows, 1, 1), 32, 0, step_info("sum")),
        ),
        scratch + ALIGNMENT,
        {"rows": rows},
    )


def rows_artifact(kernels: Path, every: Sequence[int] = ROWS, **changes: Any) -> GpuArtifact:
    """The model of these numbers of rows."""
    scratch = 2 * round_up(max(every) * COLUMNS * 4)
    fields: dict[str, Any] = {
        "name": "rows",
        "inputs": (
            TensorSpec("x", "float32", ("rows", COLUMNS)),
            TensorSpec("mask", "int8", ("rows",)),
        ),
        "outputs": (TensorSpec("y", "float32", ("rows", COLUMNS)),),
        "steps": (),
        "arena_bytes": scratch + ALIGNMENT,
        "images": {
            arch: dict.fromkeys(NAMES, image(arch, kernels)) for arch in ("sm_80", "sm_90a")
        },
        "weights": ((0, np.arange(3, dtype=np.int64)), (64, SCALE)),
        "metadata": {"target": {"kind": "cuda", "name": "cuda:sm_80"}, "precision": "fp32"},
        "variants": tuple(variant(rows, scratch) for rows in every),
        "counter_bytes": ALIGNMENT,
    }
    return GpuArtifact(**(fields | changes))


def ranged_artifact(kernels: Path, most: int, prices: dict[int, int]) -> GpuArtifact:
    """The model of 1 to ``most`` rows, in parts of these numbers of rows and these prices."""
    cover = Cover(
        *("rows", Range(1, most), tuple(prices), tuple(prices.values())),
        {"x": 0, "mask": 0, "y": 0},
    )
    return rows_artifact(kernels, tuple(prices), cover=cover)


def on_device(
    driver: FakeDriver, rows: int, seed: int = 0, **how: Any
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[np.ndarray, np.ndarray]]:
    """Inputs and an output on the device, and the arrays of the inputs."""
    x, mask = inputs(rows, seed)
    given = Tensor(driver, x, **how), Tensor(driver, mask, **how)
    return given, Tensor(driver, np.full_like(x, np.nan), **how), (x, mask)
