"""A model of one shape whose first axis is a batch: it runs in parts where this is predicted to be
faster, since the activations of a part stay in the caches.

    SegFormer of 12 images   whole 367 ms, in 3 parts of 4: 331, in 12 of 1: 291 (predicted)

The graph of a part follows from that of the whole (:mod:`gtco.graph.batch`), so the model is read
once. The whole's cut into stages gives a price of each part, and the part that is taken is cut by
a search of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gtco.driver.assembly import specs
from gtco.driver.compilation import Compilation
from gtco.driver.sizes.forms import Forms
from gtco.graph.batch import batched
from gtco.graph.samples import narrow
from gtco.machine.target import Machine, Target
from gtco.runtime.plan import Batch

if TYPE_CHECKING:
    from gtco.graph.graph import Graph
    from gtco.graph.samples import Samples

PARTS = (16, 4, 1)  # about so many samples each; tried in this order while it gets faster
GAIN = 1.02  # at least, of the whole's predicted time over that of its parts
MOST_CALLS = 16384  # of kernels, in all parts of a batch


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


def cheapest_part(whole: Compilation, samples: Samples) -> tuple[Compilation, str]:
    """The compilation of a part that is to replace ``whole``, which is cut into stages already, and
    in words what it gains; ``whole`` itself if no part is predicted to gain enough.
    """
    forms = Forms()
    for stage in {stage.key: stage for stage in whole.found.stages}.values():
        forms.learn(whole.policy, stage)
    price = whole.predicted()
    best: Compilation | None = None
    least = price
    for batch in _parts(samples):
        run = whole.like(f"part={batch.part}")
        run.batch = batch
        run.lower_as(samples.at(batch.part), whole)
        run.cut_as(whole, partial(forms.predict, whole.policy))
        seconds = len(batch.firsts) * run.predicted()
        if seconds >= least or len(batch.firsts) * len(run.found.stages) > MOST_CALLS:
            break
        best, least = run, seconds
    if best is None or best.batch is None or price < GAIN * least:
        return whole, f"one pass of {samples.size}"
    best.cut_again()
    best.report.notes = [*dict.fromkeys((*whole.report.notes, *best.report.notes))]
    best.report.phases = whole.report.phases
    number, part = len(best.batch.firsts), best.batch.part
    gain = price / (number * best.predicted())
    return best, f"{number} parts of {part}, {gain:.2f} times as fast as one pass of {samples.size}"


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
