"""Drawn stages of every sketch family: one operator that needs loops, with movement and
element-wise operators before and after it, and sizes that no tile divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from gtco.graph.infer import broadcast_shapes, infer_type
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

Shape = tuple[int, ...]
# smooth functions: rounding must not decide a value
UNARY = ("relu", "gelu", "sigmoid", "tanh", "negative", "abs", "silu")
BINARY = ("add", "multiply", "subtract", "maximum")
EPSILON = 1e-2  # of a norm, whose rows may be equal
# Indices are drawn from -9 to 8 (``tests.kernels.random_inputs``), and a gathered axis has at least
# so many places.
LEAST = 9


class Drawing:
    """A stage as it grows. ``core`` draws the operator and its sizes, and ``light`` its
    surroundings: stages with the same core and other surroundings have the same sizes.
    """

    def __init__(
        self, core: Random, light: Random, depth: int = 2, sizes: Sequence[int] = ()
    ) -> None:
        self.random, self.light, self.depth, self.sizes = core, light, depth, sizes
        self.types: dict[str, TensorType] = {}
        self.constants: list[str] = []
        self.operators: list[Operator] = []

    def input(self, shape: Sequence[int], constant: bool = False, dtype: str = "float32") -> str:
        name = f"x{len(self.types)}"
        self.types[name] = TensorType(tuple(shape), dtype)
        self.constants += [name] * constant
        return name

    def add(self, kind: str, *inputs: str, out: Sequence[int] | None = None, **attrs: Any) -> str:
        """Adds the operator; ``out`` is its shape if the shape does not follow."""
        name = f"t{len(self.types)}"
        declared = TensorType(tuple(out), self.types[inputs[0]].dtype) if out is not None else None
        kept = infer_type(kind, [self.types[i] for i in inputs], attrs, declared)
        self.types[name] = kept
        self.operators.append(Operator(kind, inputs, name, kept, make_attrs(**attrs)))
        return name

    def shape(self, name: str) -> Shape:
        return tuple(int(d) for d in self.types[name].shape)

    def stage(self) -> Stage:
        return make_stage(self.operators, self.types, self.constants)

    # around the core ------------------------------------------------------------------------------
    def given(self, shape: Sequence[int], depth: int | None = None) -> str:
        """A tensor of this shape, computed in the stage from others or given as an input."""
        r, shape = self.light, tuple(shape)
        depth = self.depth if depth is None else depth
        if not depth or not shape or r.random() < 0.45:
            return self.input(shape, r.random() < 0.1)
        less = depth - 1
        axis = r.randrange(len(shape))
        match r.choice(("unary", "unary", "binary", *MOVEMENT)):
            case "unary":
                return self.add(r.choice(UNARY), self.given(shape, less))
            case "binary":
                other = self.given(self._fewer(shape), less)
                both = [self.given(shape, less), other]
                r.shuffle(both)
                return self.add(r.choice(BINARY), *both)
            case "reshape":
                return self.add("reshape", self.given(self._otherwise(shape), less), out=shape)
            case "permute":
                axes = r.sample(range(len(shape)), len(shape))
                before = [0] * len(shape)
                for place, a in enumerate(axes):
                    before[a] = shape[place]
                return self.add("permute", self.given(before, less), axes=tuple(axes))
            case "slice":
                stride, begin = r.choice((1, 1, 2)), r.randrange(3)
                larger = list(shape)
                larger[axis] = begin + stride * shape[axis] + r.randrange(2)
                zeros = [0] * len(shape)
                at = {"begin": zeros, "strides": [1] * len(shape)}
                at["begin"][axis], at["strides"][axis] = begin, stride
                return self.add("slice", self.given(larger, less), out=shape, **at)
            case "concat" if shape[axis] > 1:
                cut = r.randrange(1, shape[axis])
                parts = ([*shape[:axis], n, *shape[axis + 1 :]] for n in (cut, shape[axis] - cut))
                return self.add("concat", *(self.given(p, less) for p in parts), axis=axis)
            case "pad" if shape[axis] > 2:
                before, after = [0] * len(shape), [0] * len(shape)
                before[axis], after[axis] = r.choice(((1, 0), (0, 1), (1, 1)))
                inner = [n - b - a for n, b, a in zip(shape, before, after, strict=True)]
                x = self.given(inner, less)
                return self.add("pad", x, before=before, after=after, value=r.choice((0.0, 1.5)))
            case "broadcast":
                return self.add("broadcast", self.given(self._fewer(shape), less), out=shape)
            case "roll":
                shifts = [0] * len(shape)
                shifts[axis] = r.randrange(-3, 4)
                return self.add("roll", self.given(shape, less), shifts=shifts)
            case "gather":
                stop = min(len(shape), axis + r.choice((1, 1, 2)))
                table = [*shape[:axis], LEAST + r.randrange(4), *shape[stop:]]
                ids = self.input(shape[axis:stop], dtype=r.choice(("int64", "int32")))
                return self.add("gather", self.given(table, less), ids, axis=axis)
        return self.input(shape)

    def _fewer(self, shape: Shape) -> Shape:
        """A shape that broadcasts to this one."""
        fewer = tuple(1 if self.light.random() < 0.4 else n for n in shape)
        return fewer[self.light.randint(0, len(shape)) if self.light.random() < 0.3 else 0 :]

    def _otherwise(self, shape: Shape) -> Shape:
        """The same number of elements, with two axes merged or one axis split."""
        at = self.light.randrange(len(shape))
        divisors = [d for d in range(2, shape[at]) if shape[at] % d == 0]
        if divisors and self.light.random() < 0.5:
            d = self.light.choice(divisors)
            return (*shape[:at], d, shape[at] // d, *shape[at + 1 :])
        if len(shape) == 1:
            return (1, *shape)
        at = min(at, len(shape) - 2)
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])

    def behind(self, x: str) -> str:
        """Up to three operators that read ``x``."""
        r = self.light
        for _ in range(r.choice((0, 0, 1, 2, 3)) if self.depth else 0):
            shape = self.shape(x)
            match r.choice(("unary", "unary", "binary", "binary", "reshape", "permute")):
                case "unary":
                    x = self.add(r.choice(UNARY), x)
                case "binary":
                    both = [x, self.given(self._fewer(shape), 1)]
                    r.shuffle(both)
                    if broadcast_shapes(*(self.shape(b) for b in both)) == shape:
                        x = self.add(r.choice(BINARY), *both)
                case "reshape" if shape:
                    x = self.add("reshape", x, out=self._otherwise(shape))
                case "permute":
                    axes = tuple(r.sample(range(len(shape)), len(shape)))
                    x = self.add("permute", x, axes=axes)
        return x

    # numbers of the core --------------------------------------------------------------------------
    def size(self, most: int = 40) -> int:
        """A small size, and now and then a large one; or one of ``sizes``."""
        r = self.random
        return r.choice(self.sizes or (1, r.randint(1, 8), r.randint(1, most), r.randint(1, most)))

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def extent(self, *options: int) -> int:
        """One of the options, or one of ``sizes``."""
        return int(self.random.choice(self.sizes or options))

    def weight(self, shape: Sequence[int]) -> str:
        """A weight that is constant, as most are, or computed in the stage."""
        return self.input(shape, True) if self.light.random() < 0.7 else self.given(shape)

    def add_cast(self, x: str) -> str:
        """Rounds plain inputs to bfloat16. Only these, because the order of operations does not
        change them.
        """
        plain = x if x.startswith("x") else self.input(self.shape(x))
        name = f"t{len(self.types)}"
        self.types[name] = TensorType(self.types[plain].shape, "bfloat16")
        self.operators.append(Operator("cast", (plain,), name, self.types[name]))
        return name


MOVEMENT = ("reshape", "permute", "slice", "concat", "pad", "broadcast", "roll", "gather")


# the cores, each from its operands to its result --------------------------------------------------
def matmul(d: Drawing) -> str:
    m, k, n = d.size(60), d.size(300), d.size(70)
    lead = d.pick((), (), (), (2,), (3, 2))
    many = d.pick((), (), lead)
    return d.add("matmul", d.given((*lead, m, k)), d.weight((*many, k, n)))


def halved_matmul(d: Drawing) -> str:
    """A product that is large enough for Strassen's algorithm."""
    n, (samples, rows) = d.pick(192, 256), d.pick((1, 257), (1, 256), (2, 130), (5, 53))
    return d.add("matmul", d.given((samples, rows, 256)), d.input((256, n), True))


def norm_matmul(d: Drawing) -> str:
    """A product whose rows are normalised on their way in."""
    m, k, n = d.size(60), d.size(200), d.size(70)
    gamma, beta = (d.input((k,), True) for _ in range(2))
    x = d.add("layer_norm", d.given((m, k)), gamma, beta, epsilon=EPSILON)
    return d.add("matmul", x, d.weight((k, n)))


def _image(d: Drawing, channels: int, layout: str) -> Shape:
    n, h, w = d.extent(1, 1, 2), d.extent(3, 5, 8, 12), d.extent(4, 7, 9, 15)
    return (n, h, w, channels) if layout == "NHWC" else (n, channels, h, w)


def conv2d(d: Drawing) -> str:
    groups, layout = d.pick(1, 1, 1, 2, 5), d.pick("NHWC", "NHWC", "NCHW")
    inputs, outputs = d.pick(1, 3, 4, 8, 17), d.pick(1, 4, 7, 16, 33)
    kernel = d.pick((1, 1), (3, 3), (2, 3), (3, 1))
    strides = d.pick((1, 1), (1, 1), (2, 2), (2, 1))
    padding = d.pick((0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 0))
    # no wider than the image is
    dilation = d.pick((1, 1), (1, 1), (1, 2)) if any(padding) else (1, 1)
    window = dict(strides=strides, padding=padding, dilation=dilation)
    x = d.given(_image(d, groups * inputs, layout))
    w = d.weight((groups * outputs, inputs, *kernel))
    return d.add("conv2d", x, w, groups=groups, layout=layout, **window)


def conv3x3(d: Drawing) -> str:
    """A convolution that Winograd's filtering can compute."""
    inputs, outputs = d.size(20), d.size(40)
    x = d.given((d.pick(1, 1, 2), d.pick(1, 5, 8), d.pick(4, 7, 9), inputs))
    padding = d.pick((0, 1, 2, 0), (1, 1, 1, 1), (1, 1, 1, 1))
    window = dict(strides=(1, 1), padding=padding, dilation=(1, 1), groups=1, layout="NHWC")
    return d.add("conv2d", x, d.input((outputs, inputs, 3, 3), True), **window)


def depthwise(d: Drawing) -> str:
    channels, layout = d.size(70), d.pick("NHWC", "NHWC", "NCHW")
    x = d.given(_image(d, channels, layout))
    kernel = d.pick((3, 3), (2, 3), (5, 5), (1, 1))
    padding = d.pick((1, 1, 1, 1), (2, 2, 2, 2), *([(0, 0, 0, 0)] * (kernel[0] < 4)))
    w = d.weight((channels, 1, *kernel))
    return d.add(
        "conv2d",
        x,
        w,
        groups=channels,
        layout=layout,
        strides=d.pick((1, 1), (2, 2)),
        padding=padding,
        dilation=(1, 1),
    )


def conv_transpose2d(d: Drawing) -> str:
    layout, stride = d.pick("NHWC", "NHWC", "NCHW"), d.pick((2, 2), (1, 2), (3, 3))
    inputs, outputs, groups = d.pick(1, 3, 8), d.pick(1, 5, 16), d.pick(1, 1, 2)
    x = d.given(_image(d, groups * inputs, layout))
    w = d.weight((groups * inputs, outputs, *d.pick((2, 2), (3, 3), (4, 4))))
    attrs = dict(padding=d.pick((0, 0, 0, 0), (1, 1, 1, 1)), output_padding=(0, 0))
    return d.add("conv_transpose2d", x, w, groups=groups, layout=layout, strides=stride, **attrs)


def attention(d: Drawing) -> str:
    lead = d.pick((), (2,), (2, 3))
    m, n, k, v = d.size(50), d.size(50), d.size(40), d.size(40)
    given = [d.given((*lead, m, k)), d.given((*lead, n, k)), d.given((*lead, n, v))]
    if d.pick(True, False):
        given.append(d.given(d.pick((m, n), (1, n), (*lead, m, n))))
    return d.add("attention", *given, scale=k**-0.5)


def half_matmul(d: Drawing) -> str:
    m, k, n = d.size(60), d.size(200), d.size(70)
    return d.add("matmul", d.add_cast(d.input((m, k))), d.input((k, n), True, "bfloat16"))


def narrow_weights(d: Drawing) -> str:
    """A product of float32 by weights that kernels widen."""
    m, k, n = d.size(60), d.size(200), d.size(70)
    dtype = d.pick("float16", "int8", "int4")
    return d.add("matmul", d.given((m, k)), d.input((k, n), True, dtype))


def half_attention(d: Drawing) -> str:
    m, n, k = d.size(50), d.size(50), d.size(40)
    given = [d.add_cast(d.input((2, rows, k))) for rows in (m, n, n)]
    return d.add("attention", *given, scale=k**-0.5)


def reduction(d: Drawing) -> str:
    shape = [d.size(30) for _ in range(d.pick(1, 2, 3, 4))]
    axes = tuple(sorted(d.random.sample(range(len(shape)), d.random.randint(1, len(shape)))))
    kind = d.pick("sum", "mean", "max", "min")
    return d.add(kind, d.given(shape), axes=axes, keepdims=d.pick(True, False))


def softmax(d: Drawing) -> str:
    shape = [d.size(60) for _ in range(d.pick(1, 2, 3))]
    axis = d.random.randrange(len(shape))
    return d.add(d.pick("softmax", "log_softmax"), d.given(shape), axis=axis)


def cumsum(d: Drawing) -> str:
    shape = [d.size(40) for _ in range(d.pick(1, 2, 3))]
    axis, exclusive, reverse = d.pick(*range(len(shape))), d.pick(False, True), d.pick(False, True)
    return d.add("cumsum", d.given(shape), axis=axis, exclusive=exclusive, reverse=reverse)


def norm(d: Drawing) -> str:
    shape = [d.size(60) for _ in range(d.pick(1, 2, 3))]
    vectors = [d.given(shape[-1:], 1) for _ in range(2)]
    if d.pick(True, False):
        return d.add("layer_norm", d.given(shape), *vectors, epsilon=EPSILON)
    return d.add("rms_norm", d.given(shape), vectors[0], epsilon=EPSILON)


def norm_across(d: Drawing) -> str:
    """Rows whose elements are not neighbours, such as the channels of an image."""
    n, c, s = d.pick(1, 2), d.size(60), d.extent(19, 40, 64)
    vectors = [d.input((c,), True) for _ in range(d.pick(1, 2))]
    x = d.add("permute", d.given((n, c, s)), axes=(0, 2, 1))
    x = d.add(("rms_norm", "layer_norm")[len(vectors) - 1], x, *vectors, epsilon=EPSILON)
    return d.add("permute", x, axes=(0, 2, 1))


def group_norm(d: Drawing) -> str:
    groups, axis = d.pick(1, 2, 4), d.pick(1, 2)
    channels = groups * d.pick(1, 3, 8)
    shape = [d.pick(1, 2), d.size(20)]
    shape.insert(axis, channels)
    vectors = [d.given((channels,), 1) for _ in range(2)]
    return d.add("group_norm", d.given(shape), *vectors, groups=groups, epsilon=EPSILON, axis=axis)


def moments(d: Drawing) -> str:
    return d.add("moments", d.given((d.pick(1, 2), d.size(8), d.size(50), d.size(90))))


def merged_moments(d: Drawing) -> str:
    groups = d.pick(1, 2, 7)
    shape = (d.pick(1, 2), d.size(9), 2, groups * d.size(20))
    x = d.add("abs", d.given(shape))  # a variance is never negative
    return d.add("merged_moments", x, groups=groups, epsilon=EPSILON)


def pool(d: Drawing) -> str:
    kind, layout = d.pick("max_pool2d", "avg_pool2d"), d.pick("NHWC", "NHWC", "NCHW")
    x = d.given(_image(d, d.size(70), layout))
    kernel, strides, padding = d.pick((2, 2), (3, 3)), d.pick((1, 1), (2, 2)), d.pick(0, 1)
    space = d.shape(x)[1:3] if layout == "NHWC" else d.shape(x)[2:]
    out = [(n + 2 * padding - k) // s + 1 for n, k, s in zip(space, kernel, strides, strict=True)]
    n, c = d.shape(x)[0], d.shape(x)[3 if layout == "NHWC" else 1]
    more = {"dilation": (1, 1)} if kind == "max_pool2d" else {"count_include_pad": d.pick(0, 1)}
    return d.add(
        kind,
        x,
        out=(n, *out, c) if layout == "NHWC" else (n, c, *out),
        kernel=kernel,
        strides=strides,
        padding=(padding,) * 4,
        layout=layout,
        **more,
    )


def resize(d: Drawing) -> str:
    layout = d.pick("NHWC", "NHWC", "NCHW")
    x = d.given(_image(d, d.size(70), layout))
    out = (d.pick(4, 10, 13), d.pick(5, 14, 16))
    n, c = d.shape(x)[0], d.shape(x)[3 if layout == "NHWC" else 1]
    return d.add(
        "resize2d",
        x,
        out=(n, *out, c) if layout == "NHWC" else (n, c, *out),
        method=d.pick("linear", "cubic"),
        coordinates=d.pick("half_pixel", "align_corners"),
        rounding="round_prefer_floor",
        cubic_alpha=-0.75,
        layout=layout,
    )


def grid_sample(d: Drawing) -> str:
    layout = d.pick("NHWC", "NHWC", "NCHW")
    x = d.given(_image(d, d.size(70), layout))
    grid = d.input((d.shape(x)[0], d.pick(1, 4, 7), d.pick(1, 5, 9), 2))
    attrs = dict(padding=d.pick("zeros", "border"), align_corners=d.pick(True, False))
    return d.add("grid_sample", x, grid, method="linear", layout=layout, **attrs)


def elementwise(d: Drawing) -> str:
    shape = [d.size(30) for _ in range(d.pick(1, 2, 3, 4))]
    return d.add(d.pick(*UNARY), d.given(shape))


def scatter(d: Drawing) -> str:
    """Alone in its stage. Integers are drawn below 9, and each names a row."""
    d.depth = 0
    rows, length, count = 9 + d.size(12), d.size(40), d.pick(1, 5, 30)
    x, u = d.input((rows, length)), d.input((count, length))
    kind = d.pick("update", "add", "max")
    return d.add("scatter", x, d.input((count,), dtype="uint8"), u, rows=rows, reduction=kind)


def topk(d: Drawing) -> str:
    """Alone in its stage."""
    d.depth = 0
    n = d.size(200)
    k = d.pick(1, n, (n + 1) // 2)
    return d.add("topk", d.input((d.size(5), n)), k=k, largest=d.pick(0, 1))


CORES: tuple[Callable[[Drawing], str], ...] = (
    matmul,
    norm_matmul,
    conv2d,
    depthwise,
    conv_transpose2d,
    attention,
    half_matmul,
    narrow_weights,
    half_attention,
    reduction,
    softmax,
    cumsum,
    norm,
    norm_across,
    group_norm,
    moments,
    merged_moments,
    pool,
    resize,
    grid_sample,
    elementwise,
    conv3x3,
    scatter,
    topk,
    halved_matmul,
)
CONTRACTIONS = (
    *(matmul, norm_matmul, conv2d, conv3x3, conv_transpose2d, attention, half_matmul),
    halved_matmul,
)


def drawn(
    core: Callable[[Drawing], str],
    random: Random,
    light: Random,
    depth: int = 2,
    sizes: Sequence[int] = (),
) -> Stage:
    """A stage around this core; with ``depth`` 0 nothing is around it. If ``sizes`` are given, the
    core's extents are some of them.
    """
    d = Drawing(random, light, depth, sizes)
    d.behind(core(d))
    return d.stage()
