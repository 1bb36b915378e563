"""A model's steps in one persistent kernel, in the emulator, with tables as the runtime makes
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from gtco.runtime.gpu.plan import GpuArtifact
from gtco.tensor.cuda.persistent import MOST_TENSORS
from gtco.tensor.cuda.program import CudaProgram
from tests.cuda.emulate import emulate_grid, guarded


class Step(ctypes.Structure):
    """The struct ``gtco::Step``."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("kernel", "tasks", "first_ref", "num_refs")
    ) + tuple((name, ctypes.c_uint32) for name in ("prefetch_ref", "prefetch_bytes"))


def walk(
    artifact: GpuArtifact,
    program: CudaProgram,
    inputs: Mapping[str, np.ndarray],
    *,
    blocks: int,
    arch: int,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """The model's outputs, computed by ``blocks`` blocks of its persistent kernel, whose source is
    that of ``program``. Raises :class:`tests.cuda.emulate.Fault`.
    """
    kernel = artifact.persistent
    assert kernel is not None
    weights = guarded(np.zeros(max(1, artifact.weights_bytes), np.uint8))
    for offset, array in artifact.weights:
        weights[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    plain = artifact.arena_bytes - artifact.counter_bytes  # the rest of the arena is counters
    arena = guarded(np.empty(max(1, plain), np.uint8))
    counters = guarded(np.zeros(max(1, artifact.counter_bytes), np.uint8))
    given = [guarded(np.ascontiguousarray(inputs[spec.name])) for spec in artifact.inputs]
    made = [guarded(np.empty(spec.shape, spec.dtype)) for spec in artifact.outputs]

    def pointer(kind: str, index: int) -> int:
        if kind in ("input", "output"):
            return 2 * (index + (len(given) if kind == "output" else 0)) + 1
        if kind == "arena" and index >= plain:
            return int(counters.ctypes.data) + index - plain
        return int({"arena": arena, "weight": weights}[kind].ctypes.data) + index

    steps, pointers = [], []
    every = zip(artifact.steps, kernel.tasks, kernel.prefetches, strict=True)
    for step, tasks, (ref, nbytes) in every:
        number = kernel.kernels.index(step.kernel)
        first = len(pointers)
        steps.append(Step(number, tasks, first, len(step.buffers), first + ref, nbytes))
        pointers += [pointer(b.kind, b.index) for b in step.buffers]
    table = guarded(np.frombuffer((Step * len(steps))(*steps), np.uint8))
    addresses = guarded(np.array(pointers, np.uint64))
    tensors = (ctypes.c_void_p * MOST_TENSORS)(*(a.ctypes.data for a in (*given, *made)))
    barrier = guarded(np.zeros(1, np.uint32))
    emulate_grid(
        program,
        kernel.symbol,
        [
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_int(len(steps)),
            ctypes.c_void_p(addresses.ctypes.data),
            tensors,
            ctypes.c_void_p(barrier.ctypes.data),
        ],
        [
            *((array, "constant") for array in (table, addresses, barrier, weights, *given)),
            (arena, "scratch"),
            (counters, "counters"),
            *((array, "output") for array in made),
        ],
        blocks=blocks,
        arch=arch,
        seed=seed,
    )
    assert not counters.any(), "the next run finds them as this one did"
    return {
        spec.name: array.view(spec.dtype).reshape(spec.shape).copy()
        for spec, array in zip(artifact.outputs, made, strict=True)
    }
