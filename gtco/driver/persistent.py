"""The kernels of a model for GPUs -> one persistent kernel that does all of its steps."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gtco.codegen.build import Failure, GpuKernel, Job, ProgramJob
from gtco.codegen.generate import Generated
from gtco.codegen.nvrtc import Image
from gtco.codegen.workers import Workers
from gtco.machine.gpu import GpuTarget
from gtco.runtime.gpu_plan import PersistentKernel
from gtco.search.gpu.launches import MOST_THREADS, narrow
from gtco.search.gpu.policy import KEPT, GpuPolicy
from gtco.tensor.cuda.persistent import MOST_POINTERS, MOST_TENSORS, persistent_program
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.cuda.source import has_roles
from gtco.tensor.packing import packed_types
from gtco.tensor.space import Rejection
from gtco.tensor.stage import Stage

SYMBOL = "gtco_model"


def persistent(
    generated: Generated, tensors: int, target: GpuTarget, workers: Workers, *, text: bool = False
) -> tuple[PersistentKernel, str] | Rejection:
    """The persistent kernel of a model with that many inputs and outputs, compiled for every
    architecture in ``workers``, and where ``text`` its listing; or why there can be none. Where it
    would spill registers it has no image: a stage alone is given those that it needs.
    """
    kernels = within(generated, target, workers)
    programs = {
        kernel.symbol: CudaProgram(kernel.source, kernel.grid, kernel.threads, kernel.shared)
        for kernel in kernels.values()
    }
    if roles := [name for name, program in programs.items() if has_roles(program.source)]:
        detail = f"{roles[0]} hands over registers, which is for a kernel of its own"
        return Rejection("warp roles", detail)
    most = max((_buffers(stage, generated) for stage in generated.stages), default=0)
    if not programs:
        return Rejection("no steps", "a model without a step")
    if tensors > MOST_TENSORS:
        return Rejection("tensors", f"{tensors} inputs and outputs; {MOST_TENSORS} are possible")
    if most > MOST_POINTERS:
        return Rejection("buffers", f"a step with {most} buffers; {MOST_POINTERS} are possible")
    program = persistent_program(SYMBOL, programs)
    jobs = [
        ProgramJob(f"{SYMBOL}:{arch}", program, replace(target, images=(arch,)), text)
        for arch in target.images
    ]
    images: dict[str, Image] = {}
    listings = []
    for answer in workers.build(jobs):
        if isinstance(answer, Failure):
            arch = answer.symbol.partition(":")[2]
            return Rejection(answer.rejected or "not compiled", f"for {arch}: {answer.reason}")
        assert isinstance(answer, GpuKernel)
        images |= answer.images
        listings.append(answer.text)
    images = {arch: images[arch] for arch in target.images}
    made = PersistentKernel(
        SYMBOL,
        program.threads,
        program.shared,
        tuple(f"gtco_{key}" for key in kernels),
        {arch: b"" if image.spills else image.cubin for arch, image in images.items()},
        tuple(prefetch(stage, generated, int(KEPT * target.l2)) for stage in generated.stages),
        tuple(prod(kernels[stage.key].grid) for stage in generated.stages),
        {
            "registers": {arch: image.registers for arch, image in images.items()},
            "spilled_bytes": {arch: image.spills for arch, image in images.items()},
        },
    )
    return made, "\n".join(listings[:1])


def within(generated: Generated, target: GpuTarget, workers: Workers) -> dict[str, GpuKernel]:
    """The kernels that the persistent one is made of, by stage: those of the stages, but where a
    block has more threads than it should have one with fewer, and where its warps have roles one
    without (:func:`narrow`), if that reads the same constants and leaves others the same sums.
    """
    found: dict[str, GpuKernel] = {}
    jobs = {}
    for stage in generated.stages:
        kernel = generated.kernels[stage.key]
        assert isinstance(kernel, GpuKernel)
        found[stage.key] = kernel
        if kernel.threads > MOST_THREADS or has_roles(kernel.source):
            pick = generated.choices[stage.key]
            fewer = narrow(GpuPolicy(target), pick)
            if fewer is not pick:
                symbol = f"gtco_{stage.key}_narrow"
                jobs[stage.key] = Job(symbol, stage.canonical, fewer.config, target)
    for key, answer in zip(jobs, workers.build(jobs.values()), strict=True):
        if isinstance(answer, GpuKernel) and _same_buffers(answer, found[key]):
            found[key] = answer
    return found


def _same_buffers(one: GpuKernel, other: GpuKernel) -> bool:
    return (
        one.packings == other.packings
        and one.scratch <= other.scratch
        and one.counters == other.counters
    )


def _buffers(stage: Stage, generated: Generated) -> int:
    """Of the stage's step: inputs, output, and what its blocks share."""
    kernel = generated.kernels[stage.key]
    assert isinstance(kernel, GpuKernel)
    return len(stage.inputs) + 1 + (2 if kernel.counters else 0)


def prefetch(stage: Stage, generated: Generated, most: int) -> tuple[int, int]:
    """The largest of the stage's constants as its kernel reads them: its place among the buffers,
    and how many of its bytes are fetched ahead, ``most`` at most: beyond what L2 keeps, they would
    drive one another out and be read twice. (0, 0) where it has none.
    """
    packings = generated.kernels[stage.key].packings
    types = packed_types(stage.canonical, packings)
    sizes = [
        (types[canonical.name].nbytes, place)
        for place, (given, canonical) in enumerate(
            zip(stage.inputs, stage.canonical.inputs, strict=True)
        )
        if given.constant
    ]
    nbytes, place = max(sizes, default=(0, 0))
    return place, min(nbytes, most)
