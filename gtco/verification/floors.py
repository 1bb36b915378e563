"""Absolute errors that bounded outputs may have if no float64 decides.

A sigmoid's value of 1e-8 has the same absolute accuracy as its largest value, because engines
compute logistics, softmax and similar functions to some roundings of 1. After movement and minima
such an output keeps its bound. After other operators it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Absolute errors of two engines' float32 together, in roundings of 1 (2^-24). ONNX Runtime's
# logistic is off by one, gtco's by up to 3 ulp, tanh and erf by 2 (tensor/emit/vector_math.py).
ROUNDING = 2.0**-24
ACCURACY: Mapping[str, float] = {
    "Sigmoid": 4 * ROUNDING,
    "HardSigmoid": 2 * ROUNDING,
    "Softmax": 4 * ROUNDING,
    "Tanh": 4 * ROUNDING,
    "Erf": 4 * ROUNDING,
    "Softsign": 2 * ROUNDING,
    "Sin": 4 * ROUNDING,
    "Cos": 4 * ROUNDING,
}
_MOVES = frozenset(
    "Identity Reshape Unsqueeze Squeeze Flatten Transpose Expand Tile Slice Split Cast Gather "
    "GatherElements GatherND DepthToSpace SpaceToDepth ReduceMax ReduceMin MaxPool GlobalMaxPool "
    "ReduceMean GlobalAveragePool TopK Clip".split()
)
_JOINS = frozenset("Concat Max Min".split())


def output_floors(graph: Any) -> list[float]:
    """The absolute floor of each output of a ``GraphProto``; 0 for an output without one."""
    makers = {name: node for node in graph.node for name in node.output if name}
    return [_floor(output.name, makers) for output in graph.output]


def _floor(name: str, makers: Mapping[str, Any]) -> float:
    """The floor of one output. Everything that it is made of must be bounded."""
    largest, open_, seen = 0.0, [name], set[str]()
    while open_:
        name = open_.pop()
        if name in seen:
            continue
        seen.add(name)
        node = makers.get(name)
        if node is None:
            return 0.0
        if node.op_type in ACCURACY:
            largest = max(largest, ACCURACY[node.op_type])
        elif node.op_type in _MOVES:
            open_.append(node.input[0])
        elif node.op_type in _JOINS:
            open_ += node.input
        else:
            return 0.0
    return largest
