"""One stage and its config -> a compiled kernel, as data that crosses processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gtco.codegen import tiles
from gtco.codegen.cuda import Compiler, gpu_code, listing
from gtco.codegen.llvm import lower, object_code
from gtco.codegen.nvrtc import Image, compile_cuda
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine, Target
from gtco.support.errors import describe
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.packing import Packing
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Program, Rejection, Space
from gtco.tensor.stage import Stage


@dataclass(frozen=True)
class Job:
    """A kernel to build. ``text``: give also the lowered TIR or the CUDA C++, for a dump. ``ptx``:
    for a kernel for GPUs, give PTX beside its machine code.
    """

    symbol: str
    stage: Stage
    config: Config
    target: Machine
    text: bool = False
    ptx: bool = False


@dataclass(frozen=True)
class ProgramJob:
    """A kernel for GPUs whose program exists already: that of a whole model. It gets no PTX,
    because a driver would take as long to compile it as gtco does.
    """

    symbol: str
    program: CudaProgram
    target: GpuTarget
    text: bool = False


@dataclass(frozen=True)
class Kernel:
    """A built kernel: its object file, what the runtime must know, and the layouts of its constant
    inputs. ``tiles``: it multiplies in the tile unit.
    """

    symbol: str
    code: bytes
    tasks: int
    workspace: int
    packings: dict[str, Packing]
    text: str = ""
    tiles: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.code)


@dataclass(frozen=True, kw_only=True)
class GpuKernel(Kernel):
    """A kernel for GPUs: instead of an object file it has machine code by architecture, and it says
    how it is launched (:class:`gtco.tensor.cuda.program.CudaProgram`). ``source`` is its CUDA C++,
    from which a model's persistent kernel is made. ``scratch`` and ``counters`` are those of the
    program.
    """

    images: Mapping[str, Image]
    grid: tuple[int, int, int]
    threads: int
    shared: int
    source: str
    scratch: int = 0
    counters: int = 0
    code: bytes = b""
    tasks: int = 1
    workspace: int = 0

    @property
    def nbytes(self) -> int:
        return sum(len(image.cubin) + len(image.ptx) for image in self.images.values())


@dataclass(frozen=True)
class Failure:
    """Why a job gave no kernel: a rejection, an exception, or the crash of its process.
    ``rejected`` is the reason under which a rejection is counted.
    """

    symbol: str
    reason: str
    rejected: str = ""


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
    text = lower([program.function], target).script() if job.text else ""
    return Kernel(
        job.symbol,
        object_code([program.function], target),
        program.tasks,
        program.workspace,
        dict(program.packings),
        text,
        tiles.used(program.function),
    )


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
    )
