"""Operators of quantized models: a tensor is quantized, an operator takes its 8 bits, and the
result is dequantized; and products by weights of a few bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tests.random.builder import Builder, Tensor
from tests.random.families import small

MICROSOFT = "com.microsoft"
BYTES = ("uint8", "int8")
BLOCKS = 21  # the first opset whose DequantizeLinear has blocks


def _parameters(b: Builder, kind: str, size: float) -> list[Tensor]:
    """A scale with which 8 bits hold about three times ``size``, and a zero point. The scale is not
    a round number: where steps meet in their middle, ONNX Runtime's kernels round in several ways.
    """
    bounds = np.iinfo(kind)
    zero = int(b.numpy.integers(bounds.min + 100, bounds.max - 99))
    return [b.constant(size * b.numpy.uniform(1 / 40, 1 / 25)), b.constant(zero, kind)]


def _quantized(b: Builder, x: Tensor, kind: str) -> list[Tensor]:
    """The tensor in 8 bits, its scale and its zero point."""
    b.smooth = b.special = False
    parameters = _parameters(b, kind, 1.0)
    return [b.add("QuantizeLinear", [x, *parameters], x.shape, kind), *parameters]


def _weights(b: Builder, a: str, shape: list[int], scales: int) -> list[Tensor]:
    """Constant weights, with one scale and zero point or with ``scales`` of them."""
    kind = "int8" if a == "int8" else b.pick(BYTES)
    bounds = np.iinfo(kind)
    count = [scales] if b.chance(0.5) else []
    # one value: ONNX Runtime's convolutions have no other
    middle = b.random.choice([0, 3, -7]) if kind == "int8" else b.random.choice([128, 121, 0])
    return [
        b.constant(b.numpy.integers(bounds.min, bounds.max + 1, shape), kind),
        b.constant(np.exp(b.numpy.uniform(-7, -5, count))),
        b.constant(np.full(count, middle), kind),
    ]


def _made(
    b: Builder, operator: str, inputs: list[Any], shape: list[int], kind: str, **attrs: Any
) -> Tensor:
    """An operator with 8 bits as its result, dequantized. ``inputs`` end with the result's scale
    and zero point.
    """
    q = b.add(operator, inputs, shape, kind, **attrs)
    return b.add("DequantizeLinear", [q, *inputs[-2:]], shape)


def qlinear_matmul(b: Builder, x: Tensor) -> Tensor:
    x, kind = b.shaped(x, b.random.randint(2, 4)), b.pick(BYTES)
    k, n = x.shape[-1], b.size(20)
    a, weights = _quantized(b, x, kind), _weights(b, kind, [k, n], n)
    inputs = [*a, *weights, *_parameters(b, kind, 0.3 * k**0.5)]
    return _made(b, "QLinearMatMul", inputs, [*x.shape[:-1], n], kind)


def qgemm(b: Builder, x: Tensor) -> Tensor:
    x, kind = b.shaped(x, 2), b.pick(BYTES)
    (m, k), n = x.shape, b.size(20)
    a, weights = _quantized(b, x, kind), _weights(b, kind, [n, k], n)
    bias = b.constant(b.numpy.integers(-3000, 3000, n), "int32") if b.chance(0.5) else None
    flags = {"transB": 1, "domain": MICROSOFT}
    if b.chance(0.4):
        return b.add("QGemm", [*a, *weights, bias], [m, n], **flags)
    inputs = [*a, *weights, bias, *_parameters(b, kind, 0.3 * k**0.5)]
    return _made(b, "QGemm", inputs, [m, n], kind, **flags)


def attention_scores(b: Builder, x: Tensor) -> Tensor:
    """A product of two computed tensors and its softmax, all in 8 bits."""
    x, kind = small(b, b.shaped(x, 3), 2000), b.pick(BYTES)
    a, k = _quantized(b, x, kind), x.shape[-1]
    swapped = [x.shape[0], x.shape[2], x.shape[1]]
    turned = b.add("Transpose", [a[0]], swapped, kind, perm=[0, 2, 1])
    shape = [x.shape[0], x.shape[1], x.shape[1]]
    own = _parameters(b, kind, k**0.5)
    scores = b.add("QLinearMatMul", [*a, turned, *a[1:], *own], shape, kind)
    least = b.constant(np.iinfo(kind).min, kind)
    inputs = [scores, *own, b.constant(1 / 256), least]
    flags = {"axis": -1, "opset": 13, "domain": MICROSOFT}
    return _made(b, "QLinearSoftmax", inputs, shape, kind, **flags)


def windows(b: Builder, space: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """A convolution's kernel, pads and strides over an image, and the image that it makes."""
    kernel = [b.random.randint(1, min(size, 3)) for size in space]
    pads = [b.random.randint(0, k - 1) for k in (*kernel, *kernel)]
    strides = [b.pick([1, 1, 2]) for _ in kernel]
    out = [
        (size + pads[i] + pads[i + 2] - kernel[i]) // strides[i] + 1 for i, size in enumerate(space)
    ]
    return kernel, pads, strides, out


def qlinear_conv(b: Builder, x: Tensor) -> Tensor:
    x, kind = small(b, b.shaped(x, 4), 3000), b.pick(BYTES)
    n, channels, *space = x.shape
    groups = b.pick([1, 1, b.split_of(channels)])
    outputs = groups * b.pick([1, 3, 8, 17] if groups == 1 else [1, 2])
    kernel, pads, strides, out = windows(b, space)
    terms = channels // groups * prod(kernel)
    a = _quantized(b, x, kind)
    weights = _weights(b, kind, [outputs, channels // groups, *kernel], outputs)
    bias = [b.constant(b.numpy.integers(-3000, 3000, outputs), "int32")] if b.chance(0.6) else []
    own = _parameters(b, kind, 0.3 * terms**0.5)
    flags = {"group": groups, "pads": pads, "strides": strides}
    q = b.add("QLinearConv", [*a, *weights, *own, *bias], [n, outputs, *out], kind, **flags)
    return b.add("DequantizeLinear", [q, *own], [n, outputs, *out])


def pointwise(b: Builder, x: Tensor) -> Tensor:
    kind = b.pick(BYTES)
    a, own = _quantized(b, x, kind), _parameters(b, kind, 1.0)
    operator = b.pick(["Add", "Add", "Mul", "Sigmoid", "LeakyRelu", "Concat"])
    flags: dict[str, Any] = {"domain": MICROSOFT}
    if operator in ("Sigmoid", "LeakyRelu"):
        flags |= {"alpha": b.pick([0.1, 0.3])} if operator == "LeakyRelu" else {}
        return _made(b, f"QLinear{operator}", [*a, *own], list(x.shape), kind, **flags)
    if operator == "Concat" and x.rank:
        axis, shape = b.random.randrange(x.rank), list(x.shape)
        second = _quantized(b, b.unary("Tanh", x), kind)
        shape[axis] *= 2
        q = b.add("QLinearConcat", [*own, *a, *second], shape, kind, axis=axis, **flags)
        return b.add("DequantizeLinear", [q, *own], shape)
    other = b.input(b.broadcastable(x.shape)) if b.chance(0.5) else b.unary("Tanh", x)
    shape = list(np.broadcast_shapes(x.shape, other.shape))
    operator = "Add" if operator == "Concat" else operator
    inputs = [*a, *_quantized(b, other, kind), *own]
    return _made(b, f"QLinear{operator}", inputs, shape, kind, **flags)


def pool(b: Builder, x: Tensor) -> Tensor:
    x, kind = b.shaped(x, 4), b.pick(BYTES)
    a, own = _quantized(b, x, kind), _parameters(b, kind, 0.5)
    if b.chance(0.5):
        shape = [*x.shape[:2], 1, 1]
        flags: dict[str, Any] = {"channels_last": 0, "domain": MICROSOFT}
        return _made(b, "QLinearGlobalAveragePool", [*a, *own], shape, kind, **flags)
    kernel = [b.random.randint(1, min(n, 3)) for n in x.shape[2:]]
    shape = [*x.shape[:2], *(n - k + 1 for n, k in zip(x.shape[2:], kernel, strict=True))]
    flags = {"kernel_shape": kernel, "domain": MICROSOFT}
    return _made(b, "QLinearAveragePool", [*a, *own], shape, kind, **flags)


def to_float(b: Builder, x: Tensor) -> Tensor:
    """Integer products with float results, of a tensor that is quantized before or inside."""
    x, kind = b.shaped(x, b.random.randint(2, 3)), b.pick(BYTES)
    k, n = x.shape[-1], b.size(20)
    bias = [b.weight(n)] if b.chance(0.5) else []
    shape = [*x.shape[:-1], n]
    if b.chance(0.5):
        b.smooth = b.special = False
        w, scale, zero = _weights(b, "uint8", [k, n], n)
        flags = {"domain": MICROSOFT}
        return b.add("DynamicQuantizeMatMul", [x, w, scale, zero, *bias], shape, **flags)
    (a, a_scale, a_zero), (w, scale, zero) = (
        _quantized(b, x, kind),
        _weights(b, kind, [k, n], n),
    )
    inputs = [a, w, a_scale, scale, a_zero, zero, *bias]
    return b.add("MatMulIntegerToFloat", inputs, shape, domain=MICROSOFT)


def few_bits(b: Builder, x: Tensor) -> Tensor:
    """Weights of 4 or 8 bits in blocks, packed or in a DequantizeLinear."""
    x = b.shaped(x, b.random.randint(2, 3))
    k, n = x.shape[-1], b.size(20)
    if b.opset >= BLOCKS and b.chance(0.5):
        block = b.random.randint(1, k)
        blocks, kind = -(-k // block), b.pick(BYTES)
        w = b.constant(b.numpy.integers(0, 100, (k, n)), kind)
        scale = b.constant(np.exp(b.numpy.uniform(-6, -4, (blocks, n))))
        zero = b.constant(b.numpy.integers(0, 100, (blocks, n)), kind)
        if blocks * n > 1:
            flags = {"axis": 0, "block_size": block}
            wide = b.add("DequantizeLinear", [w, scale, zero], [k, n], **flags)
            return b.add("MatMul", [x, wide], [*x.shape[:-1], n])
    bits, block = b.pick([4, 8]), b.pick([16, 32])
    blocks = -(-k // block)
    packed = b.constant(b.numpy.integers(0, 256, (n, blocks, block * bits // 8)), "uint8")
    scale = b.constant(np.exp(b.numpy.uniform(-6, -4, (n, blocks))) * (1 if bits == 4 else 1 / 16))
    zeros = b.constant(b.numpy.integers(0, 256, (n, -(-blocks * bits // 8))), "uint8")
    inputs = [x, packed, scale, *([zeros] if b.chance(0.5) else [])]
    flags = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 1}
    return b.add("MatMulNBits", inputs, [*x.shape[:-1], n], domain=MICROSOFT, **flags)


QUANTIZED = (
    qlinear_matmul, qlinear_matmul, qgemm, attention_scores, qlinear_conv, qlinear_conv, pointwise,
    pointwise, pool, to_float, few_bits,
)  # fmt: skip
