"""Shared code of the tests of GPU sketches: a few configs, their programs and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gtco.codegen.nvrtc import compile_cuda
from gtco.machine.gpu import gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Config, build, configs
from gtco.tensor.stage import Stage
from tests.cuda.emulate import run_stage
from tests.kernels import assert_close, fresh_seed, random_inputs, reference

A100 = gpu_target("cuda:sm_80")
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # the output's rounding
Rule = Callable[[Stage, Any], Any]


def matched(rule: Rule, stage: Stage) -> Any:
    found = rule(stage, A100)
    assert found is not None
    return found


def some(sketch: Any, most: int) -> list[Config]:
    """Configs from the whole space, evenly spread."""
    every = list(configs(sketch))
    return every[:: max(1, -(-len(every) // most))]


def check(
    rule: Rule,
    stage: Stage,
    most: int = 3,
    tolerance: float = 1e-5,
    arrays: Sequence[np.ndarray] | None = None,
    wanted: np.ndarray | None = None,
) -> None:
    """Compares some configs with the reference; if no inputs are given, they are random."""
    sketch = matched(rule, stage)
    arrays = random_inputs(stage, fresh_seed()) if arrays is None else arrays
    wanted = reference(stage, arrays) if wanted is None else wanted
    for config in some(sketch, most):
        print(config.to_json())
        assert_close(run_stage(sketch, config, arrays), wanted, tolerance)


def program(sketch: Any, config: Config | None = None) -> CudaProgram:
    """The program of ``config``, or of the first config if none is given."""
    made = build(sketch, config or next(iter(configs(sketch))), "kernel_under_test")
    assert isinstance(made, CudaProgram), made
    return made


def compiles(sketch: Any, arch: str) -> None:
    """Checks that the first config's kernel compiles to machine code, and that the registers of a
    thread suffice.
    """
    image = compile_cuda(program(sketch).source, arch)
    assert image.cubin[:4] == b"\x7fELF" and image.local == 0 and image.spills == 0, image.log
