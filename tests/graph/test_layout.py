"""Channels last: the same numbers, NHWC everywhere, and permutations only where they are needed."""

from __future__ import annotations

import itertools
from math import prod

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last, moved_elements, permutes
from gtco.graph.permutes import across_reshape, compose, invert, moves_nothing
from gtco.tensor.stage import TensorType


class Build:
    """A small model built by hand; every constant is random and seeded."""

    def __init__(self, *shape: int, name: str = "x"):
        self.random = numpy.random.default_rng(0)
        self.graph = Graph((name,), (), {name: TensorType(tuple(shape))})

    def __call__(self, kind: str, *inputs: str, shape: tuple[int, ...] | None = None, **attrs):
        declared = TensorType(tuple(shape)) if shape else None
        return self.graph.add(kind, inputs, declared, **attrs)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(int(d) for d in self.graph.types[tensor].shape)

    def constant(self, *shape: int) -> str:
        return self.graph.add_constant(self.random.standard_normal(shape).astype("float32"))

    def conv(self, x: str, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
        weight = self.constant(out, self.shape(x)[1] // groups, kernel, kernel)
        pad = kernel // 2 if kernel != stride else 0
        made = self("conv2d", x, weight, strides=(stride, stride), padding=(pad,) * 4,
                    dilation=(1, 1), groups=groups, layout="NCHW")  # fmt: skip
        return self("add", made, self.constant(1, out, 1, 1))

    def pool(self, x: str, kind: str = "max_pool2d") -> str:
        n, c, h, w = self.shape(x)
        extra = {"dilation": (1, 1)} if kind == "max_pool2d" else {"count_include_pad": False}
        return self(kind, x, shape=(n, c, h // 2, w // 2), kernel=(2, 2), strides=(2, 2),
                    padding=(0, 0, 0, 0), layout="NCHW", **extra)  # fmt: skip

    def resize(self, x: str, factor: int = 2) -> str:
        n, c, h, w = self.shape(x)
        return self("resize2d", x, shape=(n, c, h * factor, w * factor), method="linear",
                    coordinates="half_pixel", rounding="", cubic_alpha=-0.75,
                    layout="NCHW")  # fmt: skip

    def reshape(self, x: str, *shape: int) -> str:
        return self("reshape", x, shape=shape)

    def norm(self, x: str) -> str:
        c = self.shape(x)[-1]
        return self("layer_norm", x, self.constant(c), self.constant(c), epsilon=1e-5)

    def linear(self, x: str, out: int) -> str:
        made = self("matmul", x, self.constant(self.shape(x)[-1], out))
        return self("add", made, self.constant(out))

    def flatten(self, x: str) -> str:
        """NCHW -> [N, HW, C]."""
        n, c, h, w = self.shape(x)
        return self("permute", self.reshape(x, n, c, h * w), axes=(0, 2, 1))

    def unflatten(self, x: str, h: int, w: int) -> str:
        """[N, HW, C] -> NCHW."""
        n, _, c = self.shape(x)
        return self.reshape(self("permute", x, axes=(0, 2, 1)), n, c, h, w)

    def done(self, *outputs: str) -> Graph:
        self.graph.outputs = outputs
        return self.graph.prune().check()


def same(graph: Graph) -> Graph:
    """Gives channels_last(graph), after checks that it is valid, NHWC where it must be, and
    numerically equal.
    """
    before = graph.dump()
    made = channels_last(graph)
    assert graph.dump() == before, "the pass changed its argument"
    made.check()
    assert made.inputs == graph.inputs and made.outputs == graph.outputs
    either = ("max_pool2d", "avg_pool2d", "resize2d")
    for op in made.operators.values():
        assert op.kind in either or op.get("layout", "NHWC") == "NHWC"
    moving = {"identity", "permute", "reshape"}  # no arithmetic is done twice
    counts = [{k: n for k, n in g.histogram().items() if k not in moving} for g in (graph, made)]
    assert counts[0] == counts[1]
    for op in made.operators.values():  # an output takes the place of its producer, if it may
        if op.kind == "identity":
            assert op.inputs[0] in made.inputs or len(made.consumers(op.inputs[0])) > 1 or (
                op.inputs[0] in made.outputs
            )
    random = numpy.random.default_rng(1)
    inputs = {
        name: random.standard_normal(graph.types[name].shape).astype("float32")
        for name in graph.inputs
    }
    expected, found = graph.evaluate(inputs, "float64"), made.evaluate(inputs, "float64")
    for name in graph.outputs:
        assert made.types[name] == graph.types[name]
        numpy.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9)
    return made


def sizes(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    """The reader of each remaining permutation, and its axes."""
    return [
        ("+".join(c.kind for c in graph.consumers(op.output)) or "output", op["axes"])
        for op in permutes(graph)
    ]


def test_vit_keeps_the_first_permutation_alone() -> None:
    b = Build(2, 3, 8, 8)
    tokens = b.flatten(b.conv("x", 16, 4, 4))
    x = b("concat", b.constant(2, 1, 16), tokens, axis=1)
    x = b("add", b.linear(b.norm(x), 16), x)
    made = same(b.done(b("slice", x, shape=(2, 1, 16), begin=(0, 0, 0), strides=(1, 1, 1))))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1))]


def test_resnet_keeps_the_first_permutation_alone() -> None:
    b = Build(2, 3, 16, 16)
    x = b.pool(b("relu", b.conv("x", 8)))
    for width in (8, 12):
        short = x if width == 8 else b.conv(x, width, 1)
        x = b("relu", b("add", b.conv(b("relu", b.conv(x, width)), width), short))
    gate = b("mean", x, axes=(2, 3), keepdims=True)
    x = b("multiply", x, b("sigmoid", b.conv(gate, 12, 1)))
    pooled = b("mean", x, axes=(2, 3), keepdims=False)
    made = same(b.done(b.linear(pooled, 5)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1))]


def test_segformer_like() -> None:
    b = Build(1, 3, 16, 16)
    tokens = b.norm(b.flatten(b.conv("x", 8, 7, 4)))
    maps = []
    for n in range(2):
        side = 4 >> n
        shrunk = b.conv(b.unflatten(tokens, side, side), 8, 2, 2)  # sequence reduction
        attended = b.linear(b.norm(b.flatten(shrunk)), 8)
        tokens = b("add", tokens, b("mean", attended, axes=(1,), keepdims=True))
        hidden = b.unflatten(b.linear(b.norm(tokens), 16), side, side)
        hidden = b("gelu", b.flatten(b.conv(hidden, 16, groups=16)))
        tokens = b("add", b.linear(hidden, 8), tokens)
        maps.append((b.unflatten(b.norm(tokens), side, side), side))
        if n == 0:
            tokens = b.norm(b.flatten(b.conv(maps[0][0], 8, 3, 2)))
    heads = []
    for x, side in maps:
        x = b.unflatten(b.linear(b.flatten(x), 6), side, side)
        heads.append(b.resize(x, 4 // side) if side != 4 else x)
    fused = b("relu", b.conv(b("concat", *heads, axis=1), 6, 1))
    made = same(b.done(b.conv(fused, 5, 1)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1)), ("output", (0, 3, 1, 2))]


def test_convnext_block_cancels() -> None:
    b = Build(1, 3, 8, 8)
    x = b.conv("x", 8, 2, 2)
    y = b("permute", b.conv(x, 8, 7, groups=8), axes=(0, 2, 3, 1))
    y = b("permute", b.linear(b("gelu", b.linear(b.norm(y), 16)), 8), axes=(0, 3, 1, 2))
    x = b("add", b("multiply", y, b.constant(8, 1, 1)), x)
    made = same(b.done(b("mean", b.conv(x, 4, 2, 2), axes=(2, 3), keepdims=False)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1))]


def test_layer_norm_over_channels_pad_roll_and_slice_let_it_pass() -> None:
    b = Build(1, 3, 8, 8)
    x = b.conv("x", 4)
    mean = b("mean", x, axes=(1,), keepdims=True)
    x = b("subtract", x, mean)
    x = b("pad", x, before=(0, 0, 1, 0), after=(0, 2, 1, 0), value=0.5)
    x = b("roll", x, shifts=(0, 1, 2, 0))
    x = b("slice", x, shape=(1, 5, 4, 8), begin=(0, 1, 2, 0), strides=(1, 1, 2, 1))
    made = same(b.done(b.conv(b("softmax", x, axis=1), 4)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1)), ("output", (0, 3, 1, 2))]


def layouts(graph: Graph) -> dict[str, str]:
    """The layouts of pooling and resizing; the graph has one operator of each kind."""
    kinds = ("max_pool2d", "avg_pool2d", "resize2d")
    return {op.kind: op["layout"] for op in graph.operators.values() if op.kind in kinds}


def test_pooling_and_resizing_between_nchw_tensors_stay() -> None:
    b = Build(2, 5, 8, 8)
    made = same(b.done(b("relu", b.resize(b.pool(b.pool("x")), 2))))
    assert not sizes(made)
    assert set(layouts(made).values()) == {"NCHW"}


def test_pooling_between_convolutions_is_channels_last() -> None:
    b = Build(1, 3, 16, 16)
    made = same(b.done(b("mean", b.conv(b.pool(b.conv("x", 8)), 4), axes=(2, 3), keepdims=False)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1))]
    assert layouts(made) == {"max_pool2d": "NHWC"}


def test_what_enlarges_before_an_nchw_output_is_permuted_while_small() -> None:
    b = Build(1, 3, 8, 8)
    made = same(b.done(b.resize(b.conv("x", 8), 4)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1)), ("resize2d", (0, 3, 1, 2))]
    assert layouts(made) == {"resize2d": "NCHW"}


def test_what_shrinks_before_an_nchw_output_is_permuted_while_small() -> None:
    b = Build(1, 3, 8, 8)
    made = same(b.done(b.pool(b.conv("x", 8))))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1)), ("output", (0, 3, 1, 2))]
    assert layouts(made) == {"max_pool2d": "NHWC"}


def test_the_image_is_pooled_before_it_is_permuted() -> None:
    b = Build(1, 3, 8, 8)
    x = b.conv(b.pool("x", "avg_pool2d"), 8)
    made = same(b.done(b("mean", x, axes=(2, 3), keepdims=False)))
    assert sizes(made) == [("conv2d", (0, 2, 3, 1))]
    assert layouts(made) == {"avg_pool2d": "NCHW"}


def test_an_operator_that_mixes_axes_keeps_its_permutation() -> None:
    b = Build(1, 3, 4, 4)
    x = b.conv("x", 4)
    made = same(b.done(b.reshape(x, 1, 8, 8)))  # merges half the rows into the channels
    assert sizes(made) == [("conv2d", (0, 2, 3, 1)), ("reshape", (0, 3, 1, 2))]


def test_chains_of_hundreds_of_operators() -> None:
    """Python's stack does not hold a walk through all of them, and squares of squares would be
    walked 2^30 times.
    """
    b = Build(1, 8, 6, 6)
    x = b.conv("x", 8)
    for _ in range(400):
        x = b("tanh", x)
    same(b.done(b.conv(x, 8)))
    b = Build(1, 8, 6, 6)
    x = b("tanh", "x")
    for _ in range(30):
        x = b("multiply", x, x)
    same(b.done(b.conv(x, 8)))


def test_no_spatial_operators_nothing_moves() -> None:
    b = Build(2, 5, 8)
    x = b.reshape(b.linear("x", 24), 2, 5, 3, 2, 4)
    x = b("permute", x, axes=(2, 0, 3, 1, 4))
    graph = b.done(b("relu", x))
    assert channels_last(graph).dump() == graph.dump()


def test_an_input_read_as_nchw_and_by_convolutions_is_permuted_once() -> None:
    b = Build(1, 4, 6, 6)
    both = b("add", b.conv("x", 4), b.conv("x", 4, 1))
    made = same(b.done(b.conv(b("add", both, "x"), 4), b("relu", "x")))
    assert len(permutes(made)) == 2  # the input's, and the NCHW output's


@st.composite
def random_models(draw: st.DrawFn) -> Graph:
    """Random NCHW operators with several readers; every tensor is [N, C, 4, 4]."""
    batch = draw(st.sampled_from([1, 2]))
    b = Build(batch, 3, 4, 4)
    tensors = ["x"]
    for _ in range(draw(st.integers(2, 8))):
        x = draw(st.sampled_from(tensors[-3:]))
        n, c, h, w = b.shape(x)
        kind = draw(st.sampled_from(
            ["conv", "relu", "add", "gate", "tokens", "concat", "pad", "pool", "mean", "softmax",
             "transpose", "mix", "where", "roll", "slice"]))  # fmt: skip
        if kind == "conv":
            x = b.conv(x, draw(st.sampled_from([3, 4])), draw(st.sampled_from([1, 3])))
        elif kind == "add":
            mates = [t for t in tensors if b.shape(t) == b.shape(x)]
            x = b("add", x, draw(st.sampled_from(mates)))
        elif kind == "gate":
            x = b("multiply", b("sigmoid", b("mean", x, axes=(2, 3), keepdims=True)), x)
        elif kind == "tokens":
            x = b.unflatten(b("add", b.norm(b.flatten(x)), b.constant(h * w, 1)), h, w)
        elif kind == "concat":
            mates = [t for t in tensors if b.shape(t) == b.shape(x)]
            x = b("concat", x, draw(st.sampled_from(mates)), axis=1)
        elif kind == "pad":
            x = b("pad", x, before=(0, 1, 0, 0), after=(0, 0, 0, 0), value=1.0)
        elif kind == "pool":
            x = b.resize(b.pool(x, draw(st.sampled_from(["max_pool2d", "avg_pool2d"]))))
        elif kind == "mean":
            x = b("add", b("mean", x, axes=(1, 3), keepdims=True), x)
        elif kind == "softmax":
            x = b("softmax", x, axis=draw(st.integers(1, 3)))
        elif kind == "transpose":
            x = b("permute", x, axes=(0, 1, 3, 2))
        elif kind == "mix":
            x = b.reshape(b("gelu", b.reshape(x, n, c * h, w)), n, c, h, w)
        elif kind == "where":
            mask = b.graph.add("greater", [x, b.constant(4, 4)])
            x = b("where", mask, x, b.constant(1, c, 1, 1))
        elif kind == "roll":
            x = b("roll", x, shifts=(0, 1, 2, 3))
        elif kind == "slice":
            if c > 1:
                x = b("slice", x, shape=(n, c - 1, h, w), begin=(0, 1, 0, 0), strides=(1, 1, 1, 1))
        else:
            x = b("relu", x)
        tensors.append(x)
    outputs = {tensors[-1], draw(st.sampled_from(tensors[1:]))} - {"x"}
    return b.done(*sorted(outputs or {b("relu", "x")}))


@settings(max_examples=200, deadline=None)
@given(random_models())
def test_random_models_keep_their_values(graph: Graph) -> None:
    spatial = [op for op in graph.operators.values() if "layout" in dict(op.attrs)]
    around = sum(graph.types[name].size for op in spatial for name in (op.inputs[0], op.output))
    made = same(graph)
    # Never more than the plain conversion: two permutations around each spatial operator. There
    # may be more permutations, of smaller tensors.
    assert moved_elements(made) <= moved_elements(graph) + around
    again = channels_last(made)
    assert moved_elements(again) <= moved_elements(made)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_across_reshape(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    permuted = [shape[a] for a in axes]
    target: list[int] = []
    for dim in permuted:  # merge with the neighbour, keep, split, or add an axis of size 1
        how = data.draw(st.sampled_from(["merge", "keep", "split", "unit"]))
        if how == "merge" and target:
            target[-1] *= dim
        elif how == "split" and dim % 2 == 0:
            target += [2, dim // 2]
        else:
            target += [dim, 1] if how == "unit" else [dim]
    x = numpy.arange(prod(shape)).reshape(shape)
    swapped = across_reshape(shape, axes, target)
    if swapped is not None:
        expected = x.transpose(axes).reshape(target)
        numpy.testing.assert_array_equal(x.reshape(swapped[0]).transpose(swapped[1]), expected)
    elif len(target) <= 5:  # None must mean that no order of the target's axes is possible
        expected = x.transpose(axes).reshape(target)
        for order in itertools.permutations(range(len(target))):
            tried = x.reshape([target[n] for n in order]).transpose(invert(order))
            assert not numpy.array_equal(tried, expected), order


def test_across_reshape_symbolic_and_refused() -> None:
    assert across_reshape(("n", 5, 4), (0, 2, 1), ("n", 2, 2, 5)) == (
        ("n", 5, 2, 2),
        (0, 2, 3, 1),
    )
    assert across_reshape((2, 3, 4), (1, 0, 2), (6, 4)) is None


def test_permutation_algebra() -> None:
    x = numpy.arange(24).reshape(2, 3, 4)
    first, then = (2, 0, 1), (1, 0, 2)
    twice = x.transpose(first).transpose(then)
    numpy.testing.assert_array_equal(x.transpose(compose(first, then)), twice)
    numpy.testing.assert_array_equal(x.transpose(first).transpose(invert(first)), x)
    assert moves_nothing((1, 3, 1, 4), (2, 1, 0, 3)) and not moves_nothing((1, 3, 4), (0, 2, 1))
