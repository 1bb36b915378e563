"""What a library says about itself: JSON, which ``gtco inspect`` and ``gtco report`` read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gtco.machine.isa import X86_64
from gtco.runtime.artifact import Artifact, variants_of
from gtco.runtime.elf import ABI_VERSION
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.gpu.table import image_sizes
from gtco.runtime.plan import Step, TensorSpec, Variant
from gtco.runtime.writing.table import normalize_features
from gtco.support.errors import BuildError


def metadata(artifact: Artifact | GpuArtifact) -> bytes:
    """The metadata of the artifact: its own ``metadata``, and what follows from its other fields.
    Raises :class:`BuildError` if both have the same name, or if it is not JSON.
    """

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in specs]

    own: dict[str, Any] = {
        "name": artifact.name,
        "abi": ABI_VERSION,
        "inputs": tensors(artifact.inputs),
        "outputs": tensors(artifact.outputs),
        "arena_bytes": artifact.arena_bytes,
        "weights_bytes": artifact.weights_bytes,
    }
    if artifact.cover:
        own["range"] = artifact.cover.to_json()
    if artifact.ranges:
        own["ranges"] = {
            name: {"low": sizes.low, "high": sizes.high, "step": sizes.step}
            for name, sizes in artifact.ranges.items()
        }
    if artifact.variants:
        own["variants"] = [
            {
                "sizes": dict(variant.sizes),
                "inputs": tensors(variant.inputs),
                "outputs": tensors(variant.outputs),
                "arena_bytes": variant.arena_bytes,
                **_steps(variant),
            }
            for variant in artifact.variants
        ]
    else:
        own |= _steps(variants_of(artifact)[0])
    if isinstance(artifact, Artifact):
        own["cpu_features"] = list(normalize_features(artifact.cpu_features, artifact.isa))
        if artifact.isa is not X86_64:
            own["isa"] = artifact.isa.name
        own["threads"] = artifact.threads
    else:
        own["images"] = image_sizes(artifact)
        own["launches"] = "persistent" if artifact.persistent else "graph"
        if artifact.persistent:
            own["persistent"] = {
                **artifact.persistent.info,
                "kernel": artifact.persistent.symbol,
                "threads": artifact.persistent.threads,
                "shared": artifact.persistent.shared,
                "prefetched_bytes": sum(n for _, n in artifact.persistent.prefetches),
            }
    taken = own.keys() & artifact.metadata.keys()
    if taken:
        raise BuildError(
            f"the metadata may not set {', '.join(sorted(taken))}: the artifact sets them itself"
        )
    try:
        return json.dumps({**artifact.metadata, **own}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BuildError(f"the metadata of the model or of a step is not JSON: {error}") from error


def _steps(variant: Variant) -> dict[str, Any]:
    """The steps for the metadata, and where the parts begin that go through them."""
    steps = [
        {
            **step.info,
            "kernel": step.kernel,
            **_launch_info(step),
            "buffers": [[ref.kind, ref.index] for ref in step.buffers],
        }
        for step in variant.steps
    ]
    return {"steps": steps, **({"parts": variant.batch.firsts} if variant.batch else {})}


def _launch_info(step: Step | GpuStep) -> dict[str, Any]:
    if isinstance(step, Step):
        return {"tasks": step.tasks, "workspace": step.workspace}
    return {"grid": list(step.grid), "threads": step.threads, "shared": step.shared}
