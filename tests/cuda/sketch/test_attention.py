"""Fused attention for GPUs, emulated, against float64.

Tolerances, relative to the largest magnitude: 1e-5 for float32 operands, 1e-3 for float16 and 8e-3
for bfloat16. In the narrow formats a weight is rounded when it is multiplied with v (by 2^-11 and
2^-9 of it), relative to the maximum of the keys so far or to an older one. If a prologue also
rounds q, k and v, the tolerance is four times as large.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.search.gpu.policy import GpuPolicy
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch.attention import cuda as attention
from gtco.tensor.sketch.attention.cuda import CudaAttention
from gtco.tensor.space import Config, check, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.emulate import run_reported, run_stage
from tests.cuda.sass_loops import longest_loop
from tests.kernels import assert_close, fresh_seed, reference

T = TensorType
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}


def op(
    kind: str, inputs: tuple[str, ...], output: str, type_: TensorType, **attrs: object
) -> Operator:
    return Operator(kind, inputs, output, type_, make_attrs(**attrs))


def heads(
    lead: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: str = "float16",
    bias: tuple[int, ...] | None = None,
    **attrs: object,
) -> Stage:
    """q [lead, m, d], k [lead, n, d], v [lead, n, e] of ``dtype`` -> float32 [lead, m, e]."""
    m, n, d, e = sizes
    types = {"q": T((*lead, m, d), dtype), "k": T((*lead, n, d), dtype)}
    types["v"] = T((*lead, n, e), dtype)
    inputs: tuple[str, ...] = ("q", "k", "v")
    if bias is not None:
        types["bias"], inputs = T(bias), (*inputs, "bias")
    attrs = {"scale": d**-0.5, **attrs}
    return make_stage([op("attention", inputs, "y", T((*lead, m, e)), **attrs)], types, [])


def merged_heads(
    batch: int, number: int, tokens: int, width: int, dtype: str = "float16", of: str = "as it is"
) -> Stage:
    """[b, n, 3 h d] -> q, k, v by slices -> attention -> [b, n, h d] of ``dtype``: the middle of a
    ViT block. The product of q, k and v is in memory as it is, in float32, or without its bias.
    """
    wide = 3 * number * width
    types = {"qkv": T((batch, tokens, wide), "float32" if of == "cast" else dtype)}
    ops, whole = [], "qkv"
    if of == "biased":
        types["b"] = T((wide,), dtype)
        ops.append(op("add", ("qkv", "b"), "sum", T((batch, tokens, wide), dtype)))
        whole = "sum"
    if of == "cast":
        ops.append(op("cast", ("qkv",), "half", T((batch, tokens, wide), dtype)))
        whole = "half"
    five, one = (3, batch, number, tokens, width), (1, batch, number, tokens, width)
    split = T((batch, tokens, 3, number, width), dtype)
    ops.append(op("reshape", (whole,), "r", split))
    ops.append(op("permute", ("r",), "p", T(five, dtype), axes=(2, 0, 3, 1, 4)))
    for i, name in enumerate("qkv"):
        at = dict(begin=(i, 0, 0, 0, 0), strides=(1,) * 5)
        ops.append(op("slice", ("p",), f"s_{name}", T(one, dtype), **at))
        ops.append(op("reshape", (f"s_{name}",), f"{name}_", T(one[1:], dtype)))
    ops += [
        op("attention", ("q_", "k_", "v_"), "o", T(one[1:]), scale=width**-0.5),
        op("permute", ("o",), "t", T((batch, tokens, number, width)), axes=(0, 2, 1, 3)),
        op("reshape", ("t",), "m", T((batch, tokens, number * width))),
    ]
    if dtype != "float32":
        ops.append(op("cast", ("m",), "y", T((batch, tokens, number * width), dtype)))
    return make_stage(ops, types, [])


def matched(stage: Stage, target: str = "cuda:sm_80") -> CudaAttention:
    sketch = attention.match(stage, gpu_target(target))
    assert sketch is not None
    return sketch


def drawn(stage: Stage, seed: int, scale: float = 1.0) -> list[np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(i.type.sizes)).astype(i.type.dtype) for i in stage.inputs]


def wanted(stage: Stage, arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The result in float64, also for float16 operands."""
    wide = [a.astype(np.float64) if a.dtype == np.float16 else a for a in arrays]
    return reference(stage, wide)


def covering(sketch: CudaAttention, seed: int) -> list[Config]:
    """Configs of the sketch in which every option of every decision occurs."""
    every = list(configs(sketch))
    random.Random(seed).shuffle(every)
    missing = {choice for config in every for choice in config.choices}
    found = []
    while missing:
        best = max(every, key=lambda c: len(missing & set(c.choices)))
        missing -= set(best.choices)
        found.append(best)
    return found


def verify(sketch: CudaAttention, config: Config, seed: int, more: float = 1.0) -> None:
    print(config.to_json())
    arrays = drawn(sketch.stage, seed)
    got = run_stage(sketch, config, arrays)
    assert_close(got, wanted(sketch.stage, arrays), more * TOLERANCE[sketch.operand])


def test_every_option_of_every_decision() -> None:
    seed = fresh_seed()
    sketch = matched(heads((3,), (37, 135, 24, 40)))
    for config in covering(sketch, seed):
        verify(sketch, config, seed)


@pytest.mark.parametrize(
    "dtype, target", [("float16", "cuda:sm_75"), ("bfloat16", "cuda:sm_90a"),
                      ("bfloat16", "cuda:sm_75"), ("float32", "cuda:sm_80")]
)  # fmt: skip
def test_every_operand_type(dtype: str, target: str) -> None:
    """All sizes are odd, so that no row, key or width is a whole tile."""
    seed = fresh_seed()
    sketch = matched(heads((2, 2), (19, 45, 33, 21), dtype), target)
    assert sketch.mma == (dtype == "float16" or target == "cuda:sm_90a")
    for config in random.Random(seed).sample(list(configs(sketch)), 2):
        verify(sketch, config, seed)


def test_every_option_on_cuda_cores() -> None:
    seed = fresh_seed()
    sketch = matched(heads((2,), (34, 70, 12, 36), "float32"))
    for config in covering(sketch, seed):
        verify(sketch, config, seed)


@pytest.mark.parametrize(
    "m, n, d, e", [(1, 1, 8, 8), (49, 49, 32, 32), (197, 197, 8, 8), (5, 1050, 16, 8),
                   (1, 5000, 8, 16), (20, 7, 3, 1)]
)  # fmt: skip
def test_any_number_of_tokens(m: int, n: int, d: int, e: int) -> None:
    seed = fresh_seed()
    sketch = matched(heads((), (m, n, d, e)))
    verify(sketch, random.Random(seed).choice(list(configs(sketch))), seed)


def test_wide_heads_in_parts() -> None:
    """Columns of v that registers do not hold have their own blocks."""
    seed = fresh_seed()
    for dtype in ("float16", "float32"):
        sketch = matched(heads((), (17, 20, 264, 300), dtype))
        every = list(configs(sketch))
        assert all(config["columns"] < 300 for config in every)
        verify(sketch, random.Random(seed).choice(every), seed)


@pytest.mark.parametrize("of", ["as it is", "biased", "cast"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_heads_read_and_stored_in_place(dtype: str, of: str) -> None:
    """Slices, reshapes and permutes are addresses of 16 bytes; computed values come in smaller
    pieces.
    """
    seed = fresh_seed()
    sketch = matched(merged_heads(1, 3, 21, 16, dtype, of))
    config = random.Random(seed).choice(list(configs(sketch)))
    program = sketch.build(config, "k")
    assert isinstance(program, CudaProgram)
    way = "addressed" if of == "as it is" else "gtco::pieced("
    assert program.source.count(f"{way}") == 3
    verify(sketch, config, seed, 4.0)


@pytest.mark.parametrize("bias", [(3, 5, 9), (5, 9), (1, 9), (2, 1, 1, 9), (5, 1), (2, 3, 5, 9)])
def test_bias_broadcasts(bias: tuple[int, ...]) -> None:
    seed = fresh_seed()
    sketch = matched(heads((2, 3), (5, 9, 8, 8), bias=bias))
    verify(sketch, random.Random(seed).choice(list(configs(sketch))), seed)


LOWEST = float(np.finfo(np.float32).min)
ROWS, KEYS = 6, 69


def special_rows(stage: Stage, low: float, seed: int) -> list[np.ndarray]:
    """In row 0 all keys are hidden, in row 1 all but the last, and in row 2 all but the first. Row
    3 has a NaN and row 4 an infinity in the bias; row 5 has a NaN in q.
    """
    q, k, v, bias = drawn(stage, seed)
    bias[:] = 0
    bias[0] = low
    bias[1, : KEYS - 1], bias[2, 1:] = low, low
    bias[3, KEYS // 2], bias[4, 3] = np.nan, np.inf
    q[5, 1] = np.nan
    return [q, k, v, bias]


@pytest.mark.parametrize("attrs", [{}, {"guarded": True}, {"hidden": True}], ids=str)
@pytest.mark.parametrize("dtype, split", [("float16", 1), ("float16", 4), ("float32", 2)])
def test_hidden_rows_are_those_of_the_reference(
    dtype: str, split: int, attrs: dict[str, Any]
) -> None:
    """The mean of V, NaN or 0, over several steps of keys, also if warps share them."""
    seed = fresh_seed()
    for low in (-np.inf, LOWEST, -1e9):
        if "hidden" in attrs:
            attrs = {"hidden": float(np.float32(low))}
        stage = heads((), (ROWS, KEYS, 5, 9), dtype, bias=(ROWS, KEYS), **attrs)
        sketch = matched(stage)
        every = [c for c in configs(sketch) if c["split"] == split and c["keys"] == 16]
        arrays = special_rows(stage, low, seed)
        if "hidden" in attrs:  # hidden scores that are not numbers
            arrays[1][KEYS - 1], arrays[3][:, KEYS - 1] = np.inf, low
            arrays[3][2, KEYS - 1] = -np.inf  # hidden twice
        # in float32, where adding -1e9 leaves nothing of a score
        with np.errstate(all="ignore"):
            single = [a.astype(np.float32) for a in arrays]
            want = reference(stage, single, precise=False)
        got = run_stage(sketch, every[0], arrays)
        assert_close(got, want, 2 * TOLERANCE[dtype])
        if attrs.get("guarded"):
            assert (got[[3, 4, 5]] == 0).all()


@pytest.mark.parametrize("dtype, split", [("float16", 1), ("float16", 4), ("float32", 2)])
def test_a_guard_hides_no_value_that_is_no_number(dtype: str, split: int) -> None:
    """Weights of 0 spread a NaN or an infinity of V as other weights do, and spread nothing
    else.
    """
    stage = heads((), (ROWS, KEYS, 5, 9), dtype, bias=(ROWS, KEYS), guarded=True)
    sketch = matched(stage)
    every = [c for c in configs(sketch) if c["split"] == split and c["keys"] == 16]
    arrays = special_rows(stage, -np.inf, fresh_seed())
    arrays[2][KEYS // 3, 2], arrays[2][KEYS - 1, 7] = np.nan, np.inf
    with np.errstate(all="ignore"):
        want = reference(stage, [a.astype(np.float32) for a in arrays], precise=False)
    got = run_stage(sketch, every[0], arrays)
    assert_close(got, want, 2 * TOLERANCE[dtype])
    lost = [0, 3, 4, 5]
    assert np.isnan(got[lost][:, [2, 7]]).all()
    assert (np.delete(got[lost], [2, 7], axis=1) == 0).all()


def test_large_scores_do_not_overflow() -> None:
    """Scores reach several hundred; their exponentials are relative to the largest so far."""
    seed = fresh_seed()
    stage = heads((2,), (18, 77, 32, 8), "float32")
    sketch = matched(stage)
    arrays = drawn(stage, seed, scale=20.0)
    for config in random.Random(seed).sample(list(configs(sketch)), 2):
        assert_close(run_stage(sketch, config, arrays), wanted(stage, arrays), 1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_near_the_largest_number(dtype: str) -> None:
    """Multiplied by log2(e) they would be infinite, so the difference to the largest is taken
    first.
    """
    stage = heads((), (ROWS, KEYS, 5, 9), dtype, bias=(ROWS, KEYS))
    sketch, seed = matched(stage), fresh_seed()
    arrays = drawn(stage, seed)
    bias = arrays[3]
    bias[:] = 0
    bias[0, 3], bias[1, 3], bias[1, 40], bias[2, 60] = 3e38, 2.6e38, 2.9e38, -3e38
    every = [config for config in configs(sketch) if config["keys"] == 16]
    got = run_stage(sketch, random.Random(seed).choice(every), arrays)
    assert_close(got, wanted(stage, arrays), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("largest", [1e5, 1e9])
def test_large_scores_without_a_bias(largest: float) -> None:
    """Scores far below the largest have no weight. Scale and shift are one multiply-add, and its
    rounding is the same for all weights of a row.
    """
    stage = heads((), (ROWS, KEYS, 8, 8), "float32")
    sketch, seed = matched(stage), fresh_seed()
    q, k, v = drawn(stage, seed)
    q[:, 0], k[:, 0] = 1, 0
    k[3, 0], k[40, 0] = largest, -largest
    every = [config for config in configs(sketch) if config["keys"] == 16]
    got = run_stage(sketch, random.Random(seed).choice(every), [q, k, v])
    assert_close(got, wanted(stage, [q, k, v]), 2 * TOLERANCE["float32"])


def test_a_negative_scale() -> None:
    """The least product has the greatest score."""
    seed = fresh_seed()
    sketch = matched(heads((), (9, 40, 8, 8), scale=-1.5))
    verify(sketch, next(iter(configs(sketch))), seed, 2.0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiles_are_read_without_bank_conflicts(dtype: str) -> None:
    seed = fresh_seed()
    for width in (24, 32, 48, 64):
        sketch = matched(heads((), (33, 40, width, width), dtype))
        config = random.Random(seed + width).choice(list(configs(sketch)))
        _, report = run_reported(sketch, config, drawn(sketch.stage, seed))
        assert not report.bank_conflicts, (config.to_json(), report.conflicts)


# the space ----------------------------------------------------------------------------------------
MODELS = {
    "vit": heads((12,), (197, 197, 64, 64)),
    "detr": heads((8,), (1050, 1050, 32, 32)),
    "swin": heads((64, 3), (49, 49, 32, 32), bias=(64, 3, 49, 49)),
    "query": heads((8,), (1, 5000, 64, 64)),
    "wide": heads((), (300, 300, 512, 512)),
    "float32": heads((12,), (197, 197, 64, 64), "float32"),
    "merged": merged_heads(1, 12, 197, 64, "float16", "biased"),
}


@pytest.mark.parametrize("target", [f"cuda:{arch}" for arch in ARCHITECTURES])
@pytest.mark.parametrize("stage", MODELS.values(), ids=MODELS)
def test_the_space_fits_the_target(stage: Stage, target: str) -> None:
    """There are no dead ends: every partial choice can be completed, and every config can be
    launched.
    """
    sketch = matched(stage, target)
    machine = sketch.target
    every = list(configs(sketch))
    assert 1 < len(every) < 1000
    for config in every:
        assert check(sketch, config) is None
        launch = sketch.workload(config)
        assert launch.shared <= machine.shared and launch.threads <= 256
        assert launch.registers * launch.threads <= machine.registers_sm
        assert launch.work >= launch.flops == sketch.flops
        assert launch.traffic >= launch.written


def test_what_is_not_attention_on_a_gpu() -> None:
    target = gpu_target("cuda:sm_80")
    assert attention.match(heads((2,), (5, 6, 8, 8), "float64"), target) is None
    stage = heads((2,), (5, 6, 8, 8))
    (given,) = stage.operators
    mixed = {**stage.types, "k": T((2, 6, 8), "bfloat16")}
    assert attention.match(make_stage([given], mixed, []), target) is None
    softmax = op("softmax", ("y",), "z", given.type, axis=2)
    assert attention.match(make_stage([given, softmax], stage.types, []), target) is None


# the compiler's view ------------------------------------------------------------------------------
SLOW_PATH = 4  # reciprocals in the compiler's routine for divisions that need more than one


def in_turn() -> Iterator[Any]:
    """Every model for every architecture. ``make test`` takes every other one of them."""
    for number, (name, arch) in enumerate(itertools.product(MODELS, ARCHITECTURES)):
        marks = [pytest.mark.scheduled] if (number + number // len(ARCHITECTURES)) % 2 else []
        yield pytest.param(name, arch, marks=marks)


@pytest.mark.parametrize(("name", "arch"), in_turn())
def test_machine_code(name: str, arch: str) -> None:
    """The config that the policy picks and, on one architecture, also the config with the most
    registers. Both products are instructions of Tensor Cores, nothing is spilled, and a lane
    divides once a row.
    """
    sketch = matched(MODELS[name], f"cuda:{arch}")
    picked, _ = GpuPolicy(sketch.target).compared(sketch)
    tried = {picked[0]}
    if arch == "sm_80":
        tried.add(max(configs(sketch), key=lambda c: sketch.workload(c).registers))
    for config in tried:
        program, launch = sketch.build(config, "k"), sketch.workload(config)
        assert isinstance(program, CudaProgram)
        image = compile_cuda(program.source, arch)
        code = machine_code(image.cubin)["k"]
        print(config.to_json(), code.registers, launch.registers)
        assert image.spills == image.local == code.spilled == 0
        assert code.registers * launch.threads <= sketch.target.registers_sm
        assert code.tensor_core >= products_of(sketch, config)
        assert code.count("FFMA") > 0 and code.count("MUFU") > 0
        assert code.instructions["MUFU.RCP"] <= rows_of(sketch, config) + SLOW_PATH


def rows_of(sketch: CudaAttention, config: Config) -> int:
    """The number of query rows of which a lane has a part."""
    return (2 if sketch.mma else 4) * sketch.blocking(config.by_name).tiles


def products_of(sketch: CudaAttention, config: Config) -> int:
    """The matrix instructions of one step of a warp, of q k^T and of the weights and v.
    Instructions that a loop repeats are left out, and so are those of keys after the last, which
    the compiler omits.
    """
    if not sketch.mma:
        return 0
    block, (_, _, n, _, _) = sketch.blocking(config.by_name), sketch.extents
    halves = 1 if sketch.target.generation >= 80 else 2
    depths = block.depth // 16 if block.held else min(block.depth // 16, 4)
    keys = min(block.keys, n)
    products = depths * -(-keys // 8) + -(-keys // 16) * block.width // 8
    return halves * block.tiles * products


# Instructions of a step's loop for each score of a lane, where it has 64, and how many they may be.
# The last two also stand where the loop seldom comes: in the last step, and where a maximum grew.
BUDGET = {
    ("HMMA",): 2.0,
    ("MUFU",): 1.1,
    ("FFMA",): 1.1,
    ("FADD",): 1.1,
    ("FMNMX",): 1.15,
    ("F2FP",): 0.5,
    ("LDSM",): 0.65,
    ("IMAD", "LEA", "LOP3", "IADD3", "VIADD", "SHF", "ISETP"): 2.0,
    ("FSEL",): 0.85,
    ("FMUL",): 1.25,
}


@pytest.mark.parametrize("warps", [2, 4])
def test_instructions_of_a_score(warps: int) -> None:
    """The loop computes no address again that is the same in each step, compares keys with the last
    one in the last step alone, and scales sums only where a maximum grew.
    """
    sketch = matched(heads((6,), (1370, 1370, 64, 64)), "cuda:sm_90a")
    chosen = dict(columns=64, query="shared", tiles=2, keys=64, warps=warps, split=1, heads=1)
    (config,) = (c for c in configs(sketch) if c.by_name == {**chosen, "stages": 2})
    program = sketch.build(config, "k")
    assert isinstance(program, CudaProgram)
    loop = longest_loop(compile_cuda(program.source, "sm_90a").cubin)
    print(loop)
    for names, most in BUDGET.items():
        assert sum(loop[name] for name in names) <= 64 * most, names
    assert loop.total() <= 64 * 13.0
