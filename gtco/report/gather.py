"""A library's metadata -> facts. No code of the library is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from gtco.report.bounds import bound_of, nominal, target_of
from gtco.report.facts import (
    ArenaPlace,
    Facts,
    Machine,
    ModelFacts,
    Operator,
    Place,
    StageFacts,
    Tensor,
)
from gtco.report.words import FEWER_PRODUCTS, decisions, instructions, number_format
from gtco.runtime.library import check_model, read_metadata
from gtco.runtime.publish import weights_beside
from gtco.runtime.variants import choose, described_variants
from gtco.support.errors import ArtifactError
from gtco.support.sizes import evenly_spread, sizes_text
from gtco.tensor.loops import Line
from gtco.tensor.stage import item_bytes

# the place of an input that no stage wrote, by the kind of its buffer
PLACES: Mapping[str, Place] = {"input": "input", "weight": "weight"}
MOST_MODELS = 16  # variants of a library in one report
SLOWER = 2.0  # times the predicted time, from which on a note says so
TINY = 20e-6  # seconds of stages of which that is not said: their time is that of starting them


def gather(library: Path, dims: Mapping[str, int] | None = None) -> Facts:
    """The facts of a library, or of its variants of these sizes; of many variants those of
    :data:`MOST_MODELS`, and a note says which. Raises
    :class:`~gtco.support.errors.ArtifactError` if it is not a model that gtco compiled.
    """
    metadata = read_metadata(library)
    check_model(library, metadata)
    if not isinstance(metadata.get("target"), Mapping):
        raise ArtifactError(
            f"{library} does not say what it was compiled for, as every library of gtco compile "
            "does: compile the model again"
        )
    target = target_of(metadata)
    threads = metadata.get("threads") or target.cores
    machine = nominal(target, threads, f"the constants of {target.name} in the library")
    if dims:
        chosen = choose(metadata, dims, library)
        assert chosen is not None
        variants: Sequence[Mapping[str, Any]] = [chosen]
    else:
        variants = described_variants(metadata)
    notes = tuple(metadata.get("notes", ()))
    if len(variants) > MOST_MODELS:
        every, some = len(variants), evenly_spread([one["sizes"] for one in variants], MOST_MODELS)
        variants = [variants[number] for number in some]
        names = "; ".join(sizes_text(one["sizes"]) for one in variants)
        notes += (f"{len(some)} of {every} variants are shown: {names}; --dim chooses another one",)
    files = [library, *weights_beside(library)]
    facts = Facts(
        name=metadata["name"],
        file=library.name,
        nbytes=sum(file.stat().st_size for file in files),
        versions={name: metadata[name] for name in ("gtco", "tvm", "nvrtc") if name in metadata},
        target=target.name if target.kind == "cuda" else metadata["target"]["mcpu"],
        features=tuple(metadata.get("cpu_features") or metadata.get("images") or ()),
        precision=metadata.get("precision", "fp32"),
        weights_bytes=metadata["weights_bytes"],
        weights_by_dtype=metadata.get("weights_by_dtype") or {},
        notes=notes,
        machine=machine,
        models=tuple(model_facts(variant, metadata) for variant in variants),
    )
    return judged(facts, machine)


def model_facts(variant: Mapping[str, Any], metadata: Mapping[str, Any]) -> ModelFacts:
    """The facts of a variant, without times."""
    steps: Sequence[Mapping[str, Any]] = variant["steps"]
    wired = wires(steps)
    stages = tuple(
        stage_facts(number, step, inputs, output, metadata)
        for number, (step, (inputs, output)) in enumerate(zip(steps, wired, strict=True))
    )
    readers: dict[int, list[int]] = {}
    for stage in stages:
        for source in stage.reads:
            readers.setdefault(source, []).append(stage.number)
    stages = tuple(replace(s, read_by=tuple(readers.get(s.number, ()))) for s in stages)
    predicted = [s.predicted_seconds for s in stages]
    known = [seconds for seconds in predicted if seconds is not None]
    total = sum(known) if len(known) == len(stages) else None
    launches = metadata.get("predicted_launches") or {}
    # of the first architecture, which has a graph where one kernel would spill
    spills = metadata["target"].get("arch") in (metadata.get("persistent_would_spill") or {})
    way = "graph" if spills else metadata.get("launches")
    return ModelFacts(
        sizes=dict(variant.get("sizes", {})),
        inputs=tuple(map(spec_text, variant["inputs"])),
        outputs=tuple(map(spec_text, variant["outputs"])),
        stages=stages,
        arena_bytes=variant["arena_bytes"],
        arena=tuple(arena(steps, stages)),
        flops=sum(stage.flops for stage in stages),
        predicted_seconds=launches.get(way, total) or total,
        measurement=None,
        unmeasured="not measured",
    )


def spec_text(spec: Mapping[str, Any]) -> str:
    """``image: float32[1x3x224x224]``"""
    return f"{spec['name']}: {spec['dtype']}[{'x'.join(map(str, spec['shape']))}]"


def bytes_of(type_text: str) -> int:
    """The bytes of a tensor by its type, ``float32[1x197x192]``."""
    dtype, _, shape = type_text.partition("[")
    count = 1
    for size in shape.rstrip("]").split("x") if shape != "]" else ():
        count *= int(size)
    return ceil(count * item_bytes(dtype))


def wires(steps: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """The inputs and the output of each stage. A place in the arena holds what the last stage
    before wrote there.
    """
    written: dict[tuple[str, int], int] = {}
    found = []
    for number, step in enumerate(steps):
        types, buffers = step["inputs"], step["buffers"]
        names = step.get("tensors") or [""] * (len(types) + 1)
        inputs = []
        for at, (type_text, (kind, index)) in enumerate(zip(types, buffers, strict=False)):
            source = written.get((kind, index))
            packed = tuple(step.get("packed", {}).get(str(at), ()))
            place: Place = "stage" if source is not None else PLACES[kind]
            inputs.append(Tensor(names[at], type_text, bytes_of(type_text), place, source, packed))
        kind, index = output_buffer(step)
        to: Place = "output" if kind == "output" else "stage"
        output = step["output"]
        found.append((tuple(inputs), Tensor(names[-1], output, bytes_of(output), to, number)))
        written[kind, index] = number
    return found


def output_buffer(step: Mapping[str, Any]) -> tuple[str, int]:
    """Where a step's output is. A kernel that several sizes share has its numbers behind it, and
    one for GPUs may have scratch before it.
    """
    kind, index = step["buffers"][-1 if "grid" in step else len(step["inputs"])]
    return kind, index


def stage_facts(
    number: int,
    step: Mapping[str, Any],
    inputs: tuple[Tensor, ...],
    output: Tensor,
    metadata: Mapping[str, Any],
) -> StageFacts:
    config, target = step["schedule"], metadata["target"]
    kinds = step["operators"]
    nodes = step.get("nodes") or [""] * len(kinds)
    results = step.get("results") or [""] * len(kinds)
    names = ("tasks", "workspace", "grid", "threads", "shared", "registers", "spilled_bytes")
    return StageFacts(
        number=number,
        name=step["name"],
        key=step.get("key", ""),
        kernel=step["kernel"],
        sketch=config.get("sketch", ""),
        structure=step.get("structure", ""),
        operators=tuple(map(Operator, kinds, nodes, results)),
        inputs=inputs,
        output=output,
        read_by=(),
        instructions=instructions(step, target),
        number_format=number_format(step, target),
        layout=step.get("layout", ""),
        config=decisions(config, target),
        flops=step["flops"],
        nbytes=step["bytes"],
        predicted_seconds=step["predicted_seconds"],
        measured=None,
        share=None,
        bound=None,
        roofline=None,
        peak=None,
        launch={name: step[name] for name in names if name in step},
        loops=tuple(map(Line.from_json, metadata.get("loops", {}).get(step["kernel"], ()))),
    )


def arena(steps: Sequence[Mapping[str, Any]], stages: Sequence[StageFacts]) -> list[ArenaPlace]:
    """Where the stages' outputs lie in the arena, and for how long."""
    found = []
    for step, stage in zip(steps, stages, strict=True):
        kind, offset = output_buffer(step)
        if kind == "arena":
            last = max(stage.read_by, default=stage.number)
            found.append(ArenaPlace(stage.number, offset, stage.output.nbytes, stage.number, last))
    return found


def judged(facts: Facts, machine: Machine) -> Facts:
    """The facts with what follows from times and the machine: shares, bounds and notes."""
    models = []
    for model in facts.models:
        whole = sum(stage.seconds for stage in model.stages)
        if model.measurement:
            whole = max(whole, model.measurement.end_to_end.median)
        stages = []
        for stage in model.stages:
            tensors = (*stage.inputs, stage.output)
            bound = bound_of(
                machine, stage.number_format, stage.flops, tensors, facts.weights_bytes
            )
            peak = machine.peaks.get(stage.number_format) or machine.peaks.get("float32")
            seconds = stage.seconds
            judged = replace(
                stage,
                share=seconds / whole if whole else None,
                bound=bound,
                roofline=bound.seconds / seconds if bound and seconds else None,
                peak=stage.flops / seconds / peak if peak and seconds and stage.flops else None,
            )
            stages.append(replace(judged, notes=notes_of(judged, facts.notes)))
        models.append(replace(model, stages=tuple(stages)))
    return replace(facts, machine=machine, models=tuple(models))


def notes_of(stage: StageFacts, notes: Sequence[str]) -> tuple[str, ...]:
    """What a reader should know of a stage."""
    found = [note for note in notes if stage.name and f"'{stage.name}'" in note]
    if stage.sketch == "fallback":
        found.append("No sketch takes this operator: it is compiled by itself, right and slow.")
    if stage.peak and stage.peak > 1 and stage.sketch in FEWER_PRODUCTS:
        found.append(
            "Above 100 % of the peak: FLOPs are those of the definition, and "
            f"{stage.sketch.capitalize()}'s algorithm multiplies less."
        )
    predicted = stage.predicted_seconds
    if stage.measured and predicted and predicted > TINY:
        times = stage.measured.minimum / predicted  # other processes lengthen the median too
        if times > SLOWER:
            found.append(f"It takes at least {times:.1f} times as long as predicted.")
    return tuple(found)
