"""A driver without a GPU. It builds ``fake_driver.cpp`` as libcuda.so.1 and loads it into this
process, where the C runtime then finds it. Also small GPU models whose kernels are C.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from gtco.runtime.gpu.plan import GpuArtifact, GpuStep, PersistentKernel
from gtco.runtime.plan import BufferRef, TensorSpec
from gtco.support.environment import c_compiler
from tests.runtime.test_models import COLUMNS, ROWS, SCALE

SOURCE = Path(__file__).with_name("fake_driver.cpp")
OUT_OF_MEMORY, ILLEGAL_ADDRESS, UNKNOWN = 2, 700, 999
BLOCKING, NON_BLOCKING = 0, 1

_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "reset": (None, (c_int, c_int, c_int, c_uint)),
    "device": (None, (c_int, c_int, c_int, c_size_t)),
    "cooperative": (None, (c_int, c_int, c_int)),
    "version": (None, (c_int,)),
    "calls": (c_long, ()),
    "copies": (c_long, ()),
    "fail": (None, (c_long, c_int)),
    "fail_call": (None, (c_char_p, c_long, c_int)),
    "failed": (c_char_p, ()),
    "kernel_fault": (None, (c_int,)),
    "faults": (c_char_p, ()),
    "live": (c_char_p, ()),
    "alloc": (c_size_t, (c_int, c_size_t)),
    "alloc_foreign": (c_size_t, (c_int, c_size_t)),
    "free": (None, (c_size_t,)),
    "write": (None, (c_size_t, c_void_p, c_size_t)),
    "read": (None, (c_void_p, c_size_t, c_size_t)),
    "stream": (c_void_p, (c_int, c_uint)),
    "write_later": (None, (c_void_p, c_int, c_size_t, c_void_p, c_size_t)),
    "sync": (None, (c_void_p, c_int)),
    "pending": (c_size_t, (c_void_p, c_int)),
    "capture": (None, (c_void_p, c_int)),
    "replay": (None, (c_void_p,)),
    "push": (None, (c_int,)),
    "pop": (None, (c_int,)),
    "current": (c_int, ()),
}


def build(folder: Path, *flags: str) -> Path:
    """The library, built with more ``flags`` for the compiler."""
    library = folder / "libcuda.so.1"
    form = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    command = ["g++", *form, *flags, str(SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


class FakeDriver:
    """The functions ``fake_*`` of fake_driver.cpp, and numpy arrays in device memory."""

    def __init__(self, library: Path) -> None:
        # It has the driver's soname: code that opens libcuda.so.1 from now on gets this one.
        self.library = library
        dll = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(dll, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers
        raise AttributeError(name)

    def check(self) -> None:
        """Checks that nothing was done wrong, and that everything was released."""
        assert (self.faults().decode(), self.live().decode()) == ("", "")

    def put(self, array: np.ndarray, ordinal: int = 0, offset: int = 0) -> int:
        """Puts the array's bytes into device memory, ``offset`` bytes after its start."""
        data = np.ascontiguousarray(array)
        pointer = self.alloc(ordinal, data.nbytes + offset) + offset
        self.write(pointer, data.ctypes.data, data.nbytes)
        return int(pointer)

    def get(self, pointer: int, like: np.ndarray) -> np.ndarray:
        """The bytes at this address, as an array of that shape and dtype."""
        array = np.empty_like(like)
        self.read(array.ctypes.data, pointer, array.nbytes)
        return array

    @contextmanager
    def failing(self, n: int, code: int = UNKNOWN) -> Iterator[None]:
        self.fail(n, code)
        try:
            yield
        finally:
            self.fail(0, 0)


# The model of tests/runtime/test_models.py, as kernels of the fake driver.
KERNELS = """
#include <stdint.h>
#define N 40
int scale_rows_count = 3, mask_relu_count = 3, total_count = 2;
void scale_rows(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const float *x = a[0], *scale = a[1];
  float* out = a[2];
  for (unsigned i = 0; i < grid[0] * N; ++i) out[i] = x[i] * scale[i % N];
  if (threads != 64 || shared != 60000) out[0] = 1e30f;
}
void mask_relu(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const float* t = a[0];
  const int8_t* mask = a[1];
  float* out = a[2];
  for (unsigned i = 0; i < grid[0] * grid[1] * N; ++i) {
    float v = t[i] + (float)mask[i / N];
    out[i] = v > 0 ? v : 0;
  }
}
void total(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const float* y = a[0];
  float* out = a[1];
  for (int c = 0; c < N; ++c) {
    float sum = 0;
    for (int r = 0; r < 96; ++r) sum += y[r * N + c];
    out[c] = sum;
  }
}
/* Adds a counter, which every run leaves at 0: it is 0 if nothing else writes there. */
int counted_count = 3;
void counted(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const float* x = a[0];
  const uint32_t* counter = a[1];
  float* out = a[2];
  for (unsigned i = 0; i < grid[0] * N; ++i) out[i] = x[i] + (float)*counter;
}

// All of them as one, which walks the tables as the persistent kernel does (persistent_tables.cuh).
typedef struct {
  int32_t kernel, tasks, first_ref, num_refs;
  uint32_t prefetch_ref, prefetch_bytes;
} step;
int whole_count = 5, whole_sizes[] = {8, 4, 8, 512, 8};
void whole(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const step* steps = *(step**)a[0];
  const uint64_t *pointers = *(uint64_t**)a[2], *tensors = a[3];
  uint32_t* barrier = *(uint32_t**)a[4];
  for (int s = 0; s < *(int*)a[1]; ++s) {
    const step* t = &steps[s];
    void* b[3];
    for (int i = 0; i < t->num_refs; ++i) {
      const uint64_t p = pointers[t->first_ref + i];
      b[i] = (void*)(p & 1 ? tensors[p >> 1] : p);
    }
    const float* fetched = t->prefetch_bytes ? (void*)pointers[t->prefetch_ref] : 0;
    if (fetched && (fetched != b[1] || t->prefetch_bytes != N * 4)) ((float*)b[0])[0] = 1e30f;
    const unsigned blocks[] = {t->tasks, 1, 1};
    if (t->kernel == 0) total(b, blocks, 32, 0);
    if (t->kernel == 1) scale_rows(b, blocks, 64, 60000);
    if (t->kernel == 2) mask_relu(b, blocks, 128, 0);
    if (s == 0 && *barrier % 3) ((float*)b[2])[0] = 1e30f; /* no run leaves another count */
    ++*barrier;
  }
  if (*(const float*)tensors[0] == 99) ++*barrier; /* as where two runs overlap */
  if (threads != 128 || shared != 60256) *barrier = 1;
}
"""


def compile_kernels(source: str, folder: Path, *flags: str) -> Path:
    """The shared object of kernels in the form that the fake driver takes."""
    (folder / "kernels.c").write_text(source)
    path = folder / "kernels.so"
    command = [c_compiler(), "-O1", "-g", "-fPIC", "-shared", *flags, "kernels.c", "-o", str(path)]
    subprocess.run(command, cwd=folder, check=True)
    return path


def image(architecture: str, kernels: Path) -> bytes:
    """A cubin that the fake driver takes; PTX for ``compute_80``."""
    if architecture.startswith("compute_"):
        return ptx(architecture, str(kernels))
    return f"GTCOFAKE {architecture} {kernels}".encode()


def ptx(architecture: str, kernels: str, version: str = "9.0") -> bytes:
    """PTX that the fake driver compiles. If ``kernels`` is not an absolute path the compile fails,
    and ``kernels`` is the driver's log.
    """
    target = architecture.replace("compute_", "sm_")
    return f".version {version}\n.target {target}\n// {kernels}\n".encode()


def persistent_kernel(kernels: Path, shared: int = 60256) -> PersistentKernel:
    """The persistent kernel of the small model: ``whole`` of KERNELS."""
    return PersistentKernel(
        symbol="whole",
        threads=128,
        shared=shared,
        kernels=("total", "scale_rows", "mask_relu"),
        images={arch: image(arch, kernels) for arch in ("sm_80", "sm_90a")},
        prefetches=((1, COLUMNS * 4), (0, 0), (0, 0)),
        tasks=(ROWS, ROWS // 2 * 2, 1),
        info={"registers": {"sm_80": 128, "sm_90a": 128}},
    )


def step_info(operator: str) -> dict[str, Any]:
    """What a step says of itself to readers of the library."""
    return {
        "name": operator,
        "operators": [operator],
        "inputs": ["96x40"],
        "output": "96x40",
        "schedule": {"sketch": "test"},
        "flops": 3840,
        "bytes": 15360,
        "predicted_seconds": 1e-6,
    }


def small_gpu_artifact(kernels: Path, **changes: Any) -> GpuArtifact:
    """y = relu(x * scale + mask), total = sum of y's rows. There are three launches; one of them
    needs more shared memory than a kernel gets by default.
    """
    x, mask = BufferRef("input", 0), BufferRef("input", 1)
    y, total = BufferRef("output", 0), BufferRef("output", 1)
    scaled, scale = BufferRef("arena", 0), BufferRef("weight", 64)
    names = ("scale_rows", "mask_relu", "total")

    info = step_info
    fields: dict[str, Any] = {
        "name": "small",
        "inputs": (
            TensorSpec("x", "float32", (ROWS, COLUMNS)),
            TensorSpec("mask", "int8", (ROWS,)),
        ),
        "outputs": (
            TensorSpec("y", "float32", (ROWS, COLUMNS)),
            TensorSpec("total", "float32", (COLUMNS,)),
        ),
        "steps": (
            GpuStep(names[0], (x, scale, scaled), (ROWS, 1, 1), 64, 60000, info("multiply")),
            GpuStep(names[1], (scaled, mask, y), (ROWS // 2, 2, 1), 128, 0, info("add")),
            GpuStep(names[2], (y, total), (1, 1, 1), 32, 0, info("sum")),
        ),
        "arena_bytes": ROWS * COLUMNS * 4,
        "images": {
            arch: {name: image(arch, kernels) for name in names} for arch in ("sm_80", "sm_90a")
        },
        "weights": ((0, np.arange(3, dtype=np.int64)), (64, SCALE)),
        "metadata": {"target": {"kind": "cuda", "name": "cuda:sm_80"}, "precision": "fp32"},
    }
    return GpuArtifact(**(fields | changes))
