"""The sketch rules for GPUs, in the order in which they are asked. :mod:`gtco.tensor.sketch` has
those for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.tensor.sketch.attention import cuda as attention
from gtco.tensor.sketch.depthwise import cuda as depthwise
from gtco.tensor.sketch.elementwise import cuda as elementwise
from gtco.tensor.sketch.fallback import cuda as fallback
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.grid_sample import cuda as grid_sample
from gtco.tensor.sketch.moments import cuda as moments
from gtco.tensor.sketch.pool import cuda as pool
from gtco.tensor.sketch.resize import cuda as resize
from gtco.tensor.sketch.rows import cuda as rows
from gtco.tensor.sketch.rows import cuda_counts as counts
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
