"""Makes one persistent kernel, which does all steps of a model, of the model's kernels for GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import Failure, GpuKernel, Job, ProgramJob
from gtco.codegen.nvrtc import Image
from gtco.codegen.workers import Workers
from gtco.machine.gpu import GpuTarget
from gtco.runtime.gpu.plan import PersistentKernel
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
    """The persistent kernel of a model with ``tensors`` inputs and outputs, compiled in ``workers``
    for every architecture, with its listing if ``text`` is true; or a Rejection that says why it is
    impossible. It has no image for an architecture on which it would spill registers: a kernel of
    its own gives each stage the registers that it needs.
    """
    kernels = within(generated, target, workers)
    programs = {
        kernel.symbol: CudaProgram(kernel.source, kernel.grid, kernel.threads, kernel.shared)
        for kernel in kernels.values()
    }
    if roles := [name for name, program in programs.items() if has_roles(program.source)]:
        detail = f"{roles[0]} hands over registers, which only a kernel of its own can do"
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
    """The kernels from which the persistent one is made, by stage. Mostly they are the stages' own.
    A kernel with too many threads in a block, or with warp roles, is replaced by one without that
    (:func:`narrow`). The replacement must read the same packed constants, have the same counters
    and need no more scratch.
    """
    found: dict[str, GpuKernel] = {}
    jobs = {}
    for stage in generated.different.values():
        kernel = generated.kernels[stage.key]
        assert isinstance(kernel, GpuKernel)
        found[stage.key] = kernel
        if kernel.threads > MOST_THREADS or has_roles(kernel.source):
            pick = generated.choices[stage.key]
            fewer = narrow(GpuPolicy(target), pick, generated.wrong.get(stage.key, ()))
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
    """The number of the step's buffers: inputs, output, and those that its blocks share."""
    kernel = generated.kernels[stage.key]
    assert isinstance(kernel, GpuKernel)
    return len(stage.inputs) + 1 + (2 if kernel.counters else 0)


def prefetch(stage: Stage, generated: Generated, most: int) -> tuple[int, int]:
    """The largest of the stage's constants as its kernel reads them: its place among the buffers,
    and how many of its bytes are fetched ahead. These are at most ``most``: constants that L2
    cannot keep would push each other out and be read twice. (0, 0) if the stage has no constant.
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
