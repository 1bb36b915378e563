"""Whole models for GPUs in the tests: the programs that the policy picks, and a library that the
fake driver runs them from, emulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gtco.assembly import assemble
from gtco.codegen.build import GpuKernel
from gtco.codegen.generate import Generated
from gtco.codegen.nvrtc import Image
from gtco.compilation import Compilation, silent
from gtco.gpu import GpuTarget, gpu_target
from gtco.options import CompileOptions
from gtco.runtime.artifact import write_artifact
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from tests.cuda.emulate import build_shared
from tests.cuda.fake_driver import image


@dataclass(frozen=True)
class Whole:
    """A model's stages, and of each different one what is picked and its program."""

    graph: Any
    target: GpuTarget
    precision: str
    stages: Sequence[Stage]
    picks: Mapping[str, Pick]
    programs: Mapping[str, CudaProgram]

    def library(self, path: Path) -> tuple[Path, Path]:
        """The model's library, and the shared object of its emulated kernels."""
        arch = self.target.arch
        canonical = {s.key: s.canonical for s in self.stages}
        emulated = build_shared(
            {f"gtco_{k}": (p, sizes(canonical[k], p)) for k, p in self.programs.items()},
            arch=10 * self.target.generation,
        )
        made = Image(image(arch, emulated), "", 0, 0, 0, 0)
        kernels = {
            key: GpuKernel(
                symbol=f"gtco_{key}",
                images={arch: made},
                grid=program.grid,
                threads=program.threads,
                shared=program.shared,
                packings=dict(program.packings),
            )
            for key, program in self.programs.items()
        }
        generated = Generated(list(self.stages), dict(kernels), dict(self.picks))
        artifact: Any = assemble("whole", self.graph, generated, self.target, 1, self.precision, ())
        return write_artifact(artifact, path), emulated


def whole(model: Any, inputs: Sequence[Any], target: str, precision: str) -> Whole:
    """Raises AssertionError where a stage has no program."""
    options = CompileOptions(target=target, precision=precision)
    run = Compilation(model, Path("model.so"), tuple(inputs), options, silent)
    machine = gpu_target(target)
    run.partition(machine, None)
    stages = {s.key: s for s in run.found.stages}
    picks, programs = {}, {}
    for key, stage in stages.items():
        pick = run.policy.choose(stage, ())
        assert pick is not None, f"no sketch for {stage.label}"
        program: Any = space_of(stage.canonical, machine).build(pick.config, f"gtco_{key}")
        assert isinstance(program, CudaProgram), f"{stage.label}: {program}"
        picks[key], programs[key] = pick, program
    return Whole(run.graph, machine, precision, run.found.stages, picks, programs)


def sizes(stage: Stage, program: CudaProgram) -> list[int]:
    """Bytes of each argument as it lies in memory, the output last."""
    packed = {
        i.name: prod(program.packings[i.name].packed_shape) * np.dtype(i.type.dtype).itemsize
        for i in stage.inputs
        if i.name in program.packings
    }
    return [*(packed.get(i.name, i.type.nbytes) for i in stage.inputs), stage.output.type.nbytes]
