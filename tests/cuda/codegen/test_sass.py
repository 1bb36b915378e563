"""What machine code shows: registers, spills, and instructions of Tensor Cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from gtco.codegen import sass
from gtco.codegen.jobs import GpuKernel
from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import MachineCode, machine_code
from gtco.driver.phases import Built
from gtco.machine.gpu import ARCHITECTURES, GpuTarget, gpu_target
from gtco.search.gpu.policy import occupancy
from gtco.support.errors import BuildError
from gtco.tensor.cuda.program import Launch
from tests.cuda.compiling import Compiling, Once, persistent_kernel
from tests.cuda.sass_loops import ahead_of_wait
from tests.models.test_models import TINY, seeded

PRODUCT = """#include "gtco/device.cuh"
extern "C" __global__ void __launch_bounds__(32) product(const half* x, float* y) {
  GTCO_SHARED(room);
  gtco::copy_16(room + threadIdx.x * 16, x + threadIdx.x * 8, true);
  gtco::copy_commit();
  gtco::copy_wait<0>();
  gtco::sync<32>();
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
# An array whose index is not known is in memory.
INDEXED = """extern "C" __global__ void indexed(const int* x, float* y) {
  float of[40];
  for (int i = 0; i < 40; ++i) of[i] = y[i];
  for (int i = 0; i < 40; ++i) of[x[i]] += 1.0f;
  for (int i = 0; i < 40; ++i) y[i] = of[i];
}
"""
FEW = 64  # bytes that a thread may spill: values kept across the loop, not those used in it
# Registers of the persistent kernel beyond those of its greediest stage: the walk keeps some, and
# ptxas leaves some unused between functions.
WALK = 40
# Instructions of Tensor Cores come from these headers; no other kernel is searched for them.
MULTIPLY = ("gtco/gemm.cuh", "gtco/attention.cuh")


@pytest.mark.parametrize("arch", ARCHITECTURES)
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


# Each takes 10 s; the others are in ``make check-cuda``.
IN_TESTS = ("sm_90a",)
WHOLE = [
    pytest.param(arch, marks=[] if arch in IN_TESTS else [pytest.mark.scheduled])
    for arch in ARCHITECTURES
]


@pytest.mark.parametrize("arch", WHOLE)
def test_the_stages_of_a_vision_transformer(
    tmp_path: Path, tiny: Once, compiling: Compiling, arch: str
) -> None:
    _, built = tiny.compiled(tmp_path, f"cuda:{arch}", compiling, precision="fp16")
    assert stages_are_as_reckoned(built, compiling)


@pytest.mark.parametrize("arch", WHOLE)
def test_the_persistent_kernel_of_a_vision_transformer(
    tmp_path: Path, tiny: Once, compiling: Compiling, arch: str
) -> None:
    _, built = tiny.compiled(tmp_path, f"cuda:{arch}", compiling, precision="fp16")
    kernel = persistent_kernel(built, compiling)
    code = machine_code(kernel.images[arch])[kernel.symbol]
    assert code.tensor_core > 0 and code.spilled == 0 and kernel.info["spilled_bytes"][arch] == 0
    # the compiler assumes that no warp diverges: shuffles and barriers have no second form
    assert code.count("BRA") > 0 and not {"BRA.DIV", "BRA.CONV"} & set(code.instructions)
    # Values of another block are read by loads of global memory, which see them. None is read
    # through the cache of constants, as the constants of a single kernel are.
    assert code.count("LDG") > 0 == code.count("LD", "ST")
    assert not [name for name in code.instructions if "CONSTANT" in name]
    images = [of.images[arch] for of in built.generated.kernels.values()]  # type: ignore[attr-defined]
    single = (code for of in images for code in machine_code(of.cubin).values())
    constants = any("CONSTANT" in name for code in single for name in code.instructions)
    assert constants, "the test would not see them"
    # The barrier of all blocks has a fence and one arrival, and after it L1 is not trusted. The
    # same holds for a product whose tiles blocks share.
    shared = sum(bool(of.counters) for of in built.generated.kernels.values())  # type: ignore[attr-defined]
    assert code.count("MEMBAR") > 0 and code.count("ATOMG", "ATOM", "REDG") == 1 + shared
    assert code.instructions["CCTL.IVALL"] > 0 and code.count("CCTL") > 1  # and prefetches
    assert code.registers <= max(image.registers for image in images) + WALK
    used = Launch(1, kernel.threads, kernel.shared, code.registers, "fma", *[0.0] * 6)
    assert occupancy(used, gpu_target(f"cuda:{arch}")).blocks >= 1


def test_nothing_of_other_kernels_is_touched_before_they_have_ended(
    tmp_path: Path, tiny: Once, compiling: Compiling
) -> None:
    """In a graph for sm_90a a kernel begins while the one before it still writes its inputs. Only
    the first slices of packed weights may be on their way by then.
    """
    _, built = tiny.compiled(tmp_path, "cuda:sm_90a", compiling, precision="fp16")
    early = 0
    for kernel in built.generated.kernels.values():
        assert isinstance(kernel, GpuKernel)
        source = compiling.programs[kernel.symbol, "cuda:sm_90a"].source
        found = ahead_of_wait(kernel.images["sm_90a"].cubin)
        allowed = {"LDGSTS"} if "gtco::packed(" in source else set()
        assert set(found) <= allowed, f"{found}\n{source}"
        early += found["LDGSTS"]
    assert early > 0  # weights are


@pytest.fixture(scope="module")
def tiny() -> Once:
    return Once(seeded(TINY["vit"][0]()), (torch.zeros(1, 3, 32, 48),))


def stages_are_as_reckoned(built: Built, compiling: Compiling) -> int:
    """Checks that every kernel fits its GPU without spills, that it multiplies on Tensor Cores if
    it was priced with them, and that at least as many blocks run side by side as the policy
    expected. Gives the number of kernels that multiply on Tensor Cores.
    """
    target = built.policy.target
    assert isinstance(target, GpuTarget)
    kernels: dict[str, Any] = built.generated.kernels  # type: ignore[assignment]
    launches: dict[str, Any] = {
        key: pick.sketch.workload(pick.config) for key, pick in built.generated.choices.items()
    }
    on_tensor_cores = {key for key, of in launches.items() if of.unit.startswith("mma:")}

    def multiplies(key: str) -> bool:
        source = compiling.programs[kernels[key].symbol, target.name].source
        return key in on_tensor_cores or any(header in source for header in MULTIPLY)

    seen = [key for key in launches if multiplies(key)]
    cubins = [kernels[key].images[target.arch].cubin for key in seen]
    codes = dict(zip(seen, compiling.machine_codes(cubins), strict=True))
    faults = []
    for key, pick in built.generated.choices.items():
        kernel, output = kernels[key], pick.sketch.stage.output.type
        code = codes[key][kernel.symbol] if key in codes else None
        faults += [
            f"{pick.sketch.stage.label} -> {output}, {pick.config}: {fault}"
            for fault in _not_as_reckoned(launches[key], kernel, target, code)
        ]
    assert not faults, "\n".join(faults)
    return len(on_tensor_cores)


def _not_as_reckoned(
    launch: Launch, kernel: GpuKernel, target: GpuTarget, code: MachineCode | None
) -> Iterator[str]:
    """The differences, as sentences. ``code`` is that of a kernel that may multiply; None for
    others.
    """
    image, on_tensor_cores = kernel.images[target.arch], launch.unit.startswith("mma:")
    if code is not None:
        if (code.tensor_core > 0) != on_tensor_cores:
            yield f"{code.tensor_core} products of Tensor Cores for {launch.unit}"
        if code.spilled and on_tensor_cores:
            yield f"{code.spilled} loads and stores of a thread's own memory"
    if image.spills > (0 if on_tensor_cores else FEW):
        yield f"{image.spills} bytes spilled"
    if (launch.threads, launch.shared) != (kernel.threads, kernel.shared):
        yield f"{kernel.threads} threads, {kernel.shared} bytes for {launch}"
    used = replace(launch, registers=image.registers)
    found, reckoned = (occupancy(of, target).blocks for of in (used, launch))
    side_by_side = ceil(launch.blocks / target.sms)  # there are no more blocks to run
    if not min(found, side_by_side) >= min(reckoned, side_by_side) > 0:
        yield f"{found} blocks for {reckoned}: {image.registers} registers for {launch.registers}"
