"""Weights that a file keeps in 8 bits stay in 8 bits in the library, and kernels widen them.

    before: y = matmul(x, W)
    after:  p = matmul(x, Q {int8})    y = multiply(p, s), with W = Q * s, s for each column

This is for products of float32 by weights that are dequantized alone. Kernels widen Q exactly, and
s is part of the epilogue. So a result is as exact as one of float32 weights. The weights are found
by their values (:mod:`gtco.graph.grids`), after all other rewrites.
"""

from __future__ import annotations

import numpy as np

from gtco.graph.fusion.dpof import Floor
from gtco.graph.fusion.stages import no_floor
from gtco.graph.graph import Graph
from gtco.graph.grids import Grid, grid
from gtco.graph.precision import Cost, Prices
from gtco.support.garbage import uncollected
from gtco.tensor.analysis.window import narrow_groups
from gtco.tensor.stage import Operator

BYTE = "int8"
LEAST = 8  # steps of k: with fewer, the scales take as much memory as the weights
_PRODUCTS = ("matmul", "conv2d", "conv_transpose2d")


def byte_weights(graph: Graph, cost: Cost | None = None, floor: Floor = no_floor) -> Graph:
    """The graph with the weights of products in int8, if their values are whole steps of a scale of
    their column; the graph itself if there are none. With ``cost``, a product that would be slower
    keeps its weights. ``floor`` is a lower bound on the cost of a stage with the operator.
    """
    given, graph = graph, graph.copy()
    prices = Prices(graph, BYTE, cost, floor)
    found: dict[tuple[str, str], tuple[str, np.ndarray] | None] = {}
    with uncollected():  # as in the fusion search: the same policy prices here
        for op in list(graph.operators.values()):
            if not _multiplies(graph, op):
                continue
            source = op.inputs[1]
            if (source, op.kind) not in found:
                found[source, op.kind] = _stored(graph, op)
            twin = found[source, op.kind]
            if twin is None or not prices.pays(op, (1,)):
                continue
            steps, scale = twin
            product = graph.fresh(f"{op.output}_steps")
            graph.put(
                Operator(op.kind, (op.inputs[0], steps), product, op.type, op.attrs, op.name)
            )
            factor = graph.add_constant(_placed(op, scale), "scale")
            graph.put(Operator("multiply", (product, factor), op.output, op.type, (), op.name))
    return graph.prune() if any(found.values()) else given


def scaled_product(graph: Graph, op: Operator | None) -> str | None:
    """The kind of the product that this pass made two operators of, of which ``op`` is the second;
    None for any other.
    """
    product = graph.producer(op.inputs[0]) if op is not None and op.kind == "multiply" else None
    if product is None or product.kind not in _PRODUCTS or product.type.dtype != "float32":
        return None
    return product.kind if graph.types[product.inputs[1]].dtype == BYTE else None


def _multiplies(graph: Graph, op: Operator) -> bool:
    """True for a product of float32 by constant weights whose columns have scales of their own."""
    if op.kind not in _PRODUCTS or op.type.dtype != "float32":
        return False
    if any(graph.types[x].dtype != "float32" for x in op.inputs[:2]):
        return False
    if not graph.is_constant(op.inputs[1]) or graph.is_constant(op.inputs[0]):
        return False
    shape = graph.types[op.inputs[1]].sizes
    if len(shape) < 2 or 0 in shape:
        return False
    if op.kind == "conv_transpose2d" and op["groups"] != 1:
        return False
    return op.kind == "matmul" or not narrow_groups(op, shape)


def _stored(graph: Graph, op: Operator) -> tuple[str, np.ndarray] | None:
    """The name of the weights as int8, and the scale of each column; None if they have no grid."""
    array = graph.constants[op.inputs[1]]
    front = np.moveaxis(array, _columns(op), -1)  # columns last
    # a batch of matrices has other columns for each of them
    batch = array.shape[:-2] if op.kind == "matmul" else ()
    depth = front.size // front.shape[-1] // int(np.prod(batch, dtype=int))
    if depth < LEAST:
        return None
    matrix = front.reshape(-1, depth, front.shape[-1]).swapaxes(0, 1).reshape(depth, -1)
    made: Grid | None = grid(matrix)
    if made is None:
        return None
    steps = made.steps.reshape(depth, -1, front.shape[-1]).swapaxes(0, 1).reshape(front.shape)
    name = graph.add_constant(
        np.ascontiguousarray(np.moveaxis(steps, -1, _columns(op))), op.inputs[1]
    )
    return name, made.scale.reshape(*batch, front.shape[-1])


def _columns(op: Operator) -> int:
    """The axis of the weights that is that of the columns: outputs of a convolution."""
    return {"matmul": -1, "conv2d": 0, "conv_transpose2d": 1}[op.kind]


def _placed(op: Operator, scale: np.ndarray) -> np.ndarray:
    """The scale of each column in the shape in which it broadcasts to the product."""
    if op.kind == "matmul":
        return scale if scale.ndim == 1 else scale[..., None, :]
    return scale.reshape(-1, 1, 1) if op["layout"] == "NCHW" else scale
