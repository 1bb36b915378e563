"""The emulator: primitives against their definitions, and each kind of fault is found."""

from __future__ import annotations

import numpy as np

from gtco.tensor.cuda.program import CudaProgram
from tests.cuda.emulate import Report, emulate


def run(body: str, arrays: list[np.ndarray], out: np.ndarray, threads: int = 32, shared: int = 0,
        grid: tuple[int, int, int] = (1, 1, 1), arch: int = 800, seed: int | None = None) -> Report:
    """A kernel ``body`` over in0, in1 ... and out, whose C types follow from the arrays'."""
    types = {"float32": "float", "float16": "half", "uint16": "bf16", "uint32": "uint32_t",
             "int32": "int", "int64": "int64_t", "uint8": "uint8_t"}
    inputs = [f"const {types[a.dtype.name]}* __restrict__ in{i}" for i, a in enumerate(arrays)]
    parameters = ", ".join([*inputs, f"{types[out.dtype.name]}* __restrict__ out"])
    source = (f'#include "gtco/device.cuh"\nusing namespace gtco;\nextern "C" __global__ void '
              f'__launch_bounds__({threads}) k({parameters}) {{\nconst int t = threadIdx.x;\n'
              f'{body}\n}}\n')
    program = CudaProgram(source, grid, threads, shared)
    return emulate(program, "k", arrays, out, arch=arch, seed=seed)


def test_threads_and_blocks() -> None:
    out = np.empty((2, 3, 64), np.int32)
    run("out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + t] = "
        "blockIdx.y * 10000 + blockIdx.x * 1000 + warp() * 100 + lane();",
        [], out, threads=64, grid=(3, 2, 1))
    y, x, t = np.indices((2, 3, 64))
    np.testing.assert_array_equal(out, y * 10000 + x * 1000 + t // 32 * 100 + t % 32)
