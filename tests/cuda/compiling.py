"""Many compiles of the same models and stages with NVRTC, each thing done once: a model is read for
all targets and precisions, a text compiled for all models that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gtco.codegen.build import Failure, Job, Kernel, ProgramJob, gpu_kernel
from gtco.codegen.nvrtc import library
from gtco.compilation import Compilation, silent
from gtco.cores import allowed_cores
from gtco.gpu import GpuTarget, gpu_target
from gtco.options import CompileOptions
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Rejection


class Compiling:
    """Workers that compile in threads of this process, all cores busy, for NVRTC needs none of
    Python's locks. ``programs`` by symbol and target are of all jobs so far.
    """

    def __init__(self) -> None:
        library()
        self.pool = ThreadPoolExecutor(allowed_cores())
        self.programs: dict[tuple[str, str], CudaProgram] = {}
        self.answers: dict[tuple[str, tuple[str, ...], str], Future[Any]] = {}

    def build(self, jobs: Iterable[Job | ProgramJob]) -> Iterator[Kernel | Failure]:
        waiting = []
        for job in jobs:
            assert isinstance(job.target, GpuTarget)
            program: Any = (
                job.program
                if isinstance(job, ProgramJob)
                else space_of(job.stage, job.target).build(job.config, job.symbol)
            )
            if isinstance(program, Rejection):
                yield Failure(job.symbol, program.detail, program.reason)
                continue
            self.programs[job.symbol, job.target.name] = program
            known = (job.symbol, job.target.images, program.source)
            if known not in self.answers:
                self.answers[known] = self.pool.submit(gpu_kernel, job, program, job.target)
            waiting.append(self.answers[known])
        for answer in waiting:
            yield answer.result()


class Once:
    """A model and its example inputs, read once for as many compilations as are made of it."""

    def __init__(self, model: Any, example: Any) -> None:
        self.model, self.example = model, example
        self.imported: Any = None
        self.graphs: dict[int, Any] = {}  # by threads

    def compiled(
        self, folder: Path, target: str, compiling: Compiling, **options: Any
    ) -> Compilation:
        """The model with its kernels for the target, ready for :meth:`Compilation.finish`."""
        chosen = CompileOptions(target=target, **options)
        run = _Shared(self, folder / "model.so", chosen)
        run.prepare(gpu_target(target), None, compiling)  # type: ignore[arg-type]
        return run


class _Shared(Compilation):
    def __init__(self, once: Once, output: Path, options: CompileOptions) -> None:
        super().__init__(once.model, output, once.example, options, silent)
        self.once = once

    def read(self) -> Any:
        if self.once.imported is None:
            self.once.imported = super().read()
        return self.once.imported

    def canonical(self, imported: Any, threads: int) -> Any:
        if threads not in self.once.graphs:
            self.once.graphs[threads] = super().canonical(imported, threads)
        return self.once.graphs[threads].copy()
