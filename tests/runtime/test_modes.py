"""The floating-point mode (MXCSR). A run does not depend on the caller's mode and does not change
it, and denormal numbers count as zero on every thread.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.environment import c_compiler
from tests.runtime.test_models import compile_kernels, small_artifact

TASKS = 64
# One task for each row: the mode that it runs in, then arithmetic that traps or differs by mode.
KERNEL = """
#include <stdint.h>
#include <time.h>
#include <xmmintrin.h>
void modes(void* x, void* y, void* w, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const volatile float* in = (float*)x + 8 * t;
    float* out = (float*)y + 8 * t;
    struct timespec pause = {0, 200000};
    nanosleep(&pause, 0);  /* so that every thread gets tasks */
    out[0] = (float)(_mm_getcsr() & ~0x3fu);
    out[1] = in[0] / 3.0f;
    out[2] = 1.0f / in[1];
    out[3] = in[2] * 1e30f;
    out[4] = in[3] * 0.25f;
    out[5] = in[1] / in[1];
    out[6] = in[4] * in[4];
    out[7] = in[2];
  }
}
"""
#             inexact  zero  denormal  least normal  overflows
VALUES = np.array([1.0, 0.0, 1e-40, 2.0**-126, 3e38, 0, 0, 0], np.float32)
#                  mode
ANSWER = np.array(
    [0x9F80 | 0x40, np.float32(1) / np.float32(3), np.inf, 0, 0, np.nan, np.inf, 1e-40], np.float32
)

# Runs a model in the given mode, and tells the mode afterwards.
CALLER = """
#include <xmmintrin.h>
typedef int (*run)(void*, void*, void*);
int call(run f, void* model, void* inputs, void* outputs, unsigned mode, unsigned* after) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(mode);
  int status = f(model, inputs, outputs);
  *after = _mm_getcsr();
  _mm_setcsr(before);
  return status;
}
"""
MODES = {
    "default": 0x1F80,
    "flush and denormals are zero": 0x9FC0,
    "round up": 0x5F80,
    "round down": 0x3F80,
    "round to zero": 0x7F80,
    "all exceptions trap": 0x0000,
    "flags are set": 0x1FBF,
}


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    artifact = small_artifact(
        compile_kernels(KERNEL, folder),
        inputs=(TensorSpec("x", "float32", (TASKS, 8)),),
        outputs=(TensorSpec("y", "float32", (TASKS, 8)),),
        steps=(Step("modes", (BufferRef("input", 0), BufferRef("output", 0)), TASKS),),
        weights=(),
        arena_bytes=0,
    )
    return write_artifact(artifact, folder / "modes.so")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("caller")
    (folder / "caller.c").write_text(CALLER)
    command = [c_compiler(), "-O1", "-shared", "-fPIC", "caller.c", "-o", "caller.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "caller.so")).call


def run(caller: Any, model: Model, mode: int) -> tuple[np.ndarray, int]:
    """The outputs of a run whose caller is in ``mode``, and the caller's mode after it."""
    x = np.tile(VALUES, (TASKS, 1))
    y = np.zeros_like(x)
    after = ctypes.c_uint()
    inputs, outputs = ((ctypes.c_void_p * 1)(a.ctypes.data) for a in (x, y))
    function = ctypes.cast(model._library.run, ctypes.c_void_p)
    handle = ctypes.c_void_p(model._handle)
    status = caller(function, handle, inputs, outputs, ctypes.c_uint(mode), ctypes.byref(after))
    assert status == 0
    return y, after.value


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("name", MODES)
def test_every_thread_runs_in_one_mode(modes: Path, caller: Any, name: str, threads: int) -> None:
    with load(modes, threads) as model:
        for _ in range(2):  # workers that have just started, then workers that ran before
            y, after = run(caller, model, MODES[name])
            assert after == MODES[name], f"the caller's mode came back as {after:#x}"
            np.testing.assert_array_equal(y, np.tile(ANSWER, (TASKS, 1)))
