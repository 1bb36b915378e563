"""The parts that only an artifact for GPUs has: the C tables of its launches and images (types in
csrc/cuda/plan.h), and the images themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gtco.runtime.gpu.check import ARCHITECTURE, is_ptx
from gtco.runtime.gpu.plan import GpuArtifact, PersistentKernel
from gtco.runtime.plan import BufferRef, round_up
from gtco.runtime.writing.table import c_string, comment_text, plan_document

GPU_SOURCES = (
    "cuda/api.c cuda/device.c cuda/driver.c cuda/graph.c cuda/images.c cuda/open.c "
    "cuda/persistent.c cover.c error.c metadata.c sizes.c tensors.c variants.c weights.c"
).split()


def kernels(artifact: GpuArtifact) -> list[str]:
    """The kernels in the order of the tables."""
    return list(dict.fromkeys(step.kernel for step in artifact.every_step))


def image_sizes(artifact: GpuArtifact) -> dict[str, int]:
    """Bytes of machine code and of PTX by architecture, including the persistent kernel's."""
    sizes = dict.fromkeys(artifact.images, 0)
    for name, _, _, cubin in _cubins(artifact):
        sizes[name] += len(cubin)
    return sizes


def _cubins(artifact: GpuArtifact) -> Iterator[tuple[str, str, int, bytes]]:
    """(architecture, kernel, offset, cubin) of everything that :func:`write_images` writes: for
    each architecture the steps' kernels, then the persistent kernel if it has one for this
    architecture.
    """
    at, one = 0, artifact.persistent
    for name, image in artifact.images.items():
        found = [(kernel, image[kernel]) for kernel in kernels(artifact)]
        found += [(one.symbol, one.images[name])] if one and one.images.get(name) else []
        for kernel, cubin in found:
            yield name, kernel, at, cubin
            at = round_up(at + len(cubin) + 1)  # a zero ends each, as PTX must


def write_images(artifact: GpuArtifact, path: Path) -> None:
    """All cubins and PTX in one file, at multiples of 64 bytes."""
    with path.open("wb") as file:
        for _, _, at, cubin in _cubins(artifact):
            file.seek(at)
            file.write(cubin)
        file.write(bytes(64))


def images_data(file: str) -> str:
    """Assembly that includes the images."""
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
    numbers = {name: number for number, name in enumerate(names)}
    shared = dict.fromkeys(names, 0)
    launches: list[str] = []
    refs: list[BufferRef] = []
    for step in artifact.every_step:
        grid = ", ".join(map(str, step.grid))
        launches.append(
            f"  {{{numbers[step.kernel]}, {len(refs)}, {len(step.buffers)}, {{{grid}}}, "
            f"{step.threads}, {step.shared}}},"
        )
        refs += step.buffers
        shared[step.kernel] = max(shared[step.kernel], step.shared)
    cubins: dict[str, list[str]] = {name: [] for name in artifact.images}
    for name, kernel, at, cubin in _cubins(artifact):
        cubins[name].append(f"  {{{at}, {len(cubin)}}}, /* {comment_text(kernel)} */")
    persistent, address = [], "NULL"
    if one := artifact.persistent:  # its cubin is the last of an image that has it
        none = "  {0, 0}, /* none for %s */"
        own = [rows.pop() if one.images.get(name) else none % name for name, rows in cubins.items()]
        persistent, address = _persistent(artifact, one, own), "&persistent"
    images, tables = [], []
    for number, (name, rows) in enumerate(cubins.items()):
        found = ARCHITECTURE.fullmatch(name)
        assert found
        major, minor = found[1] or found[4], found[2] or found[5]
        kind = "PTX" if is_ptx(name) else "EXACT" if found[3] else "FAMILY"
        tables += [
            f"static const gtco_cubin cubins_{number}[] = {{",
            *(rows or ["  {0, 0},"]),
            "};",
        ]
        images.append(f'  {{"{name}", {major}, {minor}, GTCO_CODE_{kind}, cubins_{number}}},')
    definitions = [
        '#include "cuda/plan.h"',
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
        *persistent,
        "const gtco_cuda_plan gtco_the_cuda_plan = {",
        "  .launches = launches, .functions = functions, .images = images,",
        f"  .persistent = {address},",
        f"  .counter_bytes = {artifact.counter_bytes},",
        f"  .num_functions = {len(names)}, .num_images = {len(images)},",
        "};",
    ]
    return plan_document(
        artifact,
        definitions=definitions,
        refs=refs,
        features=(),
        numbers={
            "num_steps": len(launches),
            "arena_bytes": artifact.arena_bytes,
            "weights_bytes": artifact.weights_bytes,
        },
        weights_inside=weights_inside,
        identity=identity,
        steps="NULL",
    )


def _persistent(
    artifact: GpuArtifact, kernel: PersistentKernel, cubins: Sequence[str]
) -> list[str]:
    """The definition of ``persistent``, and of the table of steps that its kernel reads."""
    numbers = {name: number for number, name in enumerate(kernel.kernels)}
    steps, first = [], 0
    every = zip(artifact.steps, kernel.prefetches, kernel.tasks, strict=True)
    for step, (buffer, bytes_), tasks in every:
        number = numbers[step.kernel]
        fetched = first + buffer if bytes_ else 0
        steps.append(f"  {{{number}, {tasks}, {first}, {len(step.buffers)}, {fetched}, {bytes_}}},")
        first += len(step.buffers)
    return [
        "static const gtco_device_step device_steps[] = {",
        *(steps or ["  {0, 0, 0, 0, 0, 0},"]),
        "};",
        "static const gtco_cubin persistent_cubins[] = {",
        *cubins,
        "};",
        "static const gtco_persistent persistent = {",
        f"  .name = {c_string(kernel.symbol)}, .steps = device_steps, .cubins = persistent_cubins,",
        f"  .threads = {kernel.threads}, .shared = {kernel.shared},",
        "};",
    ]
