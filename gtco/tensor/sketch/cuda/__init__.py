"""The sketch rules for GPUs, in the order they are asked; as those for CPUs one package up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gtco.gpu import GpuTarget
from gtco.tensor.sketch.cuda import (
    attention,
    counts,
    depthwise,
    elementwise,
    fallback,
    gemm,
    grid_sample,
    moments,
    pool,
    resize,
    rows,
)
from gtco.tensor.stage import Stage

CudaRule = Callable[[Stage, GpuTarget], Any]

RULES: tuple[CudaRule, ...] = (
    gemm.match,
    attention.match,
    depthwise.match,
    rows.match,
    counts.match,
    moments.match,
    pool.match,
    resize.match,
    grid_sample.match,
    elementwise.match,
    fallback.match,
)
