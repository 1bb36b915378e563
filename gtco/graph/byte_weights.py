"""Weights that a file keeps in 8 or 4 bits stay so in the library, and kernels widen them.

    before: y = matmul(x, W)
    after:  p = matmul(x, Q {int8})    y = multiply(p, s), with W = Q * s, s for each column
    or:     y = matmul(x, Q {int8}, s), with s for each block of k and column
    or:     y = matmul(x, Q {int8}, s, z), with W = (Q - z) * s; and all of them with int4
    or:     y = conv2d(x, Q {int8}, s) or conv2d(x, Q {int8}, s, z) of narrow groups

This is for products of float32 by weights that are dequantized alone. Kernels widen Q exactly, and
s is part of the epilogue; with blocks, and in depthwise convolutions, of the widening. So a result
is as exact as one of float32 weights. The weights are found by their values
(:mod:`gtco.graph.grids`), after all other rewrites. A zero point z is needed where steps do not lie
around 0; one scale for each column is then one block. Blocks have scales of float16 if that holds
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from gtco.graph.fusion.dpof import Floor
from gtco.graph.fusion.stages import no_floor
from gtco.graph.graph import Graph
from gtco.graph.grids import Grid, grid, in_bits
from gtco.graph.precision import Cost, Prices
from gtco.support.garbage import uncollected
from gtco.tensor.analysis.window import narrow_groups
from gtco.tensor.stage import INT4, Operator, make_attrs

BYTE = "int8"
BLOCKS = (256, 128, 64, 32, 16)  # steps of k that have scales of their own
LEAST = 8  # steps of k: with fewer, the scales take as much memory as the weights
_PRODUCTS = ("matmul", "conv2d", "conv_transpose2d")


def byte_weights(graph: Graph, cost: Cost | None = None, floor: Floor = no_floor) -> Graph:
    """The graph with the weights of products in int4 or int8, if their values are whole steps of a
    scale of their column; the graph itself if there are none. With ``cost``, a product that would
    be slower keeps its weights. ``floor`` is a lower bound on the cost of a stage with the
    operator.
    """
    given, graph = graph, graph.copy()
    prices = Prices(graph, BYTE, cost, floor)
    found: dict[tuple[str, str], list[_Stored]] = {}
    stored = False
    with uncollected():  # the fusion search does so too: the same policy prices here
        products = [op for op in graph.operators.values() if _multiplies(graph, op)]
        left = Counter((op.inputs[1], op.kind) for op in products)
        for op in products:
            key = (op.inputs[1], op.kind)
            if key not in found:
                found[key] = _stored(graph, op)
            for twin in found[key]:
                product = _product(graph, op, twin)
                if prices.pays(op, (), product):
                    _put(graph, op, product, twin)
                    stored = True
                    break
            left[key] -= 1
            if not left[key]:  # memory has no use for the others
                graph.drop_constants(x for twin in found.pop(key) for x in twin.constants)
    return graph.prune() if stored else given


@dataclass(frozen=True)
class _Stored:
    """Weights in int8 or int4: the constant's name, and the scale of each column.

    - ``beside``: the constants that the product reads beside them, if it scales them itself: the
      scales, and the zero points if there are any;
    - ``block``: the steps of k for which there is a scale of each column; 0 for all of them.
    """

    steps: str
    scale: np.ndarray
    block: int = 0
    beside: tuple[str, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of all of its constants."""
        return (self.steps, *self.beside)


def _product(graph: Graph, op: Operator, stored: _Stored) -> Operator:
    """The product by the stored weights, without scales that stand behind it."""
    attrs = make_attrs(**dict(op.attrs), block=stored.block) if stored.block else op.attrs
    output = op.output if stored.beside else graph.fresh(f"{op.output}_steps")
    return Operator(op.kind, (op.inputs[0], *stored.constants), output, op.type, attrs, op.name)


def _put(graph: Graph, op: Operator, product: Operator, stored: _Stored) -> None:
    """Replaces an operator by the product, and the multiplication by the scales of columns."""
    graph.put(product)
    if not stored.beside:
        scale = graph.add_constant(_placed(op, stored.scale), "scale")
        graph.put(
            Operator("multiply", (product.output, scale), op.output, op.type, (), op.name)
        )


def scaled_product(graph: Graph, op: Operator | None) -> str | None:
    """The kind of the product that this pass made two operators of, of which ``op`` is the second;
    None for any other.
    """
    product = graph.producer(op.inputs[0]) if op is not None and op.kind == "multiply" else None
    if product is None or product.kind not in _PRODUCTS or product.type.dtype != "float32":
        return None
    return product.kind if graph.types[product.inputs[1]].dtype in (BYTE, INT4) else None


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
    return op.kind != "conv_transpose2d" or op["groups"] == 1


def _stored(graph: Graph, op: Operator) -> list[_Stored]:
    """The weights in int4 and in int8, the smaller first; none if they have no grid."""
    array = graph.constants[op.inputs[1]]
    front = np.moveaxis(array, _columns(op), -1)  # columns last
    # a batch of matrices has other columns for each of them
    batch = array.shape[:-2] if op.kind == "matmul" else ()
    depth = front.size // front.shape[-1] // int(np.prod(batch, dtype=int))
    if depth < LEAST:
        return []
    matrix = front.reshape(-1, depth, front.shape[-1]).swapaxes(0, 1).reshape(depth, -1)
    made: Grid | None = grid(matrix)
    if narrow_groups(op, array.shape):
        return _of_channels(graph, op.inputs[1], made, array.shape)
    if made is not None:
        found = []
        for one in (in_bits(made, bits) for bits in (4, 8)):
            if one is not None and one.zero is None:
                steps = one.steps.reshape(depth, -1, front.shape[-1]).swapaxes(0, 1)
                turned = np.moveaxis(steps.reshape(front.shape), -1, _columns(op))
                scale = one.scale.reshape(*batch, front.shape[-1])
                name = graph.add_constant(np.ascontiguousarray(turned), op.inputs[1])
                found.append(_Stored(name, scale))
            elif one is not None and op.kind == "matmul" and not batch:
                found.append(_of_blocks(graph, op.inputs[1], one, depth, depth))
        return found
    if op.kind != "matmul" or batch:
        return []
    return _in_blocks(graph, op.inputs[1], array)


def _of_channels(
    graph: Graph, name: str, made: Grid | None, shape: tuple[int, ...]
) -> list[_Stored]:
    """The weights [C, G, KH, KW] of narrow groups in int8, with the scale of each output channel
    and its zero point, if there are any; none if they have no grid.
    """
    one = made and in_bits(made, 8)
    if one is None:
        return []
    constants = [graph.add_constant(one.scale, "scales")]
    if one.zero is not None:
        constants.append(graph.add_constant(one.zero, "zeros"))
    stored = graph.add_constant(np.ascontiguousarray(one.steps.T).reshape(shape), name)
    return [_Stored(stored, one.scale, beside=tuple(constants))]


def _in_blocks(graph: Graph, name: str, matrix: np.ndarray) -> list[_Stored]:
    """The weights [k, n] in int4 and in int8 with scales of blocks of k; none if no size of blocks
    fits.
    """
    depth, _ = matrix.shape
    for block in (size for size in BLOCKS if size < depth):
        if grid(_apart(matrix[:, :1], block)) is None:  # most weights have no grid
            continue
        made = grid(_apart(matrix, block))
        if made is not None:
            both = (in_bits(made, bits) for bits in (4, 8))
            return [_of_blocks(graph, name, one, block, depth) for one in both if one is not None]
    return []


def _of_blocks(graph: Graph, name: str, made: Grid, block: int, depth: int) -> _Stored:
    """The constants of weights with scales of blocks, whose blocks lie :func:`_apart`."""
    columns = made.steps.shape[1] // -(-depth // block)
    steps = made.steps.reshape(block, -1, columns).swapaxes(0, 1).reshape(-1, columns)[:depth]
    scale = made.scale.reshape(-1, columns)
    half = scale.astype(np.float16)
    constants = [graph.add_constant(half if (half == scale).all() else scale, "scales")]
    if made.zero is not None:
        constants.append(graph.add_constant(made.zero.reshape(-1, columns), "zeros"))
    stored = graph.add_constant(np.ascontiguousarray(steps), name)
    return _Stored(stored, scale, block, tuple(constants))


def _apart(matrix: np.ndarray, block: int) -> np.ndarray:
    """The blocks of k of a matrix [k, n] beside each other: [block, blocks * n], with zeros at the
    end of the last one.
    """
    depth, columns = matrix.shape
    whole = np.pad(matrix, [(0, -depth % block), (0, 0)])
    return whole.reshape(-1, block, columns).swapaxes(0, 1).reshape(block, -1)


def _columns(op: Operator) -> int:
    """The axis of the weights that is that of the columns: outputs of a convolution."""
    return {"matmul": -1, "conv2d": 0, "conv_transpose2d": 1}[op.kind]


def _placed(op: Operator, scale: np.ndarray) -> np.ndarray:
    """The scale of each column in the shape in which it broadcasts to the product."""
    if op.kind == "matmul":
        return scale if scale.ndim == 1 else scale[..., None, :]
    return scale.reshape(-1, 1, 1) if op["layout"] == "NCHW" else scale
