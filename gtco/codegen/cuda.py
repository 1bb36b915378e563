"""A stage's program for GPUs -> images for every architecture of the target, held against what each
of them has.
"""

from __future__ import annotations

from collections.abc import Mapping

from gtco.codegen.nvrtc import Image, compile_cuda
from gtco.gpu import GPUS, GpuTarget
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Rejection

GRID = (2**31 - 1, 65535, 65535)  # the most blocks along x, y and z
THREADS = 1024  # the most of one block
GRANULE = 8  # registers of a thread are given out in eights


def gpu_code(
    program: CudaProgram, target: GpuTarget, ptx: bool = False
) -> dict[str, Image] | Rejection:
    """The program's image for each architecture, or why one of them could not launch it. Where
    ``ptx``, that of ``target.portable`` has its PTX. What the compiler refuses is a
    :class:`gtco.errors.BuildError`.
    """
    if wrong := _unlaunchable(program, target):
        return wrong
    images = {}
    for arch in target.images:
        image = _compiled(program, arch, ptx and arch == target.portable)
        if wrong := _unfit(program, arch, image):
            return wrong
        images[arch] = image
    return images


def _compiled(program: CudaProgram, arch: str, ptx: bool) -> Image:
    """The program's image, without spills where that is possible. Told of its threads alone the
    compiler now and then spills a few bytes for a round number of registers; told that three
    quarters as many blocks on a multiprocessor are enough, it takes those that it needs. (Where a
    kernel has launch bounds, ``--maxrregcount`` gives it no more.)
    """
    image = compile_cuda(program.source, arch, ptx)
    bounds = f"__launch_bounds__({program.threads}"
    if not image.spills or f"{bounds})" not in program.source:
        return image
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
    blocks = min(gpu.registers_sm // _registers(image), gpu.threads_sm) // program.threads
    fewer = f"{bounds}, {max(1, blocks * 3 // 4)})"
    roomy = compile_cuda(program.source.replace(f"{bounds})", fewer), arch, ptx)
    return min(image, roomy, key=lambda i: i.spills)


def _registers(image: Image) -> int:
    """Those that a thread is given."""
    return -(-image.registers // GRANULE) * GRANULE


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
    if not all(1 <= n <= most for n, most in zip(program.grid, GRID, strict=True)):
        return Rejection("grid", f"a grid of {program.grid} blocks; {GRID} are possible")
    if not 1 <= program.threads <= THREADS:
        return Rejection("threads", f"{program.threads} threads a block; {THREADS} are possible")
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
