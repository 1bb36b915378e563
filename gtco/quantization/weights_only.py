"""Weights in 8 bits, activations in float: a smaller model, for which no samples are needed.

before: y = MatMul(x, w)
after:  v = DequantizeLinear(w {int8}, t, 0, axis = 1); y = MatMul(x, v)

t has a scale for each output channel. The first and the last products are quantized too: what they
lose is the rounding of their weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx

from gtco.quantization.insertion import with_weights
from gtco.quantization.products import DEPTHWISE, EXCLUDED, Product, products_of


@dataclass(frozen=True)
class WeightsOnly:
    """A model and its products. Those that are not in ``quantized`` keep weights of float32:
    depthwise convolutions, and those that were excluded.
    """

    model: Any
    products: tuple[Product, ...]
    quantized: tuple[Product, ...]


def weights_only(model: onnx.ModelProto, exclude: tuple[str, ...] = ()) -> WeightsOnly:
    """The model with the weights of its products in int8. Raises what
    :func:`~gtco.quantization.products.products_of` raises.
    """
    products = tuple(products_of(model, exclude))
    quantized = tuple(p for p in products if p.float_because not in (EXCLUDED, DEPTHWISE))
    made = with_weights(model, quantized)
    onnx.checker.check_model(made)
    return WeightsOnly(made, products, quantized)
