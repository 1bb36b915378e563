"""The register level of GPUs: each row against its own meaning, each layout against the formulas of
the PTX manual, and the emulated instructions against both.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.cuda.tensor_core import (
    EMITTED,
    MOVES,
    ROWS,
    Fragment,
    TensorCoreRow,
    emitted_rows,
    rows,
    sums_64,
)
from tests.cuda.emulate import emulate
from tests.kernels import fresh_seed


def fragments(row: TensorCoreRow) -> list[tuple[Fragment, tuple[int, int]]]:
    m, n, k = row.extents
    found = []
    for operand, shape in ((row.a, (m, k)), (row.b, (k, n)), (row.c, (m, n))):
        if operand.fragment is not None:
            found.append((operand.fragment, shape))
    return found


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_element_is_held(row: TensorCoreRow) -> None:
    """Fragments hold their whole matrices and nothing else. If lanes do not share an operand, its
    fragments hold each element once.
    """
    for fragment, shape in fragments(row):
        held = set(fragment.places.values())
        every = {(i, j, g) for i, j in product(*map(range, shape)) for g in range(row.batch)}
        assert held == every, f"{row.name}: {shape}"
        if row.unit != "fma":
            assert fragment.lanes * fragment.elements == len(every)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_means_what_it_says(row: TensorCoreRow) -> None:
    """The matrices are distributed to lanes, if the layout is known, multiplied there and collected
    again; the result is their product.
    """
    rng = np.random.default_rng(fresh_seed())
    m, n, k = row.extents
    a, b, c = (
        rng.integers(-8, 9, (row.batch, *shape)).astype(np.float64)
        for shape in ((m, k), (k, n), (m, n))
    )
    known = [operand.fragment for operand in (row.a, row.b, row.c)]
    dealt = [f.deal(x) if f else x for f, x in zip(known, (a, b, c), strict=True)]
    got = row.run(*dealt)
    last = known[-1]
    np.testing.assert_array_equal(last.collect(got, c.shape) if last else got, c + a @ b)


# The PTX manual's words for lane and element, of 16-bit operands and float32 sums: groupID = lane
# >> 2, threadID_in_group = lane % 4.
def a_m16n8k16(lane: int, i: int) -> tuple[int, int, int]:
    row = lane // 4 if i < 2 or 4 <= i < 6 else lane // 4 + 8
    return row, lane % 4 * 2 + (i & 1) + (0 if i < 4 else 8), 0


def b_m16n8k16(lane: int, i: int) -> tuple[int, int, int]:
    return lane % 4 * 2 + (i & 1) + (0 if i < 2 else 8), lane // 4, 0


def c_m16n8(lane: int, i: int) -> tuple[int, int, int]:
    return (lane // 4 if i < 2 else lane // 4 + 8), lane % 4 * 2 + (i & 1), 0


def a_m16n8k8(lane: int, i: int) -> tuple[int, int, int]:
    return (lane // 4 if i < 2 else lane // 4 + 8), lane % 4 * 2 + (i & 1), 0


def b_m16n8k8(lane: int, i: int) -> tuple[int, int, int]:
    return lane % 4 * 2 + i, lane // 4, 0


def quad_pair(lane: int) -> int:
    """For m8n8k4: lanes 0-3 and 16-19 make the first of four products, and so on."""
    return lane % 16 // 4


def a_m8n8k4(lane: int, i: int) -> tuple[int, int, int]:
    return lane % 4 if lane < 16 else lane % 4 + 4, i, quad_pair(lane)


def b_m8n8k4(lane: int, i: int) -> tuple[int, int, int]:
    return i, lane % 4 if lane < 16 else lane % 4 + 4, quad_pair(lane)


def c_m8n8k4(lane: int, i: int) -> tuple[int, int, int]:
    x = (lane & 1) + (i & 2)
    return x if lane < 16 else x + 4, (i & 4) + (lane & 2) + (i & 1), quad_pair(lane)


def a_wgmma(lane: int, i: int) -> tuple[int, int, int]:
    row, column, _ = a_m16n8k16(lane % 32, i)
    return lane // 32 * 16 + row, column, 0


def c_wgmma(lane: int, i: int) -> tuple[int, int, int]:
    return lane // 32 * 16 + lane % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2, 0


Formula = Callable[[int, int], tuple[int, int, int]]
MANUAL: dict[str, tuple[Fragment | None, Formula]] = {
    "a of m16n8k16": (ROWS["mma.m16n8k16"].a.fragment, a_m16n8k16),
    "b of m16n8k16": (ROWS["mma.m16n8k16"].b.fragment, b_m16n8k16),
    "c of m16n8k16": (ROWS["mma.m16n8k16"].c.fragment, c_m16n8),
    "a of m16n8k8": (ROWS["mma.m16n8k8"].a.fragment, a_m16n8k8),
    "b of m16n8k8": (ROWS["mma.m16n8k8"].b.fragment, b_m16n8k8),
    "c of m16n8k8": (ROWS["mma.m16n8k8"].c.fragment, c_m16n8),
    "a of m8n8k4": (ROWS["mma.m8n8k4"].a.fragment, a_m8n8k4),
    "b of m8n8k4": (ROWS["mma.m8n8k4"].b.fragment, b_m8n8k4),
    "c of m8n8k4": (ROWS["mma.m8n8k4"].c.fragment, c_m8n8k4),
    "a of wgmma": (ROWS["wgmma.m64n8k16"].a.fragment, a_wgmma),
    "c of wgmma": (sums_64(48), c_wgmma),
    "ldmatrix": (MOVES["ldmatrix.x4"].fragment, lambda lane, i: (lane // 4, lane % 4 * 2 + i, 0)),
    "ldmatrix.trans": (
        MOVES["ldmatrix.x4.trans"].fragment,
        lambda lane, i: (lane % 4 * 2 + i, lane // 4, 0),
    ),
}


@pytest.mark.parametrize(("fragment", "formula"), MANUAL.values(), ids=MANUAL)
def test_layouts_are_those_of_the_manual(fragment: Fragment | None, formula: Formula) -> None:
    assert fragment is not None
    for (lane, i), place in fragment.places.items():
        assert place == formula(lane, i), f"element {i} of lane {lane}"


KERNEL = """
#include "gtco/device.cuh"
extern "C" __global__ void multiply(const uint32_t* a, const uint32_t* b, const float* c,
                                    float* out) {{
  uint32_t mine_a[{a}], mine_b[{b}];
  float sums[4];
  for (int i = 0; i < {a}; ++i) mine_a[i] = a[threadIdx.x * {a} + i];
  for (int i = 0; i < {b}; ++i) mine_b[i] = b[threadIdx.x * {b} + i];
  for (int i = 0; i < 4; ++i) sums[i] = c[threadIdx.x * 4 + i];
  gtco::mma_{name}<{format}>(sums, mine_a, mine_b);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = sums[i];
}}
"""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("m16n8k16", "float16"), ("m16n8k16", "bfloat16"), ("m16n8k8", "float16")],
)
def test_the_instruction_computes_what_the_row_means(name: str, dtype: str) -> None:
    """The row's layouts distribute the operands. The result is exact, since the elements are small
    integers.
    """
    row = ROWS[f"mma.{name}"]
    rng = np.random.default_rng(fresh_seed())
    m, n, k = row.extents
    a, b, c = (rng.integers(-8, 9, (1, *shape)) for shape in ((m, k), (k, n), (m, n)))
    (fa, _), (fb, _), (fc, _) = fragments(row)
    format_ = {"float16": "half", "bfloat16": "bf16"}[dtype]
    text = KERNEL.format(a=fa.elements // 2, b=fb.elements // 2, name=name, format=format_)
    arrays = [f.deal(x.astype(np.dtype(dtype))).view(np.uint32) for f, x in ((fa, a), (fb, b))]
    given = fc.deal(c.astype(np.float32))
    out = np.empty_like(given)
    emulate(CudaProgram(text, (1, 1, 1), 32), "multiply", [*arrays, given], out)
    np.testing.assert_array_equal(fc.collect(out, c.shape), c + a @ b)


# Rows that no kernel is made of, by the names that the row has for its instructions; eights of
# registers each, of m8n8k4 two for either operand.
HIDDEN = """{{ .reg .b32 a<8>, b<8>; .reg .f32 c<8>;
{load_a}.sync.aligned.row.{shape}.global.f16 {{{a}}}, [%0];
{load_b}.sync.aligned.col.{shape}.global.f16 {{{b}}}, [%1];
{load_c}.sync.aligned.row.{shape}.global.f32 {{{c}}}, [%2];
wmma.mma.sync.aligned.row.col.{shape}.f32.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};
{store_d}.sync.aligned.row.{shape}.global.f32 [%2], {{{c}}}; }}"""
QUADS = """{{ .reg .b32 a<2>, b<2>; .reg .f32 c<8>;
ld.global.v2.b32 {{a0,a1}}, [%0]; ld.global.v2.b32 {{b0,b1}}, [%1];
ld.global.v4.f32 {{c0,c1,c2,c3}}, [%2]; ld.global.v4.f32 {{c4,c5,c6,c7}}, [%2+16];
mma.sync.aligned.{shape}.row.col.f32.f16.f16.f32 {{{c}}}, {{a0,a1}}, {{b0,b1}}, {{{c}}};
st.global.v4.f32 [%2], {{c0,c1,c2,c3}}; st.global.v4.f32 [%2+16], {{c4,c5,c6,c7}}; }}"""
# The product of one machine instruction; Turing's m8n8k4 is four steps of one.
MACHINE = {"HMMA.1688": 2 * 16 * 8 * 8, "HMMA.16816": 2 * 16 * 8 * 16, "HMMA.884": 4 * 2 * 8 * 8}


def machine_products(row: TensorCoreRow, arch: str) -> int:
    """The FLOPs of Tensor Cores in the machine code of the row's instruction."""
    unit, shape = row.name.split(".")
    registers = {x: ",".join(f"{x}{i}" for i in range(8)) for x in "abc"}
    text = (HIDDEN if unit == "wmma" else QUADS).format(
        shape=shape,
        load_a=row.a.load,
        load_b=row.b.load,
        load_c=row.c.load,
        store_d=row.c.store,
        **registers,
    )
    lines = "\n".join(f'    "{line}\\n"' for line in text.splitlines())
    source = (
        '#include "gtco/device.cuh"\n'
        'extern "C" __global__ void row(const half* a, const half* b, float* c) {\n'
        f'  asm volatile(\n{lines} :: "l"(a), "l"(b), "l"(c) : "memory");\n}}\n'
    )
    code = machine_code(compile_cuda(source, arch).cubin)["row"]
    return sum(
        n * flops
        for name, n in code.instructions.items()
        for stem, flops in MACHINE.items()
        if name.startswith(f"{stem}.")
    )


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("wmma.")])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_instruction_with_hidden_layouts_multiplies_as_much_as_its_row(
    name: str, arch: str
) -> None:
    assert ROWS[name].admitted(gpu_target(f"cuda:{arch}"), "float16")
    assert machine_products(ROWS[name], arch) == ROWS[name].flops


def test_quad_pairs_are_tensor_cores_on_turing_alone() -> None:
    """As its ``until`` says: later GPUs multiply it on CUDA cores."""
    row = ROWS["mma.m8n8k4"]
    for arch in ARCHITECTURES:
        there = row.admitted(gpu_target(f"cuda:{arch}"), "float16")
        assert there is (arch == "sm_75")
        assert machine_products(row, arch) == (row.flops if there else 0)


def test_targets_have_the_rows_of_their_architecture() -> None:
    def names(target: str, operand: str) -> set[str]:
        return {row.name for row in rows(gpu_target(target), operand)}

    assert {"mma.m16n8k8", "mma.m8n8k4", "wmma.m8n32k16", "fma"} <= names("cuda:sm_75", "float16")
    assert names("cuda:sm_75", "bfloat16") == names("cuda:sm_90a", "float32") == {"fma"}
    assert "mma.m8n8k4" not in names("cuda:sm_80", "float16")
    assert "wgmma.m64n256k16" in names("cuda:sm_90a", "bfloat16")
    assert "wgmma.m64n256k16" not in names("cuda:sm_89", "bfloat16")


@pytest.mark.parametrize(
    ("target", "operand", "best"),
    [
        ("cuda:sm_75", "float16", "mma.m16n8k8"),
        ("cuda:sm_75", "bfloat16", "fma"),
        ("cuda:sm_80", "bfloat16", "mma.m16n8k16"),
        ("cuda:sm_90a", "float32", "fma"),
        ("cuda:sm_80,sm_75", "float16", "mma.m16n8k8"),  # an image for both
    ],
)
def test_kernels_are_made_of_the_best_row_of_all_images(
    target: str, operand: str, best: str
) -> None:
    found = emitted_rows(gpu_target(target), operand)
    assert found[0].name == best and found[-1].name == "fma"
    assert {row.name for row in found} <= set(EMITTED)
