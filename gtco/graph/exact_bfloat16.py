"""Products of whole numbers of 8 bits multiply in bfloat16, and lose nothing.

    before: y = matmul(dequantize(a, s, u), dequantize(b, t, v))
    after:  p = matmul(cast(dequantize(a, 1, u)) {bf16}, cast(dequantize(b, 1, v)) {bf16})
            y = multiply(p, s * t)

    before: y = matmul(a, b) {exact=8}
    after:  y = matmul(cast(a) {bf16}, cast(b) {bf16}) {exact=8}

In the first form a and b are 8 bits, with movement anywhere behind them. bfloat16 holds every whole
number up to 256, so the operands are exact, and their sums are float32's as before. The second form
is what :mod:`gtco.graph.rewrites.quantized.exact_products` makes of ONNX's integer operators. Both
are the products of attention in quantized files. Products by constants are products of integers
(:mod:`gtco.graph.rewrites.quantized.integer_products`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from gtco.graph.fusion.dpof import Floor
from gtco.graph.fusion.stages import no_floor
from gtco.graph.graph import Graph
from gtco.graph.precision import Cost, Prices
from gtco.graph.rewrites.apply import MOVES, apply_rule, moved, scalar
from gtco.machine.target import Machine, Target
from gtco.support.garbage import uncollected
from gtco.tensor.intrinsics.table import kinds
from gtco.tensor.stage import Operator, TensorType

DTYPE = "bfloat16"
EXACT = 256  # the largest whole number up to which bfloat16 holds all
BITS = 8  # of such a number


@dataclass(frozen=True)
class _Steps:
    """(q - zero) * scale, behind which ``moves`` are done, the last first."""

    q: str
    scale: float
    zero: str
    moves: tuple[Operator, ...] = ()


def exact_bfloat16(
    graph: Graph, machine: Machine, cost: Cost | None = None, floor: Floor = no_floor
) -> Graph:
    """The graph with such products, if the machine has an instruction that multiplies bfloat16; the
    graph itself if there are none. With ``cost``, a product that would be slower stays as it is.
    ``floor`` is a lower bound on the cost of a stage with the operator.
    """
    if not isinstance(machine, Target) or kinds(machine, DTYPE)[0].a.dtype != DTYPE:
        return graph
    if not any(op.kind == "dequantize" or op.get("exact") for op in graph.operators.values()):
        return graph
    prices = Prices(graph, DTYPE, cost, floor)

    def rule(graph: Graph, op: Operator) -> str | None:
        if op.get("exact"):
            if op["exact"] > BITS or not prices.pays(op, (0, 1)):
                return None
            narrow = [_narrow(graph, x) for x in op.inputs]
            return graph.add("matmul", narrow, op.type, name=op.name, exact=op["exact"])
        a, b = (_steps(graph, x) for x in op.inputs)
        if a is None or b is None or not _normal(a.scale * b.scale):
            return None
        if not prices.pays(op, (0, 1)):
            return None
        operands = [_exact(graph, x) for x in (a, b)]
        product = graph.add("matmul", operands, op.type, name=op.name)
        scale = graph.add_constant(np.array(a.scale * b.scale, np.float32), "scale")
        return graph.add("multiply", (product, scale), op.type, name=op.name)

    with uncollected():  # the fusion search does so too: the same policy prices here
        return apply_rule(graph, {"matmul"}, rule)


def _steps(graph: Graph, tensor: str) -> _Steps | None:
    """The tensor as whole numbers that bfloat16 holds, times one scale."""
    moves: list[Operator] = []
    op = graph.producer(tensor)
    while op is not None and op.kind in MOVES:
        moves.append(op)
        op = graph.producer(op.inputs[0])
    if op is None or op.kind != "dequantize" or op.type.dtype != "float32":
        return None
    q, scale, zero = op.inputs[0], *(scalar(graph, x) for x in op.inputs[1:])
    if scale is None or zero is None or not zero.is_integer():
        return None
    bounds = np.iinfo(graph.types[q].dtype)
    if max(abs(bounds.min - zero), abs(bounds.max - zero)) > EXACT:
        return None
    return _Steps(q, scale, op.inputs[2], tuple(moves))


def _exact(graph: Graph, x: _Steps) -> str:
    """The whole numbers in bfloat16, in their place."""
    shape = graph.types[x.q].shape
    one = graph.add_constant(np.array(1, np.float32), "one")
    y = graph.add("dequantize", (x.q, one, x.zero), TensorType(shape, "float32"))
    return moved(graph, _narrow(graph, y), reversed(x.moves))


def _narrow(graph: Graph, tensor: str) -> str:
    if graph.is_constant(tensor):
        return graph.add_constant(graph.constants[tensor].astype(bfloat16), tensor)
    return graph.add("cast", (tensor,), TensorType(graph.types[tensor].shape, DTYPE))


def _normal(scale: float) -> bool:
    """True if float32 holds the scale, and loses none of its digits."""
    bounds = np.finfo(np.float32)
    return bool(bounds.tiny <= abs(scale) <= bounds.max)
