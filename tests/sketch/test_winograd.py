"""Winograd convolutions against float64: sizes that no tile divides, one-sided padding, several
images, prologues and epilogues, and the rounding of the two sizes of tiles.

Tolerance: 2e-6 x sqrt(k) of the largest magnitude with k = 9 x channels, as for the direct
convolution. The tests of bfloat16 give their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random

import ml_dtypes
import numpy as np
import pytest

from gtco.machine.target import TARGETS, Target, target
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor import space
from gtco.tensor.emit.filtering import TRANSFORMS
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.space import Program, configs
from gtco.tensor.stage import Stage, TensorType, make_stage
from gtco.tensor.workload import Workload
from tests.kernels import build, build_each, fresh_seed, reference, runnable, targets
from tests.sketch.formats.test_bfloat16 import WINDOWS, conv, few, inputs, machines
from tests.sketch.test_contractions import check, grouped, op
from tests.sketch.test_convolution import dressed, window

T = TensorType
SIZES = tuple(TRANSFORMS)


def case(c: int, n: int, size: tuple[int, int], padding: tuple[int, ...] = (1,) * 4) -> Stage:
    """silu -> 3x3 -> + bias -> gelu -> + residual, two images."""
    return grouped((1, c, n, size, (3, 3), (1, 1), padding, (1, 1)))


CASES = [
    (16, 24, (9, 11), (1, 1, 1, 1)),
    (3, 5, (3, 3), (0, 0, 0, 0)),  # one output
    (7, 33, (10, 5), (0, 1, 2, 0)),
    (40, 17, (12, 8), (2, 0, 1, 3)),
    (20, 1, (6, 14), (0, 0, 0, 0)),
    (9, 70, (1, 2), (1, 1, 1, 1)),  # smaller than a tile
    (5, 8, (4, 4), (4, 4, 4, 4)),  # some tiles are all zeros
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", CASES)
def test_against_float64(given: tuple, size: int, name: str) -> None:
    check(case(*given), name, 1, winograd.match, ("m", size))


def by_bytes(stage: Stage, dtype: str = "int8") -> Stage:
    """The stage with weights of int8, which its product's epilogue would scale, or another
    dtype.
    """
    (w,) = (op.inputs[1] for op in stage.operators if op.kind == "conv2d")
    types = {**stage.types, w: T(stage.types[w].shape, dtype)}
    return make_stage(stage.operators, types, stage.constants)


def drawn(stage: Stage, rng: np.random.Generator) -> list[np.ndarray]:
    return [
        rng.integers(-128, 128, tuple(i.type.shape)).astype(np.int8)
        if i.type.dtype == "int8"
        else rng.standard_normal(tuple(i.type.shape), dtype=np.float32)
        for i in stage.inputs
    ]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", CASES)
def test_weights_of_8_bits_against_float64(given: tuple, size: int, name: str) -> None:
    """As exact as float32 weights, in a quarter of a plain float32 weight's bytes."""
    machine, stage = runnable(name), by_bytes(case(*given))
    sketch = winograd.match(stage, machine)
    assert sketch is not None
    rng = np.random.default_rng(fresh_seed())
    arrays = drawn(stage, rng)
    want = reference(stage, arrays)
    found = [c for c in configs(sketch) if c["m"] == size]
    (packing,) = sketch.layouts(found[0]).values()
    columns = sketch.row(found[0]).columns
    assert np.prod(packing.packed_shape) == -(-given[1] // columns) * columns * given[0] * 9
    for config, kernel in build_each(sketch, [found[0], found[-1]], machine):
        error = np.abs(kernel(*arrays) - want).max() / np.abs(want).max()
        assert error < 2e-6 * (9 * given[0]) ** 0.5, config.to_json()


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_8_bits_are_priced_by_the_bytes_that_are_stored(size: int) -> None:
    """9 bytes are read for the float32 numbers of all positions; what widens them costs more."""
    machine, stage = target("x86-64-v4"), plain(64, 64, 16, 16)
    wide, narrow = (winograd.match(s, machine) for s in (stage, by_bytes(stage)))
    assert wide is not None and narrow is not None
    config = next(c for c in configs(wide) if c["m"] == size and c in [*configs(narrow)])
    one, other = wide.workload(config), narrow.workload(config)

    def weights(work: Workload) -> float:
        return sum(s.nbytes for s in work.layers[1].loads) * work.layers[1].iterations

    assert weights(other) * 4 * TRANSFORMS[size].positions == pytest.approx(9 * weights(one))
    assert sum(e.amount * e.units for e in other.extra) > sum(e.amount * e.units for e in one.extra)


@pytest.mark.parametrize("size", SIZES)
def test_transformed_weights_of_8_bits_are_rounded_once(size: int) -> None:
    """Sums of 8 bits by powers of the points are exact in float32; then there is one product, by a
    constant that is rounded too.
    """
    made = TRANSFORMS[size]
    w = np.random.default_rng(size).integers(-128, 128, (100, 3, 3))
    powers = np.array([[float(x) for x in row] for row in made.powers])
    sums = powers @ w @ powers.T
    assert np.array_equal(sums, sums.astype(np.float32))
    inverse = np.array([1 / float(x) for x in made.divisors])
    exact = np.array(made.weight_matrix) @ w @ np.array(made.weight_matrix).T
    np.testing.assert_allclose(sums * np.outer(inverse, inverse), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("narrow", [False, True])
def test_many_tasks_and_passes(name: str, narrow: bool) -> None:
    """Several chunks of tiles and of columns, each with several passes, which use the scratch
    again.
    """
    machine = runnable(name)
    small = replace(machine.memory[1], capacity=8 << 10)
    machine = replace(machine, memory=(machine.memory[0], small, *machine.memory[2:]))
    stage = case(24, 70, (13, 18))
    stage = by_bytes(stage) if narrow else stage
    sketch = winograd.match(stage, machine)
    assert sketch is not None
    seed = Random(name).randrange(1 << 30)
    arrays = drawn(stage, np.random.default_rng(seed))
    want = reference(stage, arrays)
    for size in SIZES:
        config = max(
            (c for c in configs(sketch) if c["m"] == size),
            key=lambda c: (c["chunks_n"], c["chunks_m"] > 1, -sketch.nest(c).shape.tasks, -c["mc"]),
        )
        shape = sketch.nest(config).shape
        assert shape.chunks_m > 1 and shape.chunks_n > 1 and config["mc"] < shape.task_blocks
        got = build(sketch, config, machine)(*arrays)
        assert np.abs(got - want).max() <= 2e-6 * (9 * 24) ** 0.5 * np.abs(want).max()


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("size", SIZES)
def test_prologue_and_epilogue(size: int, name: str) -> None:
    """A concatenation and a gate come first; the result is stored transposed."""
    check(dressed(), name, 2, winograd.match, ("m", size))


def test_borders_are_zeros_behind_a_prologue() -> None:
    """exp(0) is 1, but the padding of the image is 0."""
    size, out = T((1, 5, 6, 8)), T((1, 5, 6, 16))
    operators = [
        op("exp", ("x",), "e", size),
        op("conv2d", ("e", "w"), "y", out, **window(size.shape, 16)),  # type: ignore[arg-type]
    ]
    stage = make_stage(operators, {"x": size, "w": T((16, 8, 3, 3))}, ["w"])
    check(stage, "x86-64-v3", 3, winograd.match)


def plain(c: int, n: int, height: int, width: int) -> Stage:
    x, out = T((1, height, width, c)), T((1, height, width, n))
    conv = op("conv2d", ("x", "w"), "y", out, **window(x.shape, n))  # type: ignore[arg-type]
    return make_stage([conv], {"x": x, "w": T((n, c, 3, 3))}, ["w"])


@pytest.mark.parametrize("channels", [16, 64, 512])
def test_rounding_beside_a_direct_convolution(channels: int) -> None:
    """The root of the mean square error, over that of the direct sketch. F(2x2) has the smaller
    error, since it sums fewer products; that of F(4x4) is at most three times as large.
    """
    machine, stage = runnable("x86-64-v3"), plain(channels, 16, 8, 8)
    rng = np.random.default_rng(channels)
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    want = reference(stage, arrays)

    def error(sketch: space.Sketch, config: space.Config) -> float:
        got = build(sketch, config, machine)(*arrays)
        return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))

    direct, sketch = (rule(stage, machine) for rule in (convolution.match, winograd.match))
    assert direct is not None and sketch is not None
    base = error(direct, next(configs(direct)))
    two, four = (error(sketch, next(c for c in configs(sketch) if c["m"] == m)) for m in SIZES)
    assert 0 < two < base and base < four < 3 * base
    assert four < 3e-7 * channels**0.5


SHORT = {
    "conv3x3": WINDOWS["conv3x3"],
    "dressed": WINDOWS["dressed"],  # a prologue that rounds, a residual, a result that is rounded
    "wide": conv(5, 512, 20, 3),
    "narrow": conv(11, 2, 70, 3),
    "unpadded": conv(6, 34, 17, 3, padding=(0,) * 4),
}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", SHORT.values(), ids=SHORT)
def test_bfloat16_against_float64(stage: Stage, name: str) -> None:
    """Every kind of row, against float64 of the same operands. The transformed operands are rounded
    once more. If inputs are random, this costs 4e-3 of the outputs in the root of the mean square,
    and 2e-2 in the worst of some thousands; twice that is allowed.
    """
    machine = runnable(name)
    sketch = winograd.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, fresh_seed())
    wanted = reference(stage, arrays).astype(np.float64)
    for config, kernel in build_each(sketch, few(sketch, 3), machine):
        assert config["m"] == 2
        error = kernel(*arrays).astype(np.float64) - wanted
        assert np.sqrt(np.square(error).mean()) <= 8e-3 * wanted.std(), config.to_json()
        assert np.abs(error).max() <= 4e-2 * wanted.std() + 2.0**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("channels", [16, 64, 512])
def test_bfloat16_beside_a_direct_convolution(channels: int, name: str) -> None:
    """The root of the mean square error, against float64 of the operands before they were rounded.
    That of F(2x2) is twice that of a direct convolution, or 1.5 times if inputs are widened and
    their transforms stay float32.
    """
    machine, stage = runnable(name), conv(8, channels, 16, 3)
    rng = np.random.default_rng(fresh_seed())
    exact = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    arrays = [x.astype(ml_dtypes.bfloat16) for x in exact]
    wanted = reference(conv_of_float32(stage), exact).astype(np.float64)

    def error(rule: Callable[[Stage, Target], space.Sketch | None]) -> float:
        sketch = rule(stage, machine)
        assert sketch is not None
        got = build(sketch, next(configs(sketch)), machine)(*arrays)
        return float(np.sqrt(np.square(got - wanted).mean()))

    direct, two = error(convolution.match), error(winograd.match)
    assert 1.2 * direct < two < 2.3 * direct


def conv_of_float32(stage: Stage) -> Stage:
    types = {i.name: T(i.type.shape) for i in stage.inputs}
    return make_stage(stage.operators, types, ["w"])


@pytest.mark.parametrize("name", machines())
def test_no_pair_of_bfloat16_spans_two_pixels(name: str) -> None:
    assert winograd.match(conv(7, 5, 11, 3), runnable(name)) is None


@pytest.mark.parametrize("size", SIZES)
def test_transforms_are_exact(size: int) -> None:
    """y = A^T [(G w) * (B^T x)] in rational numbers; float32 holds A and B exactly."""
    t, random = TRANSFORMS[size], Random(size)
    x = [Fraction(random.randrange(-9, 10)) for _ in range(t.width)]
    w = [Fraction(random.randrange(-9, 10)) for _ in range(3)]

    def product(rows: tuple[tuple[Fraction, ...], ...], v: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(r, v, strict=True)), Fraction(0)) for r in rows]

    both = zip(product(t.inputs, x), product(t.weights, w), strict=True)
    got = product(t.outputs, [a * b for a, b in both])
    assert got == [sum(x[i + k] * w[k] for k in range(3)) for i in range(size)]
    for row in (*t.inputs, *t.outputs):
        assert all(Fraction(float(np.float32(float(a)))) == a for a in row)


def test_nan_stays_in_the_tiles_that_read_it() -> None:
    stage, machine = plain(8, 16, 12, 12), runnable("x86-64-v3")
    sketch = winograd.match(stage, machine)
    assert sketch is not None
    x = np.ones((1, 12, 12, 8), np.float32)
    w = np.ones((16, 8, 3, 3), np.float32)
    x[0, 5, 5, 3] = np.nan  # if tiles are 4 x 4, only those of rows and columns 4 to 7 read it
    config = next(c for c in configs(sketch) if c["m"] == 4)
    got = np.isnan(build(sketch, config, machine)(x, w)[0])
    assert got[4:7, 4:7].all()  # as a direct convolution gives
    assert not got[:4].any() and not got[8:].any()
    assert not got[:, :4].any() and not got[:, 8:].any()


@pytest.mark.parametrize(
    "given",
    [
        (1, 16, 24, (9, 11), (3, 3), (2, 1), (1, 1, 1, 1), (1, 1)),
        (1, 16, 24, (9, 11), (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
        (1, 16, 24, (9, 11), (3, 1), (1, 1), (1, 0, 1, 0), (1, 1)),
        (2, 16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ],
    ids=["stride", "dilation", "3x1", "groups"],
)
def test_not_its_business(given: tuple) -> None:
    assert winograd.match(grouped(given), target("x86-64-v3")) is None


def test_not_its_business_either() -> None:
    """Weights that are computed, and images whose channels do not lie side by side."""
    given = (1, 16, 24, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    machine = target("x86-64-v3")
    assert winograd.match(grouped(given, constant=False), machine) is None
    assert winograd.match(grouped(given, from_nchw=True), machine) is None


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_weights_whose_transformed_values_would_be_rounded_are_left(dtype: str) -> None:
    """A direct convolution takes them."""
    stage, machine = by_bytes(case(16, 24, (9, 11)), dtype), target("x86-64-v3")
    assert gemm.match(stage, machine) is not None
    assert winograd.match(stage, machine) is None


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_is_picked_where_it_saves_most(name: str) -> None:
    """It is picked for ResNet's layers. So it is in bfloat16, but not with a tile unit, in which a
    direct convolution is faster. It is not picked if a tile covers more than the image, or if
    nearly all that is read are the weights. A picked config has a program on every target.
    """
    policy = AnalyticPolicy(target(name))
    for c, size in ((128, 28),):
        short = policy.choose(conv(size, c, c, 3))
        wanted = "convolution" if "amx-bf16" in target(name).features else "winograd"
        assert short is not None and short.sketch.name == wanted
    for c, size in ((64, 56), (256, 50)):
        pick = policy.choose(plain(c, c, size, size))
        assert pick is not None and pick.sketch.name == "winograd"
        assert isinstance(space.build(pick.sketch, pick.config, "k"), Program)
        stage = pick.sketch.stage
        op_ = stage.operators[0]
        assert policy.floor(op_, stage.types) < pick.seconds
    pick = policy.choose(plain(512, 512, 2, 2))
    assert pick is not None and pick.sketch.name != "winograd"


def test_weights_come_from_memory_once() -> None:
    """All tasks and passes together read each weight from memory once, and again from a cache."""
    sketch = winograd.match(plain(64, 64, 28, 28), target("x86-64-v4"))
    assert sketch is not None
    seen = set()
    for config in few(sketch, 60):
        work, nest = sketch.workload(config), sketch.nest(config)
        _, position, passes, task = work.layers
        first, *again = position.loads
        times = position.iterations * passes.iterations * task.parallel
        assert first.memory == "DRAM" and not any(s.memory for s in again)
        weights = 4.0 * (config["m"] + 2) ** 2 * 64 * 64
        assert first.nbytes * times == pytest.approx(weights)
        panels = weights * nest.shape.chunks_m * passes.iterations
        assert sum(s.nbytes for s in position.loads) * times >= 0.99 * panels
        seen.add((nest.shape.chunks_m > 1, passes.iterations > 1, nest.row.columns))
    assert len(seen) > 4


@pytest.mark.parametrize("size", SIZES)
def test_stores_of_a_tile_where_channels_come_first_are_priced(size: int) -> None:
    """A tile's pixels of one channel are a store of their own if the output is NCHW."""
    last = plain(16, 24, 9, 11)
    shape = tuple(int(d) for d in last.output.type.shape)
    axes = (0, 3, 1, 2)
    moved = op("permute", ("y",), "n", T(tuple(shape[a] for a in axes)), axes=axes)
    first = make_stage([*last.operators, moved], dict(last.types), last.constants)
    stores = []
    for stage in (last, first):
        sketch = winograd.match(stage, runnable("x86-64-v3"))
        assert sketch is not None
        config = next(c for c in configs(sketch) if c["m"] == size)
        extra = sketch.workload(config).extra
        stores.append(sum(e.amount * e.units for e in extra if e.kernel == "store"))
    outputs = np.prod(shape)
    assert stores == [0, pytest.approx(16.0 * outputs / size)]


@pytest.mark.parametrize("size", SIZES)
def test_tiles_at_a_border_are_dearer(size: int) -> None:
    """Zeros are copied around them: a move for each number, and a run for each line. Both
    convolutions have 8 x 8 outputs.
    """
    machine, counts = target("x86-64-v3"), []
    for padding, image in (((1,) * 4, (8, 8)), ((0,) * 4, (10, 10))):
        sketch = winograd.match(case(16, 24, image, padding), machine)
        assert sketch is not None
        config = next(c for c in configs(sketch) if c["m"] == size)
        extra = sketch.workload(config).extra
        counts.append([e.amount for e in extra if e.kernel == "fma"])
    assert len(counts[0]) == len(counts[1])
    dearer = [b > p for b, p in zip(*counts, strict=True)]
    assert sum(dearer) == 2 and all(b >= p for b, p in zip(*counts, strict=True))
