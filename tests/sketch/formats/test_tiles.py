"""Products in the tile unit (Intel AMX), against float64 of the same operands.

Every machine with AVX-512 runs these kernels with an emulated unit. Where there is a real one they
run on it too, and its results are those of the emulation, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from gtco.machine.target import TILES, Target, detect
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.kernels import (
    EMULATED,
    Built,
    assert_close,
    build,
    build_each,
    config_with,
    fresh_seed,
    reference,
    runnable,
)
from tests.sketch.formats import test_int8 as int8
from tests.sketch.formats.test_bfloat16 import (
    ATTENTIONS,
    DEEP,
    ROUNDED,
    STAGES,
    chain,
    conv,
    dense,
    half,
    heads,
    inputs,
    window,
)

T = TensorType
Match = Callable[[Stage, Target], Sketch | None]
REAL = {*TILES} <= {*detect().features}
MACHINES = [EMULATED, *(["native"] if REAL else [])]
# Rows of one tile and of two, full and not; several blocks, of which the last needs the
# configuration of the others, or its own.
SIZES = [
    *((1, 7, 5), (7, 33, 31), (16, 32, 32), (17, 40, 100), (31, 16, 64), (32, 64, 33)),
    *((33, 65, 300), (48, 31, 47), (197, 70, 96), (1370, 9, 64)),
]
OTHERS = {
    **STAGES,
    "lines_of_output": chain(
        {"x": half(45, 33), "w": half(33, 96)},
        ("matmul", "x w", "c", T((45, 96)), {}),
        ("cast", "c", "y", half(45, 96), {}),
    ),
    "parts_of_lines": chain(  # heads of 48 columns
        {"x": half(45, 33), "w": half(33, 96)},
        ("matmul", "x w", "c", T((45, 96)), {}),
        ("reshape", "c", "r", T((45, 2, 48)), {}),
        ("permute", "r", "p", T((2, 45, 48)), {"axes": (1, 0, 2)}),
        ("cast", "p", "y", half(2, 45, 48), {}),
    ),
    "columns_side_by_side": chain(
        {"x": half(45, 33), "w": half(33, 70)},
        ("matmul", "x w", "c", T((45, 70)), {}),
        ("permute", "c", "y", T((70, 45)), {"axes": (1, 0)}),
    ),
    "blocks_of_a_computed_matrix": dense(40, 35, 390, constant=False),
    "batches_of_several_blocks": chain(
        {"x": half(2, 50, 70), "b": half(2, 70, 40)}, ("matmul", "x b", "y", T((2, 50, 40)), {})
    ),
    "wide_conv": conv(9, 64, 33, 3),
}


def in_tiles(sketch: Sketch, kind: str = "tiles") -> list[Config]:
    return [c for c in configs(sketch) if str(c["tile"]).startswith(f"{kind}:")]


def some(sketch: Sketch, count: int, seed: int, kind: str = "tiles") -> list[Config]:
    """The first config in tiles, the last, and others drawn at random."""
    every = in_tiles(sketch, kind)
    drawn = Random(seed).sample(every, min(count, len(every)))
    return list(dict.fromkeys((every[0], every[-1], *drawn)))


def check(stage: Stage, name: str, tolerance: float, match: Match = gemm.match) -> None:
    machine, seed = runnable(name), fresh_seed()
    sketch = match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, seed)
    wanted = reference(stage, arrays).astype(np.float64)
    for config, kernel in build_each(sketch, some(sketch, 3, seed), machine):
        print(config.to_json())
        assert_close(kernel(*arrays), wanted, tolerance)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int, int], name: str) -> None:
    check(dense(*size), name, DEEP)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("size", [(33, 320, 70), (197, 768, 96)], ids=str)
def test_blocks_of_k_inside_panels(size: tuple[int, int, int], name: str) -> None:
    machine, seed, (m, k, n) = runnable(name), fresh_seed(), size
    types = {"x": half(m, k), "w": half(k, n)}
    stage = chain(types, ("matmul", "x w", "y", T((m, n)), {}))
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, seed)
    wanted = reference(stage, arrays).astype(np.float64)
    found = [c for c in in_tiles(sketch) if c.by_name.get("order") == "k"]
    assert all(c["a"] == "direct" and c["kc"] < k for c in found)
    for _, kernel in build_each(sketch, Random(seed).sample(found, 3), machine):
        assert_close(kernel(*arrays), wanted, DEEP)


@pytest.mark.parametrize("name", MACHINES)
def test_windows_of_channels_first_keep_a_nan_to_themselves(name: str) -> None:
    """Rows of 7 pixels are copied with an eighth, and 147 steps are multiplied as 160."""
    machine, seed, out = runnable(name), fresh_seed(), T((1, 17, 20, 40))
    stage = chain(
        {"x": half(1, 3, 34, 40), "w": half(40, 3, 7, 7)},
        ("permute", "x", "p", half(1, 34, 40, 3), {"axes": (0, 2, 3, 1)}),
        ("conv2d", "p w", "y", out, window(3, strides=(2, 2))),
    )
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, seed)
    image = arrays[[i.name for i in stage.inputs].index("x")]
    image.flat[Random(seed).randrange(image.size)] = np.nan
    wanted = reference(stage, arrays).astype(np.float64)
    assert 0 < np.isnan(wanted).sum() < wanted.size
    for _, kernel in build_each(sketch, some(sketch, 3, seed), machine):
        got, scale = kernel(*arrays), np.nanmax(np.abs(wanted))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=DEEP * scale)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", OTHERS.values(), ids=OTHERS)
def test_products(stage: Stage, name: str) -> None:
    """Prologues, epilogues, convolutions, and operands that are not constant."""
    rounds = stage.output.type.dtype == "bfloat16" or stage.operators[0].kind == "layer_norm"
    check(stage, name, 2 * ROUNDED if rounds else DEEP)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("size", [*SIZES, (40, 48, 640)], ids=str)
def test_bytes(size: tuple[int, int, int], name: str) -> None:
    """Products of uint8 by int8 are exact, for every number of rows and steps of k in a tile."""
    machine, seed = runnable(name), fresh_seed()
    sketch = gemm.match(int8.dense(*size), machine)
    assert sketch is not None
    exact = some(sketch, 3, seed, "tiles8")
    int8.exact(sketch, exact, machine, int8.drawn(sketch.stage, seed))


BYTES = {
    **int8.STAGES,
    "wide": int8.dressed(45, 70, 130, "uint8"),
    "several_blocks": int8.conv(37, 64, 40, 3, strides=(2, 2)),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", BYTES.values(), ids=BYTES)
def test_products_of_bytes(stage: Stage, name: str) -> None:
    """With what is computed before and after, and convolutions that are products or windows."""
    machine, seed = runnable(name), fresh_seed()
    found = [match(stage, machine) for match in (gemm.match, convolution.match)]
    every = [s for s in found if s is not None and in_tiles(s, "tiles8")]
    assert every
    for sketch in every:
        chosen = some(sketch, 3, seed, "tiles8")
        int8.exact(sketch, chosen, machine, int8.drawn(stage, seed))


# Windows of whole steps of k: rows of one tile and of two, and several blocks of a row
WINDOWS = {
    "conv3x3": conv(9, 32, 20, 3),
    "two_tiles": conv(20, 64, 33, 3),
    "several_blocks": conv(37, 32, 40, 3, strides=(2, 1)),
    "dilated": conv(18, 64, 17, 3, dilation=(2, 2), padding=(2,) * 4),
    "grouped": conv(8, 64, 48, 5, groups=2),
    "pixels_apart": conv(5, 512, 20, 3),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", WINDOWS.values(), ids=WINDOWS)
def test_windows_read_in_place(stage: Stage, name: str) -> None:
    check(stage, name, DEEP, convolution.match)


HEADS = {
    **ATTENTIONS,
    "several_blocks": heads(37, 70, 64, 64),
    "long_sums": heads(17, 33, 300, 40),
    "one_row": heads(1, 197, 64, 64),
    "negative_scale": heads(18, 21, 16, 8, scale=-0.4),
    "no_scale": heads(5, 21, 16, 8, scale=0.0),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("stage", HEADS.values(), ids=HEADS)
def test_attention(stage: Stage, name: str) -> None:
    """A weight in the middle of two bfloat16 may round to either, half a unit of one of them."""
    check(stage, name, 2 * ROUNDED, attention.match)


@pytest.mark.parametrize("name", MACHINES)
def test_attention_of_rows_that_a_mask_hides(name: str) -> None:
    """With a guard after the softmax, rows without a key are 0, and a NaN in q stays in its row."""
    machine, stage = runnable(name), heads(19, 21, 8, 8, bias=True, guarded=True)
    sketch = attention.match(stage, machine)
    assert sketch is not None
    q, k, v, mask = inputs(stage, fresh_seed())
    mask[2], q[0, 0, 4] = -np.inf, np.nan
    wanted = reference(stage, [q, k, v, mask]).astype(np.float64)
    for config in some(sketch, 1, 0):
        got = build(sketch, config, machine)(q, k, v, mask)
        assert (got[:, :, 2] == 0).all() and (got[0, 0, 4] == 0).all()
        assert_close(got, np.nan_to_num(wanted), 2 * ROUNDED)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("choices", [{"order": "rows"}, {"kc": 128}, {"a": "packed"}], ids=str)
def test_choices(choices: dict[str, str | int], name: str) -> None:
    """Rows outermost, blocks of k, and rows of A that are packed though they could be read in
    place; the last block of rows needs a configuration of its own.
    """
    machine, stage = runnable(name), dense(69, 100, 256)
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, fresh_seed())
    built = build(sketch, config_with(sketch, tile="tiles:32x2", **choices), machine)
    assert_close(built(*arrays), reference(stage, arrays), DEEP)


def sums_of_tiles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A x B in the order of TDPBF16PS (Intel SDM vol. 2): in each 32 steps of k, the even and the
    odd ones are summed apart, and then both sums are added to C. Products are exact in float32.
    """
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    a, b = a.astype(np.float32), b.astype(np.float32)
    for start in range(0, a.shape[1], 32):
        even, odd = np.zeros_like(c), np.zeros_like(c)
        for k in range(start, start + 32, 2):
            even += a[:, k, None] * b[k]
            odd += a[:, k + 1, None] * b[k + 1]
        c += even + odd
    return c


@pytest.mark.parametrize("name", MACHINES)
def test_results_are_those_of_the_manual_bit_by_bit(name: str) -> None:
    """So the emulation is held to the manual and, where there is a tile unit, both to that."""
    stage = chain({"x": half(37, 96), "w": half(96, 40)}, ("matmul", "x w", "y", T((37, 40)), {}))
    machine = runnable(name)
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    arrays = inputs(stage, fresh_seed())
    built: Built = build(sketch, config_with(sketch, tile="tiles:32x2", kc=96), machine)
    np.testing.assert_array_equal(built(*arrays), sums_of_tiles(*arrays))


@pytest.mark.parametrize("name", MACHINES)
def test_infinities_and_nan_stay_in_their_rows_and_columns(name: str) -> None:
    """The steps of k that fill the last tile are zeros on both sides, not leftovers."""
    machine, stage = runnable(name), dense(20, 33, 37)
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    x, w, bias = inputs(stage, fresh_seed())
    x[3, 5], w[8, 2] = np.nan, np.inf
    for config in some(sketch, 1, 0):
        got = build(sketch, config, machine)(x, w, bias)
        rows, columns = np.nonzero(~np.isfinite(got))
        assert {*rows[columns != 2].tolist()} == {3} and {*columns[rows != 3].tolist()} == {2}
