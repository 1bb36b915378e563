"""Graph, stages and kernels -> the artifact: weights are packed, tensors get a place in the arena,
and each stage becomes a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import GpuKernel, Kernel
from gtco.graph.graph import Graph
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine, Target
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu_plan import GpuArtifact, GpuStep, PersistentKernel
from gtco.runtime.plan import BufferRef, Cover, Step, TensorSpec, Variant, plan_arena, round_up
from gtco.support.sizes import Range, apart
from gtco.support.version import __version__, installed
from gtco.tensor.cuda.program import Launch
from gtco.tensor.intrinsics.table import multiplied
from gtco.tensor.operators import (
    COMPLEX,
    ELEMENTWISE,
    INJECTIVE,
    OPAQUE,
    REDUCTION,
    pattern,
)
from gtco.tensor.packing import Packing
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

_SMALL = 1 << 16  # bytes of a constant that is compared with others


def assemble(
    name: str,
    graph: Graph,
    generated: Generated,
    target: Machine,
    threads: int,
    precision: str,
    notes: Sequence[str],
    persistent: PersistentKernel | None = None,
    launches: Mapping[str, float | None] | None = None,
    spilled: Mapping[str, int] = MappingProxyType({}),
    identity: str = "",
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
    gpu = isinstance(target, GpuTarget)
    places = _places(graph, generated.stages, generated.kernels if gpu else {})
    weights = _Weights(graph.constants)
    common: dict[str, Any] = {
        "name": name,
        "inputs": _specs(graph, graph.inputs),
        "outputs": _specs(graph, graph.outputs),
        "steps": _steps(generated, generated.kernels, places, weights.place, weights.numbers),
        "arena_bytes": places.arena_bytes,
        "weights": weights.packed(),
        "metadata": {
            **_metadata(target, precision, notes, identity, weights),
            **_loops(generated.kernels.values()),
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
    return Artifact(**common, **_code(kernels, target), threads=threads)


def _metadata(
    target: Machine, precision: str, notes: Sequence[str], identity: str, weights: _Weights
) -> dict[str, Any]:
    return {
        **versions(target),
        "precision": precision,
        "model": identity,
        "weights_by_dtype": dict(sorted(weights.formats.items())),
        "notes": list(notes),
    }


def _loops(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """The loops of the kernels in words, by their symbols, for readers of the library."""
    found = {k.symbol: [line.to_json() for line in k.lines] for k in kernels if k.lines}
    return {"loops": found} if found else {}


def _code(kernels: Collection[Kernel], target: Target) -> dict[str, Any]:
    """The fields of an :class:`Artifact` that follow from its kernels."""
    return {
        "kernels": {f"{kernel.symbol}.o": kernel.code for kernel in kernels},
        "cpu_features": target.required(any(kernel.tiles for kernel in kernels)),
        "isa": target.isa,
    }


@dataclass(frozen=True)
class Part:
    """What one variant is made of: its sizes by the dimension's name, its graph, its kernels."""

    sizes: Mapping[str, int]
    graph: Graph
    generated: Generated


def assemble_variants(
    name: str,
    parts: Sequence[Part],
    target: Target,
    threads: int,
    precision: str,
    notes: Sequence[str],
    identity: str = "",
    ranged: Ranged | None = None,
    ranges: Mapping[str, Range] = MappingProxyType({}),
) -> Artifact:
    """The artifact of a model with several variants, for a CPU; with ``ranged`` they are the parts
    that a batch is made of, those with the same other sizes together. ``ranges``: the dimensions
    whose sizes in the variants are a range. Constants that are one array
    in several graphs (:class:`gtco.driver.shared.Shared`) are packed once for each layout. Takes
    the constants out of the graphs, as :func:`assemble` does.
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
    weights = _Weights(constants)
    kernels: dict[str, Kernel] = {}
    variants = []
    for number, (part, own) in enumerate(zip(parts, names, strict=True)):
        made = part.generated
        used = {stage.key: made.kernels[stage.key] for stage in made.stages}
        for key, kernel in used.items():
            if kernels.setdefault(kernel.symbol, kernel).code != kernel.code:
                used[key] = renamed(kernel, number)
                kernels[used[key].symbol] = used[key]
        places = _places(part.graph, made.stages, {})
        place = _named(weights, own)
        variants.append(
            Variant(
                _specs(part.graph, part.graph.inputs),
                _specs(part.graph, part.graph.outputs),
                _steps(made, used, places, place, weights.numbers),
                places.arena_bytes,
                part.sizes,
            )
        )
    cover = ranged.cover(variants) if ranged else None
    ones = variants
    if cover:  # the smallest part at each choice of the other sizes
        ones = [variants[n[0]] for _, n in apart([part.sizes for part in parts], cover.symbol)]
    sizes = [one.sizes for one in ones]
    inputs = symbolic([one.inputs for one in ones], sizes)
    outputs = symbolic([one.outputs for one in ones], sizes)
    if cover:
        inputs = with_symbol(inputs, [one.inputs for one in ones], cover)
        outputs = with_symbol(outputs, [one.outputs for one in ones], cover)
    return Artifact(
        name=name,
        inputs=inputs,
        outputs=outputs,
        steps=(),
        arena_bytes=max(variant.arena_bytes for variant in variants),
        weights=weights.packed(),
        **_code(kernels.values(), target),
        threads=threads,
        metadata={
            **_metadata(target, precision, notes, identity, weights),
            **_loops(kernels.values()),
        },
        variants=tuple(variants),
        cover=cover,
        ranges=ranges,
    )


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
    weights: _Weights, names: Mapping[str, str]
) -> Callable[[str, Packing | None], BufferRef]:
    return lambda name, packing: weights.place(names[name], packing)


def renamed(kernel: Kernel, variant: int) -> Kernel:
    """The kernel under a name of the variant's own, for a stage that variants have with different
    configs. The new name is as long as the old one, so the object's bytes stay where they are.
    """
    symbol = f"v{variant:03d}_{kernel.symbol.removeprefix('gtco_')}"
    assert len(symbol) == len(kernel.symbol), kernel.symbol
    code = kernel.code.replace(kernel.symbol.encode(), symbol.encode())
    return replace(kernel, symbol=symbol, code=code)


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


def _steps(
    generated: Generated,
    kernels: Mapping[str, Kernel],
    places: _Places,
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


def describe(stage: Stage, choice: Pick) -> dict[str, Any]:
    """What ``gtco inspect`` shows of a stage; of one for GPUs also the unit that computes."""
    work: Any = choice.sketch.workload(choice.config)
    return {
        "name": node_name(stage),
        "key": stage.key,
        "operators": [op["op"] if op.kind == "relax" else op.kind for op in stage.operators],
        "inputs": [str(i.type) for i in stage.inputs],
        "output": str(stage.output.type),
        "structure": choice.sketch.structure,
        "schedule": choice.config.to_json(),
        "flops": work.flops,
        "multiplies": multiplied(stage),
        "bytes": stage.input_bytes + stage.output.type.nbytes,
        "predicted_seconds": choice.seconds,
        **({"unit": work.unit} if isinstance(work, Launch) else {}),
    }


def origins(stage: Stage, packings: Mapping[str, Packing]) -> dict[str, Any]:
    """Where a stage comes from, for pictures of the model.

    - ``nodes``: for each operator the model's node; "" where gtco made the operator;
    - ``results``: the type of each operator's result;
    - ``tensors``: the names of the inputs and of the output;
    - ``packed``: by an input's number, the shape in which the kernel reads a constant, where that
      is not the constant's own;
    - ``layout``: of images, NCHW or NHWC; "" if no operator has one.
    """
    layouts = (op.get("layout") for op in stage.operators)
    return {
        "nodes": [op.name for op in stage.operators],
        "results": [str(op.type) for op in stage.operators],
        "tensors": [*(given.name for given in stage.inputs), stage.output.output],
        "packed": {
            str(number): list(packings[given.name].packed_shape)
            for number, given in enumerate(stage.canonical.inputs)
            if given.name in packings
        },
        "layout": next(filter(None, layouts), ""),
    }


def node_name(stage: Stage) -> str:
    """What a stage is called: the model's node that its work is of, a product or the like before a
    reduction and that before the rest; without a name of the model's, its tensor's."""
    named = [op for op in stage.operators if op.name]
    for wanted in ({COMPLEX}, {REDUCTION}, {OPAQUE, ELEMENTWISE, INJECTIVE}):
        if found := [op.name for op in named if pattern(op.kind) in wanted]:
            return found[-1]
    return stage.output.output


class _Places(dict[str, BufferRef]):
    """Where each tensor that is no constant lies.

    - ``arena_bytes``: the size of the arena;
    - ``between``: scratch and counters of the steps whose blocks work together;
    - ``counter_bytes``: the counters of all these steps, at the end of the arena. Each step leaves
      its counters as it found them.
    """

    arena_bytes = 0
    counter_bytes = 0
    between: Mapping[int, tuple[BufferRef, ...]]


def _places(graph: Graph, stages: Sequence[Stage], kernels: Mapping[str, Kernel]) -> _Places:
    first = {stage.output.output: i for i, stage in enumerate(stages)}
    last = dict(first)
    for i, stage in enumerate(stages):
        for given in stage.inputs:
            if given.name in last:
                last[given.name] = i
    inner = [name for name in first if name not in graph.outputs]
    together = {
        i: kernel
        for i, stage in enumerate(stages)
        if isinstance(kernel := kernels.get(stage.key), GpuKernel) and kernel.counters
    }
    offsets, total = plan_arena(
        [
            *((graph.types[n].nbytes, first[n], last[n]) for n in inner),
            *((kernel.scratch, i, i) for i, kernel in together.items()),
        ]
    )
    refs = [BufferRef("arena", o) for o in offsets]
    places = _Places(zip(inner, refs[: len(inner)], strict=True))
    counters = BufferRef("arena", total)
    scratch = zip(together, refs[len(inner) :], strict=True)
    places.between = {i: (ref, counters) for i, ref in scratch}
    places.counter_bytes = counter_bytes(together.values())
    places |= {name: BufferRef("input", i) for i, name in enumerate(graph.inputs)}
    places |= {name: BufferRef("output", i) for i, name in enumerate(graph.outputs)}
    places.arena_bytes = total + places.counter_bytes
    return places


def counter_bytes(kernels: Iterable[GpuKernel]) -> int:
    """Bytes for the counters of any of these kernels."""
    return round_up(4 * max((kernel.counters for kernel in kernels), default=0))


class _Weights:
    """The constants in the layouts that kernels read, each pair of constant and layout once. Small
    constants of equal values share a place: a quantized model has many scales of its tensors.
    """

    def __init__(self, constants: dict[str, np.ndarray]) -> None:
        self.constants = constants
        self.equal: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.offsets: dict[tuple[str, Packing | None], int] = {}
        self.size = 0
        self.formats: Counter[str] = Counter()  # bytes by dtype

    def place(self, name: str, packing: Packing | None) -> BufferRef:
        array = self.constants[name]
        if array.nbytes <= _SMALL:
            key = (str(array.dtype), array.shape, array.tobytes())
            name = self.equal.setdefault(key, name)
        if (name, packing) not in self.offsets:
            items = int(np.prod(packing.packed_shape)) if packing else array.size
            self.offsets[name, packing] = self.size
            self.size = round_up(self.size + items * array.itemsize)
            self.formats[str(array.dtype)] += items * array.itemsize
        return BufferRef("weight", self.offsets[name, packing])

    def numbers(self, kernel: Kernel) -> BufferRef:
        """The place of what a kernel of several sizes reads at one of them."""
        array = np.array(kernel.numbers, kernel.numbers_dtype)
        name = f"numbers {kernel.numbers_dtype} {kernel.numbers}"  # no constant has a name like it
        self.constants[name] = array
        return self.place(name, None)

    def packed(self) -> list[tuple[int, np.ndarray]]:
        """Packs all constants, and releases each one when its last layout is made."""
        left: dict[str, int] = {}
        for name, _ in self.offsets:
            left[name] = left.get(name, 0) + 1
        for name in [n for n in self.constants if n not in left]:
            del self.constants[name]
        arrays = []
        for (name, packing), offset in self.offsets.items():
            array = self.constants[name]
            arrays.append(
                (offset, packing.apply(array) if packing else np.ascontiguousarray(array))
            )
            left[name] -= 1
            if not left[name]:
                del self.constants[name]
        return arrays


def _specs(graph: Graph, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    types: Mapping[str, Any] = graph.types
    return tuple(TensorSpec(name, types[name].dtype, types[name].shape) for name in names)


def versions(target: Machine) -> dict[str, Any]:
    """The target and the versions of what made the code."""
    tvm = installed("apache-tvm") or "unknown"
    found = {"gtco": __version__, "tvm": tvm, "target": target.to_json()}
    if isinstance(target, GpuTarget):
        found["nvrtc"] = installed("nvidia-cuda-nvrtc") or "unknown"
    return found
