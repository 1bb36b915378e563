"""Products of warp groups (device/gtco/wgmma.cuh), against the meaning of the row; wrong uses of
them are found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.cuda.tensor_core import EMITTED_COLUMNS, ROWS
from tests.cuda.emulate import emulate
from tests.cuda.emulated_objects import Fault
from tests.kernels import fresh_seed

THREADS = 128
# A of 64 rows and B of N columns, 64 steps of k each, through shared memory
KERNEL = """#include "gtco/tile.cuh"
#include "gtco/wgmma.cuh"
extern "C" __global__ void __launch_bounds__({threads}) product(
    const {format}* __restrict__ in0, const {format}* __restrict__ in1, float* __restrict__ out) {{
  using T = {format};
  constexpr int N = {n}, K = 64;
  const int t = threadIdx.x;
  GTCO_SHARED(room);
  unsigned char* const a = gtco::swizzle_aligned(room){shift};
  unsigned char* const b = a + 64 * K * sizeof(T);
  for (int i = t; i < (64 + N) * K; i += {threads}) {{
    const int row = i / K, at = gtco::Tile<T, 64 + N, K>::at(row, i % K / 8) + i % 8;
    reinterpret_cast<T*>(a)[at] = i < 64 * K ? in0[i] : in1[i - 64 * K];
  }}
  {proxy}
  {barrier}
  float d[N / 8][4] = {{}};
  {fence}
  for (int k = 0; k < K; k += 16) {{
    {multiply}
  }}
  {commit}
  {wait}
  {then}
  for (int i = 0; i < N / 2; ++i) out[t * (N / 2) + i] = d[i / 4][i % 4];
}}
"""
SHARED = "gtco::wgmma_m64nNk16<T, N>(d, {a}, gtco::wgmma_descriptor(b + 2 * k));"
FROM_SHARED = SHARED.format(a="gtco::wgmma_descriptor(a + 2 * k)")
RIGHT = {
    "shift": "",
    "proxy": "gtco::fence_proxy();",
    "barrier": "gtco::sync<{threads}>();",
    "fence": "gtco::wgmma_fence(d);",
    "multiply": FROM_SHARED,
    "commit": "gtco::wgmma_commit();",
    "wait": "gtco::wgmma_wait<0>(d);",
    "then": "",
}
FORMATS = {"float16": "half", "bfloat16": "bf16"}


def program(
    n: int = 32, dtype: str = "float16", threads: int = THREADS, **other: str
) -> CudaProgram:
    """The kernel, with ``other`` statements in place of the right ones."""
    parts = {name: text.format(threads=threads) if name == "barrier" else text
             for name, text in {**RIGHT, **other}.items()}  # fmt: skip
    text = KERNEL.format(format=FORMATS[dtype], n=n, threads=threads, **parts)
    return CudaProgram(text, (1, 1, 1), threads, (64 + n) * 128 + 1024)


def operands(n: int, dtype: str = "float16") -> list[np.ndarray]:
    """A and B along k: small integers, so that all sums are exact."""
    rng = np.random.default_rng(fresh_seed())
    return [rng.integers(-8, 9, (rows, 64)).astype(np.dtype(dtype)) for rows in (64, n)]


def run(made: CudaProgram, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The product, [row, column]."""
    n = len(arrays[1])
    row = ROWS[f"wgmma.m64n{n}k16"]
    out = np.empty((made.threads, n // 2), np.float32)
    emulate(made, "product", arrays, out, arch=900)
    assert row.c.fragment is not None
    return row.c.fragment.collect(out[:THREADS], (1, 64, n))[0]


@pytest.mark.parametrize("n", EMITTED_COLUMNS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_products(n: int, dtype: str) -> None:
    """Operands in shared memory, and four instructions one after the other, as the row means."""
    a, b = operands(n, dtype)
    wide = [x.astype(np.float64) for x in (a, b)]
    np.testing.assert_array_equal(run(program(n, dtype), (a, b)), wide[0] @ wide[1].T)


def test_groups_are_waited_for_in_order() -> None:
    """The sums of a group that is still in flight are not there; those of an older group are."""
    then = """float e[N / 8][4] = {};
  gtco::wgmma_fence(e);
  gtco::wgmma_m64nNk16<T, N>(e, gtco::wgmma_descriptor(a), gtco::wgmma_descriptor(b));
  gtco::wgmma_commit();
  gtco::wgmma_wait<1>(d);
  float of_both = d[0][0] + e[0][0];
  gtco::wgmma_wait<0>(e);
  if (of_both == of_both) d[0][0] = 1e9f;"""
    a, b = operands(32)
    wide = [x.astype(np.float64) for x in (a, b)]
    np.testing.assert_array_equal(run(program(wait="", then=then), (a, b)), wide[0] @ wide[1].T)


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ({"wait": "", "then": "gtco::wgmma_wait<1>(d);"}, "ends with products"),
        ({"commit": ""}, "ends with products"),
        ({"proxy": ""}, "no fence_proxy between that and the barrier"),
        ({"proxy": "", "fence": "gtco::fence_proxy(); gtco::wgmma_fence(d);"}, "no fence_proxy"),
        ({"barrier": "gtco::sync_warp();"}, "race|no fence_proxy"),
        ({"fence": ""}, "without a wgmma_fence"),
        ({"shift": " + 8192"}, "out of bounds"),
        ({"wait": "d[1][2] += 1.0f; gtco::wgmma_wait<0>(d);"}, "not been waited for were written"),
        (
            {"wait": "reinterpret_cast<T*>(b)[t] = in0[t]; gtco::wgmma_wait<0>(d);"},
            "has not been waited for reads",
        ),
        ({"then": "reinterpret_cast<T*>(b)[t ^ 127] = in0[t];"}, "race|not been waited for reads"),
        ({"multiply": "if (t < 96) " + FROM_SHARED}, "divergent"),
        ({"multiply": SHARED.format(a="gtco::wgmma_descriptor(a + t / 64 * 8192)")}, "divergent"),
        ({"multiply": SHARED.format(a="gtco::wgmma_descriptor(a + 2 * k) | 2ull << 62")}, "mode 3"),
        ({"multiply": SHARED.format(a="gtco::wgmma_descriptor(a + 112)")}, "from byte 112"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else re.sub(r"\W+", "_", x),
)
def test_faults(what: dict[str, str], where: str) -> None:
    with pytest.raises(Fault, match=where):
        run(program(**what), operands(32))


@pytest.mark.parametrize("threads", [64, 160])
def test_a_group_is_four_warps(threads: int) -> None:
    made = program(threads=threads)
    with pytest.raises(Fault, match="fewer than four warps"):
        emulate(made, "product", operands(32), np.empty((threads, 16), np.float32), arch=900)


@pytest.mark.parametrize(
    "what",
    [
        {"wait": "float early = d[3][1]; gtco::wgmma_wait<0>(d); d[3][1] = early;"},  # not there
        {"shift": " + 128"},  # rows are not exchanged as the addresses say
        {"multiply": SHARED.format(a="gtco::wgmma_descriptor(a + 2 * k) + (1ull << 32)")},
        {"multiply": SHARED.format(a="gtco::wgmma_descriptor(a)")},
    ],
    ids=["read too early", "not aligned", "stride", "the first steps again"],
)
def test_wrong_results(what: dict[str, str]) -> None:
    a, b = operands(32)
    wide = [x.astype(np.float64) for x in (a, b)]
    try:
        got = run(program(**what), (a, b))
    except Fault as fault:  # the wrong place may never have been written
        assert "never written" in str(fault) or "out of bounds" in str(fault)
    else:
        assert (got != wide[0] @ wide[1].T).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_machine_code(dtype: str) -> None:
    """Every text is one instruction, and the compiler put no barriers between them."""
    texts, names = [], {}
    for n in EMITTED_COLUMNS:
        names[f"product_{n}"] = n
        text = program(n, dtype).source.replace("product(", f"product_{n}(")
        texts.append(text.replace("  for (int k", "#pragma unroll\n  for (int k"))
    image = compile_cuda("".join(texts), "sm_90a")
    assert not image.spills and not image.local and "serialized" not in image.log, image.log
    codes = machine_code(image.cubin)
    assert set(codes) == set(names)
    for symbol, code in codes.items():
        found = [name for name in code.instructions if name.startswith("HGMMA")]
        assert found and all(f"64x{names[symbol]}x16.F32" in name for name in found), found
        assert all((".BF16" in name) == (dtype == "bfloat16") for name in found)
        assert code.count("HGMMA") == 4
