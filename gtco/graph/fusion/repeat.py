"""The partition of a graph, taken over by a graph that differs from it in sizes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gtco.graph.fusion.dpof import Cost
from gtco.graph.fusion.duplicate import duplicate_movement
from gtco.graph.fusion.stages import Partition
from gtco.graph.fusion.steps_in_floats import steps_in_floats
from gtco.graph.fusion.take_apart import taken_apart
from gtco.graph.graph import Graph
from gtco.tensor.stage import make_stage

Skeleton = tuple[object, ...]


def skeleton(graph: Graph) -> Skeleton:
    """The graph without its sizes: which operators it has, and what they read. Graphs with equal
    skeletons have the same partitions.
    """
    operators = tuple(
        (op.kind, op.inputs, op.output, op.type.dtype, len(op.type.shape))
        for op in graph.operators.values()
    )
    return operators, tuple(graph.inputs), tuple(graph.outputs), frozenset(graph.constants)


def repeated(graph: Graph, known: Partition, cost: Cost) -> tuple[Graph, Partition] | None:
    """The partition ``known``, of another graph with the same skeleton, for this graph, and the
    graph of its stages. ``cost`` is that of :func:`gtco.graph.fusion.stages.partition`. None if the
    graph cannot be cut so: it has other copies of movement, or no kernel can do a stage.
    """
    for attentions in known.apart:
        graph = taken_apart(graph, attentions)
    if known.single is not None:
        graph = duplicate_movement(graph, known.single)
    found = graph.operators
    if sorted(name for members in known.members for name in members) != sorted(found):
        return None
    stages = tuple(
        steps_in_floats(
            make_stage(
                [found[name] for name in members],
                graph.types,
                [i for name in members for i in found[name].inputs if graph.is_constant(i)],
            )
        )
        for members in known.members
    )
    costs = tuple(map(cost, stages))
    if math.inf in costs:
        return None
    return graph, Partition(
        stages,
        math.fsum(costs),
        costs,
        unique=len({stage.key for stage in stages}),
        members=known.members,
        apart=known.apart,
        single=known.single,
    )


def cheapest(
    graph: Graph, known: Sequence[Partition], cost: Cost
) -> tuple[Graph, Partition] | None:
    """The one of the partitions that costs least for this graph; None if it has none of them."""
    found = [made for each in known if (made := repeated(graph, each, cost)) is not None]
    return min(found, key=lambda made: made[1].seconds, default=None)
