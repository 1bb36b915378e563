"""QuantizeLinear and DequantizeLinear around operators of floats, as quantizers write them, with
parameters at the ends of what is allowed: zero points, axes, scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tests.random.builder import Builder, Tensor
from tests.random.families import small
from tests.random.quantized import windows

WIDE = 21  # the first opset with 16 bits and with blocks
POOLED = 12  # the first opset whose MaxPool takes bytes
# Scales far from those of data: quantizing saturates, or makes zeros.
FAR = (1e-30, 1e30, 2.0**-120, 1e-38, 1e10)


def _kind(b: Builder, sixteen: bool = True) -> str:
    kinds = ["uint8", "uint8", "int8"]
    return b.pick([*kinds, "int16", "uint16"] if sixteen and b.opset >= WIDE else kinds)


def _zeros(b: Builder, kind: str, count: tuple[int, ...]) -> np.ndarray:
    bounds = np.iinfo(kind)
    ends = [bounds.min, bounds.max, 0, (bounds.min + bounds.max + 1) // 2]
    if b.chance(0.3):
        return b.numpy.integers(bounds.min, bounds.max + 1, count)
    return np.full(count, b.pick(ends))


def _scales(b: Builder, kind: str, size: float, count: tuple[int, ...]) -> np.ndarray:
    """Scales of values of about this size."""
    if b.chance(0.08):
        return np.full(count, b.pick(FAR))
    steps = 3000 if "16" in kind else 30
    if b.chance(0.2):  # values lie exactly between steps
        return np.full(count, 2.0 ** np.round(np.log2(size / steps)))
    return size * b.numpy.uniform(0.7, 1.4, count) / steps


class Steps:
    """How a tensor is quantized: the inputs and attributes of both operators."""

    def __init__(self, b: Builder, x: Tensor, size: float = 1.0, single: bool = False) -> None:
        self.kind = _kind(b)
        self.flags: dict[str, int] = {}
        count: tuple[int, ...] = ()
        if not single and b.opset >= 13 and x.rank and b.chance(0.4):
            axis = b.random.randrange(x.rank)
            count = (x.shape[axis],)
            self.flags["axis"] = axis - x.rank if b.chance(0.5) else axis
        self.parameters = [b.constant(_scales(b, self.kind, size, count))]
        zeros = _zeros(b, self.kind, count)
        if not (self.kind == "uint8" and b.chance(0.1)):  # without one, the type is uint8
            self.parameters.append(b.constant(zeros, self.kind))

    def quantize(self, b: Builder, x: Tensor) -> Tensor:
        b.smooth = b.special = False
        inputs = [x, *self.parameters]
        return b.add("QuantizeLinear", inputs, x.shape, self.kind, **self.flags)

    def dequantize(self, b: Builder, q: Tensor) -> Tensor:
        return b.add("DequantizeLinear", [q, *self.parameters], q.shape, **self.flags)


def _round(b: Builder, x: Tensor, size: float = 1.0, single: bool = True) -> Tensor:
    steps = Steps(b, x, size, single)
    return steps.dequantize(b, steps.quantize(b, x))


def _sized(b: Builder, x: Tensor) -> Tensor:
    """The values at about 1, whatever came before."""
    return b.unary("Tanh", x) if b.chance(0.3) else x


def moved(b: Builder, x: Tensor) -> Tensor:
    """Movement between both, of 8 or 16 bits."""
    single = b.chance(0.6)
    steps = Steps(b, x, 1.0, single)
    q = steps.quantize(b, x)
    if not steps.flags:
        for _ in range(b.pick([0, 1, 2])):
            q = _movement(b, q)
    if not steps.flags and b.chance(0.2):  # other steps behind than before
        steps.parameters = [
            b.constant(_scales(b, steps.kind, 1.0, ())), b.constant(_zeros(b, q.dtype, ()), q.dtype)
        ]  # fmt: skip
    return steps.dequantize(b, q)


def _movement(b: Builder, q: Tensor) -> Tensor:
    what = b.pick(["turn", "slice", "flat", "twice", "pool", "pad"])
    if what == "turn" and q.rank > 1:
        return b.transpose(q, b.random.sample(range(q.rank), q.rank))
    if what == "slice" and q.rank and max(q.shape) > 1:
        axis = q.shape.index(max(q.shape))
        begin = b.random.randrange(q.shape[axis] - 1)
        return b.slice(q, axis, begin, b.random.randint(begin + 1, q.shape[axis]), b.pick([1, 2]))
    if what == "flat":
        return b.shaped(q, b.random.randint(1, 4))
    if what == "twice" and q.rank:
        axis, shape = b.random.randrange(q.rank), list(q.shape)
        shape[axis] *= 2
        return b.add("Concat", [q, q], shape, q.dtype, axis=axis)
    if what == "pool" and b.opset >= POOLED and "16" not in q.dtype:
        q = b.shaped(q, 4)
        kernel = [b.random.randint(1, min(n, 3)) for n in q.shape[2:]]
        shape = [*q.shape[:2], *(n - k + 1 for n, k in zip(q.shape[2:], kernel, strict=True))]
        return b.add("MaxPool", [q], shape, q.dtype, kernel_shape=kernel)
    if what == "pad" and b.opset >= 13 and "16" not in q.dtype and q.rank:
        pads = [b.random.randint(0, 2) for _ in range(2 * q.rank)]
        half = zip(q.shape, pads, pads[q.rank :], strict=False)
        value = b.constant(_zeros(b, q.dtype, ()), q.dtype)
        return b.add("Pad", [q, b.ints(pads), value], [n + i + j for n, i, j in half], q.dtype)
    return q


def _weights(b: Builder, shape: list[int], column: int) -> Tensor:
    """Constant weights behind DequantizeLinear: scales of the tensor, of columns, of another axis,
    or of blocks.
    """
    kind, rank = _kind(b, sixteen=b.chance(0.1)), len(shape)
    flags: dict[str, int] = {}
    count: tuple[int, ...] = ()
    if b.opset >= 13 and b.chance(0.7):
        axis = column if b.chance(0.7) else b.random.randrange(rank)
        count, flags["axis"] = (shape[axis],), axis - b.pick([0, rank])
        if b.opset >= WIDE and b.chance(0.25):
            block = b.random.randint(1, shape[axis])
            blocks = -(-shape[axis] // block)
            count = (*shape[:axis], blocks, *shape[axis + 1 :])
            flags["block_size"] = block
    bounds = np.iinfo(kind)
    low, high = bounds.min, bounds.max
    if b.chance(0.3):  # zero points in the middle and few steps, as quantizers write them
        middle = (low + high + 1) // 2
        values, zeros = middle + b.numpy.integers(-7, 8, shape), np.full(count, middle)
    else:
        values, zeros = b.numpy.integers(low, high + 1, shape), _zeros(b, kind, count)
    size = 1.0 / max(1.0, prod(shape) / shape[column]) ** 0.5
    scale = size * b.numpy.uniform(0.5, 2.0, count) / (high - low) * 4
    inputs = [b.constant(values, kind), b.constant(scale), b.constant(zeros, kind)]
    return b.add("DequantizeLinear", inputs, shape, **flags)


def _after(b: Builder, y: Tensor, columns: Sequence[int]) -> Tensor:
    """``y`` with what often follows a product: a bias, an activation, the next quantization."""
    if b.chance(0.5):
        y = b.binary("Add", y, b.weight(*columns))
    if b.chance(0.4):
        y = b.unary(b.pick(["Relu", "Sigmoid", "Tanh"]), y)
    return _round(b, y, 2.0, b.chance(0.7)) if b.chance(0.6) else y


def matmul(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(_sized(b, x), b.random.randint(2, 4))
    k, n = x.shape[-1], b.size(20)
    x = _round(b, x, 1.0, b.chance(0.8))
    if b.chance(0.3):
        w = b.transpose(_weights(b, [n, k], 0), [1, 0])
    else:
        w = _weights(b, [k, n], 1)
    y = b.add("MatMul", [x, w], [*x.shape[:-1], n])
    return _after(b, y, (n,))


def gemm(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(_sized(b, x), 2)
    (m, k), n = x.shape, b.size(20)
    x, turned = _round(b, x, 1.0, b.chance(0.8)), b.chance(0.6)
    w = _weights(b, [n, k], 0) if turned else _weights(b, [k, n], 1)
    inputs = [x, w]
    if b.chance(0.6):
        steps = b.constant(b.numpy.integers(-3000, 3000, n), "int32")
        inputs.append(b.add("DequantizeLinear", [steps, b.constant(3e-4)], [n]))
    flags = {"transB": int(turned), "alpha": b.pick([1.0, 1.0, 0.5]), "beta": b.pick([1.0, 2.0])}
    return _after(b, b.add("Gemm", inputs, [m, n], **flags), (n,))


def conv(b: Builder, x: Tensor) -> Tensor:
    x = small(b, b.shaped(_sized(b, x), 4), 3000)
    n, channels, *space = x.shape
    groups = b.pick([1, 1, channels, b.split_of(channels)])
    outputs = groups * b.pick([1, 3, 8, 17] if groups == 1 else [1, 2])
    kernel, pads, strides, out = windows(b, space)
    x = _round(b, x, 1.0, b.chance(0.8))
    w = _weights(b, [outputs, channels // groups, *kernel], 0)
    flags = {"group": groups, "pads": pads, "strides": strides}
    y = b.add("Conv", [x, w], [n, outputs, *out], **flags)
    return _after(b, y, (outputs, 1, 1))


def computed(b: Builder, x: Tensor) -> Tensor:
    """A product of two computed tensors, as attention's."""
    x = small(b, b.shaped(_sized(b, x), 3), 2000)
    a, c = _round(b, x), _round(b, b.transpose(x, [0, 2, 1]))
    y = b.add("MatMul", [a, c], [x.shape[0], x.shape[1], x.shape[1]])
    y = _round(b, y, 2.0)
    return _round(b, b.unary("Softmax", y, axis=-1), 1.0)


def joined(b: Builder, x: Tensor) -> Tensor:
    """A residual sum, or parts that are joined."""
    other = b.unary(b.pick(["Tanh", "Sigmoid", "Relu"]), x)
    if b.chance(0.3):
        other = _round(b, b.weight(*x.shape))  # constants that are quantized in the file
    x, other = _round(b, x, 1.0, False), _round(b, other)
    if x.rank and b.chance(0.4):
        axis, shape = b.random.randrange(x.rank), list(x.shape)
        shape[axis] *= 2
        return _round(b, b.add("Concat", [x, other], shape, axis=axis), 1.0, False)
    return _round(b, b.binary(b.pick(["Add", "Mul", "Sub"]), x, other), 2.0, False)


def whole(b: Builder, x: Tensor) -> Tensor:
    """Products of integers with zero points, of steps found at run time or before."""
    x = b.shaped(_sized(b, x), b.random.randint(2, 3))
    k, n = x.shape[-1], b.size(20)
    b.smooth = b.special = False
    if b.chance(0.4):
        base = b.several("DynamicQuantizeLinear", [x], [x.shape], "uint8")[0].name
        node = b.nodes[-1]
        names = [base, f"{base}_scale", f"{base}_zero"]
        del node.output[:]
        node.output.extend(names)
        q, zero = Tensor(base, x.shape, "uint8"), Tensor(names[2], (), "uint8")
    else:
        kind = _kind(b, False)
        zero = b.constant(_zeros(b, kind, ()), kind)
        q = b.add("QuantizeLinear", [x, b.constant(0.03), zero], x.shape, kind)
    kind = _kind(b, False)
    bounds = np.iinfo(kind)
    w = b.constant(b.numpy.integers(bounds.min, bounds.max + 1, (k, n)), kind)
    count = (n,) if b.chance(0.4) else ()
    inputs = [q, w, zero, b.constant(_zeros(b, kind, count), kind)]
    y = b.add("MatMulInteger", inputs[: b.pick([2, 3, 4, 4])], [*x.shape[:-1], n], "int32")
    y = b.add("Cast", [y], y.shape, to=1)
    return b.binary("Mul", y, b.constant(np.exp(b.numpy.uniform(-9, -7, (n,)))))


QDQ: tuple[Callable[[Builder, Tensor], Tensor], ...] = (
    moved, moved, matmul, matmul, matmul, gemm, conv, conv, computed, joined, whole,
)  # fmt: skip
