"""Copies of pure data movement, one for each reader, so that it can vanish into their kernels.

    before: p = permute(qkv)     q = slice(p)     k = slice(p)
    after:  p = permute(qkv)     q = slice(p)     p' = permute(qkv)     k = slice(p')

A stage keeps a tensor to itself, so DPOF cannot fuse what two stages read. Movement costs no
arithmetic: read through its index map, it is free to repeat. Anything that computes is not copied,
nor is a cast to bfloat16 or float16, whose result is what is to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtco.graph.graph import Graph
from gtco.tensor.emit.scalar import NARROW
from gtco.tensor.stage import Operator, Stage

MOVEMENT = frozenset("identity reshape permute slice broadcast cast".split())


def copyable(op: Operator) -> bool:
    """Is it movement that may be repeated for each reader?"""
    return op.kind in MOVEMENT and not (op.kind == "cast" and op.type.dtype in NARROW)


def duplicate_movement(graph: Graph, keep: Iterable[str] = ()) -> Graph:
    """Every operator of ``MOVEMENT`` with several readers gets a copy for each of them but the
    first; those named in ``keep`` and graph outputs, which are stored anyway, stay single.

    Chains are copied whole, because readers are dealt with before what they read.
    """
    graph = graph.copy()
    single = set(keep) | set(graph.outputs)
    for op in reversed(list(graph.operators.values())):
        if not copyable(op) or op.output in single:
            continue
        for reader in graph.consumers(op.output)[1:]:
            copy = graph.put(
                Operator(op.kind, op.inputs, graph.fresh(op.output), op.type, op.attrs, op.name)
            )
            inputs = tuple(copy if source == op.output else source for source in reader.inputs)
            graph.put(
                Operator(reader.kind, inputs, reader.output, reader.type, reader.attrs, reader.name)
            )
    return graph.prune()


def copied_in_vain(graph: Graph, stages: Iterable[Stage]) -> set[str]:
    """Movement of ``graph`` (the one without copies) that a partition of the graph with copies
    still stores, once for each of several readers: better kept single.

    A copy shows as a stage of movement alone; copies are equal where they make the same thing of
    the same tensors, and then every operator of the chain is to be kept.
    """
    seen: dict[tuple[object, ...], int] = {}
    for stage in stages:
        if all(op.kind in MOVEMENT for op in stage.operators):
            made = _what(stage)
            seen[made] = seen.get(made, 0) + 1
    again = {made for made, count in seen.items() if count > 1}
    return {
        op.output
        for stage in stages
        if all(op.kind in MOVEMENT for op in stage.operators) and _what(stage) in again
        for op in stage.operators
        if op.output in graph.operators
    }


def _what(stage: Stage) -> tuple[object, ...]:
    return (stage.key, tuple(i.name for i in stage.inputs))
