"""One stage and its config -> a compiled kernel, as data that crosses processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gtco.codegen import tiles
from gtco.codegen.cuda import Compiler, gpu_code, listing
from gtco.codegen.generalize import generalized, outline
from gtco.codegen.jobs import Failure, GpuKernel, Job, Kernel, Outlined, ProgramJob
from gtco.codegen.llvm import lower, object_code
from gtco.codegen.nvrtc import compile_cuda
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Target
from gtco.support.errors import describe
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.emit.lines import program_lines
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Program, Rejection, Space


def build(job: Job | ProgramJob) -> Kernel | Failure:
    """Derives the space of the stage again, builds the program of the config and compiles it."""
    if isinstance(job, ProgramJob):
        return gpu_kernel(job, job.program, job.target)
    errors: list[Exception] = []
    space = space_of(job.stage, job.target, lambda rule, error: errors.append(error))
    program: Any = program_of(job, space)
    if isinstance(program, Rejection):
        reason = "; ".join([program.detail, *map(describe, errors)])
        return Failure(job.symbol, reason, program.reason)
    if isinstance(job.target, GpuTarget):
        return gpu_kernel(job, program, job.target)
    return _kernel(job, program, job.target)


def program_of(job: Job, space: Space) -> Program | CudaProgram | Rejection:
    """The program of the job's config. A program for GPUs gets the registers that its price
    assumes.
    """
    sketch = space.sketch(job.config)
    if isinstance(sketch, Rejection):
        return sketch
    program: Any = sketch.build(job.config, job.symbol)
    if isinstance(program, CudaProgram):
        launch: Any = sketch.workload(job.config)
        return replace(program, registers=launch.registers)
    return program


def _kernel(job: Job, program: Program, target: Target) -> Kernel:
    function, packings = program.function, dict(program.packings)
    used = tiles.used(function)
    lines = program.lines or program_lines(function, program.tasks)
    if job.outlined:
        return Outlined(
            symbol=job.symbol,
            tasks=program.tasks,
            workspace=program.workspace,
            packings=packings,
            tiles=used,
            lines=lines,
            outline=outline(function),
        )
    if job.arguments is not None:
        function = generalized(function, job.arguments)
    text = lower([function], target).script() if job.text else ""
    code = object_code([function], target)
    return Kernel(job.symbol, code, program.tasks, program.workspace, packings, text, used, lines)


def gpu_kernel(
    job: Job | ProgramJob,
    program: CudaProgram,
    target: GpuTarget,
    compiler: Compiler = compile_cuda,
) -> GpuKernel | Failure:
    """The job's program, compiled for every architecture of the target."""
    images = gpu_code(program, target, isinstance(job, Job) and job.ptx, compiler)
    if isinstance(images, Rejection):
        return Failure(job.symbol, images.detail, images.reason)
    return GpuKernel(
        symbol=job.symbol,
        images=images,
        grid=program.grid,
        threads=program.threads,
        shared=program.shared,
        source=program.source,
        scratch=program.scratch,
        counters=program.counters,
        packings=dict(program.packings),
        text=listing(program, images) if job.text else "",
        lines=program.lines,
    )
