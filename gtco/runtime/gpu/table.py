"""The parts that only an artifact for GPUs has: the C tables of its launches and images (types in
csrc/cuda/plan.h), and the images themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gtco.runtime.gpu.plan import GpuArtifact, PersistentKernel
from gtco.runtime.plan import BufferRef, Variant, round_up
from gtco.runtime.writing.table import c_string, comment_text, plan_document
from gtco.support.errors import BuildError

GPU_SOURCES = (
    "cuda/api.c cuda/device.c cuda/driver.c cuda/graph.c cuda/images.c cuda/open.c "
    "cuda/persistent.c cover.c error.c metadata.c sizes.c tensors.c variants.c weights.c"
).split()
# For every GPU: https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications"
MAX_GRID, MAX_THREADS, MAX_SHARED = (2**31 - 1, 65535, 65535), 1024, 227 << 10
# For a persistent kernel's tables, gtco/tensor/cuda/device/gtco/persistent_tables.cuh.
MAX_TENSORS, MAX_TASKS = 64, 2**31 - 1
_ARCHITECTURE = re.compile(r"(?:sm_(\d+)(\d)(a?))|(?:compute_(\d+)(\d))")


def check_launches(artifact: GpuArtifact) -> None:
    """Raises :class:`BuildError` if a launch asks for more than any GPU has, or an image lacks a
    kernel.
    """
    if not 0 <= artifact.counter_bytes <= artifact.arena_bytes:
        raise BuildError(
            f"{artifact.counter_bytes} bytes of counters, in an arena of {artifact.arena_bytes}"
        )
    arity: dict[str, int] = {}
    for number, step in enumerate(artifact.every_step):
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
    if artifact.persistent:
        _check_persistent(artifact, artifact.persistent)


def _check_persistent(artifact: GpuArtifact, kernel: PersistentKernel) -> None:
    """Raises if the tables cannot describe the kernel's work."""
    tensors = len(artifact.inputs) + len(artifact.outputs)
    wrong = ""
    if artifact.variants:
        wrong = "does the steps of one shape, and the model has several"
    elif missing := [n for n in artifact.images if n not in kernel.images and not is_ptx(n)]:
        wrong = f"has no image for {', '.join(missing)}"
    elif not any(kernel.images.values()):
        wrong = "has no machine code for any architecture"
    elif tensors > MAX_TENSORS:
        wrong = f"takes {MAX_TENSORS} inputs and outputs at most, and the model has {tensors}"
    elif not 1 <= kernel.threads <= MAX_THREADS or not 0 <= kernel.shared <= MAX_SHARED:
        wrong = f"has {kernel.threads} threads and {kernel.shared} bytes of shared memory a block"
    elif len(kernel.prefetches) != len(artifact.steps):
        wrong = f"prefetches for {len(kernel.prefetches)} steps of {len(artifact.steps)}"
    elif len(kernel.tasks) != len(artifact.steps):
        wrong = f"has the tasks of {len(kernel.tasks)} steps of {len(artifact.steps)}"
    if wrong:
        raise BuildError(f"the persistent kernel {kernel.symbol} {wrong}")
    for number, (step, (buffer, bytes_), tasks) in enumerate(
        zip(artifact.steps, kernel.prefetches, kernel.tasks, strict=True)
    ):
        if step.kernel not in kernel.kernels:
            wrong = f"lacks the kernel {step.kernel} of step {number}"
        elif not 1 <= tasks <= MAX_TASKS:
            wrong = f"takes 1 to {MAX_TASKS} tasks a step, and step {number} has {tasks}"
        elif bytes_ and not (
            0 <= buffer < len(step.buffers)
            and step.buffers[buffer].kind == "weight"
            and 0 < bytes_ <= artifact.weights_bytes - step.buffers[buffer].index
        ):
            wrong = f"prefetches {bytes_} bytes of what is no weight of step {number}"
        if wrong:
            raise BuildError(f"the persistent kernel {kernel.symbol} {wrong}")


def kernels(artifact: GpuArtifact) -> list[str]:
    """The kernels in the order of the tables."""
    return list(dict.fromkeys(step.kernel for step in artifact.every_step))


def image_sizes(artifact: GpuArtifact) -> dict[str, int]:
    """Bytes of machine code and of PTX by architecture, including the persistent kernel's."""
    sizes = dict.fromkeys(artifact.images, 0)
    for name, _, _, cubin in _cubins(artifact):
        sizes[name] += len(cubin)
    return sizes


def is_ptx(architecture: str) -> bool:
    return architecture.startswith("compute_")


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


def gpu_plan_source(
    artifact: GpuArtifact, variants: Sequence[Variant], weights_inside: bool, identity: bytes
) -> str:
    """The C source that defines ``gtco_the_plan`` and ``gtco_the_cuda_plan``. ``variants``: the
    artifact's, of which every artifact has one at least.
    """
    names = kernels(artifact)
    shared = dict.fromkeys(names, 0)
    launches: list[str] = []
    refs: list[BufferRef] = []
    for step in artifact.every_step:
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
    persistent, address = [], "NULL"
    if one := artifact.persistent:  # its cubin is the last of an image that has it
        none = "  {0, 0}, /* none for %s */"
        own = [rows.pop() if one.images.get(name) else none % name for name, rows in cubins.items()]
        persistent, address = _persistent(artifact, one, own), "&persistent"
    images, tables = [], []
    for number, (name, rows) in enumerate(cubins.items()):
        found = _ARCHITECTURE.fullmatch(name)
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
        name=artifact.name,
        inputs=artifact.inputs,
        outputs=artifact.outputs,
        variants=variants,
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
        cover=artifact.cover,
        ranges=artifact.ranges,
    )


def _persistent(
    artifact: GpuArtifact, kernel: PersistentKernel, cubins: Sequence[str]
) -> list[str]:
    """The definition of ``persistent``, and of the table of steps that its kernel reads."""
    steps, first = [], 0
    every = zip(artifact.steps, kernel.prefetches, kernel.tasks, strict=True)
    for step, (buffer, bytes_), tasks in every:
        number = kernel.kernels.index(step.kernel)
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
