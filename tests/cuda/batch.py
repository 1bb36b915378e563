"""Many small kernels in one translation unit, which the emulator compiles at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gtco.tensor import space
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Config
from tests.cuda.emulate import emulate

Case = tuple[Any, Config, Sequence[np.ndarray]]  # a sketch, its config, the stage's inputs


def emulate_all(cases: Sequence[Case], arch: int = 800) -> list[np.ndarray]:
    """The output of each case."""
    programs = []
    for n, (sketch, config, _) in enumerate(cases):
        program: Any = space.build(sketch, config, f"kernel_{n}")
        assert isinstance(program, CudaProgram), f"rejected: {program}"
        programs.append(program)
    text = "\n".join(p.source for p in programs)
    found = []
    for n, (program, (sketch, _, arrays)) in enumerate(zip(programs, cases, strict=True)):
        type_ = sketch.stage.output.type
        out = np.empty([int(d) for d in type_.shape], np.dtype(type_.dtype))
        emulate(replace(program, source=text), f"kernel_{n}", arrays, out, arch=arch)
        found.append(out)
    return found
