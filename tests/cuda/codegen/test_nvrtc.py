"""NVRTC: machine code for every architecture without a GPU, and the errors when it cannot be
made.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from gtco.codegen import nvrtc, sass
from gtco.codegen.cuda import gpu_code, listing
from gtco.codegen.nvrtc import Image
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.support.errors import BuildError
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Rejection

SCALE = """#include "gtco/device.cuh"
extern "C" __global__ void __launch_bounds__(128) scale(const half* x, float* y) {
  GTCO_SHARED(room);
  float* kept = reinterpret_cast<float*>(room);
  kept[threadIdx.x] = gtco::to_float(x[blockIdx.x * 128 + threadIdx.x]);
  gtco::sync<128>();
  y[blockIdx.x * 128 + threadIdx.x] = 2.0f * kept[127 - threadIdx.x];
}
"""
# each thread keeps 200 sums and uses them in turn
HUNGRY = """extern "C" __global__ void hungry(const float* x, float* y, int n) {
  float sums[200];
  for (int i = 0; i < 200; i++) sums[i] = x[i * n + threadIdx.x];
  for (int j = 0; j < n; j++)
    for (int i = 0; i < 200; i++) sums[i] = sums[i] * sums[(i + 7) % 200] + x[i];
  for (int i = 0; i < 200; i++) y[i * n + threadIdx.x] = sums[i];
}
"""

# 64 sums in registers: every index is known
FULL = """extern "C" __global__ void full(const float* x, float* y, int n) {
  float sums[64];
#pragma unroll
  for (int i = 0; i < 64; i++) sums[i] = x[i * n + threadIdx.x];
  for (int j = 0; j < n; j++)
#pragma unroll
    for (int i = 0; i < 64; i++) sums[i] = sums[i] * x[j * n + i] + sums[(i + 7) % 64];
#pragma unroll
  for (int i = 0; i < 64; i++) y[i * n + threadIdx.x] = sums[i];
}
"""


def program(**changed: object) -> CudaProgram:
    given = {"source": SCALE, "grid": (4, 1, 1), "threads": 128, "shared": 512, **changed}
    return CudaProgram(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_becomes_machine_code(arch):
    image = nvrtc.compile_cuda(SCALE, arch)
    assert image.cubin.startswith(b"\x7fELF") and b"scale" in image.cubin
    # e_machine of CUDA, and the architecture in the flags
    assert int.from_bytes(image.cubin[18:20], "little") == 190
    assert 0 < image.registers < 64 and image.spills == image.local == image.shared == 0


@pytest.mark.parametrize("before", ["", "#define GTCO_PERSISTENT\n"])
def test_all_headers_go_together(before):
    """No two of them give one name to different things."""
    names = {path.name for path in nvrtc.DEVICE.glob("gtco/*.cuh")}
    assert len(names) > 10
    includes = [f'#include "gtco/{n}"\n' for n in sorted(names - {"persistent.cuh"})]
    if before:
        includes.append('#include "gtco/persistent.cuh"\n')
    nvrtc.compile_cuda("".join([before, *includes, SCALE]), "sm_80")


def test_registers_are_capped_and_spills_are_seen():
    bound = HUNGRY.replace("void hungry", "void __launch_bounds__(1024) hungry")
    free, capped = (nvrtc.compile_cuda(text, "sm_80") for text in (HUNGRY, bound))
    assert free.registers > 64 >= capped.registers
    assert capped.spills > free.spills and capped.local > 0


def test_static_shared_memory_is_seen():
    text = """extern "C" __global__ void turned(float* y) {
      __shared__ float s[300];
      s[threadIdx.x] = y[threadIdx.x]; __syncthreads(); y[threadIdx.x] = s[299 - threadIdx.x];
    }"""
    assert nvrtc.compile_cuda(text, "sm_75").shared == 1200


def test_what_the_compiler_refuses_is_told():
    with pytest.raises(BuildError, match=r"refuses the kernel for sm_80.*\"nothing\" is undefined"):
        nvrtc.compile_cuda(SCALE.replace("2.0f", "nothing"), "sm_80")


def test_missing_bindings_name_the_extra(monkeypatch):
    nvrtc.library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        with pytest.raises(BuildError, match=r"needs NVRTC.*pip install -e '\.\[cuda\]'"):
            nvrtc.compile_cuda(SCALE, "sm_80")
    finally:
        nvrtc.library.cache_clear()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (RuntimeError("libnvrtc.so.13 not found\nmore"), "libnvrtc.so.13 not found"),
        ((0, 12, 8), "12.8"),
    ],
)
def test_a_library_that_is_missing_or_too_old_names_the_extra(monkeypatch, version, reason):
    from cuda.bindings import nvrtc as bindings

    def answer() -> object:
        if isinstance(version, Exception):
            raise version
        return version

    nvrtc.library.cache_clear()
    monkeypatch.setattr(bindings, "nvrtcVersion", answer)
    try:
        with pytest.raises(BuildError, match=rf"{reason}.*-e '\.\[cuda\]'"):
            nvrtc.library()
    finally:
        nvrtc.library.cache_clear()


def test_a_program_has_an_image_for_each_architecture():
    images = gpu_code(program(), gpu_target("cuda:sm_80,sm_90a"))
    assert not isinstance(images, Rejection) and list(images) == ["sm_80", "sm_90a"]
    assert images["sm_80"].cubin != images["sm_90a"].cubin
    text = listing(program(), images)
    assert "// 4 x 1 x 1 blocks of 128 threads with 512 bytes" in text and text.endswith(SCALE)
    assert "// sm_90a:" in text and "0 bytes spilled" in text


def test_nothing_is_spilled_for_more_blocks_side_by_side() -> None:
    text = FULL.replace("void full", "void __launch_bounds__(128) full")
    free = nvrtc.compile_cuda(text, "sm_80")
    assert free.registers > 64 and not free.spills
    more = program(source=text, grid=(2000, 1, 1), shared=0, registers=32)
    images = gpu_code(more, gpu_target("cuda:sm_80"))
    assert not isinstance(images, Rejection)
    assert images["sm_80"].registers == free.registers and not images["sm_80"].spills


@pytest.mark.parametrize("told", ["128", "128, 1"])
def test_a_kernel_that_spills_is_told_of_fewer_blocks(told: str) -> None:
    """It is compiled for three quarters of the blocks that fit, whatever its own text says; the
    text of attention says one.
    """
    asked: list[str] = []

    def compiler(source: str, arch: str, ptx: bool) -> Image:
        asked.append(source)
        return Image(b"", "", 128, 0, 0, 8 if source == text else 0)

    text = SCALE.replace("(128)", f"({told})")
    images = gpu_code(program(source=text), gpu_target("cuda:sm_80"), compiler=compiler)
    assert not isinstance(images, Rejection) and not images["sm_80"].spills
    assert asked == [text, SCALE.replace("(128)", "(128, 3)")]


@pytest.mark.parametrize("source", [HUNGRY, SCALE.replace("(128)", "(128, 1)")])
def test_what_would_be_told_the_same_is_compiled_once(source: str) -> None:
    """A text without bounds, and a text for one block, which has all registers already."""
    asked: list[str] = []

    def compiler(source: str, arch: str, ptx: bool) -> Image:
        asked.append(source)
        return Image(b"", "", 255, 0, 0, 8)

    images = gpu_code(program(source=source), gpu_target("cuda:sm_80"), compiler=compiler)
    assert not isinstance(images, Rejection) and images["sm_80"].spills == 8
    assert asked == [source]


def test_one_of_the_images_has_ptx_where_it_is_asked_for(tmp_path):
    target = gpu_target("cuda:sm_75,sm_90a,sm_80")
    images = gpu_code(program(), target, ptx=True)
    assert not isinstance(images, Rejection)
    assert [arch for arch, image in images.items() if image.ptx] == ["sm_80"]
    text = images["sm_80"].ptx.decode()
    assert text.startswith(".version 9.0\n.target sm_80\n") and ".entry scale(" in text
    assert not {line[:1] for line in text.splitlines()} & {"", "\t", "/"}  # a third of it
    without = gpu_code(program(), target)
    assert not isinstance(without, Rejection) and not any(i.ptx for i in without.values())
    # as a driver of such a GPU does
    (tmp_path / "scale.ptx").write_text(text)
    for newer in ("sm_100", "sm_120"):
        out = tmp_path / f"{newer}.cubin"
        command = [sass.tool("ptxas"), f"-arch={newer}", tmp_path / "scale.ptx", "-o", out]
        subprocess.run(command, check=True)
        assert sass.machine_code(out.read_bytes())["scale"].count("STG") > 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"grid": (0, 1, 1)}, "grid"),
        ({"threads": 1056}, "threads"),
        ({"shared": 65 << 10}, "shared memory"),  # 64 KiB on the older of the two
        ({"source": HUNGRY, "threads": 1024}, "registers"),
    ],
)
def test_what_no_gpu_could_launch_is_rejected(changed, reason):
    rejected = gpu_code(program(**changed), gpu_target("cuda:sm_80,sm_75"))
    assert isinstance(rejected, Rejection) and rejected.reason == reason
