"""What machine code says of itself: registers, spills, instructions of Tensor Cores."""

from __future__ import annotations

import pytest

from gtco.codegen import sass
from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.errors import BuildError

PRODUCT = """#include "gtco/device.cuh"
extern "C" __global__ void __launch_bounds__(32) product(const half* x, float* y) {
  GTCO_SHARED(room);
  gtco::copy_16(room + threadIdx.x * 16, x + threadIdx.x * 8, true);
  gtco::copy_commit();
  gtco::copy_wait<0>();
  gtco::sync();
  uint32_t a[4], b[2];
  float d[4] = {0, 0, 0, 0};
  gtco::ldmatrix_x4(a, room + threadIdx.x * 16);
  gtco::ldmatrix_x2(b, room + threadIdx.x % 16 * 16);
  if constexpr (GTCO_ARCH >= 800) {
    gtco::mma_m16n8k16<half>(d, a, b);
  } else {
    const uint32_t upper[2] = {a[0], a[1]}, left[1] = {b[0]};
    gtco::mma_m16n8k8<half>(d, upper, left);
  }
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = d[i];
}
"""
# An array whose index is not known lies in memory.
INDEXED = """extern "C" __global__ void indexed(const int* x, float* y) {
  float of[40];
  for (int i = 0; i < 40; ++i) of[i] = y[i];
  for (int i = 0; i < 40; ++i) of[x[i]] += 1.0f;
  for (int i = 0; i < 40; ++i) y[i] = of[i];
}
"""


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a"])
def test_products_are_seen(arch: str) -> None:
    image = compile_cuda(PRODUCT, arch)
    code = machine_code(image.cubin)["product"]
    assert code.tensor_core == 1 and code.count("LDSM") == 2 and code.spilled == 0
    assert code.count("LDGSTS") == (0 if arch == "sm_75" else 1)  # copies past the registers
    assert code.registers == image.registers
    assert code.shared == image.shared + (1024 if arch == "sm_90a" else 0)
    assert code.stack == code.local == 0


def test_arrays_in_memory_are_seen() -> None:
    image = compile_cuda(INDEXED, "sm_80")
    code = machine_code(image.cubin)["indexed"]
    assert code.spilled > 0 and code.stack == image.local == 160 and code.tensor_core == 0


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(BuildError, match="cuobjdump cannot read the image"):
        machine_code(b"\x7fELF, but no image")


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match="pip install nvidia-cuda-cuobjdump"):
        machine_code(b"")
