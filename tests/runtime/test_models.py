"""Small artifacts with kernels written in C, for the tests of the runtime. The first test checks
that they compute right.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.artifact import Artifact
from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.environment import c_compiler

ROWS, COLUMNS = 96, 40
ARENA = ROWS * COLUMNS * 4

# y = relu(x * scale + mask), total = sum of rows of y: rows are tasks, the last step has one. The
# steps use the workspace and check the alignment of every buffer. The first step records in the
# arena what a thread must not see twice.
KERNELS = """
#include <stdint.h>
#define N 40
static int bad(const void* p) { return ((uintptr_t)p & 63) != 0; }
static int bad_of_caller(const void* p) { return ((uintptr_t)p & 15) != 0; }
void scale_rows(void* x, void* scale, void* out, void* w, int64_t begin, int64_t end) {
  float* scratch = w;
  for (int64_t r = begin; r < end; ++r) {
    for (int c = 0; c < N; ++c) scratch[c] = ((float*)x)[r * N + c] * ((float*)scale)[c];
    for (int c = 0; c < N; ++c) ((float*)out)[r * N + c] = scratch[c];
  }
  if (bad_of_caller(x) || bad(scale) || bad(out) || bad(w)) ((float*)out)[begin * N] = 1e30f;
}
void mask_relu(void* t, void* mask, void* out, void* w, int64_t begin, int64_t end) {
  for (int64_t i = begin * N; i < end * N; ++i) {
    float v = ((float*)t)[i] + (float)((int8_t*)mask)[i / N];
    ((float*)out)[i] = v > 0 ? v : 0;
  }
  if (bad_of_caller(mask) || bad_of_caller(out)) ((float*)out)[begin * N] = 1e30f;
}
void total(void* y, void* out, void* w, int64_t begin, int64_t end) {
  for (int c = 0; c < N; ++c) {
    float sum = 0;
    for (int r = 0; r < 96; ++r) sum += ((float*)y)[r * N + c];
    ((float*)out)[c] = sum;
  }
}
"""
SCALE = np.linspace(-1, 2, COLUMNS, dtype=np.float32)


def compile_kernels(source: str, folder: Path) -> bytes:
    """The ELF object of the C kernels."""
    (folder / "kernels.c").write_text(source)
    subprocess.run(
        [c_compiler(), "-O2", "-fPIC", "-c", "kernels.c", "-o", "kernels.o"],
        cwd=folder,
        check=True,
    )
    return (folder / "kernels.o").read_bytes()


def small_artifact(kernels: bytes, **changes: object) -> Artifact:
    def ref(text: str) -> BufferRef:
        kind, index = text.split()
        return BufferRef(kind, int(index))  # type: ignore[arg-type]

    def refs(*texts: str) -> tuple[BufferRef, ...]:
        return tuple(map(ref, texts))

    fields: dict[str, object] = {
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
            Step(
                "scale_rows",
                refs("input 0", "weight 64", "arena 0"),
                ROWS,
                COLUMNS * 4,
                {"operators": ["multiply"]},
            ),
            Step(
                "mask_relu",
                refs("arena 0", "input 1", "output 0"),
                ROWS,
                0,
                {"operators": ["add", "relu"]},
            ),
            Step("total", refs("output 0", "output 1"), 1, 0, {"operators": ["sum"]}),
        ),
        "arena_bytes": ARENA,
        "kernels": {"kernels.o": kernels},
        "weights": ((0, np.arange(3, dtype=np.int64)), (64, SCALE)),
        "cpu_features": ("sse2",),
        "metadata": {"target": "test"},
    }
    return Artifact(**(fields | changes))  # type: ignore[arg-type]


def reference(x: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = np.maximum(x * SCALE + mask[:, None], 0)
    return y, y.sum(0)


def example_inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        rng.integers(-2, 3, ROWS).astype(np.int8),
    )


def check(results: tuple[np.ndarray, ...], x: np.ndarray, mask: np.ndarray) -> None:
    y, total = reference(x, mask)
    np.testing.assert_allclose(results[0], y, rtol=1e-6)
    np.testing.assert_allclose(results[1], total, rtol=1e-4, atol=1e-4)


SLEEPER = """
#include <stdint.h>
#include <time.h>
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, 0);
    ((float*)y)[t] = ((float*)x)[t] + 1;
  }
}
"""


def some_tasks(source: str, folder: Path, tasks: int = 8, steps: int = 1) -> Path:
    """The library of a model with one step, ``slow``, or so many of it, which has so many tasks of
    one element each.
    """
    artifact = small_artifact(
        compile_kernels(source, folder),
        inputs=(TensorSpec("x", "float32", (tasks,)),),
        outputs=(TensorSpec("y", "float32", (tasks,)),),
        steps=(Step("slow", (BufferRef("input", 0), BufferRef("output", 0)), tasks),) * steps,
        weights=(),
        arena_bytes=0,
    )
    return write_artifact(artifact, folder / "slow.so")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_kernels(KERNELS, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def small(kernels: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the small model's library."""
    return write_artifact(small_artifact(kernels), tmp_path_factory.mktemp("small") / "small.so")


@pytest.mark.parametrize("threads", [1, 2, 5, 33])
def test_results_do_not_depend_on_the_number_of_threads(small: Path, threads: int) -> None:
    with load(small, threads) as model:
        assert model.threads == threads
        for seed in range(200):  # enough rounds for workers to sleep, come late and miss runs
            inputs = example_inputs(seed)
            check(model(*inputs), *inputs)
