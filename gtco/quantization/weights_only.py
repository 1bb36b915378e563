"""Weights in 8 bits, activations in float: a smaller model, for which no samples are needed.

before: y = MatMul(x, w)
after:  v = DequantizeLinear(w {int8}, t, 0, axis = 1); y = MatMul(x, v)

t has a scale for each output channel. The first and the last products are quantized too: what they
lose is the rounding of their weights alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from gtco.quantization.insertion import with_weights
from gtco.quantization.products import DEPTHWISE, EXCLUDED, Product, products_of
from gtco.quantization.reading import read_model
from gtco.quantization.report import write_whole


@dataclass(frozen=True)
class QuantizedWeights:
    """What ``gtco.quantize_weights`` gives: ``model``, an ONNX ``ModelProto`` that
    ``compile_model`` and other tools take, and its ``products``. Those that are not in
    ``quantized`` keep weights of float32: depthwise convolutions, and those that were excluded.
    """

    model: Any
    products: tuple[Product, ...]
    quantized: tuple[Product, ...]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the ONNX file; a half-written file never has the name."""
        return write_whole(Path(path), self.model.SerializeToString())


def quantize_weights(
    model: Any, example_inputs: Any = None, exclude: Sequence[str] = ()
) -> QuantizedWeights:
    """The model with the weights of its products in int8. Raises what
    :func:`~gtco.quantization.products.products_of` raises.
    """
    source = read_model(model, example_inputs)
    products = tuple(products_of(source, exclude))
    quantized = tuple(p for p in products if p.float_because not in (EXCLUDED, DEPTHWISE))
    made = with_weights(source, quantized)
    onnx.checker.check_model(made)
    return QuantizedWeights(made, products, quantized)
