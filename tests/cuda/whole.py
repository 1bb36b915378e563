"""Whole models on the CPU. They are compiled for a GPU like a user's, but the emulator takes the
place of NVRTC, and the fake driver that of libcuda. The library, its plan, the C runtime and the
text of the kernels are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.jobs import Failure, GpuKernel, Job, Kernel, ProgramJob
from gtco.codegen.nvrtc import Image
from gtco.driver.compilation import Compilation, silent
from gtco.driver.compiled import CompileReport
from gtco.driver.library import Library
from gtco.driver.linking.finishing import finish
from gtco.driver.phases import Built
from gtco.machine.gpu import gpu_target
from gtco.runtime.module import load
from gtco.support.options import CompileOptions
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.packing import Packing, packed_types
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Rejection
from tests.cuda.emulate import build_shared, faults_of
from tests.cuda.fake_driver import FakeDriver, image


class Emulating:
    """Workers that give a kernel in the emulator's shared object ``path`` for each job;
    :meth:`link` makes this object from all of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.programs: dict[str, tuple[CudaProgram, list[int]]] = {}
        self.persistent: dict[str, CudaProgram] = {}

    def build(self, jobs: Iterable[Job | ProgramJob]) -> Iterator[Kernel | Failure]:
        for job in jobs:
            if isinstance(job, ProgramJob):
                self.persistent[job.symbol.partition(":")[0]] = job.program
                yield self._kernel(job, job.program, {})
                continue
            program: Any = space_of(job.stage, job.target).build(job.config, job.symbol)
            if isinstance(program, Rejection):
                yield Failure(job.symbol, program.detail, program.reason)
                continue
            inputs = packed_types(job.stage, program.packings)
            sizes = [inputs[i.name].nbytes for i in job.stage.inputs]
            self.programs[job.symbol] = program, [*sizes, job.stage.output.type.nbytes]
            yield self._kernel(job, program, dict(program.packings))

    def _kernel(
        self, job: Job | ProgramJob, program: CudaProgram, packings: dict[str, Packing]
    ) -> GpuKernel:
        return GpuKernel(
            symbol=job.symbol,
            images={
                arch: Image(image(arch, self.path), "", 0, 0, 0, 0)
                for arch in job.target.images  # type: ignore[union-attr]
            },
            grid=program.grid,
            threads=program.threads,
            shared=program.shared,
            source=program.source,
            scratch=program.scratch,
            counters=program.counters,
            packings=packings,
            text=program.source if job.text else "",
        )

    def link(self, arch: int) -> None:
        self.path.symlink_to(build_shared(self.programs, self.persistent, arch=arch))


def emulated(
    driver: FakeDriver, folder: Path, model: Any, example: Any, arch: str, **options: Any
) -> tuple[CompileReport, Any, Emulating]:
    """The model compiled for ``arch`` and opened on the fake driver's GPU; see
    :func:`gtco.compile_model`.
    """
    run, built, workers = prepared(folder, model, example, f"cuda:{arch}", **options)
    generation = gpu_target(run.options.target).generation
    workers.link(10 * generation)
    finish(run, built, folder)
    driver.reset(1, generation // 10, generation % 10, 1)
    return run.report, load(run.output), workers


def prepared(
    folder: Path, model: Any, example: Any, target: str, **options: Any
) -> tuple[Compilation, Built, Emulating]:
    """The model's stages, the policy's pick for each, and their programs."""
    chosen = CompileOptions(target=target, **options)
    run = Compilation(model, folder / "model.so", example, chosen, silent)
    workers = Emulating(folder / "kernels.so")
    fused = run.to_stages(gpu_target(target))
    return run, run.generate(fused, workers), workers  # type: ignore[arg-type]


def several(
    driver: FakeDriver, folder: Path, model: Any, example: Any, arch: str, **options: Any
) -> tuple[CompileReport, Any, Emulating]:
    """As :func:`emulated`, of a library of several sizes, which ``dims`` names."""
    made, built, workers = prepared_library(folder, model, example, f"cuda:{arch}", **options)
    generation = gpu_target(f"cuda:{arch}").generation
    workers.link(10 * generation)
    made.finish(built, folder)
    driver.reset(1, generation // 10, generation % 10, 1)
    return made.report(), load(folder / "model.so"), workers


def prepared_library(
    folder: Path, model: Any, example: Any, target: str, **options: Any
) -> tuple[Library, dict[Compilation, Built], Emulating]:
    """The library's variants with their stages, picks and programs."""
    chosen = CompileOptions(target=target, **options)
    made = Library(model, folder / "model.so", example, chosen, silent)
    workers = Emulating(folder / "kernels.so")
    built = made.prepare(gpu_target(target), None, workers)  # type: ignore[arg-type]
    return made, built, workers


def outputs(model: Any, workers: Emulating, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's outputs for the inputs; every fault of a kernel is an error."""
    found: dict[str, np.ndarray] = model.run(inputs)
    assert not (faults := faults_of(workers.path.resolve())), "\n".join(faults)
    return found
