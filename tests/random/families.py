"""The kernel families, each in the forms that exporters write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.random.builder import Builder, Tensor
from tests.random.light import cut, light

LOWEST = float(np.finfo(np.float32).min)


def small(b: Builder, x: Tensor, most: int) -> Tensor:
    """``x`` cut down to about ``most`` elements."""
    while x.size > most:
        axis = max(range(x.rank), key=lambda a: x.shape[a])
        x = b.slice(x, axis, 0, max(1, x.shape[axis] // 2))
    return x


def _without_hidden_rows(b: Builder, x: Tensor) -> Tensor:
    """``x`` with numbers in place of the NaN of rows that a mask of -inf hides."""
    if any(np.isneginf(c).any() for c in b.constants.values() if c.dtype == np.float32):
        return b.add("Where", [b.add("IsNaN", [x], x.shape, "bool"), b.number(0.5), x], x.shape)
    return x


# products -----------------------------------------------------------------------------------------
def matmul(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(2, 4))
    k, n = x.shape[-1], b.size(20)
    lead = b.pick([[], [], b.broadcastable(x.shape[:-2]), list(x.shape[:-2])])
    scale = k**-0.5
    shape = [*lead, k, n]
    if b.chance(0.3):
        other = b.binary("Mul", b.input(shape), b.number(scale))
    else:
        other = b.weight(*shape, scale=scale)
    if b.chance(0.2) and len(shape) > 1:
        swapped = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        turned = b.transpose(other, swapped)
        other = b.transpose(b.unary("Identity", turned), swapped)
    if b.chance(0.15):
        other = light(b, other)
        if other.rank < 2 or other.shape[-2] != k:
            other = b.weight(k, n, scale=scale)
        try:
            np.broadcast_shapes(x.shape[:-2], other.shape[:-2])
        except ValueError:
            other = b.weight(k, n, scale=scale)
    n = other.shape[-1]
    lead = list(np.broadcast_shapes(x.shape[:-2], other.shape[:-2]))
    y = b.add("MatMul", [x, other], [*lead, x.shape[-2], n])
    return b.binary("Add", y, b.weight(n)) if b.chance(0.5) else y


def product_with_itself(b: Builder, x: Tensor) -> Tensor:
    x = small(b, b.shaped(x, b.random.randint(2, 4)), 2000)
    order = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    pair = (x, b.transpose(x, order)) if b.chance(0.5) else (b.transpose(x, order), x)
    shape = [*x.shape[:-2], pair[0].shape[-2], pair[1].shape[-1]]
    y = b.add("MatMul", pair, shape)
    return b.binary("Mul", y, b.number(pair[0].shape[-1] ** -0.5))


def gemm(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, 2)
    turn_a, turn_b = b.chance(0.3), b.chance(0.5)
    m, k = x.shape[::-1] if turn_a else x.shape
    n = b.size(20)
    w = b.weight(*((n, k) if turn_b else (k, n)), scale=k**-0.5)
    bias = [b.pick([b.weight(n), b.weight(m, n), b.weight(1), b.weight(m, 1)])]
    attrs = {"alpha": 0.5} if b.chance(0.3) else {}
    attrs |= {"beta": 1.5} if b.chance(0.3) else {}
    bias = bias if b.chance(0.7) else []
    return b.add("Gemm", [x, w, *bias], [m, n], transA=int(turn_a), transB=int(turn_b), **attrs)


def einsum(b: Builder, x: Tensor) -> Tensor:
    equations = [
        "bhwc,hkc->bhwk", "bhwc,wkc->bhwk", "bij,bjk->bik", "bhid,bhjd->bhij", "bhij,bhjd->bihd",
        "ij,jk->ik", "bic,cd->bid", "abc,cd->abd", "bihd,bjhd->bhij", "bn,bd->bnd", "ijk,ilk->jl",
    ]  # fmt: skip
    equation = b.pick(equations)
    first, rest = equation.split(",")
    second, out = rest.split("->")
    x = small(b, b.shaped(x, len(first)), 1500)
    sizes = dict(zip(first, x.shape, strict=True))
    for letter in second:
        sizes.setdefault(letter, b.size(8))
    summed = np.prod([sizes[c] for c in sizes if c not in out])
    other = b.weight(*(sizes[c] for c in second), scale=summed**-0.5)
    return b.add("Einsum", [x, other], [sizes[c] for c in out], equation=equation)


# convolutions -------------------------------------------------------------------------------------
def _image(b: Builder, x: Tensor, rank: int = 4) -> Tensor:
    """``x`` as [batch, channels, ...] with a number of channels that can be grouped."""
    x = b.shaped(x, rank)
    if x.shape[1] < 3 and b.chance(0.8):
        channels = b.pick([2, 3, 4, 6, 8, 12, 16, 18])
        x = b.add("Expand", [x, b.ints([1, channels // x.shape[1], *[1] * (rank - 2)])], [
            x.shape[0], max(x.shape[1], channels // x.shape[1]), *x.shape[2:]
        ]) if x.shape[1] == 1 else x  # fmt: skip
    return small(b, x, 3000)


def conv(b: Builder, x: Tensor) -> Tensor:
    space = b.pick([1, 2, 2, 2, 2])
    x = _image(b, x, 2 + space)
    channels = x.shape[1]
    groups = b.pick([1, 1, b.split_of(channels), channels])
    outputs = groups * b.pick([1, 1, 2, 3, 5] if groups > 1 else [1, 3, 8, 16, 17, 20])
    kernel, stride, dilation, before, after = [], [], [], [], []
    for n in x.shape[2:]:
        k = b.pick([1, 1, 2, 3, 3, 4, 5, 7])
        d = b.pick([1, 1, 1, 2])
        lost = (k - 1) * d + 1 - n  # what padding must add
        p, q = (b.random.randint(0, k) for _ in range(2)) if b.chance(0.5) else [k // 2] * 2
        q = max(q, lost - p)
        kernel.append(k), stride.append(b.pick([1, 1, 1, 2, 3, k])), dilation.append(d)
        before.append(p), after.append(q)
    out = [
        (n + p + q - (k - 1) * d - 1) // s + 1
        for n, p, q, k, d, s in zip(
            x.shape[2:], before, after, kernel, dilation, stride, strict=True
        )
    ]
    scale = (channels // groups * np.prod(kernel)) ** -0.5
    inputs = [x, b.weight(outputs, channels // groups, *kernel, scale=scale)]
    if b.chance(0.6):
        inputs.append(b.weight(outputs))
    return b.add(
        "Conv", inputs, [x.shape[0], outputs, *out], kernel_shape=kernel, strides=stride,
        dilations=dilation, pads=before + after, group=groups,
    )  # fmt: skip


def conv_transpose(b: Builder, x: Tensor) -> Tensor:
    space = b.pick([1, 2, 2, 2])
    b.special = False  # a phase that has fewer taps than the others multiplies by zeros
    x = _without_hidden_rows(b, small(b, _image(b, x, 2 + space), 800))
    channels = x.shape[1]
    groups = b.pick([1, 1, b.split_of(channels)])
    outputs = b.pick([1, 2, 3, 8])
    kernel, stride, dilation, before, after, extra = [], [], [], [], [], []
    for n in x.shape[2:]:
        k, s, d = b.pick([1, 2, 3, 4]), b.pick([1, 2, 3]), b.pick([1, 1, 2])
        whole = (n - 1) * s + (k - 1) * d + 1
        p, q = (b.random.randint(0, min(k, (whole - 1) // 2)) for _ in range(2))
        kernel.append(k), stride.append(s), dilation.append(d), before.append(p), after.append(q)
        extra.append(b.random.randint(0, s - 1) if b.chance(0.3) else 0)
    out = [
        (n - 1) * s + (k - 1) * d + 1 - p - q + e
        for n, s, k, d, p, q, e in zip(
            x.shape[2:], stride, kernel, dilation, before, after, extra, strict=True
        )
    ]
    scale = (channels // groups * np.prod(kernel)) ** -0.5
    inputs = [x, b.weight(channels, outputs, *kernel, scale=scale)]
    if b.chance(0.5):
        inputs.append(b.weight(outputs * groups))
    return b.add(
        "ConvTranspose", inputs, [x.shape[0], outputs * groups, *out], kernel_shape=kernel,
        strides=stride, dilations=dilation, pads=before + after, output_padding=extra, group=groups,
    )  # fmt: skip


# attention ----------------------------------------------------------------------------------------
def _heads(b: Builder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [batch, heads, tokens, width]: from separate projections, from one that is cut in
    three, or from none.
    """
    x = small(b, b.shaped(x, 3), 1500)
    batch, tokens, channels = x.shape
    heads, width = b.random.randint(1, 3), b.pick([1, 3, 4, 8, 16])
    scale = channels**-0.5

    def project(y: Tensor, n: int) -> Tensor:
        y = b.add("MatMul", [y, b.weight(channels, n, scale=scale)], [*y.shape[:2], n])
        return b.binary("Add", y, b.weight(n)) if b.chance(0.6) else y

    def apart(y: Tensor) -> Tensor:
        y = b.reshape(y, (batch, y.shape[1], heads, y.shape[2] // heads))
        return b.transpose(y, (0, 2, 1, 3))

    match b.random.randrange(3):
        case 0:
            y = b.reshape(project(x, 3 * heads * width), (batch, tokens, 3, heads, width))
            y = b.transpose(y, (2, 0, 3, 1, 4))
            shape = (batch, heads, tokens, width)
            q, k, v = (
                b.add("Gather", [y, b.constant(i, "int64")], shape, axis=0)
                if b.chance(0.5)
                else b.reshape(b.slice(y, 0, i, i + 1), shape)
                for i in range(3)
            )
            return q, k, v
        case 1:
            memory = b.input((batch, b.size(), channels)) if b.chance(0.4) else x
            values = heads * b.pick([width, width, 5])
            return (
                apart(project(x, heads * width)),
                apart(project(memory, heads * width)),
                apart(project(memory, values)),
            )
    y = b.reshape(x, (batch, 1, tokens, channels))
    return y, light_of_same_shape(b, y), light_of_same_shape(b, y)


def light_of_same_shape(b: Builder, x: Tensor) -> Tensor:
    y = light(b, x)
    return y if y.shape == x.shape else x


def _mask(b: Builder, scores: Tensor) -> Tensor:
    """Masked scores: by a bias or by where(), constant or at run time; whole rows may be hidden."""
    shape = b.broadcastable(scores.shape)
    low = b.number(b.pick([-np.inf, LOWEST, -1e9, -1e4]))
    rows, columns = scores.shape[-2:]
    match b.random.randrange(6):
        case 0:
            return b.binary("Add", scores, b.weight(*shape))
        case 1:
            held = b.input(shape, "bool")
            term = b.add("Where", [held, b.number(0), low], held.shape)
            return b.binary("Add", scores, term)
        case 2:
            held = b.input(shape, "bool")
            pair = (scores, low) if b.chance(0.5) else (low, scores)
            return b.add("Where", [held, *pair], scores.shape)
        case 3:
            causal = np.tri(rows, columns, dtype=bool)
            if b.chance(0.5):
                causal[b.random.randrange(rows)] = False
            if b.chance(0.5):
                value = b.constants[low.name]
                return b.binary("Add", scores, b.constant(np.where(causal, 0, value)))
            held = b.constant(causal, "bool")
            return b.add("Where", [held, scores, low], scores.shape)
        case 4:  # (1 - mask) * finfo.min, as Hugging Face extends a mask
            held = b.add("Cast", [b.input(shape, "bool")], shape, to=1)
            rest = b.binary("Sub", b.number(1.0), held)
            return b.binary("Add", scores, b.binary("Mul", rest, b.number(b.pick([LOWEST, -1e4]))))
    windows = [d for d in range(2, scores.shape[0] + 1) if scores.shape[0] % d == 0]
    if not windows:
        return scores
    w = b.pick(windows)  # Swin: one mask for each window, through reshapes
    apart = b.reshape(scores, (scores.shape[0] // w, w, *scores.shape[1:]))
    masked = b.binary("Add", apart, b.weight(1, w, 1, *scores.shape[2:]))
    return b.reshape(masked, scores.shape)


def attention(b: Builder, x: Tensor) -> Tensor:
    q, k, v = _heads(b, x)
    kt = b.transpose(k, (0, 1, 3, 2))
    factor = q.shape[-1] ** -0.5
    place = b.pick(["scores", "q", "both", "divide", "none"])
    if place == "q":
        q = b.binary("Mul", q, b.number(factor))
    elif place == "both":
        q, kt = (b.binary("Mul", t, b.number(factor**0.5)) for t in (q, kt))
    scores = b.add("MatMul", [q, kt], [*q.shape[:2], q.shape[2], k.shape[2]])
    if place == "scores":
        scores = b.binary("Mul", scores, b.number(factor))
    elif place == "divide":
        scores = b.binary("Div", scores, b.number(1 / factor))
    for _ in range(b.pick([0, 1, 1, 2])):
        scores = _mask(b, scores)
    p = b.unary("Softmax", scores, axis=-1)
    if b.chance(0.3):  # as the dynamo exporter guards it
        nan = b.add("IsNaN", [p], p.shape, "bool")
        p = b.add("Where", [nan, b.number(0), p], p.shape)
    if b.chance(0.15):
        p = light_of_same_shape(b, p)
    y = b.add("MatMul", [p, v], [*p.shape[:3], v.shape[3]])
    if b.chance(0.7):
        y = b.transpose(y, (0, 2, 1, 3))
        y = b.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3]))
    return y


# normalisation and reductions ---------------------------------------------------------------------
def layer_norm(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(1, 4))
    match b.random.randrange(4):
        case 0:
            axis = b.pick([-1, -1, b.random.randrange(x.rank)])
            shape = x.shape[axis:]
            inputs = [x, b.weight(*shape)] + ([b.weight(*shape)] if b.chance(0.7) else [])
            return b.add("LayerNormalization", inputs, x.shape, axis=axis, epsilon=1e-5)
        case 1:  # RMS norm
            squares = b.binary("Pow", x, b.number(2.0)) if b.chance(0.5) else b.binary("Mul", x, x)
            mean = b.reduce("ReduceMean", squares, [-1])
            root = b.unary("Sqrt", b.binary("Add", mean, b.number(1e-6)))
            y = (
                b.binary("Mul", x, b.unary("Reciprocal", root))
                if b.chance(0.5)
                else b.binary("Div", x, root)
            )
            return b.binary("Mul", y, b.weight(x.shape[-1]))
    axis = b.pick([-1, x.rank - 1, b.random.randrange(x.rank)])  # channels first too
    centred = b.binary("Sub", x, b.reduce("ReduceMean", x, [axis]))
    square = (
        b.binary("Pow", centred, b.number(2.0))
        if b.chance(0.5)
        else b.binary("Mul", centred, centred)
    )
    variance = b.reduce("ReduceMean", square, [axis])
    y = b.binary("Div", centred, b.unary("Sqrt", b.binary("Add", variance, b.number(1e-5))))
    shape = [x.shape[axis]] + [1] * ((-axis if axis < 0 else x.rank - axis) - 1)
    y = b.binary("Mul", y, b.weight(*shape))
    return b.binary("Add", y, b.weight(*shape)) if b.chance(0.7) else y


def group_norm(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.pick([3, 4, 4]))
    n, c = x.shape[:2]
    match b.random.randrange(4):
        case 0:
            return b.add("InstanceNormalization", [x, b.weight(c), b.weight(c)], x.shape)
        case 1:
            stats = [b.weight(c), b.weight(c), b.weight(c), b.constant(b.numpy.random(c) + 0.5)]
            return b.add("BatchNormalization", [x, *stats], x.shape)
        case 2 if b.opset >= 21:
            groups = b.split_of(c)
            return b.add(
                "GroupNormalization", [x, b.weight(c), b.weight(c)], x.shape, num_groups=groups
            )
    groups = b.split_of(c)  # as torch exports it
    y = b.reshape(x, (n, groups, x.size // (n * groups)))
    ones = b.constant(np.ones(groups)), b.constant(np.zeros(groups))
    y = b.reshape(b.add("InstanceNormalization", [y, *ones], y.shape), x.shape)
    shape = (c, *[1] * (x.rank - 2))
    return b.binary("Add", b.binary("Mul", y, b.weight(*shape)), b.weight(*shape))


def softmax(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(1, 4))
    axis = b.pick([-1, b.random.randrange(x.rank)])
    match b.random.randrange(4):
        case 0:
            shifted = b.binary("Sub", x, b.reduce("ReduceMax", x, [axis]))
            e = b.unary("Exp", shifted)
            b.special = False
            return b.binary("Div", e, b.reduce("ReduceSum", e, [axis]))
        case 1:
            return b.unary("LogSoftmax", x, axis=axis)
    return b.unary("Softmax", x, axis=axis)


def reduction(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(1, 4))
    axes = b.random.sample(range(x.rank), b.random.randint(1, x.rank))
    kind = b.pick("Sum Mean Mean Max Min L1 L2 SumSquare LogSumExp Prod".split())
    b.special &= kind not in ("Max", "Min", "LogSumExp", "L1", "L2")
    if kind == "Prod":
        x = b.unary("Sigmoid", small(b, x, 60))
    axes = [a - x.rank if b.chance(0.3) else a for a in axes]
    return b.reduce("Reduce" + kind, x, axes, b.chance(0.5))


def scan(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, b.random.randint(1, 3))
    axis = b.random.randrange(x.rank)
    b.special = False
    if b.chance(0.5):
        axes = b.constant(axis, "int64")
        turned = {"exclusive": int(b.chance(0.3)), "reverse": int(b.chance(0.3))}
        return b.add("CumSum", [x, axes], x.shape, **turned)
    b.smooth = False
    shape = [1 if a == axis else n for a, n in enumerate(x.shape)]
    x = _without_hidden_rows(b, x)  # each engine decides which of several NaN is the largest
    index = b.add(b.pick(["ArgMax", "ArgMin"]), [x], shape, "int64", axis=axis, keepdims=1)
    return b.add("Cast", [index], shape, to=1)


# windows ------------------------------------------------------------------------------------------
def pool(b: Builder, x: Tensor) -> Tensor:
    x = _image(b, x)
    kind = b.pick(["MaxPool", "AveragePool", "AveragePool", "Global"])
    b.special &= kind != "MaxPool"
    if kind == "Global":
        kind = b.pick(["GlobalAveragePool", "GlobalMaxPool"])
        b.special &= kind != "GlobalMaxPool"
        return b.add(kind, [x], [*x.shape[:2], 1, 1])
    kernel, stride, before, after, out = [], [], [], [], []
    for n in x.shape[2:]:
        k = b.random.randint(1, min(n, 4))
        p, q = (b.random.randint(0, k - 1) for _ in range(2)) if b.chance(0.5) else (0, 0)
        s = b.pick([1, 2, k])
        kernel.append(k), stride.append(s), before.append(p), after.append(q)
        out.append((n + p + q - k) // s + 1)
    attrs = {"count_include_pad": b.pick([0, 1])} if kind == "AveragePool" else {}
    return b.add(
        kind, [x], [*x.shape[:2], *out], kernel_shape=kernel, strides=stride, pads=before + after,
        **attrs,
    )  # fmt: skip


def resize(b: Builder, x: Tensor) -> Tensor:
    x = small(b, _image(b, x), 1500)
    b.special = False
    sizes = [b.pick([n, 2 * n, b.random.randint(1, 2 * n + 3)]) for n in x.shape[2:]]
    mode = b.pick(["nearest", "linear", "linear", "cubic"])
    where = b.pick(["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
    attrs = {"nearest_mode": b.pick(["floor", "round_prefer_floor"])} if mode == "nearest" else {}
    if attrs:
        pairs = zip(x.shape[2:], sizes, strict=True)
        sizes = [o if _float32_finds(n, o, where, **attrs) else n for n, o in pairs]
    b.smooth &= mode != "nearest"
    inputs = [x, None, None, b.ints([*x.shape[:2], *sizes])]
    return b.add(
        "Resize", inputs, [*x.shape[:2], *sizes], mode=mode, coordinate_transformation_mode=where,
        **attrs,
    )  # fmt: skip


def _float32_finds(size: int, out: int, where: str, nearest_mode: str) -> bool:
    """False if ONNX Runtime, which computes in float32, takes another position than float64."""
    found = []
    for number in (np.float32, np.float64):
        o, half = np.arange(out, dtype=number), number(0.5)
        if where == "align_corners":
            at = o * number(size - 1) / number(max(out - 1, 1))
        else:
            scale, shift = number(out) / number(size), half if "half_pixel" in where else number(0)
            at = (o + shift) / scale - shift
        at = np.round(at, 9) if number is np.float64 else at
        found.append(np.floor(at) if nearest_mode == "floor" else np.ceil(at - half))
    return bool(np.array_equal(*found))


def pixels(b: Builder, x: Tensor) -> Tensor:
    x = b.shaped(x, 4)
    n, c, h, w = x.shape
    fits = [s for s in (2, 3) if c % (s * s) == 0]
    if fits and b.chance(0.6):
        s = b.pick(fits)
        shape = [n, c // (s * s), h * s, w * s]
        return b.add("DepthToSpace", [x], shape, blocksize=s, mode=b.pick(["DCR", "CRD"]))
    fits = [s for s in (1, 2, 3) if h % s == 0 and w % s == 0]
    s = fits[-1]
    return b.add("SpaceToDepth", [x], [n, c * s * s, h // s, w // s], blocksize=s)


def rotary(b: Builder, x: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin."""
    x = b.shaped(x, b.pick([3, 4]))
    if x.shape[-1] % 2:
        return cut(b, x)
    half, tables = x.shape[-1] // 2, (x.shape[-2], x.shape[-1])
    first, second = b.slice(x, -1, 0, half), b.slice(x, -1, half, 1 << 60)
    turned = b.add("Concat", [b.unary("Neg", second), first], x.shape, axis=-1)
    return b.binary(
        "Add", b.binary("Mul", x, b.weight(*tables)), b.binary("Mul", turned, b.weight(*tables))
    )


FAMILIES: tuple[Callable[[Builder, Tensor], Tensor], ...] = (
    matmul, matmul, product_with_itself, gemm, einsum, conv, conv, conv, conv_transpose, attention,
    attention, attention, attention, layer_norm, layer_norm, group_norm, softmax, reduction, scan,
    pool, resize, pixels, rotary,
)  # fmt: skip
