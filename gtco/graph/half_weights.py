"""Weights of float16 files stay float16 in the library, and kernels widen them.

    before: y = matmul(x, W)            t = gather(E, ids)
    after:  y = matmul(x, W {float16})  h = gather(E {float16}, ids)  t = cast(h)

Products of float32 with float16 weights give the same results as with float32 weights, because
kernels widen the weights exactly, with F16C. A constant that is float16 in the file is exact in
float16, also after any movement. A constant that was computed from several ones mostly is not
exact, and stays float32.
"""

from __future__ import annotations

import numpy as np

from gtco.graph.fusion.dpof import Floor
from gtco.graph.fusion.stages import no_floor
from gtco.graph.graph import Graph
from gtco.graph.precision import Cost, Prices
from gtco.support.garbage import uncollected
from gtco.tensor.stage import Operator, TensorType

HALF = "float16"
# The positions of the weights among the inputs of operators.
_WEIGHTS = {"matmul": 1, "conv2d": 1, "conv_transpose2d": 1, "gather": 0}


def half_weights(graph: Graph, cost: Cost | None = None, floor: Floor = no_floor) -> Graph:
    """The graph with the weights of products and the tables of gathers in float16, if float16 holds
    their values. With ``cost``, a product that would be slower keeps its weights. ``floor`` is a
    lower bound on the cost of a stage with the operator.
    """
    graph = graph.copy()
    prices = Prices(graph, HALF, cost, floor)
    half: dict[str, str] = {}  # a constant's twin; "" if float16 does not hold its values

    def stored(tensor: str) -> str:
        if tensor not in half:
            array = graph.constants[tensor]
            with np.errstate(over="ignore"):
                narrow = array.astype(np.float16)
            same = np.array_equal(narrow.astype(array.dtype), array, equal_nan=True)
            half[tensor] = graph.add_constant(narrow, tensor) if same else ""
        return half[tensor]

    with uncollected():  # the fusion search does so too: the same policy prices here
        for op in list(graph.operators.values()):
            where = _weights(graph, op)
            if where is None or not (twin := stored(op.inputs[where])):
                continue
            if op.kind == "gather":
                _put_gather(graph, op, twin)
            elif prices.pays(op, (where,)):
                inputs = tuple(twin if i == where else x for i, x in enumerate(op.inputs))
                graph.put(Operator(op.kind, inputs, op.output, op.type, op.attrs, op.name))
    return graph.prune()


def _weights(graph: Graph, op: Operator) -> int | None:
    """The position of the float32 constant that a product multiplies float32 by, or that a gather
    reads; None if there is none.
    """
    if op.kind not in _WEIGHTS or op.type.dtype != "float32":
        return None
    where = _WEIGHTS[op.kind]
    multiplied = op.inputs[: where + 1]
    if any(graph.types[x].dtype != "float32" for x in multiplied):
        return None
    return where if graph.is_constant(op.inputs[where]) else None


def _put_gather(graph: Graph, op: Operator, table: str) -> None:
    """Adds the gather of ``table``, and a cast that makes the tensor of the old gather."""
    kind = TensorType(op.type.shape, HALF)
    made = graph.fresh(f"{op.output}_fp16")
    graph.put(Operator(op.kind, (table, *op.inputs[1:]), made, kind, op.attrs, op.name))
    graph.put(Operator("cast", (made,), op.output, op.type, (), op.name))
