"""Element-wise operators and data movement, which come before and after every kernel family."""

from __future__ import annotations

from math import prod

import numpy as np

from tests.random.builder import MOST, Builder, Tensor

UNARY = (
    "Relu Sigmoid Tanh Erf Softplus Abs Neg HardSigmoid HardSwish Elu Mish Sin Cos Softsign Selu "
    "LeakyRelu Identity Atan Celu"
).split()
ROUGH = ("Floor", "Ceil", "Round", "Sign")
# in these, ONNX Runtime treats NaN and infinity in its own way
UNUSUAL = ("HardSigmoid", "HardSwish", "Mish", "Sin", "Cos", "Softsign", "Sign", "Selu", "Celu")


def light(b: Builder, x: Tensor) -> Tensor:
    """One element-wise operator or movement."""
    return elementwise(b, x) if b.chance(0.5) else movement(b, x)


def elementwise(b: Builder, x: Tensor) -> Tensor:
    return b.pick([unary, unary, binary, binary, gate, chosen, composite])(b, x)


def unary(b: Builder, x: Tensor) -> Tensor:
    kind = b.pick(UNARY + list(ROUGH)) if b.chance(0.2) else b.pick(UNARY)
    kind = "Relu" if kind == "Mish" and b.opset < 18 else kind
    b.smooth &= kind not in ROUGH
    b.special &= kind not in UNUSUAL
    attrs = {"Elu": ["alpha"], "LeakyRelu": ["alpha"], "HardSigmoid": ["alpha", "beta"]}
    return b.unary(kind, x, **{a: b.pick([0.1, 0.2, 0.5]) for a in attrs.get(kind, [])})


def composite(b: Builder, x: Tensor) -> Tensor:
    """Functions with a restricted domain, kept inside it, and functions that exporters take
    apart.
    """
    one = b.number(1.0)
    match b.random.randrange(9):
        case 0:
            return b.unary("Sqrt", b.binary("Add", b.unary("Abs", x), one))
        case 1:
            return b.unary("Log", b.binary("Add", b.unary("Abs", x), one))
        case 2:
            return b.unary("Reciprocal", b.binary("Add", b.unary("Abs", x), one))
        case 3:
            return b.unary("Exp", b.add("Clip", [x, b.number(-9), b.number(3)], x.shape))
        case 4:
            return b.binary("Pow", x, b.number(b.pick([1.0, 2.0, 3.0])))
        case 5:  # GELU as TorchScript's exporter writes it
            gate = b.unary("Erf", b.binary("Div", x, b.number(2**0.5)))
            return b.binary("Mul", b.binary("Mul", x, b.binary("Add", gate, one)), b.number(0.5))
        case 6 if b.opset >= 20:
            return b.unary("Gelu", x, approximate=b.pick(["none", "tanh"]))
        case 7:
            low, high = sorted(b.numpy.standard_normal(2))
            return b.add("Clip", [x, b.number(low), b.number(high)], x.shape)
    inner = b.binary("Add", x, b.binary("Mul", b.binary("Pow", x, b.number(3)), b.number(0.044715)))
    inner = b.unary("Tanh", b.binary("Mul", inner, b.number(0.7978845608)))
    return b.binary("Mul", b.binary("Mul", x, b.binary("Add", inner, one)), b.number(0.5))


def gate(b: Builder, x: Tensor) -> Tensor:
    """SiLU, a sigmoid gate of a squeezed tensor, or a gated half (GLU)."""
    match b.random.randrange(3):
        case 0:
            return b.binary("Mul", x, b.unary("Sigmoid", x))
        case 1 if x.rank:
            squeezed = b.reduce("ReduceMean", x, [b.random.randrange(x.rank)])
            return b.binary("Mul", b.unary(b.pick(["Sigmoid", "HardSigmoid"]), squeezed), x)
    even = [a for a, n in enumerate(x.shape) if n % 2 == 0]
    if not even:
        return b.binary("Mul", b.unary("Sigmoid", x), x)
    axis = b.pick(even)
    half = x.shape[axis] // 2
    first, second = b.slice(x, axis, 0, half), b.slice(x, axis, half, 2 * half)
    return b.binary("Mul", first, b.unary(b.pick(["Sigmoid", "Tanh", "Relu"]), second))


def other(b: Builder, x: Tensor) -> Tensor:
    """A second operand: a constant, an input, or a tensor computed from ``x``."""
    match b.random.randrange(4):
        case 0 | 1:
            return b.weight(*b.broadcastable(x.shape))
        case 2:
            return b.input(b.broadcastable(x.shape))
    if x.rank and b.chance(0.5):
        return b.reduce("ReduceMean", x, [b.random.randrange(x.rank)])
    return unary(b, x)


def binary(b: Builder, x: Tensor) -> Tensor:
    kind, y = b.pick("Add Add Sub Mul Mul Div Max Min".split()), other(b, x)
    if kind == "Div":
        return b.binary("Div", x, b.binary("Add", b.unary("Abs", y), b.number(1.0)))
    pair = (x, y) if b.chance(0.5) else (y, x)
    return b.binary(kind, *pair)


def chosen(b: Builder, x: Tensor) -> Tensor:
    """A choice by a condition that is an input or is compared here."""
    if b.chance(0.6):
        mask = b.input(b.broadcastable(x.shape), "bool")
    else:
        b.smooth = False
        kind = b.pick(["Less", "Greater", "LessOrEqual", "GreaterOrEqual"])
        mask = b.binary(kind, x, other(b, x), "bool")
        if b.chance(0.3):
            mask = b.unary("Not", mask)
    if b.chance(0.3):
        cast = b.add("Cast", [mask], mask.shape, to=1)
        return b.binary("Mul", x, cast)
    pair = (x, b.number(b.pick([0.0, -1.5]))) if b.chance(0.5) else (other(b, x), x)
    shape = np.broadcast_shapes(mask.shape, pair[0].shape, pair[1].shape)
    return b.add("Where", [mask, *pair], shape)


def movement(b: Builder, x: Tensor) -> Tensor:
    moves = [reshape, flip, concat, expand, unsqueeze]
    if x.rank:
        moves += [transpose, cut, split, gather, pad, roll, squeeze, tile, several_steps]
    return b.pick(moves)(b, x)


def reshape(b: Builder, x: Tensor) -> Tensor:
    return b.shaped(x, b.random.randint(1, 5)) if x.size < MOST else b.shaped(x, max(x.rank, 1))


def transpose(b: Builder, x: Tensor) -> Tensor:
    return b.transpose(x, b.random.sample(range(x.rank), x.rank))


def several_steps(b: Builder, x: Tensor) -> Tensor:
    """Windows that are cut and joined again, or almost: reshape, transpose, reshape."""
    y = b.shaped(x, b.random.randint(3, 6))
    y = transpose(b, y)
    return b.shaped(y, b.random.randint(1, 4))


def flip(b: Builder, x: Tensor) -> Tensor:
    axes = [a for a in range(x.rank) if x.shape[a] > 1]
    return b.slice(x, b.pick(axes), -1, -(1 << 60), -1) if axes else unsqueeze(b, x)


def cut(b: Builder, x: Tensor) -> Tensor:
    axis = b.random.randrange(x.rank)
    n = x.shape[axis]
    begin = b.random.randrange(n)
    end = b.random.randint(begin + 1, n)
    return b.slice(x, axis, begin, end if b.chance(0.7) else 1 << 60, b.pick([1, 1, 2, 3]))


def split(b: Builder, x: Tensor) -> Tensor:
    axis = b.random.randrange(x.rank)
    n = x.shape[axis]
    if n < 2:
        return cut(b, x)
    first = b.random.randint(1, n - 1)
    shapes = [[m if a == axis else k for a, k in enumerate(x.shape)] for m in (first, n - first)]
    parts = b.several("Split", [x, b.ints([first, n - first])], shapes, axis=axis)
    if b.chance(0.5):
        return b.pick(parts)
    return b.add("Concat", parts[::-1], x.shape, axis=axis)


def concat(b: Builder, x: Tensor) -> Tensor:
    if not x.rank:
        return unsqueeze(b, x)
    axis = b.random.randrange(x.rank)
    parts = [x]
    for _ in range(b.random.randint(1, 2)):
        shape = list(x.shape)
        if b.chance(0.4):
            parts.append(unary(b, x))
            continue
        shape[axis] = b.random.randint(1, 4)
        parts.append(b.input(shape) if b.chance(0.4) else b.weight(*shape))
    b.random.shuffle(parts)
    shape = list(x.shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    return b.add("Concat", parts, shape, axis=axis)


def gather(b: Builder, x: Tensor) -> Tensor:
    axis = b.random.randrange(x.rank)
    n = x.shape[axis]
    if b.chance(0.3):
        index = b.constant(b.random.randrange(-n, n), "int64")
    else:
        count = b.random.randint(1, min(n + 2, 12))
        index = b.ints([b.random.randrange(-n, n) for _ in range(count)])
        if b.chance(0.3):  # neighbours in order, as windows are cut
            index = b.ints(range(n - n // 2))
    shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    return b.add("Gather", [x, index], shape, axis=axis)


def expand(b: Builder, x: Tensor) -> Tensor:
    wide = [b.random.randint(1, 4) if n == 1 else n for n in x.shape]
    wide = ([b.random.randint(1, 3)] if b.chance(0.5) else []) + wide
    if prod(wide) > MOST:
        return x
    return b.add("Expand", [x, b.ints(wide)], wide)


def pad(b: Builder, x: Tensor) -> Tensor:
    mode = b.pick(["constant", "constant", "edge", "reflect"])
    before, after = (
        [b.random.randint(0, min(3, n - 1) if mode == "reflect" else 3) for n in x.shape]
        for _ in range(2)
    )
    if mode == "constant" and b.chance(0.3):  # taken away
        taken = [n > 3 and b.chance(0.5) for n in x.shape]
        before = [-1 if t else p for t, p in zip(taken, before, strict=True)]
    shape = [n + p + q for n, p, q in zip(x.shape, before, after, strict=True)]
    if prod(shape) > MOST:
        return cut(b, x)
    inputs = [x, b.ints(before + after)]
    if mode == "constant" and b.chance(0.5):
        inputs.append(b.number(b.pick([0.0, 1.5])))
    return b.add("Pad", inputs, shape, mode=mode)


def roll(b: Builder, x: Tensor) -> Tensor:
    axis = b.random.randrange(x.rank)
    n = x.shape[axis]
    if n < 2:
        return x
    at = b.random.randint(1, n - 1)
    parts = [b.slice(x, axis, at, 1 << 60), b.slice(x, axis, 0, at)]
    return b.add("Concat", parts, x.shape, axis=axis)


def unsqueeze(b: Builder, x: Tensor) -> Tensor:
    at = b.random.randint(0, x.rank)
    return b.add("Unsqueeze", [x, b.ints([at])], [*x.shape[:at], 1, *x.shape[at:]])


def squeeze(b: Builder, x: Tensor) -> Tensor:
    ones = [a for a, n in enumerate(x.shape) if n == 1]
    if not ones:
        return unsqueeze(b, x)
    at = b.pick(ones)
    return b.add("Squeeze", [x, b.ints([at])], [*x.shape[:at], *x.shape[at + 1 :]])


def tile(b: Builder, x: Tensor) -> Tensor:
    times = [b.pick([1, 1, 2]) for _ in x.shape]
    shape = [n * t for n, t in zip(x.shape, times, strict=True)]
    return b.add("Tile", [x, b.ints(times)], shape) if prod(shape) <= MOST else cut(b, x)
