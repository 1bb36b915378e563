"""Fusion by rules, as in TVM's FuseOps and Ansor, as a comparison for DPOF.

A complex operator takes the element-wise and injective operators after it; a reduction takes the
element-wise and injective ones before it; injective operators join each other. No rule looks at a
cost. Only the benchmarks ``partition`` and ``ablation`` use this.
"""

from __future__ import annotations

import math

from gtco.graph.fusion.dpof import Cost, Pricer
from gtco.graph.fusion.stages import Partition
from gtco.graph.graph import Graph
from gtco.tensor.operators import COMPLEX, ELEMENTWISE, INJECTIVE, OPAQUE, REDUCTION, pattern
from gtco.tensor.stage import Operator, make_stage

_LIGHT = (ELEMENTWISE, INJECTIVE)


def fuse_greedy(graph: Graph, cost: Cost) -> Partition:
    """A partition by the rules above. A stage that ``cost`` refuses is cut into its operators."""
    pricer = Pricer(cost)
    order = list(graph.operators.values())
    taken: set[str] = set()
    groups: list[list[Operator]] = []
    for sink in reversed(order):
        if sink.output not in taken:
            group = _grow(graph, sink, taken)
            taken |= {op.output for op in group}
            groups.append(group)
    groups.reverse()
    stages = []
    for group in groups:
        whole = make_stage(group, graph.types, graph.constants)
        if len(group) == 1 or pricer(whole) < math.inf:
            stages.append(whole)
        else:
            stages += [make_stage([op], graph.types, graph.constants) for op in group]
    costs = tuple(pricer(stage) for stage in stages)
    return Partition(
        tuple(stages),
        math.fsum(costs),
        costs,
        states=len(order),
        priced=len(pricer.memo),
        unique=len({stage.key for stage in stages}),
    )


def _grow(graph: Graph, sink: Operator, taken: set[str]) -> list[Operator]:
    """The stage that ends in ``sink``. It grows upwards from the sink until a rule stops it."""
    group = {sink.output: sink}
    anchor = pattern(sink.kind) in (COMPLEX, REDUCTION)
    if pattern(sink.kind) in (OPAQUE, COMPLEX):
        return [sink]  # nothing is fused before a complex operator
    pending = list(sink.inputs)
    while pending:
        op = graph.producer(pending.pop(0))
        if op is None or op.output in group or op.output in taken or op.output in graph.outputs:
            continue
        if any(reader.output not in group for reader in graph.consumers(op.output)):
            continue
        if pattern(op.kind) == COMPLEX and not anchor:
            anchor = True
            group[op.output] = op  # the group does not grow above it
        elif pattern(op.kind) in _LIGHT:
            group[op.output] = op
            pending += op.inputs
    return [op for op in graph.operators.values() if op.output in group]
