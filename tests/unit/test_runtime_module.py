"""gtco.load and Model: tensors in and out, errors that name the fix, threads and forks."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gtco.errors import ArtifactError, InputError, OptionError
from gtco.runtime.artifact import write_artifact
from gtco.runtime.library import Library, read_metadata
from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.tensors import like, to_numpy
from tests.unit.test_runtime_models import (
    COLUMNS,
    ROWS,
    check,
    compile_kernels,
    example_inputs,
    kernels,
    small,
    small_artifact,
)

REPOSITORY = Path(__file__).parents[2]


def unaligned(array: np.ndarray, by: int) -> np.ndarray:
    """A copy whose data begins `by` bytes after a multiple of 64."""
    buffer = np.empty(array.nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + by
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_describes_itself(small: Path) -> None:
    with load(small) as model:
        assert model.inputs == (
            TensorSpec("x", "float32", (96, 40)),
            TensorSpec("mask", "int8", (96,)),
        )
        assert [spec.name for spec in model.outputs] == ["y", "total"]
        assert [stage["kernel"] for stage in model.stages] == ["scale_rows", "mask_relu", "total"]
        assert model.stages[0]["operators"] == ["multiply"] and model.stages[0]["tasks"] == ROWS
        assert model.metadata["target"] == "test" and model.metadata["cpu_features"] == ["sse2"]
        assert "x: float32[96, 40]" in repr(model)
    assert read_metadata(small)["steps"] == model.stages


def test_by_position_and_by_name(small: Path) -> None:
    x, mask = example_inputs()
    with load(small) as model:
        check(model(x, mask), x, mask)
        check(model(x, mask=mask), x, mask)
        result = model.run({"mask": mask, "x": x})
        assert list(result) == ["y", "total"]
        check((result["y"], result["total"]), x, mask)
        assert all(array.ctypes.data % 64 == 0 for array in result.values())


def test_strided_unaligned_and_read_only_inputs(small: Path) -> None:
    x, mask = example_inputs()
    wide = np.zeros((ROWS, 2 * COLUMNS), np.float32)
    wide[:, ::2] = x
    frozen = unaligned(x, 4)
    frozen.flags.writeable = False
    with load(small, 2) as model:
        for other in (wide[:, ::2], np.asfortranarray(x), frozen, unaligned(x, 32)):
            check(model(other, unaligned(mask, 1)), x, mask)
        np.testing.assert_array_equal(frozen, x)


def c_run(model, inputs: list[int | None], outputs: list[int | None]) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    """gtco_run with these addresses; the status and the message."""
    library, handle = model._library, model._handle
    arrays = [(ctypes.c_void_p * len(a))(*a) for a in (inputs, outputs)]
    status = library.run(handle, *arrays)
    return status, library.last_error(handle).decode()


@pytest.mark.parametrize("by", [0, 1, 4, 63])
def test_c_pointers_of_any_alignment(small: Path, by: int) -> None:
    x, mask = (unaligned(a, by) for a in example_inputs())
    y, total = unaligned(np.zeros_like(x), by), unaligned(np.zeros(COLUMNS, np.float32), by)
    guard = y.base
    before = guard.copy()
    with load(small, 2) as model:
        assert c_run(
            model, [x.ctypes.data, mask.ctypes.data], [y.ctypes.data, total.ctypes.data]
        ) == (0, "")
    check((y, total), x, mask)
    start = y.ctypes.data - guard.ctypes.data
    np.testing.assert_array_equal(guard[:start], before[:start])  # nothing around it is written
    np.testing.assert_array_equal(guard[start + y.nbytes :], before[start + y.nbytes :])


def test_c_bad_pointers_are_errors(small: Path) -> None:
    x, mask = example_inputs()
    y, total = np.zeros_like(x), np.zeros(COLUMNS, np.float32)
    with load(small, 2) as model:
        good = [x.ctypes.data, mask.ctypes.data]
        status, message = c_run(model, good, [y.ctypes.data, None])
        assert status == 1 and "output 1 ('total', 160 bytes) is NULL" in message
        status, message = c_run(model, [None, good[1]], [y.ctypes.data, total.ctypes.data])
        assert status == 1 and "input 0 ('x', 15360 bytes) is NULL" in message
        status, message = c_run(model, good, [x.ctypes.data + 64, total.ctypes.data])
        assert status == 1 and "output 'y' overlaps 'x'" in message
        status, message = c_run(model, good, [y.ctypes.data, y.ctypes.data + 640])
        assert status == 1 and "output 'total' overlaps 'y'" in message
        assert c_run(model, good, [y.ctypes.data, total.ctypes.data]) == (0, "")  # still in order
        assert model._library.run(model._handle, None, None) == 1


def test_torch_in_torch_out(small: Path) -> None:
    torch = pytest.importorskip("torch")
    x, mask = example_inputs()
    with load(small) as model:
        results = model(torch.from_numpy(x), torch.from_numpy(mask))
        assert all(isinstance(result, torch.Tensor) for result in results)
        check(tuple(result.numpy() for result in results), x, mask)
        mixed = model(x, torch.from_numpy(mask))
        assert isinstance(mixed[0], torch.Tensor)
        transposed = torch.from_numpy(np.ascontiguousarray(x.T)).T
        check(tuple(r.numpy() for r in model(transposed, mask=torch.from_numpy(mask))), x, mask)
        with pytest.raises(InputError, match="detach"):
            model(torch.from_numpy(x).requires_grad_(), mask)
        with pytest.raises(
            InputError, match=r"dtype float64, expected float32.*x\.to\(torch\.float32\)"
        ):
            model(torch.from_numpy(x).double(), mask)
        with pytest.raises(InputError, match=r"dtype bfloat16, .*x\.to\(torch\.float32\)"):
            model(torch.from_numpy(x).bfloat16(), mask)
        with pytest.raises(InputError, match=r"'x' .*cannot be read"):
            model(torch.from_numpy(x).to("meta"), mask)


def test_a_tensor_that_stands_for_the_negative_of_its_memory(small: Path) -> None:
    """DLPack knows nothing of torch's negative bit, which ``z.conj().imag`` has."""
    torch = pytest.importorskip("torch")
    x, mask = example_inputs()
    given = torch.complex(torch.zeros(x.shape), -torch.from_numpy(x)).conj().imag
    assert given.is_neg() and np.array_equal(given.numpy(force=True), x)
    with load(small) as model:
        results = model(given, torch.from_numpy(mask))
        check(tuple(result.numpy() for result in results), x, mask)


def test_torchs_bfloat16_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    spec = TensorSpec("x", "bfloat16", (5, 3))
    given = torch.linspace(-9, 9, 15).bfloat16().reshape(3, 5).T
    array = to_numpy(spec, given)
    assert array.dtype.name == "bfloat16" and array.flags.c_contiguous
    np.testing.assert_array_equal(array.astype(np.float32), given.float().numpy())
    back = like(given, array)
    assert back.dtype == torch.bfloat16 and torch.equal(back, given)
    with pytest.raises(InputError, match="detach"):
        to_numpy(spec, given.clone().requires_grad_())
    with pytest.raises(InputError, match=r"dtype float32, expected bfloat16.*torch\.bfloat16"):
        to_numpy(spec, given.float())


def test_dlpack_of_another_library(small: Path) -> None:
    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    x, mask = example_inputs()
    with load(small) as model:
        check(model(Tensor(x), Tensor(mask)), x, mask)


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "uint8", "float64", "float16"])
def test_other_dtypes_and_scalars(tmp_path: Path, dtype: str) -> None:
    source = """
    #include <stdint.h>
    #include <string.h>
    void copy(void* x, void* y, void* w, int64_t b, int64_t e) { memcpy(y, x, BYTES); }
    """
    for shape in ((3, 5), (), (0, 4)):
        spec, out = TensorSpec("x", dtype, shape), TensorSpec("y", dtype, shape)
        code = compile_kernels(source.replace("BYTES", str(spec.nbytes)), tmp_path)
        step = Step("copy", (BufferRef("input", 0), BufferRef("output", 0)))
        artifact = small_artifact(
            code, inputs=(spec,), outputs=(out,), steps=(step,), weights=(), arena_bytes=0
        )
        x = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
        with load(
            write_artifact(artifact, tmp_path / f"{dtype}{len(shape)}{spec.nbytes}.so")
        ) as model:
            y = model(x)
            assert y.dtype == x.dtype and y.shape == x.shape
            np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing input 'x', 'mask'"),
        ((), {"self": "x"}, "no input 'self'; the inputs are x, mask"),
        (("x",), {}, "missing input 'mask'"),
        (("x", "mask", "mask"), {}, "got 3 inputs, expected 2: x, mask"),
        (("x", "mask"), {"masq": "mask"}, "no input 'masq'; the inputs are x, mask"),
        (("x", "mask"), {"mask": "mask"}, "given twice"),
        (("mask", "mask"), {}, r'\'x\' has dtype int8, expected float32; .*x\.astype\("float32"\)'),
        (("x", "short"), {}, r"'mask' has shape \(95,\), expected \(96,\)"),
        (("list", "mask"), {}, "'x' is a list, expected a numpy array.*np.asarray"),
    ],
)
def test_wrong_inputs(small: Path, args: tuple, kwargs: dict, message: str) -> None:
    x, mask = example_inputs()
    values = {"x": x, "mask": mask, "short": mask[1:], "list": x.tolist()}
    with load(small) as model:
        with pytest.raises(InputError, match=message):
            model(*(values[a] for a in args), **{k: values[v] for k, v in kwargs.items()})
        check(model(x, mask), x, mask)


def test_two_handles_run_at_the_same_time(small: Path) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x, mask = example_inputs(seed)
            with load(small, 2) as model:
                for _ in range(300):
                    check(model(x, mask), x, mask)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_one_handle_from_many_threads(small: Path) -> None:
    failures: list[BaseException] = []
    with load(small, 2) as model:

        def work(seed: int) -> None:
            try:
                x, mask = example_inputs(seed)
                for _ in range(100):
                    check(model(x, mask), x, mask)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures


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


def eight_tasks(source: str, folder: Path) -> Path:
    return some_tasks(source, folder, 8)


def some_tasks(source: str, folder: Path, tasks: int) -> Path:
    """The library of a model of one step, ``slow``, with so many tasks of an element each."""
    artifact = small_artifact(
        compile_kernels(source, folder),
        inputs=(TensorSpec("x", "float32", (tasks,)),),
        outputs=(TensorSpec("y", "float32", (tasks,)),),
        steps=(Step("slow", (BufferRef("input", 0), BufferRef("output", 0)), tasks),),
        weights=(),
        arena_bytes=0,
    )
    return write_artifact(artifact, folder / "slow.so")


WAVES = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
static atomic_int arrived;
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  int threads = (int)((float*)x)[0];
  for (int64_t t = begin; t < end; ++t) {
    int wave = atomic_fetch_add(&arrived, 1) / threads, waited = 0;
    while (atomic_load(&arrived) < (wave + 1) * threads && waited++ < 300000) {
      struct timespec pause = {0, 1000000};
      nanosleep(&pause, 0);
    }
    ((float*)y)[t] = atomic_load(&arrived) < (wave + 1) * threads ? -1 : 1;
  }
}
"""


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_tasks_are_shared_out(threads: int, tmp_path: Path) -> None:
    """A task waits (up to five minutes) until as many have begun as there are threads: all of them
    end only where every thread works at once, and does as many of the 8 as the others.
    """
    x = np.full(8, threads, np.float32)
    with load(eight_tasks(WAVES, tmp_path), threads) as model:
        for _ in range(3):
            np.testing.assert_array_equal(model(x), np.ones(8, np.float32))
            time.sleep(0.02)  # the workers may fall asleep, or not


COUNTS = """
#include <stdint.h>
static unsigned char done[200003];
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) ((float*)y)[t] = (float)++done[t];
}
"""


@pytest.mark.parametrize("tasks", [2, 7, 65537, 200003])
def test_every_task_runs_once(tasks: int, tmp_path: Path) -> None:
    x = np.zeros(tasks, np.float32)
    with load(some_tasks(COUNTS, tmp_path, tasks), 3) as model:
        for run in range(1, 6):
            np.testing.assert_array_equal(model(x), np.full(tasks, run, np.float32))


GATE = """
#include <stdint.h>
#include <unistd.h>
void slow(void* x, void* y, void* w, int64_t begin, int64_t end) {
  char c = 's';
  for (int64_t t = begin; t < end; ++t) {
    ((float*)y)[t] = 1;
    if (t == 0 && write((int)((float*)x)[0], &c, 1) + read((int)((float*)x)[1], &c, 1) != 2)
      ((float*)y)[t] = -1;
  }
}
"""


def test_a_busy_handle_is_an_error_in_c(tmp_path: Path) -> None:
    """The first run says that it has begun, and ends when it is told to."""
    begun, say, told, tell = *os.pipe(), *os.pipe()
    x, y = np.array([say, told] + [0] * 6, np.float32), np.zeros(8, np.float32)
    statuses: list[int] = []
    with load(eight_tasks(GATE, tmp_path), 2) as model:
        runner = threading.Thread(
            target=lambda: statuses.append(c_run(model, [x.ctypes.data], [y.ctypes.data])[0])
        )
        runner.start()
        try:
            assert os.read(begun, 1) == b"s"
            other = np.zeros(8, np.float32)
            assert c_run(model, [x.ctypes.data], [other.ctypes.data])[0] == 6
        finally:
            os.write(tell, b"e")
            runner.join()
    assert statuses == [0] and (y == 1).all()
    for pipe in (begun, say, told, tell):
        os.close(pipe)


def test_profile_times_every_stage(small: Path, tmp_path: Path) -> None:
    with load(eight_tasks(SLEEPER, tmp_path), 2) as model:
        began = time.perf_counter()
        (seconds,) = model.profile(np.zeros(8, np.float32), repeat=2)
        assert 8 * 0.02 / 2 <= seconds <= time.perf_counter() - began
    with load(small, 2) as model:
        began = time.perf_counter()
        seconds = model.profile(*example_inputs())
        assert len(seconds) == 3 and all(s > 0 for s in seconds)
        assert sum(seconds) <= time.perf_counter() - began


def test_fork_after_open(small: Path) -> None:
    x, mask = example_inputs()
    with load(small, 3) as model:
        check(model(x, mask), x, mask)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(50):
                    check(model(x, mask), x, mask)
                threads = len(os.listdir("/proc/self/task"))
                model.close()
                code = 0 if threads == 3 and len(os.listdir("/proc/self/task")) == 1 else 2
            finally:
                os._exit(code)
        check(model(x, mask), x, mask)
        assert os.waitpid(child, 0)[1] == 0
        check(model(x, mask), x, mask)


def test_number_of_threads(kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_artifact(small_artifact(kernels, threads=3), tmp_path / "m.so")
    assert load(path).threads == 3 and load(path, 4).threads == 4
    monkeypatch.setenv("GTCO_NUM_THREADS", "5")
    assert load(path).threads == 5 and load(path, 4).threads == 4
    for bad in ("0", "-1", "two", "9999"):
        monkeypatch.setenv("GTCO_NUM_THREADS", bad)
        with pytest.raises(ArtifactError, match=f"GTCO_NUM_THREADS is '{bad}'"):
            load(path)
    monkeypatch.delenv("GTCO_NUM_THREADS")
    for wrong in (-1, 1025, 2**32 + 1, "2", 1.5, None):  # the third is 1 to C
        with pytest.raises(OptionError, match=r"threads=.* a whole number from 0 to 1024"):
            load(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="num_threads is -1"):
        Library(path).open(-1, 0, 0)


def test_default_threads_follow_the_affinity_mask(small: Path) -> None:
    allowed = os.sched_getaffinity(0)
    with load(small) as model:
        assert 1 <= model.threads <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        with load(small) as model:
            assert model.threads == 1
        with load(small, 2) as model:  # more threads than CPUs still end
            check(model(*example_inputs()), *example_inputs())
    finally:
        os.sched_setaffinity(0, allowed)


def test_closed_and_pickled(small: Path) -> None:
    model = load(small)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    model.close()
    model.close()
    with pytest.raises(ArtifactError, match="is closed"):
        model(*example_inputs())


def test_imports_nothing_heavy(small: Path) -> None:
    script = (
        "import sys, numpy, gtco.runtime.module\n"
        f"gtco.runtime.module.load({str(small)!r}).close()\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'tvm', 'torch', 'onnx', 'networkx', 'rich', 'onnxruntime', 'psutil', 'scipy'}))"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert result.stdout.strip() == "[]"


def test_no_thread_is_an_error(small: Path) -> None:
    """A thread's stack takes 8 MB of address space, of which 1 GB more is allowed."""
    script = (
        "import resource, numpy\n"
        "from gtco.errors import ArtifactError\n"
        "from gtco.runtime.module import load\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))\n"
        "limit = pages * resource.getpagesize() + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"try: load({str(small)!r}, 1000)\n"
        "except ArtifactError as error: print(error)\n"
        f"print(load({str(small)!r}, 3).threads)\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    message, threads = result.stdout.splitlines()
    assert "cannot start 999 threads: Resource temporarily unavailable" in message
    assert threads == "3"


def test_bfloat16_tensors_need_nothing_imported_before() -> None:
    """numpy knows the type's name only where ml_dtypes is imported."""
    code = (
        "from gtco.runtime.plan import TensorSpec; from gtco.runtime.tensors import aligned_empty\n"
        "x = aligned_empty(TensorSpec('x', 'bfloat16', (2, 3)))\n"
        "assert str(x.dtype) == 'bfloat16' and x.shape == (2, 3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
