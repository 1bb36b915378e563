"""A stage's program for GPUs -> images for every architecture of the target, held against what each
of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from gtco.codegen.nvrtc import Image, compile_cuda
from gtco.machine.gpu import GPUS, MOST_BLOCK_THREADS, MOST_BLOCKS, REGISTER_GRANULE, GpuTarget
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.cuda.source import bounded
from gtco.tensor.space import Rejection

Compiler = Callable[[str, str, bool], Image]  # called as compile_cuda is


def gpu_code(
    program: CudaProgram, target: GpuTarget, ptx: bool = False, compiler: Compiler = compile_cuda
) -> dict[str, Image] | Rejection:
    """The program's image for each architecture, or why one of them could not launch it. Where
    ``ptx``, that of ``target.portable`` has its PTX. What the compiler refuses is a
    :class:`gtco.support.errors.BuildError`.
    """
    if wrong := _unlaunchable(program, target):
        return wrong
    images = {}
    for arch in target.images:
        image = _compiled(program, arch, ptx and arch == target.portable, compiler)
        if wrong := _unfit(program, arch, image):
            return wrong
        images[arch] = image
    return images


def _compiled(program: CudaProgram, arch: str, ptx: bool, compiler: Compiler) -> Image:
    """The program's image, without spills where that is possible, and with as many blocks side by
    side as the price reckons with.

    Told of its threads alone the compiler now and then spills a few bytes for a round number of
    registers; told that three quarters as many blocks on a multiprocessor are enough, it takes
    those that it needs. Or it takes a few more than are left to each of so many blocks, which it
    can do without once it is told of them. (Where a kernel has launch bounds, ``--maxrregcount``
    gives it no more.)
    """
    image = compiler(program.source, arch, ptx)
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
    if image.spills:
        blocks = min(gpu.registers_sm // _registers(image), gpu.threads_sm) // program.threads
        roomy = bounded(program.source, max(1, blocks * 3 // 4))
        if roomy == program.source:  # it says that already, or nothing of its launch
            return image
        return min(image, compiler(roomy, arch, ptx), key=lambda i: i.spills)
    reckoned = replace(image, registers=program.registers or image.registers)
    wanted = _side_by_side(program, reckoned, gpu)
    if _side_by_side(program, image, gpu) >= wanted:
        return image
    tight = compiler(bounded(program.source, wanted), arch, ptx)
    return image if tight.spills else tight


def _side_by_side(program: CudaProgram, image: Image, gpu: GpuTarget) -> int:
    """Blocks that a multiprocessor has room for, each of whose threads has the image's registers,
    and no more than there are: about, as what a block's shared memory costs beside its own is left
    out.
    """
    shared = program.shared + image.shared
    return min(
        -(-prod(program.grid) // min(g.sms for g in GPUS.values() if g.arch == gpu.arch)),
        gpu.registers_sm // (_registers(image) * program.threads),
        gpu.threads_sm // program.threads,
        gpu.shared_sm // shared if shared else gpu.threads_sm,
    )


def _registers(image: Image) -> int:
    """Those that a thread is given."""
    return -(-image.registers // REGISTER_GRANULE) * REGISTER_GRANULE


def listing(program: CudaProgram, images: Mapping[str, Image]) -> str:
    """The program as a person reads it: how it is launched and what it came to, then its source."""
    grid = " x ".join(map(str, program.grid))
    lines = [
        f"// {grid} blocks of {program.threads} threads with {program.shared} bytes of dynamic "
        "shared memory",
        *(
            f"// {arch}: {image.registers} registers, {image.spills} bytes spilled, "
            f"{image.shared} bytes of static shared memory, {len(image.cubin)} bytes of code"
            for arch, image in images.items()
        ),
    ]
    return "\n".join([*lines, program.source])


def _unlaunchable(program: CudaProgram, target: GpuTarget) -> Rejection | None:
    """Why no GPU of the target could launch it, whatever the compiler makes of it."""
    if not all(1 <= n <= most for n, most in zip(program.grid, MOST_BLOCKS, strict=True)):
        return Rejection("grid", f"a grid of {program.grid} blocks; {MOST_BLOCKS} are possible")
    if not 1 <= program.threads <= MOST_BLOCK_THREADS:
        return Rejection(
            "threads", f"{program.threads} threads a block; {MOST_BLOCK_THREADS} are possible"
        )
    if program.shared > target.shared:
        return Rejection(
            "shared memory",
            f"{program.shared} bytes of shared memory a block, of {target.shared} on {target.name}",
        )
    return None


def _unfit(program: CudaProgram, arch: str, image: Image) -> Rejection | None:
    """Why a GPU of this architecture could not launch the image."""
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
    registers = _registers(image) * program.threads
    if registers > gpu.registers_sm:
        return Rejection(
            "registers",
            f"{image.registers} registers in each of {program.threads} threads, of "
            f"{gpu.registers_sm} on {arch}",
        )
    if program.shared + image.shared > gpu.shared:
        return Rejection(
            "shared memory",
            f"{program.shared} + {image.shared} bytes of shared memory a block, of {gpu.shared} on "
            f"{arch}",
        )
    return None
