"""What an artifact for GPUs has of its own: the C tables of its launches and images (types in
csrc/cuda_plan.h), and the images themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gtco.errors import BuildError
from gtco.runtime.gpu_plan import GpuArtifact
from gtco.runtime.plan import BufferRef, round_up
from gtco.runtime.table import c_string, comment_text, plan_document

GPU_SOURCES = (
    "cuda_api.c cuda_device.c cuda_driver.c cuda_graph.c cuda_images.c error.c tensors.c weights.c"
).split()
# Of every GPU: https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications"
MAX_GRID, MAX_THREADS, MAX_SHARED = (2**31 - 1, 65535, 65535), 1024, 227 << 10
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)(a?)")


def check_launches(artifact: GpuArtifact) -> None:
    """Raises :class:`BuildError` where a launch asks for what no GPU has, or an image lacks a
    kernel.
    """
    arity: dict[str, int] = {}
    for number, step in enumerate(artifact.steps):
        where = f"step {number} ({step.kernel})"
        if not all(1 <= n <= most for n, most in zip(step.grid, MAX_GRID, strict=True)):
            raise BuildError(f"{where} has the grid {step.grid}; 1 to {MAX_GRID} are possible")
        if not 1 <= step.threads <= MAX_THREADS:
            raise BuildError(f"{where} has {step.threads} threads; 1 to {MAX_THREADS} are possible")
        if not 0 <= step.shared <= MAX_SHARED:
            raise BuildError(
                f"{where} asks for {step.shared} bytes of shared memory; {MAX_SHARED} is the most"
            )
        if arity.setdefault(step.kernel, len(step.buffers)) != len(step.buffers):
            raise BuildError(
                f"kernel {step.kernel} is launched with {arity[step.kernel]} and with "
                f"{len(step.buffers)} buffers; a kernel has one number of arguments"
            )
    if not artifact.images:
        raise BuildError("the artifact has no image; name an architecture, such as sm_80")
    for name, image in artifact.images.items():
        if not _ARCHITECTURE.fullmatch(name):
            raise BuildError(f"{name!r} is no architecture of a GPU; one is named like sm_80")
        missing = [kernel for kernel in arity if kernel not in image]
        if missing:
            raise BuildError(f"the image for {name} lacks the kernels {', '.join(missing)}")


def kernels(artifact: GpuArtifact) -> list[str]:
    """The kernels in the order of the tables."""
    return list(dict.fromkeys(step.kernel for step in artifact.steps))


def image_sizes(artifact: GpuArtifact) -> dict[str, int]:
    """Bytes of machine code by architecture."""
    return {
        name: sum(len(image[kernel]) for kernel in kernels(artifact))
        for name, image in artifact.images.items()
    }


def _cubins(artifact: GpuArtifact) -> Iterator[tuple[str, str, int, bytes]]:
    """(architecture, kernel, offset, cubin) of what :func:`write_images` writes."""
    at = 0
    for name, image in artifact.images.items():
        for kernel in kernels(artifact):
            yield name, kernel, at, image[kernel]
            at = round_up(at + len(image[kernel]) + 1)  # a zero ends each, as that of a PTX text


def write_images(artifact: GpuArtifact, path: Path) -> None:
    """All cubins in one file, at multiples of 64 bytes."""
    with path.open("wb") as file:
        for _, _, at, cubin in _cubins(artifact):
            file.seek(at)
            file.write(cubin)
        file.write(bytes(64))


def images_data(file: str) -> str:
    """Assembly that takes the images in."""
    lines = [
        '.section .gtco_images,"a",@progbits',
        ".balign 4096",
        ".globl gtco_the_images",
        ".hidden gtco_the_images",
        "gtco_the_images:",
        f'.incbin "{file}"',
    ]
    return "\n".join([*lines, ""])


def gpu_plan_source(artifact: GpuArtifact, weights_inside: bool, identity: bytes) -> str:
    """The C source that defines ``gtco_the_plan`` and ``gtco_the_cuda_plan``."""
    names = kernels(artifact)
    shared = dict.fromkeys(names, 0)
    launches: list[str] = []
    refs: list[BufferRef] = []
    for step in artifact.steps:
        grid = ", ".join(map(str, step.grid))
        launches.append(
            f"  {{{names.index(step.kernel)}, {len(refs)}, {len(step.buffers)}, {{{grid}}}, "
            f"{step.threads}, {step.shared}}},"
        )
        refs += step.buffers
        shared[step.kernel] = max(shared[step.kernel], step.shared)
    cubins: dict[str, list[str]] = {name: [] for name in artifact.images}
    for name, kernel, at, cubin in _cubins(artifact):
        cubins[name].append(f"  {{{at}, {len(cubin)}}}, /* {comment_text(kernel)} */")
    images, tables = [], []
    for number, (name, rows) in enumerate(cubins.items()):
        found = _ARCHITECTURE.fullmatch(name)
        assert found
        exact = int(bool(found[3]))
        tables += [
            f"static const gtco_cubin cubins_{number}[] = {{",
            *(rows or ["  {0, 0},"]),
            "};",
        ]
        images.append(f'  {{"{name}", {found[1]}, {found[2]}, {exact}, cubins_{number}}},')
    definitions = [
        '#include "cuda_plan.h"',
        "",
        "static const gtco_launch launches[] = {",
        *(launches or ["  {0, 0, 0, {0, 0, 0}, 0, 0},"]),
        "};",
        "static const gtco_function functions[] = {",
        *([f"  {{{c_string(name)}, {shared[name]}}}," for name in names] or ["  {NULL, 0},"]),
        "};",
        *tables,
        "static const gtco_image images[] = {",
        *images,
        "};",
        "const gtco_cuda_plan gtco_the_cuda_plan = {",
        "  .launches = launches, .functions = functions, .images = images,",
        f"  .num_functions = {len(names)}, .num_images = {len(images)},",
        "};",
    ]
    return plan_document(
        name=artifact.name,
        inputs=artifact.inputs,
        outputs=artifact.outputs,
        definitions=definitions,
        refs=refs,
        features=(),
        numbers={
            "num_steps": len(artifact.steps),
            "arena_bytes": artifact.arena_bytes,
            "weights_bytes": artifact.weights_bytes,
        },
        weights_inside=weights_inside,
        identity=identity,
        steps="NULL",
    )
