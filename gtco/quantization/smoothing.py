"""Moves part of the size of activations into the weights (Xiao et al., SmoothQuant, 2023).

before: y = MatMul(x, w)
after:  y = MatMul(x * (1 / s), s * w), with s = max|x|^a / max|w|^(1 - a) for each channel of k

A few channels of x are often a hundred times as large as the others, and one scale for all of x
leaves the others a few steps. Weights have a scale for each output channel, and bear it better. s
is rounded to a power of two, so that the model in float stays the same to the last bit. If x comes
from a LayerNormalization that nothing else reads, 1 / s goes into its scale and bias. Convolutions
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from gtco.quantization.products import Constants, Product, by_tensor, reads

Array = NDArray[Any]
STRENGTHS = (0.25, 0.5, 0.75)  # that smooth='auto' tries beside none
_MOST = 2.0**10  # and 2^-10: s stays where float32 has room


def smoothed(
    model: onnx.ModelProto,
    products: Sequence[Product],
    largest: Mapping[str, Array],
    strength: float,
) -> onnx.ModelProto:
    """The model with this strength, from 0 to 1: how much of an activation's size is moved.
    ``largest``: the largest magnitudes of each tensor by channel, its last axis.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    constants = Constants(graph)
    taken = {name for node in graph.node for name in (*reads(node), *node.output)}
    for tensor, readers in by_tensor(products).items():
        readers = [p for p in readers if p.kind != "Conv"]
        if not readers or tensor not in largest:
            continue
        factors = _factors(readers, largest[tensor], strength)
        if bool((factors == 1).all()):
            continue
        for product in readers:
            node = next(n for n in graph.node if product.output in n.output)
            k = 1 - product.axis
            wide = factors.reshape((-1, 1) if k == 0 else (1, -1))
            node.input[1] = _constant(
                graph, product.weights * wide, f"{product.weight}_smoothed", taken
            )
        _divide(graph, constants, tensor, readers, factors, taken)
    return made


def _factors(products: Sequence[Product], largest: Array, strength: float) -> Array:
    """s for each channel; 1 where the channel or its weights are zero."""
    weights = numpy.zeros_like(largest)
    for product in products:
        weights = numpy.maximum(weights, numpy.abs(product.weights).max(axis=product.axis))
    alive = (largest > 0) & (weights > 0)
    x, w = numpy.where(alive, largest, 1.0), numpy.where(alive, weights, 1.0)
    s = x.astype(numpy.float64) ** strength / w.astype(numpy.float64) ** (1 - strength)
    if bool(alive.any()):  # about 1 in the middle: only the differences between channels count
        s = s / numpy.exp(numpy.log(s[alive]).mean())
    s = numpy.clip(numpy.where(alive, s, 1.0), 1 / _MOST, _MOST)
    return numpy.exp2(numpy.rint(numpy.log2(s))).astype(numpy.float32)


def _divide(
    graph: onnx.GraphProto,
    constants: Constants,
    tensor: str,
    products: Sequence[Product],
    factors: Array,
    taken: set[str],
) -> None:
    """Makes these products read the tensor divided by the factors."""
    mine = {p.output for p in products}
    readers = [n for n in graph.node if tensor in reads(n)]
    alone = all(mine & set(n.output) for n in readers)
    alone = alone and tensor not in {value.name for value in graph.output}
    maker = next((n for n in graph.node if tensor in n.output), None)
    inverse = 1 / factors
    if alone and maker is not None and maker.op_type == "LayerNormalization":
        values = [constants.value(name) for name in maker.input[1:]]
        if all(v is not None and v.shape == factors.shape for v in values):
            for n, value in enumerate(values, 1):
                assert value is not None
                name = f"{maker.input[n]}_smoothed"
                maker.input[n] = _constant(graph, value * inverse, name, taken)
            return
    name = _free(f"{tensor}_smoothed", taken)
    inverse_name = _constant(graph, inverse, f"{tensor}_smoothing", taken)
    node = helper.make_node("Mul", [tensor, inverse_name], [name], name=name)
    first = next(n for n, node in enumerate(graph.node) if mine & set(node.output))
    for reader in graph.node:
        if mine & set(reader.output):
            reader.input[0] = name
    graph.node.insert(first, node)


def _constant(graph: onnx.GraphProto, value: Array, name: str, taken: set[str]) -> str:
    name = _free(name, taken)
    graph.initializer.append(numpy_helper.from_array(value.astype(numpy.float32), name))
    return name


def _free(wanted: str, taken: set[str]) -> str:
    found, n = wanted, 1
    while found in taken:
        found, n = f"{wanted}_{n}", n + 1
    taken.add(found)
    return found
