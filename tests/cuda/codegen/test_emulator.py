"""The emulator: its primitives against their definitions, and every kind of fault is found."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import pytest

from gtco.tensor.cuda.program import CudaProgram
from tests.cuda.emulate import Report, build_shared, emulate, faults_of
from tests.cuda.emulated_objects import Fault
from tests.kernels import fresh_seed

TYPES = {"float32": "float", "float16": "half", "uint16": "bf16", "uint32": "uint32_t",
         "int32": "int", "uint8": "uint8_t"}  # fmt: skip
HEADER = '#include "gtco/device.cuh"\nusing namespace gtco;\n'


def kernel(symbol: str, body: str, inputs: Sequence[str], out: str, threads: int = 32) -> str:
    """A kernel with ``body`` over in0, in1 ... and out of these C types; ``t`` is the thread, one
    of ``ALL``.
    """
    named = [*(f"const {c}* __restrict__ in{i}" for i, c in enumerate(inputs)),
             f"{out}* __restrict__ out"]  # fmt: skip
    return (
        f'extern "C" __global__ void {symbol}({", ".join(named)}) {{\n'
        f"  const int t = threadIdx.x; constexpr int ALL = {threads};\n{body}\n}}\n"
    )


def run(
    body: str,
    arrays: list[np.ndarray],
    out: np.ndarray,
    threads: int = 32,
    shared: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    arch: int = 800,
    seed: int | None = None,
) -> Report:
    """Fills ``out``."""
    types = [TYPES[a.dtype.name] for a in arrays]
    source = kernel("k", body, types, TYPES[out.dtype.name], threads)
    program = CudaProgram(HEADER + source, grid, threads, shared)
    return emulate(program, "k", arrays, out, arch=arch, seed=seed)


# ---- right kernels run


def test_threads_and_blocks() -> None:
    out = np.empty((2, 3, 64), np.int32)
    run(
        "out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + t] = "
        "blockIdx.y * 10000 + blockIdx.x * 1000 + warp() * 100 + lane();",
        [], out, threads=64, grid=(3, 2, 1),
    )  # fmt: skip
    y, x, t = np.indices((2, 3, 64))
    np.testing.assert_array_equal(out, y * 10000 + x * 1000 + t // 32 * 100 + t % 32)


def test_formats() -> None:
    rng = np.random.default_rng(fresh_seed())
    special = [0, -0.0, 1, 65504, 65519.9, 65520, 1e-8, 6e-8, 3e38, np.inf, -np.inf, np.nan]
    x = np.concatenate([np.float32(special), rng.standard_normal(116).astype(np.float32)])
    # Halfway between two neighbours of either format, a value rounds to the even one.
    x[20:24] = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]
    out = np.empty((5, 128), np.uint32)
    run(
        "const float x = in0[t]; const half h = from_float<half>(x);"
        "const bf16 b = from_float<bf16>(x); out[t] = h.bits; out[128 + t] = b.bits;"
        "out[256 + t] = __float_as_uint(to_float(h)); out[384 + t] = __float_as_uint(to_float(b));"
        "out[512 + t] = pack<half>(x, -x) ^ pack<bf16>(x, x);",
        [x], out, threads=128,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    some = ~np.isnan(x)
    np.testing.assert_array_equal(out[0][some], halves.view(np.uint16)[some])
    np.testing.assert_array_equal(out[2].view(np.float32), halves.astype(np.float32))
    exact = out[3].view(np.float32)
    with np.errstate(invalid="ignore"):
        near = np.abs(exact - x.astype(np.float64)) <= 2.0**-8 * np.abs(x)
    assert (near | np.isinf(x) | (np.isinf(exact) & (np.abs(x) > 3.3e38)))[some].all()
    assert np.isnan(exact[~some]).all()
    np.testing.assert_array_equal(exact[20:24], np.float32([1, 1, 1, 1 + 2**-6]))
    low, high = out[0] ^ out[1], (halves * -1).view(np.uint16) ^ out[1]
    np.testing.assert_array_equal(out[4][some], (low | high << 16)[some])


def test_shuffles() -> None:
    x = np.random.default_rng(fresh_seed()).standard_normal(64).astype(np.float32)
    out = np.empty((5, 64), np.float32)
    run(
        "const float x = in0[t]; out[t] = shuffle(x, (lane() + 3) % 32);"
        "out[64 + t] = shuffle_xor(x, 5); out[128 + t] = shuffle_down(x, 7);"
        "out[192 + t] = warp_sum(x); out[256 + t] = warp_max(x);",
        [x], out, threads=64,
    )  # fmt: skip
    lane = np.arange(32)
    for begin in (0, 32):
        of = x[begin : begin + 32]
        got = out[:, begin : begin + 32]
        np.testing.assert_array_equal(got[0], of[(lane + 3) % 32])
        np.testing.assert_array_equal(got[1], of[lane ^ 5])
        np.testing.assert_array_equal(got[2], np.where(lane + 7 < 32, np.roll(of, -7), of))
        np.testing.assert_allclose(got[3], of.sum(dtype=np.float64), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[4], of.max())


def fragment(register: str, depth: int) -> np.ndarray:
    """The place of each element of a lane's fragment, [lane, element, (row, column)]: PTX ISA,
    "Matrix Fragments for mma.m16n8k8" (.f16) and "... mma.m16n8k16", formula by formula.
    """
    elements = {"a": depth // 2, "b": depth // 4, "c": 4}[register]
    where = np.empty((32, elements, 2), int)
    for lane in range(32):
        group, thread_in_group = lane >> 2, lane % 4
        for i in range(elements):
            match register, depth:
                case "a", 16:
                    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
                    col = thread_in_group * 2 + (i & 1) + (8 if i >= 4 else 0)
                case "a", 8:
                    row = group if i < 2 else group + 8
                    col = thread_in_group * 2 + (i & 1)
                case "b", 16:
                    row = thread_in_group * 2 + (i & 1) + (8 if i >= 2 else 0)
                    col = group
                case "b", 8:
                    row, col = thread_in_group * 2 + i, group
                case _:
                    row = group if i < 2 else group + 8
                    col = thread_in_group * 2 + (i & 1)
            where[lane, i] = row, col
    return where


def as_bf16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bits of values that bfloat16 holds, and the values."""
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("dtype", "depth"), [("half", 16), ("bf16", 16), ("half", 8)])
def test_mma(dtype: str, depth: int) -> None:
    rng = np.random.default_rng(fresh_seed())
    a, b = rng.standard_normal((16, depth)), rng.standard_normal((depth, 8))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    if dtype == "half":
        bits = [x.astype(np.float16).view(np.uint16) for x in (a, b)]
        wide = [x.astype(np.float16).astype(np.float64) for x in (a, b)]
    else:
        both = [as_bf16(x) for x in (a, b)]
        bits, wide = [x for x, _ in both], [x.astype(np.float64) for _, x in both]
    held = [
        np.ascontiguousarray(x[tuple(np.moveaxis(fragment(r, depth), 2, 0))]).view(np.uint32)
        for r, x in zip("ab", bits, strict=True)
    ]
    spots = tuple(np.moveaxis(fragment("c", depth), 2, 0))
    got = np.empty((32, 4), np.float32)
    run(
        f"uint32_t a[{depth // 4}], b[{depth // 8}]; float d[4];"
        f"for (int i = 0; i < {depth // 4}; ++i) a[i] = in0[t * {depth // 4} + i];"
        f"for (int i = 0; i < {depth // 8}; ++i) b[i] = in1[t * {depth // 8} + i];"
        "for (int i = 0; i < 4; ++i) d[i] = in2[t * 4 + i];"
        f"mma_m16n8k{depth}<{dtype}>(d, a, b);"
        "for (int i = 0; i < 4; ++i) out[t * 4 + i] = d[i];",
        [*held, np.ascontiguousarray(c[spots])], got, arch=800 if depth == 16 else 750,
    )  # fmt: skip
    whole = np.empty((16, 8), np.float32)
    whole[spots] = got
    np.testing.assert_allclose(whole, wide[0] @ wide[1] + c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("matrices", [2, 4])
@pytest.mark.parametrize("trans", ["", "_trans"])
def test_ldmatrix(matrices: int, trans: str) -> None:
    """PTX ISA, ldmatrix: of row i / 4, thread i gets the elements 2 (i % 4) and the next."""
    stored = np.random.default_rng(fresh_seed()).integers(0, 1 << 16, (matrices, 8, 8))
    out = np.empty((32, matrices, 2), np.uint16)
    words = np.ascontiguousarray(stored.astype(np.uint16)).view(np.uint32)
    run(
        "GTCO_SHARED(s);"
        f"for (int i = t; i < {words.size}; i += 32) reinterpret_cast<uint32_t*>(s)[i] = in0[i];"
        f"sync_warp(); uint32_t r[{matrices}];"
        f"ldmatrix_x{matrices}{trans}(r, s + t % {8 * matrices} * 16);"
        f"for (int i = 0; i < {matrices}; ++i) "
        f"reinterpret_cast<uint32_t*>(out)[t * {matrices} + i] = r[i];",
        [words], out, shared=words.nbytes,
    )  # fmt: skip
    for lane in range(32):
        for m in range(matrices):
            matrix = stored[m].T if trans else stored[m]
            row, column = lane // 4, 2 * (lane % 4)
            np.testing.assert_array_equal(out[lane, m], matrix[row, column : column + 2])


@pytest.mark.parametrize("arch", [750, 800, 900])
def test_copies_in_stages(arch: int) -> None:
    """Three buffers and one barrier a step: a copy may land while another buffer is read."""
    x = np.random.default_rng(fresh_seed()).integers(0, 1 << 31, (10, 64, 4)).astype(np.uint32)
    out = np.empty((10, 64), np.uint32)
    run(
        "GTCO_SHARED(s); const uint32_t* of = reinterpret_cast<const uint32_t*>(s);"
        "auto fetch = [&](int i) { if (i < 10) copy_16(s + i % 3 * 1024 + t * 16, "
        "in0 + (i * 64 + t) * 4, t < 60); copy_commit(); };"
        "fetch(0); fetch(1);"
        "for (int i = 0; i < 10; ++i) {"
        "  copy_wait<1>(); sync<ALL>();"
        "  const int other = 63 - t; out[i * 64 + t] = of[i % 3 * 256 + other * 4 + 2];"
        "  fetch(i + 2); }",
        [x], out, threads=64, shared=3072, arch=arch,
    )  # fmt: skip
    wanted = x[:, ::-1, 2].copy()
    wanted[:, :4] = 0  # not valid
    np.testing.assert_array_equal(out, wanted)


def test_seed_draws_the_order() -> None:
    """With different seeds, atomic additions come in different orders; with the same seed they do
    not.
    """
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    body = "if (t == 0) out[0] = 0.0f; sync<ALL>(); atomic_add(out, in0[2 * t] + in0[2 * t + 1]);"
    sums = []
    for seed in (1, 1, 2, 3, 4, 5, 6):
        out = np.empty(1, np.float32)
        run(body, [x], out, threads=256, seed=seed)
        sums.append(float(out[0]))
    assert sums[0] == sums[1] and len(set(sums)) > 1
    np.testing.assert_allclose(sums, x.sum(dtype=np.float64), atol=1e-4)


# ---- wrong ones are found

# name: (threads, body, what the message says). Shared memory has 512 bytes, in0 is uint32_t[256],
# out is float[64]; there are two blocks if the name says so.
FAULTS: dict[str, tuple[int, str, str]] = {
    "shared_behind": (32, "w[128 + t] = 1; out[t] = w[128 + t];", "out of bounds: write .* shared"),
    "shared_before": (32, "out[t] = w[t - 64];", "out of bounds: read of 4 bytes at -"),
    "in_behind": (64, "out[t] = in0[t + 200];", "out of bounds: reads .* argument 0"),
    "in_before": (64, "out[t] = in0[t - 1];", "out of bounds: reads 4 bytes at -4 of argument 0"),
    "out_behind": (64, "out[t + 1] = 1;", "out of bounds: writes .* the output"),
    "wild": (32, "out[t] = *reinterpret_cast<const float*>(uint64_t(t) * 8);", "no memory of its"),
    "memcpy_behind": (
        64, "volatile int n = 512; __builtin_memcpy(s + 4, in0, n); out[t] = 0;", "out of bounds"),
    "unwritten": (64, "if (t != 7) w[t] = 1; sync<ALL>(); out[t] = w[t];",
                  "byte 28 .* never written"),
    "race_read": (64, "w[t] = t; out[t] = w[63 - t];", "race: reads|never written"),
    "race_both_write": (64, "w[t / 2] = 1; sync<ALL>(); out[t] = w[t / 2];",
                        "race: writes .* wrote"),
    "race_read_then_write": (
        64, "w[t] = t; sync<ALL>(); out[t] = w[63 - t]; w[t] = 2;", "race: (writes|reads)"),
    "race_second_step": (
        64, "for (int i = 0; i < 2; ++i) { w[t] = t; sync<ALL>(); out[t] = w[t ^ 33]; }", "race"),
    "race_in_warp": (32, "w[t] = t; shuffle(t, 0); out[t] = w[t ^ 1];", "race: reads"),
    "race_half_word": (
        32, "auto h = reinterpret_cast<uint16_t*>(s); h[t] = 1; h[t + 1] = 1; sync<ALL>();"
        "out[t] = h[t];", "race: writes"),
    "copy_not_waited": (32, "copy_16(s + t * 16, in0, true); sync<ALL>(); out[t] = w[t * 4];",
                        "has not been waited for"),
    "copy_not_committed": (
        32, "copy_4(w + t, in0, true); copy_wait<0>(); out[t] = w[t];", "not been waited for"),
    "copy_waited_too_little": (
        32, "copy_4(w + t, in0, true); copy_commit(); copy_wait<1>(); sync<ALL>(); out[t] = w[t];",
        "has not been waited for"),
    "copy_without_barrier": (
        64, "copy_4(w + t, in0, true); copy_commit(); copy_wait<0>(); out[t] = w[63 - t];",
        "race|waited|never written"),
    "copy_over_what_is_read": (
        64, "w[t] = 1; sync<ALL>(); out[t] = w[63 - t]; copy_4(w + t, in0, true); copy_commit();"
        "copy_wait<0>();", "race|reads byte"),
    "copy_twice": (
        32, "copy_4(w + t, in0, true); copy_4(w + t, in0, true); copy_commit(); copy_wait<0>();"
        "out[t] = w[t];", "under way"),
    "copy_misaligned": (
        32, "copy_16(s + t * 8, in0, true); copy_commit(); copy_wait<0>(); out[t] = 0;",
        "copy of 16 bytes to shared memory at"),
    "copy_from_misaligned": (
        32, "copy_16(s + t * 16, in0 + 1, true); copy_commit(); copy_wait<0>(); out[t] = 0;",
        "which is not aligned"),
    "copy_from_behind": (
        32, "copy_16(s + t * 16, in0 + 8 * t + 16, true); copy_commit(); out[t] = 0;",
        "out of bounds: reads 16 bytes"),
    "misaligned": (
        32, "out[t] = reinterpret_cast<const uint4*>(in0 + 1)->x + uint4(*reinterpret_cast<"
        "const uint4*>(in0 + 1)).x;", "not aligned"),
    "ldmatrix_misaligned": (
        32, "for (int i = t; i < 128; i += 32) w[i] = i; sync<ALL>(); uint32_t r[4];"
        "ldmatrix_x4(r, s + t * 8); out[t] = r[0];", "not a multiple of 16"),
    "ldmatrix_of_global": (
        32, "uint32_t r[4]; ldmatrix_x4(r, in0); out[t] = r[0];", "not in shared memory"),
    "barrier_diverges": (64, "if (t < 32) sync<ALL>(); out[t] = 0;", "divergent: .* have ended"),
    "barrier_in_half_a_warp": (64, "if (t % 2) sync<ALL>(); out[t] = warp_sum(t);", "divergent"),
    "barriers_of_two_lines": (
        64, "if (t % 2) {\n sync<ALL>();\n out[t] = 1;\n } else {\n sync<ALL>();\n out[t] = 2;\n }",
        "divergent: threads of one warp meet at"),
    "shuffle_diverges": (32, "out[t] = t < 16 ? shuffle(t, 0) : 0;", "divergent"),
    "shuffles_differ": (
        32, "if (t % 2) out[t] = shuffle_xor(t, 1); else out[t] = shuffle_down(t, 1);",
        "divergent: comes to"),
    "shuffle_of_no_lane": (32, "out[t] = shuffle(t, 32);", "shuffle of lane 32"),
    "half_a_warp": (48, "out[t] = warp_sum(1.0f);", "in a warp of 16 threads"),
    "leaves_early": (64, "if (t == 5) return; sync<ALL>(); out[t] = 0;",
                     "divergent: .* have ended"),
    "writes_input": (32, "const_cast<uint32_t*>(in0)[t] = 1; out[t] = 0;", "which is an input"),
    "output_not_written": (60, "out[t] = 0;", "16 of 256 bytes .* the first at 240"),
    "output_read": (64, "out[t] += 1;", "reads byte .* the output, which was never written"),
    "output_race": (64, "out[t / 2] = 1; out[32 + t / 2] = 1;", "race: writes .* the output"),
    "output_of_two_blocks": (64, "out[t] = blockIdx.x;", "race: writes .* that block"),
    "others_local": (
        32, "float mine[4] = {1.0f * t, 2, 3, 4}; auto p = reinterpret_cast<float**>(s);"
        "if (t == 0) p[0] = mine; sync<ALL>(); out[t] = p[0][t % 4];",
        "a local variable of thread"),
}  # fmt: skip


@functools.cache
def faults_source() -> str:
    begin = "  GTCO_SHARED(s); auto w = reinterpret_cast<uint32_t*>(s); (void)w;\n"
    of = (
        kernel(name, begin + body, ["uint32_t"], "float", threads)
        for name, (threads, body, _) in FAULTS.items()
    )
    return HEADER + "".join(of)


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    threads, _, message = FAULTS[name]
    program = CudaProgram(faults_source(), (2 if "two_blocks" in name else 1, 1, 1), threads, 512)
    with pytest.raises(Fault, match=message) as found:
        emulate(program, name, [np.arange(256, dtype=np.uint32)], np.empty(64, np.float32))
    if name != "output_not_written":
        assert "kernel:" in str(found.value), "a fault names its line"


def test_uninitialised_array_spoils_the_result() -> None:
    out = np.empty(32, np.float32)
    body = "float of[8]; of[in0[t] % 4] = 1; const float* end = of + in0[32]; out[t] = end[-1];"
    run(body, [np.append(np.zeros(32, np.uint32), np.uint32(8))], out)
    assert (np.abs(out) > 1e30).all()


def test_uninitialised_variable_is_refused() -> None:
    with pytest.raises(Fault, match="uninitialized"):
        run("float sum; for (int i = 0; i < 4; ++i) sum += in0[i]; out[t] = sum;",
            [np.ones(4, np.float32)], np.empty(32, np.float32))  # fmt: skip


# ---- figures


def conflicts(index: str) -> int:
    out = np.empty(32, np.float32)
    report = run(
        "GTCO_SHARED(s); auto w = reinterpret_cast<float*>(s);"
        "for (int i = t; i < 2048; i += 32) w[i] = i;\nsync<ALL>();\n"
        f"out[t] = w[{index}];",
        [], out, shared=8192,
    )  # fmt: skip
    return report.bank_conflicts


@pytest.mark.parametrize(
    ("index", "wanted"),
    [("t", 0), ("0", 0), ("t * 32", 31), ("t * 33", 0), ("t * 2", 1), ("t / 2 * 64", 15)],
)
def test_bank_conflicts(index: str, wanted: int) -> None:
    assert conflicts(index) == wanted


@pytest.mark.parametrize(("stride", "wanted"), [(16, 0), (128, 4 * 7), (64, 4 * 3), (144, 0)])
def test_bank_conflicts_of_ldmatrix(stride: int, wanted: int) -> None:
    report = run(
        "GTCO_SHARED(s); for (int i = t; i < 1200; i += 32) reinterpret_cast<float*>(s)[i] = i;\n"
        f"sync<ALL>();\nuint32_t r[4];\nldmatrix_x4(r, s + t * {stride});\nout[t] = r[0] + r[3];",
        [], np.empty(32, np.uint32), shared=4800,
    )  # fmt: skip
    of = [s for s in report.sites if s.kind == "ldmatrix"]
    assert [s.passes - s.least for s in of] == [wanted] and [s.least for s in of] == [4]
    assert {s.line for s in report.conflicts} == ({of[0].line} if wanted else set())
    assert of[0].line.startswith("kernel:")


@pytest.mark.parametrize(("stride", "wanted"), [(1, 1.0), (8, 8.0), (2, 2.0)])
def test_sectors(stride: int, wanted: float) -> None:
    report = run(f"out[t] = in0[t * {stride}];", [np.zeros(32 * 8, np.float32)],
                 np.empty(32, np.float32))  # fmt: skip
    read = [s for s in report.sites if s.kind == "global read"]
    assert sum(s.passes for s in read) / sum(s.least for s in read) == wanted
    assert report.sector_ratio == (wanted + 1) / 2


def test_vectors_are_one_access() -> None:
    report = run(
        "reinterpret_cast<float4*>(out)[t] = reinterpret_cast<const float4*>(in0)[t];",
        [np.arange(128, dtype=np.float32)], out := np.empty(128, np.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.arange(128))
    assert sorted((s.kind, s.bytes, s.requests) for s in report.sites) == [
        ("global read", 16, 1),
        ("global write", 16, 1),
    ]


# ---- kernels by symbol, for a driver


def test_kernels_of_a_library() -> None:
    """Two kernels behind one interface; a fault is reported with the name of its kernel."""
    names = {"twice": "out[t] = 2 * in0[t];", "turn": "out[t] = in0[32 - t];"}
    kernels = {
        name: (
            CudaProgram(HEADER + kernel(name, body, ["float"], "float"), (1, 1, 1), 32),
            (128, 128),
        )
        for name, body in names.items()
    }
    path = build_shared(kernels)
    library = ctypes.CDLL(str(path))
    x, out = np.arange(32, dtype=np.float32), np.empty(32, np.float32)
    arguments, grid = (
        (ctypes.c_void_p * 2)(x.ctypes.data, out.ctypes.data),
        (ctypes.c_uint * 3)(1, 1, 1),
    )
    assert ctypes.c_int.in_dll(library, "twice_count").value == 2
    library.twice(arguments, grid, 32, 0)
    np.testing.assert_array_equal(out, 2 * x)
    assert faults_of(path) == [] and library.gtco_launches() == 1
    library.turn(arguments, grid, 32, 0)
    (found,) = faults_of(path)
    assert found.startswith("turn: block (0, 0, 0), thread 0: out of bounds: reads")
    assert "kernel:5" in found
