"""The plan of a model for a GPU: one launch for each step, and the machine code of the kernels for
each architecture.

Buffers are placed as on a CPU (:mod:`gtco.runtime.plan`): inputs and outputs of the model, offsets
in an arena and in the packed weights. Here all of them are in the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gtco.runtime.plan import BufferRef, Cover, TensorSpec, Variant
from gtco.support.sizes import Range

# Architecture -> symbol of a kernel -> its definition: for "sm_80" a cubin (an ELF file), for
# "compute_80" PTX, which the driver compiles for a newer GPU.
Images = Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True)
class GpuStep:
    """One launch of ``kernel(*buffers)``.

    - ``buffers``: pointers to device memory, in this order, the output last. If the blocks work
      together, their scratch and counters come before the output
    - ``grid``: in blocks
    - ``threads``: of a block, along x
    - ``shared``: dynamic shared memory in bytes; the runtime must ask the driver for more than 48
      KiB
    - ``info``: JSON, shown by ``gtco inspect``
    """

    kernel: str
    buffers: tuple[BufferRef, ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PersistentKernel:
    """One kernel for all steps: ``symbol(steps, count, pointers, tensors, barrier)``, with the
    types of device/gtco/persistent_tables.cuh, launched cooperatively in one wave of blocks.

    - ``threads``: of a block, along x
    - ``shared``: dynamic shared memory of a block in bytes
    - ``kernels``: symbols of ``steps`` in the order of their numbers in the kernel
    - ``images``: its cubin by architecture; b"" for an architecture without one, where the model is
      launched as a graph
    - ``prefetches``: for each step the buffer, by its place among the step's buffers, that the step
      before it fetches into L2, and how many bytes from its start; (0, 0) for none
    - ``tasks``: the blocks of each step in this kernel; a step's own kernel may have other ones
    - ``info``: JSON, shown by ``gtco inspect``: registers and spilled bytes by architecture
    """

    symbol: str
    threads: int
    shared: int
    kernels: tuple[str, ...]
    images: Mapping[str, bytes]
    prefetches: tuple[tuple[int, int], ...]
    tasks: tuple[int, ...]
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuArtifact:
    """A model for GPUs, ready to be written. The fields that
    :class:`gtco.runtime.artifact.Artifact` has too mean the same.

    - ``images``: all kernels of all steps for each architecture, in the order in which these were
      asked for; PTX comes last
    - ``persistent``: the kernel that does all steps, if one was made. It has an image for at least
      one architecture, and no PTX. A model of several shapes has none
    - ``counter_bytes``: the size of the blocks' counters at the end of the arena, in the same place
      for all variants. They are zero before the first run, and every step leaves them zero
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[GpuStep, ...]
    arena_bytes: int
    images: Images
    weights: Sequence[tuple[int, np.ndarray]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    persistent: PersistentKernel | None = None
    counter_bytes: int = 0
    variants: tuple[Variant, ...] = ()
    cover: Cover | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def every_step(self) -> tuple[GpuStep, ...]:
        """The steps of all variants, one variant after the other."""
        return self.steps or tuple(step for variant in self.variants for step in variant.steps)

    @property
    def weights_bytes(self) -> int:
        return max((offset + array.nbytes for offset, array in self.weights), default=0)
