"""Graph, stages and kernels -> the artifact: weights are packed, tensors get a place in the arena,
and each stage becomes a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import GpuKernel, Kernel
from gtco.driver.linking.metadata import describe, loops_of, metadata, origins
from gtco.driver.linking.places import Places, Weights, placed
from gtco.graph.graph import Graph
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine, Target
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep, PersistentKernel
from gtco.runtime.plan import Batch, BufferRef, Step, TensorSpec, Variant
from gtco.tensor.packing import Packing


def assemble(
    name: str,
    graph: Graph,
    generated: Generated,
    target: Machine,
    threads: int,
    precision: str,
    notes: Sequence[str],
    persistent: PersistentKernel | None,
    launches: Mapping[str, float | None] | None,
    spilled: Mapping[str, int],
    identity: str,
) -> Artifact | GpuArtifact:
    """The artifact of a model. It takes the constants out of the graph: packed, they move to the
    artifact.

    - ``identity``: which ONNX file the model came from, to protect other models' libraries;
    - ``persistent`` (GPUs): the kernel of all steps, if the library is to have one;
    - ``launches`` (GPUs): the predicted seconds of a run by the way it is launched, for readers of
      the library;
    - ``spilled`` (GPUs): by architecture, the bytes that the persistent kernel would spill, if it
      was left out for that.
    """
    places = placed(graph, generated.stages, generated.kernels, target)
    weights = Weights(graph.constants)
    common: dict[str, Any] = {
        "name": name,
        "inputs": specs(graph, graph.inputs),
        "outputs": specs(graph, graph.outputs),
        "steps": steps_of(generated, generated.kernels, places, weights.place, weights.numbers),
        "arena_bytes": places.arena_bytes,
        "weights": weights.packed(),
        "metadata": {
            **metadata(target, precision, notes, identity, weights.formats),
            **loops_of(generated.kernels.values()),
            **({"predicted_launches": dict(launches)} if launches is not None else {}),
            **({"persistent_would_spill": dict(spilled)} if spilled else {}),
        },
    }
    # in the order of the steps: what is linked in another order is another library
    kernels = [generated.kernels[key] for key in dict.fromkeys(s.key for s in generated.stages)]
    if isinstance(target, GpuTarget):
        return GpuArtifact(
            **common,
            images=images_of(kernels, target),
            persistent=persistent,
            counter_bytes=places.counter_bytes,
        )
    return Artifact(**common, **code_of(kernels, target), threads=threads)


Run = TypeVar("Run", Artifact, Variant)


def in_parts(part: Run, batch: Batch | None) -> Run:
    """What runs ``part``, a model of some samples, on all samples of a batch. A run of that calls
    each step once for each part of the batch, and the step reports the work and the time of all
    these calls. Without a batch, ``part`` itself.
    """
    if batch is None:
        return part
    times = len(batch.firsts)

    def of_all(info: Mapping[str, Any]) -> dict[str, Any]:
        whole = {name: info[name] * times for name in ("flops", "bytes", "predicted_seconds")}
        return {**info, **whole, "times": times}

    return replace(
        part,
        inputs=batch.whole(part.inputs),
        outputs=batch.whole(part.outputs),
        steps=tuple(replace(step, info=of_all(step.info)) for step in part.steps),
        batch=batch,
    )


def code_of(kernels: Collection[Kernel], target: Target) -> dict[str, Any]:
    """The fields of an :class:`Artifact` that follow from its kernels."""
    return {
        "kernels": {f"{kernel.symbol}.o": kernel.code for kernel in kernels},
        "cpu_features": target.required(any(kernel.tiles for kernel in kernels)),
        "isa": target.isa,
    }


def steps_of(
    generated: Generated,
    kernels: Mapping[str, Kernel],
    places: Places,
    weight: Callable[[str, Packing | None], BufferRef],
    numbers: Callable[[Kernel], BufferRef],
) -> tuple[Any, ...]:
    """The stages in order, each as a step. ``weight`` gives a constant in a layout its place, and
    ``numbers`` gives one to those that a kernel reads.
    """
    steps: list[Any] = []
    # kernels of several sizes read their numbers behind all other buffers
    for number, stage in enumerate(generated.stages):
        kernel = kernels[stage.key]
        buffers = [
            weight(given.name, kernel.packings.get(canonical.name))
            if given.constant
            else places[given.name]
            for given, canonical in zip(stage.inputs, stage.canonical.inputs, strict=True)
        ]
        info = {
            **describe(stage, generated.choices[stage.key]),
            **origins(stage, kernel.packings),
        }
        buffers += (*places.between.get(number, ()), places[stage.output.output])
        if kernel.numbers_dtype:
            buffers.append(numbers(kernel))
        steps.append(step_of(kernel, tuple(buffers), info))
    return tuple(steps)


def step_of(
    kernel: Kernel, buffers: tuple[BufferRef, ...], info: Mapping[str, Any]
) -> Step | GpuStep:
    if not isinstance(kernel, GpuKernel):
        return Step(kernel.symbol, buffers, kernel.tasks, kernel.workspace, info)
    used = {
        "registers": {arch: image.registers for arch, image in kernel.images.items()},
        "spilled_bytes": {arch: image.spills for arch, image in kernel.images.items()},
    }
    return GpuStep(
        kernel.symbol, buffers, kernel.grid, kernel.threads, kernel.shared, {**info, **used}
    )


def images_of(kernels: Iterable[Kernel], target: GpuTarget) -> dict[str, dict[str, bytes]]:
    """The machine code of the kernels by architecture and symbol, followed by their PTX."""
    found: dict[str, dict[str, bytes]] = {arch: {} for arch in target.images}
    ptx: dict[str, dict[str, bytes]] = {}
    for kernel in kernels:
        assert isinstance(kernel, GpuKernel)
        for arch, image in kernel.images.items():
            found[arch][kernel.symbol] = image.cubin
            if image.ptx:
                ptx.setdefault(arch.replace("sm_", "compute_"), {})[kernel.symbol] = image.ptx
    return found | ptx


def specs(graph: Graph, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    types: Mapping[str, Any] = graph.types
    return tuple(TensorSpec(name, types[name].dtype, types[name].shape) for name in names)
