"""torch.roll in the forms that exporters give it.

before: concat(slice(x, k:), slice(x, :k))                       after: roll(x, -k)
before: gather(x, [k, k+1, ..., n-1, 0, ..., k-1])               after: roll(x, -k)
before: gather(x, [b, b+s, b+2s, ...])                           after: slice(x)
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.stage import Operator, TensorType


def roll(graph: Graph) -> Graph:
    """Finds both forms. Rolls of several axes merge in ``simplify_movement``."""
    graph = apply_rule(graph, {"gather"}, _gather)
    return apply_rule(graph, {"concat"}, _concat)


def _concat(graph: Graph, op: Operator) -> str | None:
    if len(op.inputs) != 2:
        return None
    axis = op["axis"]
    back, front = made_by(graph, op.inputs[0], "slice"), made_by(graph, op.inputs[1], "slice")
    if (
        back is None
        or front is None
        or back.inputs != front.inputs
        or graph.types[back.inputs[0]] != op.type
    ):
        return None
    if any(s != 1 for s in (*back["strides"], *front["strides"])) or any(front["begin"]):
        return None
    start = back["begin"][axis]
    if start != front.type.shape[axis] or any(b for i, b in enumerate(back["begin"]) if i != axis):
        return None
    shifts = [
        int(op.type.shape[axis]) - start if i == axis else 0 for i in range(len(op.type.shape))
    ]
    return graph.add("roll", back.inputs, name=op.name, shifts=shifts)


def _gather(graph: Graph, op: Operator) -> str | None:
    x, index = op.inputs
    indices, axis = graph.constants.get(index), op["axis"]
    if indices is None or indices.size == 0 or op.output in graph.outputs:
        return None
    shape = tuple(int(d) for d in graph.types[x].shape)
    size, count = shape[axis], indices.size
    flat = indices.reshape(-1).astype(numpy.int64)
    flat = numpy.where(flat < 0, flat + size, flat)
    if flat.min() < 0 or flat.max() >= size:
        return None
    stride = int(flat[1] - flat[0]) if count > 1 else 1
    cut = (*shape[:axis], count, *shape[axis + 1 :])
    if stride and bool((flat == flat[0] + stride * numpy.arange(count)).all()):
        y = graph.add(
            "slice",
            (x,),
            TensorType(cut, op.type.dtype),
            name=op.name,
            begin=[int(flat[0]) if i == axis else 0 for i in range(len(shape))],
            strides=[stride if i == axis else 1 for i in range(len(shape))],
        )
    elif count == size and bool((flat == (flat[0] + numpy.arange(count)) % size).all()):
        y = graph.add(
            "roll",
            (x,),
            name=op.name,
            shifts=[-int(flat[0]) % size if i == axis else 0 for i in range(len(shape))],
        )
    else:
        return None
    return y if graph.types[y] == op.type else graph.add("reshape", (y,), op.type, name=op.name)
