"""The variants of a library, each made for sizes of its own -> one artifact with shared weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import GpuKernel, Kernel
from gtco.driver.linking.assembly import code_of, images_of, in_parts, specs, steps_of
from gtco.driver.linking.metadata import loops_of, metadata
from gtco.driver.linking.places import Weights, placed, share_counters
from gtco.graph.graph import Graph
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.plan import Batch, BufferRef, Cover, TensorSpec, Variant
from gtco.support.sizes import Range, by_other_sizes
from gtco.tensor.packing import Packing


@dataclass(frozen=True)
class Part:
    """What one variant is made of: its sizes by the dimension's name, its graph, its kernels; these
    are of a part of its samples with a ``batch``.
    """

    sizes: Mapping[str, int]
    graph: Graph
    generated: Generated
    batch: Batch | None = None


def assemble_variants(
    name: str,
    parts: Sequence[Part],
    target: Machine,
    threads: int,
    precision: str,
    notes: Sequence[str],
    identity: str,
    ranged: Ranged | None,
    ranges: Mapping[str, Range],
) -> Artifact | GpuArtifact:
    """The artifact of a model with several variants; with ``ranged`` they are the parts that a
    batch is made of, those with the same other sizes together. ``ranges``: the dimensions whose
    sizes in the variants are a range. Constants that are one array in several graphs
    (:class:`gtco.driver.sizes.shared.Shared`) are packed once for each layout. Takes the constants
    out of the graphs, as :func:`assemble` does.
    """
    constants: dict[str, np.ndarray] = {}
    names: list[dict[str, str]] = []
    by_id: dict[int, str] = {}
    for part in parts:
        own = {}
        for given, array in part.graph.constants.items():
            own[given] = by_id.setdefault(id(array), f"{len(by_id)}")
            constants[own[given]] = array
        names.append(own)
        part.graph.constants.clear()
    weights = Weights(constants)
    kernels: dict[str, Kernel] = {}
    variants = []
    every = [placed(p.graph, p.generated.stages, p.generated.kernels, target) for p in parts]
    arena_bytes, counters = share_counters(every)
    for number, (part, own, places) in enumerate(zip(parts, names, every, strict=True)):
        made = part.generated
        used = {stage.key: made.kernels[stage.key] for stage in made.stages}
        for key, kernel in used.items():
            if not _same_code(kernels.setdefault(kernel.symbol, kernel), kernel):
                used[key] = renamed(kernel, number)
                kernels[used[key].symbol] = used[key]
        place = _named(weights, own)
        variant = Variant(
            specs(part.graph, part.graph.inputs),
            specs(part.graph, part.graph.outputs),
            steps_of(made, used, places, place, weights.numbers),
            places.arena_bytes,
            part.sizes,
        )
        variants.append(in_parts(variant, part.batch))
    cover = ranged.cover(variants) if ranged else None
    ones = variants
    if cover:  # the smallest part at each choice of the other sizes
        groups = by_other_sizes([part.sizes for part in parts], cover.symbol)
        ones = [variants[part_numbers[0]] for _, part_numbers in groups]
    sizes = [one.sizes for one in ones]
    inputs = symbolic([one.inputs for one in ones], sizes)
    outputs = symbolic([one.outputs for one in ones], sizes)
    if cover:
        inputs = with_symbol(inputs, [one.inputs for one in ones], cover)
        outputs = with_symbol(outputs, [one.outputs for one in ones], cover)
    common: dict[str, Any] = {
        "name": name,
        "inputs": inputs,
        "outputs": outputs,
        "steps": (),
        "arena_bytes": arena_bytes,
        "weights": weights.packed(),
        "metadata": {
            **metadata(target, precision, notes, identity, weights.formats),
            **loops_of(kernels.values()),
        },
        "variants": tuple(variants),
        "cover": cover,
        "ranges": ranges,
    }
    if isinstance(target, GpuTarget):
        images = images_of(kernels.values(), target)
        return GpuArtifact(**common, images=images, counter_bytes=counters)
    return Artifact(**common, **code_of(kernels.values(), target), threads=threads)


@dataclass(frozen=True)
class Ranged:
    """A range of sizes that the parts of a library are to cover, and where tensors have samples."""

    symbol: str
    sizes: Range
    axes: Mapping[str, int | None]

    def cover(self, variants: Sequence[Variant]) -> Cover:
        """With the variants' predicted times as prices."""
        seconds = [sum(s.info["predicted_seconds"] for s in v.steps) for v in variants]
        return Cover(
            self.symbol,
            self.sizes,
            tuple(variant.sizes[self.symbol] for variant in variants),
            tuple(max(1, round(1e9 * one)) for one in seconds),
            self.axes,
        )


def with_symbol(
    tensors: Sequence[TensorSpec], smallest: Sequence[Sequence[TensorSpec]], cover: Cover
) -> tuple[TensorSpec, ...]:
    """The tensors with the name of the range's dimension where they have samples. ``smallest``:
    those of the smallest part, at each choice of the other sizes. A size that is the dimension
    times a number is named by its place (``y.0``).
    """
    found = []
    for spec, *parts in zip(tensors, *smallest, strict=True):
        shape = list(spec.shape)
        if (axis := cover.axes[spec.name]) is not None:
            alone = all(part.shape[axis] == cover.sizes[0] for part in parts)
            shape[axis] = cover.symbol if alone else f"{spec.name}.{axis}"
        found.append(replace(spec, shape=tuple(shape)))
    return tuple(found)


def _named(
    weights: Weights, names: Mapping[str, str]
) -> Callable[[str, Packing | None], BufferRef]:
    return lambda name, packing: weights.place(names[name], packing)


def _same_code(one: Kernel, other: Kernel) -> bool:
    if isinstance(one, GpuKernel) and isinstance(other, GpuKernel):
        return one.images == other.images
    return one.code == other.code


def renamed(kernel: Kernel, variant: int) -> Kernel:
    """The kernel under a name of the variant's own, for a stage that variants have with different
    configs. The new name is as long as the old one, so the object's bytes stay where they are.
    """
    symbol = f"v{variant:03x}_{kernel.symbol.removeprefix('gtco_')}"
    assert len(symbol) == len(kernel.symbol), kernel.symbol
    old, new = kernel.symbol.encode(), symbol.encode()
    if not isinstance(kernel, GpuKernel):
        return replace(kernel, symbol=symbol, code=kernel.code.replace(old, new))
    images = {
        arch: replace(image, cubin=image.cubin.replace(old, new), ptx=image.ptx.replace(old, new))
        for arch, image in kernel.images.items()
    }
    return replace(kernel, symbol=symbol, images=images)


def symbolic(
    tensors: Sequence[Sequence[TensorSpec]], sizes: Sequence[Mapping[str, int]]
) -> tuple[TensorSpec, ...]:
    """The tensors of a model from those of its variants, with the variants' sizes by dimension. A
    size that differs between them is the name of the dimension that has the same sizes, or else of
    its place (``y.1``).
    """
    dims = {name: tuple(one[name] for one in sizes) for name in sizes[0]}
    found = []
    for same in zip(*tensors, strict=True):
        shape: list[int | str] = []
        for axis, values in enumerate(zip(*(spec.shape for spec in same), strict=True)):
            place = f"{same[0].name}.{axis}"
            equal = [name for name, sizes_of in dims.items() if sizes_of == values]
            if len(set(values)) == 1:
                shape.append(values[0])
            else:
                shape.append(place if place in equal or not equal else equal[0])
        found.append(replace(same[0], shape=tuple(shape)))
    return tuple(found)
