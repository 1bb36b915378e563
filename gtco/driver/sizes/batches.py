"""A model of one shape whose first axis is a batch: it runs in parts where this is predicted to be
faster, since the activations of a part stay in the caches.

    SegFormer of 12 images   whole 367 ms, in 3 parts of 4: 331, in 12 of 1: 291 (predicted)

The graph of a part follows from that of the whole (:mod:`gtco.graph.batch`), so the model is read
once. The whole's cut into stages gives a price of each part, and the part that is taken is cut by
a search of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gtco.driver.compilation import Compilation
from gtco.driver.linking.assembly import specs
from gtco.driver.phases import Fused, Lowered
from gtco.driver.sizes.forms import Forms
from gtco.graph.batch import batched
from gtco.graph.fusion.repeat import cheapest, skeleton
from gtco.graph.samples import narrow
from gtco.machine.target import Machine, Target
from gtco.runtime.plan import Batch

if TYPE_CHECKING:
    from gtco.graph.fusion.dpof import Cost
    from gtco.graph.graph import Graph
    from gtco.graph.samples import Samples

PARTS = (16, 4, 1)  # about so many samples each; tried in this order while it gets faster
GAIN = 1.02  # the least gain: the whole's predicted time over that of its parts
MOST_CALLS = 16384  # calls of kernels, in all parts of a batch


def samples_of(graph: Graph, machine: Machine) -> Samples | None:
    """Where the samples of a graph are, as it was lowered, if it may be run in parts."""
    if not isinstance(machine, Target):
        return None  # a GPU is filled by a batch
    from gtco.graph.rewrites.fold_constants import fold_constants

    # Narrow weights become float32 one layer at a time, and a second graph would hold all of them.
    if narrow(graph) or any(map(graph.constants.is_later, graph.constants)):
        return None
    folded = fold_constants(graph)
    found = None if narrow(folded) else batched(folded)
    return found if found is not None and [*_parts(found)] else None


def cheapest_part(
    whole: Compilation, fused: Fused, samples: Samples
) -> tuple[Compilation, Fused, str]:
    """The compilation of a part that is to replace ``whole``, and the part's stages; ``fused`` has
    those of the whole. In words, what it gains. Gives ``whole`` and ``fused`` themselves if no part
    is predicted to gain enough.

    All prices are the model's own. Measured times of some stages would not be compared with
    predictions of others fairly: they may have been read while the machine was busy.
    """
    forms, model = Forms(), fused.policy.policy
    for stage in {stage.key: stage for stage in fused.partition.stages}.values():
        forms.learn(model, stage)
    price = fused.predicted()
    best: tuple[Compilation, Fused, Batch] | None = None
    least = price
    for batch in _parts(samples):
        run = whole.like(f"part={batch.part}")
        run.said_as(whole)
        lowered = Lowered(samples.at(batch.part), fused.whole.facts)
        part = cut_as(run, lowered, batch, fused, partial(forms.predict, model))
        seconds = len(batch.firsts) * part.predicted()
        if seconds >= least or len(batch.firsts) * len(part.partition.stages) > MOST_CALLS:
            break
        best, least = (run, part, batch), seconds
    if best is None or price < GAIN * least:
        return whole, fused, f"one pass of {samples.size}"
    run, part, batch = best
    if not part.searched:
        part = run.partitioned(part.whole)
    run.report.notes = [*dict.fromkeys((*whole.report.notes, *run.report.notes))]
    run.report.phases = whole.report.phases
    number = len(batch.firsts)
    gain = price / min(least, number * part.predicted())
    said = f"{gain:.2f} times as fast as one pass of {samples.size}"
    return run, part, f"{number} parts of {batch.part}, {said}"


def cut_as(run: Compilation, lowered: Lowered, batch: Batch, other: Fused, price: Cost) -> Fused:
    """A part of a batch, cut into the stages that ``other`` was cut into, the same model of more
    samples, at this price of a stage. They are searched only if the graphs differ in more than
    sizes.
    """
    policy = other.policy
    whole = run.rounded(run.canonical(lowered, policy.target), policy)
    whole = replace(whole, batch=batch)
    if skeleton(whole.graph) == skeleton(other.whole.graph):
        found = cheapest(whole.graph, [other.partition], price)
        if found is not None:
            return Fused(whole, *found, searched=False)
    return run.partitioned(whole)


def sizes(samples: int) -> list[int]:
    """The samples of the parts that are tried, descending."""
    found = (max(d for d in range(1, most + 1) if samples % d == 0) for most in PARTS)
    return [part for part in dict.fromkeys(found) if part < samples]


def _parts(samples: Samples) -> Iterator[Batch]:
    """Those of these sizes that begin at aligned places."""
    graph = samples.graph
    tensors = (*specs(graph, graph.inputs), *specs(graph, graph.outputs))
    for size in sizes(samples.size):
        batch = Batch(samples.size, size, samples.axes)
        if batch.aligned(tensors):
            yield batch
