"""Contractions on GPUs, emulated, against float64 of the same operands."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from gtco.machine.gpu import GpuTarget, gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.gemm.cuda import CudaGemm
from gtco.tensor.space import Config, build, configs
from gtco.tensor.stage import Stage, TensorType
from tests.cuda.emulate import run_reported
from tests.kernels import assert_close, fresh_seed, reference
from tests.sketch.formats.test_bfloat16 import chain, window

# float32 sums of exact products: rounding of up to 400 sums
TOLERANCE = 2e-6
# A result in 16 bits may be off by one unit: a float32 sum may lie on the other side of the middle
# between two of them.
ROUNDED = {"float32": TOLERANCE, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FORMATS = ("float16", "bfloat16", "float32")


def T(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype)


def dense(m: int, n: int, k: int, dtype: str, *, constant: bool = True, out: str = "") -> Stage:
    b = "w" if constant else "b"
    rows: list[tuple[str, str, str, TensorType, Any]] = [
        ("matmul", f"x {b}", "c", T(m, n), {}),
        ("add", "c bias", "y", T(m, n), {}),
    ]
    if out:
        rows.append(("cast", "y", "z", T(m, n, dtype=out), {}))
    return chain({"x": T(m, k, dtype=dtype), b: T(k, n, dtype=dtype), "bias": T(n)}, *rows)


def conv(
    size: int, channels: int, n: int, taps: int, dtype: str, layout: str = "NHWC", **attrs: Any
) -> Stage:
    shape = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    attrs = window(taps // 2, layout=layout, **attrs)
    padding, strides, dilation = attrs["padding"], attrs["strides"], attrs["dilation"]
    h, w = (
        (size + 2 * p - (taps - 1) * d - 1) // s + 1
        for p, s, d in zip(padding[:2], strides, dilation, strict=True)
    )
    result = (2, h, w, n) if layout == "NHWC" else (2, n, h, w)
    weights = T(n, channels // attrs["groups"], taps, taps, dtype=dtype)
    types = {"x": T(*shape, dtype=dtype), "w": weights}
    return chain(types, ("conv2d", "x w", "y", T(*result), attrs))


def inputs(stage: Stage, seed: int) -> list[np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal([int(d) for d in i.type.shape]).astype(np.dtype(i.type.dtype))
        for i in stage.inputs
    ]


def sketch_of(stage: Stage, target: str | GpuTarget = "cuda:sm_80") -> CudaGemm:
    sketch = gemm.match(stage, gpu_target(target) if isinstance(target, str) else target)
    assert sketch is not None
    return sketch


def check(sketch: CudaGemm, config: Config, seed: int) -> Any:
    stage = sketch.stage
    arrays = inputs(stage, seed)
    print(config.to_json())
    got, report = run_reported(sketch, config, arrays, seed=seed)
    # A value computed in float32 may be rounded the other way than one computed in float64.
    computed = {"subtract", "cast"} <= {op.kind for op in stage.operators}
    tolerance = 1e-3 if computed else ROUNDED[stage.output.type.dtype]
    assert_close(got, reference(stage, list(map(wide, arrays))), tolerance)
    return report


def wide(array: np.ndarray) -> np.ndarray:
    """Narrow operands, widened exactly."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def N(*shape: int) -> TensorType:
    """A tensor of narrow elements."""
    return T(*shape, dtype="float16")


def phased(pad: int) -> dict[str, Any]:
    """The attributes of a transposed convolution."""
    given = {"layout": "NHWC", "groups": 1, "strides": (2, 2), "output_padding": (0, 0)}
    return {**given, "padding": (pad,) * 4}


STAGES = {
    "dense": dense(29, 72, 48, "float16"),
    "odd": dense(13, 37, 33, "float16"),
    "one_row": dense(1, 50, 130, "bfloat16"),
    "computed": dense(19, 40, 47, "bfloat16", constant=False),
    "stored_rounded": dense(13, 37, 33, "bfloat16", out="bfloat16"),
    "float32": dense(21, 40, 37, "float32"),
    "float32_in_place": dense(21, 36, 40, "float32", constant=False),
    "rounded_in_front": chain(
        {"x": T(11, 45), "w": T(45, 33, dtype="bfloat16")},
        ("cast", "x", "h", T(11, 45, dtype="bfloat16"), {}),
        ("matmul", "h w", "y", T(11, 33), {}),
    ),
    "batches": chain(
        {"x": N(3, 10, 24), "b": N(3, 24, 16)}, ("matmul", "x b", "y", T(3, 10, 16), {})
    ),
    "batches_of_a": chain(
        {"x": N(3, 10, 24), "b": N(24, 18)}, ("matmul", "x b", "y", T(3, 10, 18), {})
    ),
    "batches_of_both": chain(
        {"x": N(2, 1, 3, 7, 16), "b": N(1, 4, 3, 16, 9)},
        ("matmul", "x b", "y", T(2, 4, 3, 7, 9), {}),
    ),
    "transposed": chain(
        {"x": N(10, 24), "b": N(18, 24)},
        ("permute", "b", "t", N(24, 18), {"axes": (1, 0)}),
        ("matmul", "x t", "y", T(10, 18), {}),
    ),
    "transposed_a": chain(
        {"x": N(24, 40), "b": N(24, 18)},
        ("permute", "x", "t", N(40, 24), {"axes": (1, 0)}),
        ("matmul", "t b", "y", T(40, 18), {}),
    ),
    "heads": chain(  # attention's q k^T, straight out of one projection
        {"x": N(11, 3 * 4 * 16)},
        ("slice", "x", "q", N(11, 64), {"begin": (0, 0), "strides": (1, 1)}),
        ("slice", "x", "k", N(11, 64), {"begin": (0, 64), "strides": (1, 1)}),
        ("reshape", "q", "q4", N(11, 4, 16), {}),
        ("reshape", "k", "k4", N(11, 4, 16), {}),
        ("permute", "q4", "qt", N(4, 11, 16), {"axes": (1, 0, 2)}),
        ("permute", "k4", "kt", N(4, 16, 11), {"axes": (1, 2, 0)}),
        ("matmul", "qt kt", "y", T(4, 11, 11), {}),
    ),
    "dressed": chain(
        {"x": N(17, 24), "w": N(24, 40), "bias": T(40), "r": T(17, 40)},
        ("matmul", "x w", "c", T(17, 40), {}),
        ("add", "c bias", "d", T(17, 40), {}),
        ("gelu", "d", "g", T(17, 40), {}),
        ("add", "g r", "y", T(17, 40), {}),
    ),
    "stored_by_heads": chain(
        {"x": N(10, 24), "w": N(24, 48)},
        ("matmul", "x w", "c", T(10, 48), {}),
        ("cast", "c", "h", N(10, 48), {}),
        ("reshape", "h", "s", N(10, 3, 16), {}),
        ("permute", "s", "y", N(3, 10, 16), {"axes": (1, 0, 2)}),
    ),
    "stored_across": chain(
        {"x": N(33, 24), "w": N(24, 40)},
        ("matmul", "x w", "c", T(33, 40), {}),
        ("permute", "c", "y", T(40, 33), {"axes": (1, 0)}),
    ),
    "stored_across_in_runs": chain(
        {"x": N(36, 24), "w": N(24, 41), "bias": T(41), "r": T(41, 36)},
        ("matmul", "x w", "c", T(36, 41), {}),
        ("add", "c bias", "d", T(36, 41), {}),
        ("permute", "d", "t", T(41, 36), {"axes": (1, 0)}),
        ("add", "t r", "y", T(41, 36), {}),
    ),
    "stored_by_pairs": dense(13, 38, 40, "float16", out="float16"),
    "concatenated": chain(
        {"x": N(9, 16), "z": N(9, 24), "w": N(40, 16)},
        ("concat", "x z", "c", N(9, 40), {"axis": 1}),
        ("matmul", "c w", "y", T(9, 16), {}),
    ),
    "conv1x1": conv(5, 16, 24, 1, "float16"),
    "conv3x3": conv(6, 16, 24, 3, "float16"),
    "conv3x3_odd": conv(7, 5, 11, 3, "bfloat16"),
    "conv3x3_float32": conv(5, 8, 12, 3, "float32"),
    "strided": conv(9, 8, 17, 3, "float16", strides=(2, 1)),
    "dilated": conv(8, 8, 17, 3, "float16", dilation=(2, 2), padding=(2,) * 4),
    "grouped": conv(6, 16, 24, 3, "float16", groups=2),
    "grouped_odd": conv(6, 10, 8, 3, "float16", groups=2),
    "stem": conv(15, 3, 20, 7, "float16", "NCHW", strides=(2, 2)),
    "patches": conv(16, 3, 20, 8, "float16", "NCHW", strides=(8, 8), padding=(0,) * 4),
    "rounded_patches": chain(
        {"x": T(1, 3, 16, 16), "w": N(20, 3, 8, 8)},
        ("cast", "x", "h", N(1, 3, 16, 16), {}),
        ("conv2d", "h w", "c", T(1, 20, 2, 2), window(0, layout="NCHW", strides=(8, 8))),
        ("reshape", "c", "s", T(1, 20, 4), {}),
        ("permute", "s", "y", T(1, 4, 20), {"axes": (0, 2, 1)}),
    ),
    "normalised_in_front": chain(
        {"x": T(19, 40), "mean": T(19, 1), "scale": T(40), "w": N(40, 24)},
        ("subtract", "x mean", "d", T(19, 40), {}),
        ("multiply", "d scale", "e", T(19, 40), {}),
        ("cast", "e", "h", N(19, 40), {}),
        ("matmul", "h w", "y", T(19, 24), {}),
    ),
    "computed_across": chain(  # columns of B and rows of A lie side by side
        {"x": T(24, 20), "b": T(24, 36)},
        ("permute", "x", "t", T(20, 24), {"axes": (1, 0)}),
        ("cast", "t", "h", N(20, 24), {}),
        ("cast", "b", "c", N(24, 36), {}),
        ("matmul", "h c", "y", T(20, 36), {}),
    ),
    "computed_conv": chain(
        {"x": T(2, 6, 6, 12), "w": N(20, 12, 3, 3)},
        ("cast", "x", "h", N(2, 6, 6, 12), {}),
        ("conv2d", "h w", "y", T(2, 6, 6, 20), window(1, layout="NHWC")),
    ),
    "upsampled": chain(
        {"x": N(1, 5, 4, 16), "w": N(16, 12, 2, 2)},
        ("conv_transpose2d", "x w", "y", T(1, 10, 8, 12), phased(0)),
    ),
    "upsampled_odd": chain(
        {"x": N(1, 5, 4, 6), "w": N(6, 7, 4, 4)},
        ("conv_transpose2d", "x w", "y", T(1, 10, 8, 7), phased(1)),
    ),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_products(stage: Stage) -> None:
    """By a config that is drawn."""
    seed = fresh_seed()
    sketch = sketch_of(stage)
    check(sketch, Random(seed).choice(list(configs(sketch))), seed)


@pytest.mark.parametrize(
    "name",
    ["dense", "odd", "computed", "computed_conv", "rounded_in_front", "transposed_a", "conv3x3"],
)
def test_products_before_asynchronous_copies(name: str) -> None:
    """On sm_75 slices go through registers, and bfloat16 has no Tensor Cores."""
    sketch = sketch_of(STAGES[name], "cuda:sm_75")
    check(sketch, next(configs(sketch)), fresh_seed())


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("dense", 4),
        ("dressed", 4),
        ("stored_by_heads", 4),
        ("stored_by_pairs", 2),
        ("stored_rounded", 1),
        ("stored_across", 1),
        ("stored_across_in_runs", 4),
    ],
)
def test_lanes_store_as_many_as_rows_are_whole_runs_of(name: str, run: int) -> None:
    sketch = sketch_of(STAGES[name])
    program = build(sketch, next(configs(sketch)), "kernel")
    assert isinstance(program, CudaProgram)
    assert f"in_runs<{run}>" in program.source if run > 1 else "one_by_one" in program.source


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("rounded_in_front", False),  # 45 steps of k
        ("rounded_patches", True),
        ("normalised_in_front", True),
        ("computed_across", True),
        ("computed_conv", True),
        ("stem", False),
    ],
)
def test_operands_are_computed_by_runs_where_rows_are_whole_runs(name: str, runs: bool) -> None:
    sketch = sketch_of(STAGES[name])
    program = build(sketch, next(configs(sketch)), "kernel")
    assert isinstance(program, CudaProgram)
    assert ("computed_runs<" in program.source) == runs
    assert ("gtco::computed<" in program.source) != runs


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "stored_across",
        "computed_across",
        "normalised_in_front",
        "stored_across_in_runs",
        "computed",
        "conv3x3",
        "float32",
    ],
)
def test_no_bank_conflicts(name: str) -> None:
    """There are none when tiles are filled, when fragments are read, and when sums pass through.
    CUDA cores that multiply 16-bit numbers are the exception: each of their lanes holds eight
    neighbours and hands them on one by one, four lanes in a bank.
    """
    seed = fresh_seed()
    sketch = sketch_of(STAGES[name])
    drawn = [c for c in configs(sketch) if name == "float32" or c["row"] != "fma"]
    report = check(sketch, Random(seed).choice(drawn), seed)
    assert not report.conflicts


def test_the_space_of_a_large_product() -> None:
    """Every config fits the GPU by DyGen's rules 2 to 4. None has tiles with little reuse (rule 5),
    and there are few enough to price them all.
    """
    sketch = sketch_of(dense(6304, 3072, 768, "float16"))
    every = list(configs(sketch))
    assert 50 < len(every) < 1000
    for config in every:
        tiles = sketch.tiles(config.by_name)
        assert tiles.fits(sketch.target)
        m, n, _ = tiles.block
        assert m * n / (m + n) >= 20
        launch = sketch.workload(config)
        assert launch.work >= launch.flops and launch.blocks == tiles.blocks


@pytest.mark.scheduled
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "computed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_tile(dtype: str, constant: bool) -> None:
    """Each tile of a block, each tile of a warp and each number of stages once."""
    seed = fresh_seed()
    sketch = sketch_of(dense(70, 72, 72, dtype, constant=constant))
    seen: set[object] = set()
    for config in configs(sketch):
        new = {(name, config[name]) for name in ("block", "warps", "stages")} - seen
        if new:
            seen |= new
            check(sketch, config, seed)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 200), (40, 9, 1), (17, 130, 8)], ids=str)
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "computed"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", ["cuda:sm_75", "cuda:sm_90a"])
def test_every_size_has_a_kernel(
    sizes: tuple[int, int, int], constant: bool, dtype: str, target: str
) -> None:
    """On every row, for any extents of the operands."""
    sketch = sketch_of(dense(*sizes, dtype, constant=constant), target)
    for row in sketch.rows.values():
        assert sketch.mapping_options(row)
        assert all(mapped.tilings(row) for mapped in sketch.mappings.values())
    assert isinstance(build(sketch, next(configs(sketch)), "kernel"), CudaProgram)


def test_mappings_of_a_convolution() -> None:
    """All 35 mappings of GTCO, if each loop runs more than once."""
    sketch = sketch_of(conv(6, 16, 24, 3, "float16"))
    assert len(sketch.mappings) == 35
    row = sketch.rows["mma.m16n8k16"]
    options = sketch.mapping_options(row)
    waste = [sketch.mappings[name].product.waste(row.extents) for name in options]
    assert 1 < len(options) < 35 and waste == sorted(waste)
    assert max(waste) <= gemm.WASTE * min(waste)


@pytest.mark.parametrize(
    "kind", ["convolution", "grouped", "channels first", "transposed", "batches"]
)
def test_every_mapping_computes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes mappings that waste too much to be an option."""
    monkeypatch.setattr(gemm, "WASTE", 1e9)
    monkeypatch.setattr(gemm, "MAPPINGS", 100)
    stage = {
        "convolution": conv(3, 8, 6, 2, "float16", padding=(1, 1, 1, 1)),
        "grouped": conv(3, 16, 8, 2, "float16", groups=2, padding=(0,) * 4),
        "channels first": conv(4, 3, 5, 2, "float16", "NCHW", padding=(0,) * 4),
        "transposed": STAGES["upsampled_odd"],
        "batches": STAGES["batches_of_both"],
    }[kind]
    seed = fresh_seed()
    sketch = sketch_of(stage)
    row = next(iter(sketch.rows))
    names = Random(seed).sample(list(sketch.mappings), min(2, len(sketch.mappings)))
    for name in names:
        check(sketch, next(configs(sketch, {"row": row, "mapping": name})), seed)
