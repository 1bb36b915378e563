"""Copies data movement, one copy for each reader, so that their kernels can take it in.

    before: p = permute(qkv)     q = slice(p)     k = slice(p)
    after:  p = permute(qkv)     q = slice(p)     p' = permute(qkv)     k = slice(p')

A tensor inside a stage has readers only in that stage, so DPOF cannot fuse an operator that two
stages read. Movement costs no arithmetic: a kernel reads through its index map, so repeating it is
free. A dequantization is copied too: three instructions read a quarter of the bytes. Other
operators that compute are not copied. Neither is a cast to bfloat16, float16 or 8 bits, because its
narrow result is the tensor to store.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtco.graph.graph import Graph
from gtco.tensor.emit.scalar import NARROW
from gtco.tensor.stage import Operator, Stage

MOVEMENT = frozenset("identity reshape permute slice broadcast cast dequantize".split())
_STORED = (*NARROW, "int8", "uint8")


def copyable(op: Operator) -> bool:
    """True if the operator is movement that may be repeated for each reader."""
    return op.kind in MOVEMENT and not (op.kind == "cast" and op.type.dtype in _STORED)


def duplicate_movement(graph: Graph, keep: Iterable[str] = ()) -> Graph:
    """Copies every operator of ``MOVEMENT`` that has several readers: each reader but the first
    gets a copy. Operators named in ``keep`` stay single, and so do graph outputs, which are stored
    anyway.

    Chains are copied whole, because readers are handled before the operators that they read.
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
    """The movement of ``graph`` (the one without copies) that is better kept single: a partition of
    the graph with copies still stores it once for each of several readers.

    A stored copy is a stage of movement alone. Copies are equal if they make the same tensor from
    the same tensors; then every operator of the chain is kept single.
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
