"""What must hold for an artifact for GPUs: launches that a GPU can do, images that have them."""

from __future__ import annotations

import re

from gtco.machine.gpu import GPUS, MOST_BLOCK_THREADS, MOST_BLOCKS
from gtco.runtime.gpu.plan import GpuArtifact, PersistentKernel
from gtco.support.errors import BuildError

MAX_SHARED = max(gpu.shared for gpu in GPUS.values())
# Limits of a persistent kernel's tables: gtco/tensor/cuda/device/gtco/persistent_tables.cuh
MAX_TENSORS, MAX_TASKS = 64, 2**31 - 1
ARCHITECTURE = re.compile(r"(?:sm_(\d+)(\d)(a?))|(?:compute_(\d+)(\d))")


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
        if not all(1 <= n <= most for n, most in zip(step.grid, MOST_BLOCKS, strict=True)):
            raise BuildError(f"{where} has the grid {step.grid}; 1 to {MOST_BLOCKS} are possible")
        if not 1 <= step.threads <= MOST_BLOCK_THREADS:
            raise BuildError(
                f"{where} has {step.threads} threads; 1 to {MOST_BLOCK_THREADS} are possible"
            )
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
        if not ARCHITECTURE.fullmatch(name):
            raise BuildError(f"{name!r} is not an architecture of a GPU; one is named like sm_80")
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
    elif not 1 <= kernel.threads <= MOST_BLOCK_THREADS or not 0 <= kernel.shared <= MAX_SHARED:
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
            wrong = f"prefetches {bytes_} bytes of what is not a weight of step {number}"
        if wrong:
            raise BuildError(f"the persistent kernel {kernel.symbol} {wrong}")


def is_ptx(architecture: str) -> bool:
    return architecture.startswith("compute_")
