"""The artifact: a compiled model as one value, ready to be written as a library, and what must hold
for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gtco.machine.isa import X86_64, Isa, host
from gtco.runtime.gpu.check import check_launches
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.plan import ALIGNMENT, DTYPES, Batch, Cover, Step, TensorSpec, Variant
from gtco.support.errors import BuildError, ShapeError
from gtco.support.sizes import Range

MAX_STEPS, MAX_TASKS = 0xFFFFD, 2**31 - 1  # what fits in the pool's word, csrc/thread_pool.c


@dataclass(frozen=True)
class Artifact:
    """A model ready to be written.

    - ``kernels``: file name → bytes of a position-independent ELF object of ``isa``; one object may
      hold several symbols
    - ``weights``: packed arrays and their byte offsets (multiples of 64, no overlap), to which
      weight buffers refer
    - ``variants``: of a model of several shapes, one for each; its ``inputs`` and ``outputs`` then
      have symbolic sizes, and its ``steps`` are empty. A model of one shape has none
    - ``cover``: the range of sizes that the variants together run, if there is one
    - ``ranges``: dimensions whose sizes in the variants are a range, by name
    - ``batch``: if the samples run in parts; ``steps`` are those of one part
    - ``cpu_features``: the instruction sets that the kernels need, by LLVM's names; they are
      checked when the model is opened
    - ``threads``: 0 means all that the process may use
    - ``metadata``: JSON, shown by ``gtco inspect``
    - ``isa``: the instruction set of the kernels and of the runtime
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    kernels: Mapping[str, bytes]
    weights: Sequence[tuple[int, np.ndarray]] = ()
    cpu_features: tuple[str, ...] = ()
    threads: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    cover: Cover | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    batch: Batch | None = None
    isa: Isa = X86_64

    @property
    def weights_bytes(self) -> int:
        return max((offset + array.nbytes for offset, array in self.weights), default=0)


def isa_of(artifact: Artifact | GpuArtifact) -> Isa:
    """The instruction set of the library. That of a library for GPUs is this
    machine's.
    """
    return artifact.isa if isinstance(artifact, Artifact) else host() or X86_64


def code_of(artifact: Artifact | GpuArtifact) -> list[bytes]:
    """The machine code of the kernels, for all architectures."""
    if isinstance(artifact, Artifact):
        return list(artifact.kernels.values())
    more = artifact.persistent.images.values() if artifact.persistent else ()
    return [*(cubin for image in artifact.images.values() for cubin in image.values()), *more]


def variants_of(artifact: Artifact | GpuArtifact) -> Sequence[Variant]:
    """The variants, of which every artifact has one at least."""
    own = Variant(
        artifact.inputs,
        artifact.outputs,
        artifact.steps,
        artifact.arena_bytes,
        batch=artifact.batch if isinstance(artifact, Artifact) else None,
    )
    return artifact.variants or (own,)


def check(artifact: Artifact | GpuArtifact) -> None:
    """Raises :class:`BuildError` if a step, a buffer or a weight is not possible, and
    :class:`ShapeError` for symbolic shapes.
    """
    variants = variants_of(artifact)
    for variant in variants:
        _check_variant(artifact, variant)
    number = sum(len(variant.calls) for variant in variants)
    if number > MAX_STEPS:
        raise BuildError(f"the plan has {number} steps; {MAX_STEPS} is the most")
    if isinstance(artifact, GpuArtifact):
        check_launches(artifact)
    end = 0
    for offset, array in sorted(artifact.weights, key=lambda w: w[0]):
        if offset % ALIGNMENT or offset < end:
            raise BuildError(
                f"the weights at offset {offset} are misaligned or overlap those before them"
            )
        end = offset + array.nbytes


def _check_variant(artifact: Artifact | GpuArtifact, variant: Variant) -> None:
    for spec in (*variant.inputs, *variant.outputs):
        if spec.dtype not in DTYPES:
            raise BuildError(
                f"tensor {spec.name!r} has dtype {spec.dtype}, which an artifact cannot describe"
            )
        symbols = [d for d in spec.shape if not isinstance(d, int)]
        if symbols:
            raise ShapeError(
                f"tensor {spec.name!r} has the symbolic size {symbols[0]!r}; a variant serves one "
                "shape: give the size a value"
            )
    # on a GPU the counters are behind the tensors of all variants
    arena = artifact if isinstance(artifact, GpuArtifact) else variant
    limits = {
        "input": len(variant.inputs),
        "output": len(variant.outputs),
        "arena": arena.arena_bytes,
        "weight": artifact.weights_bytes,
    }
    steps: Sequence[Step | GpuStep] = variant.steps
    for number, step in enumerate(steps):
        if isinstance(step, Step) and not 1 <= step.tasks <= MAX_TASKS:
            raise BuildError(
                f"step {number} ({step.kernel}) has {step.tasks} tasks; 1 to {MAX_TASKS} are "
                "possible"
            )
        for ref in step.buffers:
            # An empty tensor may lie at the very end of the arena or the weights.
            end_counts = ref.kind in ("arena", "weight")
            if not 0 <= ref.index < limits[ref.kind] + end_counts:
                raise BuildError(
                    f"step {number} ({step.kernel}) refers to {ref.kind} {ref.index}, which does "
                    "not exist"
                )
            if end_counts and ref.index % ALIGNMENT:
                raise BuildError(
                    f"step {number} ({step.kernel}): {ref.kind} offset {ref.index} is not a "
                    "multiple of 64"
                )
    written = {ref.index for step in steps for ref in step.buffers if ref.kind == "output"}
    for index, spec in enumerate(variant.outputs):
        if index not in written:
            raise BuildError(f"no step writes output {index} ({spec.name!r})")
