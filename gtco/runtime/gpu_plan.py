"""The plan of a model for a GPU: one launch a step, and the machine code of its kernels by
architecture.

Buffers lie as on a CPU (:mod:`gtco.runtime.plan`): inputs and outputs of the model, offsets in an
arena and in the packed weights, here all of them in the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gtco.runtime.plan import BufferRef, TensorSpec

# Architecture -> symbol of a kernel -> what defines it: of "sm_80" a cubin, an ELF file; of
# "compute_80" PTX, which the driver compiles for a newer GPU.
Images = Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True)
class GpuStep:
    """One launch of ``kernel(*buffers)``, pointers to device memory in this order, the output last,
    ahead of it where its blocks work together their scratch and counters.

    ``grid`` in blocks, ``threads`` of a block (along x), ``shared`` its dynamic shared memory in
    bytes: above 48 KiB it has to be asked for. ``info`` (JSON) is what ``gtco inspect`` shows.
    """

    kernel: str
    buffers: tuple[BufferRef, ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PersistentKernel:
    """One kernel for all steps: ``symbol(steps, count, pointers, tensors, barrier)``, types in
    device/gtco/persistent_tables.cuh, launched cooperatively in one wave of blocks.

    ``threads`` of a block (along x), ``shared`` its dynamic shared memory in bytes. ``kernels``:
    symbols of ``steps`` in the order of their numbers in it. ``images``: its cubin by architecture;
    b"" where there is none for it, and the model is launched as a graph. ``prefetches``: of each
    step the buffer, by its place among the step's, that the step before it fetches into L2, and how
    many bytes from its start; (0, 0) where there is none. ``tasks``: the blocks of each step here;
    a step's own kernel may have other ones. ``info`` (JSON) is what ``gtco inspect`` shows:
    registers and spilled bytes by architecture.
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
    """A model for GPUs, ready to be written; fields as those of
    :class:`gtco.runtime.artifact.Artifact`. Every image has all kernels of ``steps``, in the order
    of the architectures that were asked for, behind them PTX. ``persistent``: the kernel that does
    all of them, where one was made, with an image for some architecture and no PTX.
    ``counter_bytes``: the last so many bytes of the arena are what blocks count in, zeros before
    the first run, which every step leaves as zeros.
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

    @property
    def weights_bytes(self) -> int:
        return max((offset + array.nbytes for offset, array in self.weights), default=0)
