"""Graphs of images whose height and width are open: every node is written so that it holds at any
size. Sizes are read from the tensors (Shape, and arithmetic on it) as exporters do it, or left to
Reshape's 0 and -1.

:func:`draw_image` draws one, at a height and width that no other size is a multiple of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from random import Random

from tests.random.builder import Builder, Drawn, Tensor
from tests.random.families import conv, conv_transpose, matmul, pixels, pool, scan
from tests.random.light import composite, gate, unary
from tests.random.quantized import attention_scores, pointwise, qlinear_conv, qlinear_matmul

HEIGHT, WIDTH = 13, 11  # while a graph is drawn
CHANNELS = (1, 3, 4, 8, 8, 12, 16, 16, 17, 24, 32)
Piece = Callable[[Builder, Tensor], Tensor]


# sizes that are read from tensors -----------------------------------------------------------------
def _sizes(b: Builder, x: Tensor, first: int, last: int) -> Tensor:
    """The sizes of the axes from ``first`` to ``last``, without it."""
    whole = b.add("Shape", [x], [x.rank], "int64")
    return b.slice(whole, 0, first, last)


def _joined(b: Builder, parts: Sequence[Tensor | int]) -> Tensor:
    given = [b.ints([p]) if isinstance(p, int) else p for p in parts]
    return b.add("Concat", given, [sum(p.shape[0] for p in given)], "int64", axis=0)


def _reshaped(
    b: Builder, x: Tensor, target: Tensor | Sequence[int], shape: Sequence[int]
) -> Tensor:
    given = target if isinstance(target, Tensor) else b.ints(target)
    return b.add("Reshape", [x, given], shape, x.dtype)


def _whole(b: Builder, kind: str, x: Tensor, y: Tensor | int) -> Tensor:
    """Arithmetic of sizes."""
    other = b.ints([y]) if isinstance(y, int) else y
    return b.add(kind, [x, other], x.shape, "int64")


# element-wise -------------------------------------------------------------------------------------
def _light(b: Builder, x: Tensor) -> Tensor:
    channels = [1 if a != 1 or x.rank != 4 else n for a, n in enumerate(x.shape)]
    if x.rank == 3:
        channels = [x.shape[-1]]
    match b.random.randrange(6):
        case 0:
            return unary(b, x)
        case 1:
            return composite(b, x)
        case 2:
            return gate(b, x)
        case 3:
            return b.binary(b.pick(["Add", "Mul", "Sub", "Max"]), x, b.weight(*channels))
        case 4:
            return b.binary(b.pick(["Add", "Mul"]), x, unary(b, x))
    return b.binary("Mul", x, b.reduce("ReduceMean", x, [b.random.randrange(x.rank)]))


# images [batch, channels, height, width] ----------------------------------------------------------
def _norm(b: Builder, x: Tensor) -> Tensor:
    c = x.shape[1]
    if b.chance(0.4):  # over the channels, as ConvNeXt has it
        y = b.transpose(x, (0, 2, 3, 1))
        y = b.add("LayerNormalization", [y, b.weight(c), b.weight(c)], y.shape, axis=-1)
        return b.transpose(y, (0, 3, 1, 2))
    groups = b.split_of(c)
    y = _reshaped(b, x, [0, groups, -1], [x.shape[0], groups, x.size // x.shape[0] // groups])
    ones = b.constant([1.0] * groups), b.constant([0.0] * groups)
    y = b.add("InstanceNormalization", [y, *ones], y.shape)
    y = _reshaped(b, y, b.add("Shape", [x], [4], "int64"), x.shape)
    return b.binary("Mul", y, b.weight(c, 1, 1))


def _squeezed(b: Builder, x: Tensor) -> Tensor:
    c, inner = x.shape[1], b.pick([1, 4, 8])
    y = b.add("GlobalAveragePool", [x], [*x.shape[:2], 1, 1])
    y = b.add("Conv", [y, b.weight(inner, c, 1, 1), b.weight(inner)], [x.shape[0], inner, 1, 1])
    y = b.add("Conv", [b.unary("Relu", y), b.weight(c, inner, 1, 1)], [x.shape[0], c, 1, 1])
    return b.binary("Mul", x, b.unary("Sigmoid", y))


def _means(b: Builder, x: Tensor) -> Tensor:
    axes = b.pick([[2], [3], [-1], [2, 3], [1]])
    kind = b.pick(["ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"])
    b.special = False
    return b.reduce(kind, x, axes, True)


def _scaled(b: Builder, x: Tensor) -> Tensor:
    """Resized by constant factors."""
    factors = [b.pick([1.0, 2.0, 2.0, 3.0]) for _ in "hw"]
    mode = b.pick(["nearest", "linear"])
    attrs = {"nearest_mode": "floor"} if mode == "nearest" else {}
    where = "asymmetric" if mode == "nearest" else b.pick(["half_pixel", "align_corners"])
    shape = [*x.shape[:2], *(int(n * f) for n, f in zip(x.shape[2:], factors, strict=True))]
    if prod(shape) > 9000:
        return x
    inputs = [x, None, b.constant([1.0, 1.0, *factors])]
    return b.add("Resize", inputs, shape, mode=mode, coordinate_transformation_mode=where, **attrs)


def _pyramid(b: Builder, x: Tensor) -> Tensor:
    """A coarse level, resized to the size of the fine one, beside or on top of it."""
    n, c, h, w = x.shape
    shape = [n, c, (h - 1) // 2 + 1, (w - 1) // 2 + 1]
    weights = b.weight(c, c, 3, 3, scale=(9 * c) ** -0.5)
    y = b.add("Conv", [x, weights], shape, strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    target = _joined(b, [_sizes(b, y, 0, 2), _sizes(b, x, 2, 4)])
    mode = "linear"
    attrs = {"coordinate_transformation_mode": b.pick(["half_pixel", "align_corners"])}
    y = b.add("Resize", [y, None, None, target], x.shape, mode=mode, **attrs)
    if b.chance(0.5):
        return b.binary("Add", x, y)
    return b.add("Concat", [x, y], [n, 2 * c, h, w], axis=1)


def _table(b: Builder, x: Tensor) -> Tensor:
    """A table of positions, resized to the image."""
    _, c, h, w = x.shape
    table = b.weight(1, c, b.pick([1, 4, 7]), b.pick([1, 5, 8]))
    target = _joined(b, [1, c, _sizes(b, x, 2, 4)])
    attrs = {"coordinate_transformation_mode": b.pick(["half_pixel", "pytorch_half_pixel"])}
    y = b.add("Resize", [table, None, None, target], [1, c, h, w], mode="linear", **attrs)
    return b.binary("Add", x, y)


def _part(b: Builder, x: Tensor) -> Tensor:
    axis, far = b.pick([2, 3]), 1 << 60
    begin, end, step = b.pick([(1, far, 1), (0, -1, 1), (0, far, 2), (1, far, 3), (-2, far, 1)])
    if b.chance(0.3):
        begin, end, step = -1, -far, -1
    return b.slice(x, axis, begin, end, step)


def _edges(b: Builder, x: Tensor) -> Tensor:
    mode = b.pick(["constant", "edge", "reflect"])
    pads = [b.random.randint(0, 2) for _ in range(4)]
    shape = [*x.shape[:2], x.shape[2] + pads[0] + pads[2], x.shape[3] + pads[1] + pads[3]]
    both = b.ints([0, 0, *pads[:2], 0, 0, *pads[2:]])
    return b.add("Pad", [x, both], shape, mode=mode)


def _turned(b: Builder, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    if b.chance(0.5):
        return b.transpose(x, (0, 1, 3, 2))
    y = _light(b, b.transpose(x, b.pick([(0, 2, 3, 1), (0, 3, 2, 1)])))
    del n, c, h, w
    return b.transpose(y, (0, 3, 1, 2))


def _branches(b: Builder, x: Tensor) -> Tensor:
    axis = b.pick([1, 1, 2, 3])
    parts = [x, _light(b, x)]
    if parts[1].shape != x.shape:
        return x
    if axis > 1 and b.chance(0.5):
        shape = [n if a != axis else 1 for a, n in enumerate(x.shape)]
        parts[1] = b.reduce("ReduceMean", parts[1], [axis])
        assert list(parts[1].shape) == shape
    whole = [n if a != axis else n + parts[1].shape[a] for a, n in enumerate(x.shape)]
    return b.add("Concat", parts, whole, axis=axis)


def _softmax(b: Builder, x: Tensor) -> Tensor:
    return b.unary("Softmax", x, axis=b.pick([1, 2, 3, -1]))


def _gram(b: Builder, x: Tensor) -> Tensor:
    """Products of the image with itself: of rows, of columns, of channels."""
    n, c, h, w = x.shape
    match b.random.randrange(3):
        case 0:
            y = b.add("MatMul", [x, b.transpose(x, (0, 1, 3, 2))], [n, c, h, h])
            return b.add("MatMul", [b.unary("Softmax", y, axis=-1), x], x.shape)
        case 1:
            y = b.add("MatMul", [b.transpose(x, (0, 1, 3, 2)), x], [n, c, w, w])
            return b.add("MatMul", [x, b.unary("Softmax", y, axis=-1)], x.shape)
    flat = _reshaped(b, x, [0, 0, -1], [n, c, h * w])
    y = b.add("MatMul", [flat, b.transpose(flat, (0, 2, 1))], [n, c, c])
    y = b.add("MatMul", [b.unary("Softmax", y, axis=-1), flat], [n, c, h * w])
    return _reshaped(b, y, _joined(b, [_sizes(b, x, 0, 2), _sizes(b, x, 2, 4)]), x.shape)


def _windows(b: Builder, x: Tensor) -> Tensor:
    """Attention in windows, as Swin has it: padded to whole windows, cut, attended to, cropped."""
    n, c, h, w = x.shape
    side = b.pick([2, 3, 4])
    size = [_sizes(b, x, a, a + 1) for a in (2, 3)]
    up = [-(-h // side), -(-w // side)]
    more = [_whole(b, "Mod", _whole(b, "Mul", s, side - 1), side) for s in size]  # -s mod side
    pads = _joined(b, [0, 0, 0, 0, 0, 0, *more])
    y = b.add("Pad", [x, pads], [n, c, up[0] * side, up[1] * side])
    count = [
        _whole(b, "Div", _whole(b, "Add", s, m), side) for s, m in zip(size, more, strict=True)
    ]
    target = _joined(b, [n, c, count[0], side, count[1], side])
    y = _reshaped(b, y, target, [n, c, up[0], side, up[1], side])
    y = b.transpose(y, (0, 2, 4, 3, 5, 1))
    y = _reshaped(b, y, [-1, side * side, c], [n * up[0] * up[1], side * side, c])
    y = _attention(b, y)
    y = _reshaped(b, y, _joined(b, [n, *count, side, side, c]), [n, *up, side, side, c])
    y = b.transpose(y, (0, 5, 1, 3, 2, 4))
    target = _joined(b, [n, c, *(_whole(b, "Mul", k, side) for k in count)])
    y = _reshaped(b, y, target, [n, c, up[0] * side, up[1] * side])
    ends = _joined(b, size)
    y = b.add("Slice", [y, b.ints([0, 0]), ends, b.ints([2, 3])], x.shape)
    return b.binary("Add", x, y)


def _smooth_scan(b: Builder, x: Tensor) -> Tensor:
    y = scan(b, x)
    return y if y.rank == 4 else x


# tokens [batch, tokens, channels] -----------------------------------------------------------------
def _attention(b: Builder, x: Tensor) -> Tensor:
    n, t, c = x.shape
    heads, width = b.pick([1, 2, 3]), b.pick([4, 8, 16])
    scale = c**-0.5

    def project() -> Tensor:
        y = b.add("MatMul", [x, b.weight(c, heads * width, scale=scale)], [n, t, heads * width])
        y = b.binary("Add", y, b.weight(heads * width)) if b.chance(0.5) else y
        y = _reshaped(b, y, [0, -1, heads, width], [n, t, heads, width])
        return b.transpose(y, (0, 2, 1, 3))

    q, k, v = project(), project(), project()
    scores = b.add("MatMul", [q, b.transpose(k, (0, 1, 3, 2))], [n, heads, t, t])
    scores = b.binary("Mul", scores, b.number(width**-0.5))
    y = b.add("MatMul", [b.unary("Softmax", scores, axis=-1), v], [n, heads, t, width])
    y = b.transpose(y, (0, 2, 1, 3))
    y = _reshaped(b, y, [0, -1, heads * width], [n, t, heads * width])
    weights = b.weight(heads * width, c, scale=(heads * width) ** -0.5)
    return b.add("MatMul", [y, weights], [n, t, c])


def _residual(b: Builder, x: Tensor) -> Tensor:
    c = x.shape[-1]
    y = b.add("LayerNormalization", [x, b.weight(c), b.weight(c)], x.shape, axis=-1)
    return b.binary("Add", x, _attention(b, y))


def _mlp(b: Builder, x: Tensor) -> Tensor:
    c, inner = x.shape[-1], b.pick([8, 24, 40, 64])
    y = b.add("MatMul", [x, b.weight(c, inner, scale=c**-0.5)], [*x.shape[:2], inner])
    y = composite(b, b.binary("Add", y, b.weight(inner)))
    return b.add("MatMul", [y, b.weight(inner, c, scale=inner**-0.5)], x.shape)


def _class_token(b: Builder, x: Tensor) -> Tensor:
    n, t, c = x.shape
    return b.add("Concat", [b.weight(n, 1, c), x], [n, t + 1, c], axis=1)


def _token_mean(b: Builder, x: Tensor) -> Tensor:
    return b.binary(b.pick(["Sub", "Mul"]), x, b.reduce("ReduceMean", x, [1]))


def _along_tokens(b: Builder, x: Tensor) -> Tensor:
    c, k = x.shape[-1], b.pick([1, 3, 5])
    y = b.transpose(x, (0, 2, 1))
    groups = b.pick([1, c])
    w = b.weight(c, c // groups, k, scale=(k * c // groups) ** -0.5)
    flags = {"group": groups, "pads": [k // 2] * 2, "kernel_shape": [k]}
    return b.transpose(b.add("Conv", [y, w], y.shape, **flags), (0, 2, 1))


IMAGES: tuple[Piece, ...] = (
    conv, conv, conv, conv, conv_transpose, pool, pool, pixels, _norm, _norm, _squeezed, _means,
    _scaled, _pyramid, _pyramid, _table, _part, _part, _edges, _turned, _branches, _softmax, _gram,
    _windows, _smooth_scan, qlinear_conv, pointwise,
)  # fmt: skip
TOKENS: tuple[Piece, ...] = (
    _residual, _residual, _mlp, _mlp, _class_token, _token_mean, _along_tokens, matmul,
    attention_scores, qlinear_matmul, pointwise,
)  # fmt: skip


def draw_image(seed: int, opset: int) -> Drawn:
    """The graph of this seed. Its first input has the open height and width as its last axes."""
    b = Builder(Random(seed), opset, f"g{seed}_")
    x = b.input([b.pick([1, 1, 1, 2, 3]), b.pick(CHANNELS), HEIGHT, WIDTH])
    inner = [x]

    def several(x: Tensor, pieces: Sequence[Piece], count: int) -> Tensor:
        for _ in range(count):
            made = b.pick(pieces)(b, x)
            x = made if made.rank == x.rank and made.size < 9000 else x
            x = _light(b, x) if b.chance(0.5) else x
            inner.append(x)
        return x

    x = several(x, IMAGES, b.pick([1, 2, 2, 3, 4]))
    if b.chance(0.45) and x.shape[2] * x.shape[3] < 300:
        image, (n, c, h, w) = x, x.shape
        x = b.transpose(_reshaped(b, x, [0, 0, -1], [n, c, h * w]), (0, 2, 1))
        x = several(x, TOKENS, b.pick([1, 1, 2, 3]))
        if list(x.shape) == [n, h * w, c] and b.chance(0.6):
            target = _joined(b, [_sizes(b, image, 0, 2), _sizes(b, image, 2, 4)])
            x = _reshaped(b, b.transpose(x, (0, 2, 1)), target, image.shape)
            x = several(x, IMAGES, b.pick([0, 1, 1]))
    outputs = b.outputs(x, inner, 0.2)
    return Drawn(seed, opset, tuple(b.nodes), b.constants, b.used(), outputs, b.smooth)
