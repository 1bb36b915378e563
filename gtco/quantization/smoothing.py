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
from numpy.typing import NDArray
from onnx import helper

from gtco.frontend.onnx import OnnxSource
from gtco.quantization.insertion import Edit
from gtco.quantization.products import Constants, Product, by_tensor, reads

Array = NDArray[Any]
STRENGTHS = (0.25, 0.5, 0.75)  # smooth='auto' tries these beside none
_MOST = 2.0**10  # s lies between 1 / _MOST and this, so that products with it fit float32


def smoothed(
    model: OnnxSource,
    products: Sequence[Product],
    largest: Mapping[str, Array],
    strength: float,
) -> OnnxSource:
    """The model with this strength, from 0 to 1: how much of an activation's size is moved.
    ``largest``: the largest magnitudes of each tensor by channel, its last axis.
    """
    edit = Edit(model)
    edit.nodes = list(edit.given)
    constants = Constants(model.skeleton.graph, model.weights)
    for tensor, readers in by_tensor(products).items():
        readers = [p for p in readers if p.kind != "Conv"]
        if not readers or tensor not in largest:
            continue
        factors = _factors(readers, largest[tensor], strength)
        if bool((factors == 1).all()):
            continue
        for product in readers:
            node = next(n for n in edit.nodes if product.output in n.output)
            k = 1 - product.axis
            wide = factors.reshape((-1, 1) if k == 0 else (1, -1))
            node.input[1] = _constant(edit, product.weights * wide, f"{product.weight}_smoothed")
        _divide(edit, constants, tensor, readers, factors)
    return edit.finish()


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
    edit: Edit, constants: Constants, tensor: str, products: Sequence[Product], factors: Array
) -> None:
    """Makes these products read the tensor divided by the factors."""
    mine = {p.output for p in products}
    readers = [n for n in edit.nodes if tensor in reads(n)]
    alone = all(mine & set(n.output) for n in readers)
    alone = alone and tensor not in {value.name for value in edit.model.graph.output}
    maker = next((n for n in edit.nodes if tensor in n.output), None)
    inverse = 1 / factors
    if alone and maker is not None and maker.op_type == "LayerNormalization":
        values = [constants.value(name) for name in maker.input[1:]]
        if all(v is not None and v.shape == factors.shape for v in values):
            for n, value in enumerate(values, 1):
                assert value is not None
                name = f"{maker.input[n]}_smoothed"
                maker.input[n] = _constant(edit, value * inverse, name)
            return
    name = edit.name(f"{tensor}_smoothed")
    inverse_name = _constant(edit, inverse, f"{tensor}_smoothing")
    node = helper.make_node("Mul", [tensor, inverse_name], [name], name=name)
    first = next(n for n, node in enumerate(edit.nodes) if mine & set(node.output))
    for reader in edit.nodes:
        if mine & set(reader.output):
            reader.input[0] = name
    edit.nodes.insert(first, node)


def _constant(edit: Edit, value: Array, name: str) -> str:
    return edit.constant(value.astype(numpy.float32), name)
