"""Finds the samples of a model of one shape: the proof of :mod:`gtco.graph.samples` from one graph.

Another size to compare with is not needed for a graph that will run at this size alone. Inputs have
their samples along the outermost axis, the rules of operators say where results have them, and a
constant that is as long as the samples where it meets them must repeat one sample:

    images [12, 3, 224, 224]                       12 samples along axis 0
    concat of constant [12, 1, 192], [12, 196, 192]    the constant is one class token, 12 times
    add of constant [12, 197, 192], other values for each sample        refused

Any choice of places that all rules accept is right, so a size that happens to equal the batch does
no harm.
"""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.sample_rules import Along, Call, Mixed, Place, rule_of
from gtco.graph.samples import Samples, one_sample, outermost
from gtco.support.errors import ShapeError
from gtco.tensor.stage import Operator


def batched(graph: Graph) -> Samples | None:
    """Where a graph has its samples, which are as many as its first input is long. ``graph`` has
    its constants folded. None if there are fewer than two, or if an output mixes them.
    """
    shapes = [graph.types[name].sizes for name in graph.inputs]
    size = shapes[0][0] if shapes and shapes[0] else 1
    if size < 2:
        return None
    places: dict[str, Place] = {
        name: Along(0) if shape and shape[0] == size else None
        for name, shape in zip(graph.inputs, shapes, strict=True)
    }
    try:
        for op in graph.operators.values():
            _step(graph, op, size, places)
        axes = {name: _axis(graph, name, places[name]) for name in (*graph.inputs, *graph.outputs)}
        found = Samples(axes, graph, size, places)
        found.at(1).check()  # also of what no rule says, such as sizes that broadcast
    except (Mixed, ShapeError, AssertionError):
        return None
    return found


def _step(graph: Graph, op: Operator, size: int, places: dict[str, Place]) -> None:
    """Adds the place of the operator's result, and those of its constants."""
    for source in op.inputs:
        if graph.is_constant(source):
            place = _constant(graph, op, source, size, places)
            if places.setdefault(source, place) != place:
                raise Mixed("reads a constant in another way than an operator before it")
    own = tuple(places[source] for source in op.inputs)
    place = None
    if any(own):
        types = tuple(graph.types[source] for source in op.inputs)
        place = rule_of(op.kind)(Call(op, types, own, (size, size), op))
    if place and op.type.sizes[place.axis] != place.outer * size * place.inner:
        raise Mixed("moves samples to an axis that does not have their number")
    places[op.output] = place


def _constant(
    graph: Graph, op: Operator, name: str, size: int, places: dict[str, Place]
) -> Place:
    """The place of a constant that is as long as the samples of another operand of ``op``, where
    their axes are aligned and the constant repeats one sample.
    """
    shape = graph.types[name].sizes
    for other in op.inputs:
        if (place := places.get(other)) is None or other == name:
            continue
        axis = place.axis - len(graph.types[other].sizes) + len(shape)
        if axis >= 0 and shape[axis] == place.outer * size * place.inner:
            array = graph.constants[name]
            if one_sample(array, axis, place.outer, size, place.inner) is not None:
                return place.at(axis)
    return None


def _axis(graph: Graph, name: str, place: Place) -> int | None:
    if place is None:
        return None
    if not outermost(graph.types[name], place):
        raise Mixed("has its samples on an axis that is not the outermost one")
    return place.axis
