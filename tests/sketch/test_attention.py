"""Fused attention against float64, through the movement that models put around it.

Tolerance: 1e-5 of the largest magnitude (softmax weights are good to 2 ulp, sums of n products in
float32).
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.learning.statements import statements
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.space import Config, Program, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.inner_loops import keeps_sums, product_loops
from tests.kernels import Built, build, build_each, fresh_seed, reference, runnable, targets

T = TensorType


def op(
    kind: str, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], **attrs: object
) -> Operator:
    return Operator(kind, inputs, output, T(shape), make_attrs(**attrs))


def packed_heads(
    batch: int, heads: int, tokens: int, width: int, bias: tuple[int, ...] | None = None
) -> Stage:
    """[b, n, 3 h d] -> q, k, v by slices -> attention -> [b, n, h d]: a ViT block's middle."""
    types = {"qkv": T((batch, tokens, 3 * heads * width))}
    ops = [
        op("reshape", ("qkv",), "r", (batch, tokens, 3, heads, width)),
        op("permute", ("r",), "p", (3, batch, heads, tokens, width), axes=(2, 0, 3, 1, 4)),
    ]
    for i, name in enumerate("qkv"):
        ops += [
            op(
                "slice",
                ("p",),
                f"s{name}",
                (1, batch, heads, tokens, width),
                begin=(i, 0, 0, 0, 0),
                strides=(1,) * 5,
            ),
            op("reshape", (f"s{name}",), name, (batch, heads, tokens, width)),
        ]
    inputs: tuple[str, ...] = ("q", "k", "v")
    if bias is not None:
        types["bias"] = T(bias)
        inputs += ("bias",)
    ops += [
        op("attention", inputs, "o", (batch, heads, tokens, width), scale=width**-0.5),
        op("permute", ("o",), "t", (batch, tokens, heads, width), axes=(0, 2, 1, 3)),
        op("reshape", ("t",), "y", (batch, tokens, heads * width)),
    ]
    return make_stage(ops, types, [])


def separate(batch: int, m: int, n: int, d: int, e: int, dtype: str = "float32") -> Stage:
    shapes = {"q": (batch, m, d), "k": (batch, n, d), "v": (batch, n, e)}
    return make_stage(
        [op("attention", ("q", "k", "v"), "o", (batch, m, e), scale=0.3)],
        {name: T(shape, dtype) for name, shape in shapes.items()},
        [],
    )


def check(
    stage: Stage, name: str, scale: float = 1.0, most: int = 2, tolerance: float = 1e-5
) -> None:
    machine = runnable(name)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    arrays = [
        scale * rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs
    ]
    want = reference(stage, arrays)
    found = list(configs(sketch))
    chosen = random.Random(seed).sample(found, min(most, len(found)))
    for config, kernel in build_each(sketch, chosen, machine):
        got = kernel(*arrays)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < tolerance, f"{config.to_json()}: {error:.1e}"


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "shape", [(1, 2, 197, 64), (2, 3, 49, 32), (1, 1, 5, 20), (1, 2, 16, 16), (1, 2, 33, 80)]
)
def test_packed_heads(shape: tuple[int, int, int, int], name: str) -> None:
    check(packed_heads(*shape), name)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("bias", [(1, 3, 49, 49), (4, 1, 1, 49), (4, 3, 49, 49)])
def test_bias_broadcasts(bias: tuple[int, ...], name: str) -> None:
    check(packed_heads(4, 3, 49, 32, bias), name)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "sizes", [(3, 7, 100, 24, 40), (1, 100, 7, 8, 8), (2, 1, 50, 32, 16), (1, 20, 1, 5, 3)]
)
def test_cross_attention(sizes: tuple[int, int, int, int, int], name: str) -> None:
    check(separate(*sizes), name)


@pytest.mark.parametrize("name", targets())
def test_blocks_that_share_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two heights, a last pass with fewer blocks, sums of queries and keys in parts, and
    a mask that differs by row.
    """
    monkeypatch.setattr(attention, "LARGE", 0)
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    masked = packed_heads(1, 2, 77, 16, (1, 2, 77, 77))
    for stage in (separate(2, 61, 131, 24, 40), separate(1, 43, 70, 300, 17), masked):
        sketch = attention.match(stage, machine)
        assert sketch is not None
        inputs = [rng.standard_normal(i.type.shape, dtype=np.float32) for i in stage.inputs]
        want = reference(stage, inputs)
        shared = [c for c in configs(sketch) if c["mc"] > 1]
        chosen = random.Random(fresh_seed()).sample(shared, 3)
        for config, kernel in build_each(sketch, chosen, machine):
            error = np.abs(kernel(*inputs) - want).max() / np.abs(want).max()
            assert error < 1e-5, f"{config.to_json()}: {error:.1e}"


@pytest.mark.parametrize("samples", [1, 2])
def test_chunks_of_rows_count_before_heads(samples: int) -> None:
    """Each thread has all heads of its rows."""
    machine, rng = replace(runnable("x86-64-v3"), cores=4), np.random.default_rng(fresh_seed())
    stage = packed_heads(samples, 3, 61, 16, (samples, 3, 61, 61))
    sketch = attention.match(stage, machine)
    assert sketch is not None
    assert [sketch.foreign(n) for n in (1, 2, 4)] == [1 - samples / 4, 1 - samples / 2, 0]
    inputs = [rng.standard_normal(i.type.shape, dtype=np.float32) for i in stage.inputs]
    want = reference(stage, inputs)
    of_chunks = {c["chunks_m"]: c for c in configs(sketch)}
    assert len(of_chunks) > 2
    for config, kernel in build_each(sketch, list(of_chunks.values()), machine):
        error = np.abs(kernel(*inputs) - want).max() / np.abs(want).max()
        assert error < 1e-5, f"{config.to_json()}: {error:.1e}"


def test_large_scores_do_not_overflow() -> None:
    """Scores reach 400, where float32 holds them to 3e-5; their exponentials are no more exact."""
    check(packed_heads(1, 2, 37, 32), "x86-64-v3", scale=20.0, tolerance=1e-3)


def test_masked_keys_count_for_nothing() -> None:
    """A bias of -inf removes keys; the result is the softmax over the other keys."""
    machine = runnable("x86-64-v3")
    stage = packed_heads(1, 1, 20, 16, (1, 1, 1, 20))
    sketch = attention.match(stage, machine)
    rng = np.random.default_rng(fresh_seed())
    qkv = rng.standard_normal((1, 20, 48), dtype=np.float32)
    bias = np.where(np.arange(20) % 3 == 0, -np.inf, 0).astype(np.float32).reshape(1, 1, 1, 20)
    got = build(sketch, next(iter(configs(sketch))), machine)(qkv, bias)
    want = reference(stage, [qkv, bias])
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


LOWEST = float(np.finfo(np.float32).min)
ROWS = 6


def masked(n: int, **attrs: object) -> Stage:
    """[ROWS, 5] x [n, 5] -> [ROWS, 9], with a bias [ROWS, n]."""
    return make_stage(
        [op("attention", ("q", "k", "v", "bias"), "o", (ROWS, 9), scale=0.3, **attrs)],
        {"q": T((ROWS, 5)), "k": T((n, 5)), "v": T((n, 9)), "bias": T((ROWS, n))},
        [],
    )


def special_rows(n: int, low: float) -> list[np.ndarray]:
    """In row 0 all keys are hidden, and in row 1 all but the last. The bias of row 3 has a NaN, and
    that of row 4 an infinity.
    """
    rng = np.random.default_rng(n)
    q, k, v = (
        rng.standard_normal(shape, dtype=np.float32) for shape in ((ROWS, 5), (n, 5), (n, 9))
    )
    bias = np.zeros((ROWS, n), np.float32)
    bias[0] = low
    bias[1, : n - 1] = low
    bias[3, n // 2], bias[4, 0] = np.nan, np.inf
    return [q, k, v, bias]


@cache
def first_kernel(n: int, attrs: tuple[tuple[str, object], ...]) -> tuple[Stage, Built]:
    """A masked attention over ``n`` keys, and the kernel of its first config."""
    machine = runnable("x86-64-v3")
    stage = masked(n, **dict(attrs))
    sketch = attention.match(stage, machine)
    assert sketch is not None
    return stage, build(sketch, next(iter(configs(sketch))), machine)


@pytest.mark.parametrize("low", [-np.inf, LOWEST, -1e9])
@pytest.mark.parametrize("attrs", [{}, {"guarded": True}, {"hidden": True}])
def test_hidden_rows_are_those_of_the_reference(low: float, attrs: dict[str, object]) -> None:
    """The result is the mean of V, NaN or 0, for any rest of the keys beyond whole vectors (n %
    lanes).
    """
    machine = runnable("x86-64-v3")
    if "hidden" in attrs:
        attrs = {"hidden": float(np.float32(low))}
    for n in range(1, machine.lanes + 3):
        stage, kernel = first_kernel(n, tuple(attrs.items()))
        arrays = special_rows(n, low)
        if "hidden" in attrs:
            arrays[1][n - 1], arrays[3][:, n - 1] = np.inf, low  # hidden, not a number
            arrays[3][2, n - 1] = -np.inf  # hidden twice
        with np.errstate(all="ignore"):
            want = reference(stage, arrays, precise=False)
        np.testing.assert_allclose(kernel(*arrays), want, rtol=2e-5, atol=1e-5, err_msg=f"n = {n}")


def channels(tokens: int, groups: int, width: int) -> Stage:
    """[1, n, 3 g c] -> q, k, v of channels by tokens -> attention -> [1, n, g c], as in DaViT."""
    types = {"qkv": T((1, tokens, 3 * groups * width))}
    ops = []
    for i, name in enumerate("qkv"):
        ops += [
            op(
                "slice",
                ("qkv",),
                f"s{name}",
                (1, tokens, groups * width),
                begin=(0, 0, i * groups * width),
                strides=(1, 1, 1),
            ),
            op("reshape", (f"s{name}",), f"r{name}", (1, tokens, groups, width)),
            op("permute", (f"r{name}",), name, (1, groups, width, tokens), axes=(0, 2, 3, 1)),
        ]
    ops += [
        op("attention", ("q", "k", "v"), "o", (1, groups, width, tokens), scale=tokens**-0.5),
        op("permute", ("o",), "t", (1, tokens, groups, width), axes=(0, 3, 1, 2)),
        op("reshape", ("t",), "y", (1, tokens, groups * width)),
    ]
    return make_stage(ops, types, [])


@pytest.mark.parametrize("name", targets())
def test_heads_wider_than_what_is_unrolled(name: str) -> None:
    """The widths of the keys and of the values are several whole vectors and a rest of one."""
    check(channels(611, 2, 21), name)
    check(separate(1, 10, 19, 300, 512), name)
    check(separate(1, 10, 19, 256, 293), name)


@pytest.mark.parametrize("name", targets())
def test_long_sums_of_one_sign(name: str) -> None:
    """An image of one colour gives DaViT's channels such sums. One accumulator would lose 1e-4 of
    them, all in the same direction, and exp would multiply this by the score.
    """
    machine, depth = runnable(name), 8300
    rng = np.random.default_rng(fresh_seed())
    q, k = (np.repeat(rng.uniform(0.5, 1, (1, n, 1)), depth, 2) for n in (8, 33))
    arrays = [x.astype(np.float32) for x in (q * 60 / depth, k, rng.standard_normal((1, 33, 16)))]
    stage = separate(1, 8, 33, depth, 16)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    want = reference(stage, arrays)
    got = build(sketch, next(iter(configs(sketch))), machine)(*arrays)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize(
    ("stage", "asked"),
    [
        (separate(2, 20, 20, 32, 32), {"q", "k", "v"}),
        (separate(1, 20, 20, 32, 32), set()),
        (separate(2, 20, 9000, 32, 32), set()),  # L2 has room for 4096 keys of this width
        (packed_heads(1, 2, 20, 32), {"qkv"}),
    ],
)
def test_the_next_head_is_asked_for_where_it_fits(stage: Stage, asked: set[str]) -> None:
    sketch = attention.match(stage, target("x86-64-v4"))
    assert sketch is not None
    program = sketch.build(next(configs(sketch)), "kernel")
    assert isinstance(program, Program)
    lines = [x for x in str(program.function).splitlines() if "llvm.prefetch" in x]
    reads = (re.search(r"address_of\(([a-z]+)\w*\[.*\), 0, 2, 1", line) for line in lines)
    assert {read[1] for read in reads if read} == asked


MOST_STATEMENTS = 1500  # of a kernel of any shape: LLVM's time grows faster than their number


@pytest.mark.parametrize("name", targets())
def test_a_kernel_is_no_longer_where_its_shape_is_larger(name: str) -> None:
    """In DaViT's attention among channels the heads are as wide as the image has tokens. When their
    vectors were unrolled, LLVM took over two minutes.
    """
    machine = target(name)
    drawn = random.Random(fresh_seed())

    def size() -> int:
        return round(2 ** drawn.uniform(0, 15))

    stages = [channels(9216, 3, 32), separate(1, 8, 8, 32767, 32767)]
    stages += [channels(size(), drawn.randint(1, 3), drawn.randint(1, 40)) for _ in range(4)]
    stages += [separate(2, size(), size(), size(), size()) for _ in range(8)]
    for stage in stages:
        sketch = attention.match(stage, machine)
        assert sketch is not None
        found = list(configs(sketch))
        for config in drawn.sample(found, min(2, len(found))):
            program = sketch.build(config, "kernel")
            assert isinstance(program, Program)
            count = len(statements(program, stage, 4 * machine.lanes))
            assert count <= MOST_STATEMENTS, f"{sketch.extents}, {config.to_json()}: {count}"


def test_what_comes_before_the_operands_is_priced() -> None:
    """The same attention in bfloat16 costs more for each step before its operands: a bias,
    rounding, and reading them as float32.
    """
    shapes = {"q": (6, 197, 64), "k": (6, 197, 64), "v": (6, 197, 64)}

    def stage(source: str, *kinds: str) -> Stage:
        types, ops = {}, []
        for x, shape in shapes.items():
            types[x] = T(shape, source)
            last = x
            for kind in kinds:
                inputs, dtype = (last,), "bfloat16" if kind == "cast" else source
                if kind == "add":
                    types[f"{x}b"], inputs = T((64,), source), (last, f"{x}b")
                last = f"{x}{kind}"
                attrs = {"dtype": dtype} if kind == "cast" else {}
                ops.append(Operator(kind, inputs, last, T(shape, dtype), make_attrs(**attrs)))
        operands = tuple("".join((x, *kinds[-1:])) for x in shapes)
        attend = Operator("attention", operands, "o", T((6, 197, 64)), make_attrs(scale=0.125))
        return make_stage([*ops, attend], types, [])

    policy = AnalyticPolicy(target("znver4"))
    plain, cast, biased = (
        policy.predict(stage(*given))
        for given in (("bfloat16",), ("float32", "cast"), ("float32", "add", "cast"))
    )
    assert plain < cast < biased < 1.5 * plain


@pytest.mark.parametrize("keys", [197, 256, 1370])
@pytest.mark.parametrize(
    ("name", "dtype"), [("x86-64-v4", "float32"), ("znver5", "float32"), ("znver4", "bfloat16")]
)
def test_sums_of_products_stay_in_registers(keys: int, name: str, dtype: str) -> None:
    """In the machine code, no loop of products stores a vector to the stack or moves sums from one
    register to another. LLVM once kept softmax's constants in registers and the sums in memory,
    which halved the speed.
    """
    machine = target(name)
    sketch = attention.match(separate(1, 64, keys, 32, 64, dtype), machine)
    assert sketch is not None
    decision = sketch.next_decision({})
    assert decision is not None
    rounded = dtype == "bfloat16"
    for tile in ("10x2", "12x2", "14x2", "9x3"):
        tile = f"bf16:{tile}" if rounded else tile
        assert tile in decision.options
        built = sketch.build(Config(sketch.name, (("tile", tile), ("chunks_m", 1))), "attend")
        assert isinstance(built, Program)
        instruction = "vdpbf16ps" if rounded else "vfmadd"
        bodies = product_loops([built.function], machine, instruction)
        products = [body for body in bodies if "vscalef" not in body]
        assert products, tile
        for body in products:
            assert keeps_sums(body), (tile, body)
            moves = re.findall(r"vmov\w+\s+%[yz]mm\d+, %[yz]mm\d+", body)
            assert len(moves) <= 2, (tile, body)
