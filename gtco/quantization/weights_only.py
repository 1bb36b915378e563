"""Weights in 8 or 4 bits, activations in float: a smaller model, for which no samples are needed.

before: y = MatMul(x, w)
after:  v = DequantizeLinear(w {int8}, t, 0, axis = 1); y = MatMul(x, v)
or:     v = DequantizeLinear(w {int4}, t, axis = 0, block_size = 32); y = MatMul(x, v)

t has a scale for each output channel, or for each block of k and output channel. The first and the
last products are quantized too: what they lose is the rounding of their weights alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtco.frontend.onnx import OnnxSource
from gtco.frontend.weights import whole
from gtco.quantization.insertion import with_weights
from gtco.quantization.products import EXCLUDED, Product, products_of
from gtco.quantization.reading import OPSET, OPSET_OF_BLOCKS, read_model
from gtco.quantization.upsampling import products_before_upsampling
from gtco.quantization.writing import write_model
from gtco.support.errors import OptionError

BITS = (8, 4)
BLOCKS = (16, 32, 64, 128, 256)  # those that ONNX Runtime's quantizer writes
BLOCK = 32  # the block of weights of 4 bits


@dataclass(frozen=True)
class QuantizedWeights:
    """What ``gtco.quantize_weights`` gives. ``compile_model`` takes it as a model. Of its
    ``products``, those that were excluded are not in ``quantized`` and keep weights of float32.
    """

    source: OnnxSource = field(repr=False)
    products: tuple[Product, ...]
    quantized: tuple[Product, ...]

    @property
    def model(self) -> Any:
        """The model as an ONNX ``ModelProto``, a new one each time. protobuf cannot write one of
        2 GB or more; :meth:`save` can.
        """
        return whole(self.source.skeleton, self.source.weights)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the ONNX file. A half-written file never has the name. Weights of more than 1 GB
        go to ``NAME.onnx.data`` beside it.
        """
        return write_model(Path(path), self.source)


def quantize_weights(
    model: Any,
    example_inputs: Any = None,
    exclude: Sequence[str] = (),
    bits: int = 8,
    block_size: int | None = None,
) -> QuantizedWeights:
    """The model with the weights of its products in int8, or its matrices in int4. With
    ``block_size``, matrices have scales for blocks of so many steps of k; those of 4 bits always
    have, by default for BLOCK. Raises :class:`OptionError` for other numbers of bits and sizes of
    blocks, and what :func:`~gtco.quantization.products.products_of` raises.
    """
    if bits not in BITS:
        raise OptionError(f"bits: weights of {bits} bits; gtco quantizes to {_listed(BITS)}")
    if block_size is not None and block_size not in BLOCKS:
        raise OptionError(f"block_size: blocks of {block_size}; it is one of {_listed(BLOCKS)}")
    block = block_size or (BLOCK if bits < 8 else 0)
    source = read_model(model, example_inputs, OPSET_OF_BLOCKS if block else OPSET)
    products = products_of(source, exclude)
    source, products, _ = products_before_upsampling(source, products, {}, exclude)
    quantized = tuple(p for p in products if p.float_because != EXCLUDED)
    made = with_weights(source, quantized, bits, block)
    return QuantizedWeights(made, tuple(products), quantized)


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}"
