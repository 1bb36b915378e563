"""The kernels of a model for GPUs -> one persistent kernel that does all of its steps."""

from __future__ import annotations

from dataclasses import replace

from gtco.codegen.build import Failure, GpuKernel, ProgramJob
from gtco.codegen.generate import Generated
from gtco.codegen.nvrtc import Image
from gtco.codegen.workers import Workers
from gtco.gpu import GpuTarget
from gtco.runtime.gpu_plan import PersistentKernel
from gtco.search.gpu_policy import KEPT
from gtco.tensor.cuda.persistent import MOST_POINTERS, MOST_TENSORS, persistent_program
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Rejection, packed_types
from gtco.tensor.stage import Stage

SYMBOL = "gtco_model"


def persistent(
    generated: Generated, tensors: int, target: GpuTarget, workers: Workers, *, text: bool = False
) -> tuple[PersistentKernel, str] | Rejection:
    """The persistent kernel of a model with that many inputs and outputs, compiled for every
    architecture in ``workers``, and where ``text`` its listing; or why there can be none.
    """
    kernels = {stage.key: generated.kernels[stage.key] for stage in generated.stages}
    programs = {}
    for key, kernel in kernels.items():
        assert isinstance(kernel, GpuKernel)
        programs[f"gtco_{key}"] = CudaProgram(
            kernel.source, kernel.grid, kernel.threads, kernel.shared
        )
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
        tuple(programs),
        {arch: image.cubin for arch, image in images.items()},
        tuple(prefetch(stage, generated, int(KEPT * target.l2)) for stage in generated.stages),
        {
            "registers": {arch: image.registers for arch, image in images.items()},
            "spilled_bytes": {arch: image.spills for arch, image in images.items()},
        },
    )
    return made, "\n".join(listings[:1])


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
