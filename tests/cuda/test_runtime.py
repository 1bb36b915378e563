"""A model for GPUs in Python, on the fake driver: host and device tensors, streams, and what a user
may do wrong. Two fake GPUs of sm_80.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gtco.cli import main
from gtco.errors import ArtifactError, BuildError, InputError
from gtco.runtime.artifact import EXPORTS, write_artifact
from gtco.runtime.device_tensors import stream_handle
from gtco.runtime.library import read_metadata
from gtco.runtime.module import Model, load
from gtco.runtime.plan import TensorSpec
from tests.cuda.fake_driver import (
    ILLEGAL_ADDRESS,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    FakeDriver,
    image,
    small_gpu_artifact,
)
from tests.unit.test_runtime_artifact import readelf
from tests.unit.test_runtime_models import COLUMNS, ROWS, check, example_inputs

Y, TOTAL = np.empty((ROWS, COLUMNS), np.float32), np.empty(COLUMNS, np.float32)


class Tensor:
    """An array in the fake GPU's memory, with DLPack as frameworks have it."""

    def __init__(self, driver: FakeDriver, array: np.ndarray, **how: Any) -> None:
        self.driver, self.array = driver, array
        self.ordinal, offset = how.get("ordinal", 0), how.get("offset", 0)
        self.strides: tuple[int, ...] | None = how.get("strides")
        self.pointer = driver.put(array, self.ordinal, offset)
        self.offset = how.get("byte_offset", 0)
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.ordinal)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.asked.append(stream)
        kinds = {"f": 2, "i": 0, "u": 1, "b": 6}
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        strides = (ctypes.c_int64 * self.array.ndim)(*(self.strides or ()))
        managed = (ctypes.c_uint64 * 16)()  # a DLManagedTensor
        managed[0] = self.pointer - self.offset
        managed[1] = 2 | self.ordinal << 32
        code = kinds[self.array.dtype.kind] | self.array.itemsize * 8 << 8 | 1 << 16
        managed[2] = self.array.ndim | code << 32
        managed[3] = ctypes.addressof(shape)
        managed[4] = ctypes.addressof(strides) if self.strides else 0
        managed[5] = self.offset
        self.alive = (shape, strides, managed)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(managed), b"dltensor", None)

    def numpy(self) -> np.ndarray:
        return self.driver.get(self.pointer, self.array)


def tensors(driver: FakeDriver, ordinal: int = 0, seed: int = 0) -> tuple[Any, ...]:
    """Inputs and outputs on the device, and the inputs' arrays."""
    x, mask = example_inputs(seed)
    on = [Tensor(driver, array, ordinal=ordinal) for array in (x, mask, Y, TOTAL)]
    return (on[0], on[1]), (on[2], on[3]), (x, mask)


def test_arrays_of_the_host(driver: FakeDriver, small_gpu: Path) -> None:
    with load(small_gpu) as model:
        assert model.device == 0 and "cuda:0" in repr(model)
        for seed in range(3):
            inputs = example_inputs(seed)
            check(model(*inputs), *inputs)
        result = model.run(dict(zip(("x", "mask"), inputs, strict=True)))
        check((result["y"], result["total"]), *inputs)
        seconds = model.profile(*inputs, repeat=2)
        assert len(seconds) == 3 and all(s > 0 for s in seconds)
    driver.check()


def test_needs_libc_alone_and_exports_the_interface(small_gpu: Path) -> None:
    needed = [x.split("[")[1][:-1] for x in readelf(small_gpu, "-d").splitlines() if "NEEDED" in x]
    assert needed and set(needed) <= {"libc.so.6", "libdl.so.2"}
    lines = map(str.split, readelf(small_gpu, "--dyn-syms").splitlines())
    assert {f[7] for f in lines if len(f) == 8 and f[6].isdigit() and f[3] != "SECTION"} == set(
        EXPORTS
    )


def test_tensors_of_the_device_are_used_in_place(driver: FakeDriver, small_gpu: Path) -> None:
    with load(small_gpu) as model:
        for seed in range(3):  # other pointers each time: nodes of the graph get new ones
            inputs, outputs, arrays = tensors(driver, seed=seed)
            given = model(*inputs, out=outputs)
            assert given == outputs and inputs[0].asked == outputs[1].asked == [1]
            # nothing was copied, and nothing waited for
            assert driver.pending(None, 0) >= 3 and driver.copies() == 0
            driver.sync(None, 0)
            check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_runs_on_the_callers_stream(driver: FakeDriver, small_gpu: Path) -> None:
    """What earlier work of the stream writes is read; runs of one handle on two streams wait for
    each other, in whatever order the streams get to run."""
    streams = [driver.stream(0, NON_BLOCKING) for _ in range(3)]
    with load(small_gpu) as model:
        for turn in range(4):
            runs = []
            for number, stream in enumerate(streams):
                inputs, outputs, _ = tensors(driver, seed=0)
                x, mask = example_inputs(3 * turn + number + 1)
                size = x.nbytes
                driver.write_later(stream, 0, inputs[0].pointer, x.ctypes.data, size)
                driver.write_later(stream, 0, inputs[1].pointer, mask.ctypes.data, mask.nbytes)
                model(*inputs, out=outputs, stream=stream)
                assert inputs[0].asked == [stream]
                runs.append((outputs, (x, mask)))
            host = example_inputs(99)
            check(model(*host), *host)  # on a stream of its own, behind them
            for stream in streams:
                driver.sync(stream, 0)
            for outputs, arrays in runs:
                check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_weights_are_there_before_the_first_run(driver: FakeDriver, small_gpu: Path) -> None:
    """A stream that does not wait for the legacy one, in whose stream weights are copied."""
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    with load(small_gpu) as model:
        assert driver.pending(None, 0) == 0
        model(*inputs, out=outputs, stream=stream)
        driver.sync(stream, 0)
        check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_closing_waits_for_what_is_under_way(driver: FakeDriver, small_gpu: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    with load(small_gpu) as model:
        model(*inputs, out=outputs, stream=stream)
        assert driver.pending(stream, 0)
    check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_becomes_part_of_a_captured_graph(driver: FakeDriver, small_gpu: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, _ = tensors(driver)
    with load(small_gpu) as model:
        model(
            *inputs, out=outputs, stream=stream
        )  # the event of this run is outside of the capture
        driver.sync(stream, 0)
        driver.capture(stream, 1)
        model(*inputs, out=outputs, stream=stream)
        driver.capture(stream, 0)
        assert driver.pending(stream, 0) == 0
        for seed in (5, 6):
            x, mask = example_inputs(seed)
            driver.write(inputs[0].pointer, x.ctypes.data, x.nbytes)
            driver.write(inputs[1].pointer, mask.ctypes.data, mask.nbytes)
            driver.replay(stream)
            driver.sync(stream, 0)
            check(tuple(t.numpy() for t in outputs), x, mask)
    driver.check()


def test_pointers_that_are_not_aligned_cost_a_copy(driver: FakeDriver, small_gpu: Path) -> None:
    x, mask = example_inputs()
    with load(small_gpu) as model:
        inputs = (Tensor(driver, x, offset=4), Tensor(driver, mask, offset=3, byte_offset=3))
        outputs = (Tensor(driver, Y, offset=8), Tensor(driver, TOTAL))
        model(*inputs, out=list(outputs))
        assert driver.copies() == 3
        driver.sync(None, 0)
        check(tuple(t.numpy() for t in outputs), x, mask)
    driver.check()


def test_torch_gets_torch_back(
    driver: FakeDriver, small_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch that has the fake GPU: its current stream, and outputs that are memory of it."""
    stream, other = driver.stream(0, NON_BLOCKING), driver.stream(0, NON_BLOCKING)
    inside: list[int] = [stream]
    made = {}

    class Entered:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __enter__(self) -> None:
            inside.append(self.handle)

        def __exit__(self, *_: object) -> None:
            inside.pop()

    def empty(shape: Any, dtype: Any, device: Any) -> Any:
        made[shape] = (inside[-1], device)
        return TorchTensor(driver, np.empty(shape, dtype), ordinal=device[1])

    current = [0]

    class OnDevice(Entered):
        def __enter__(self) -> None:
            current.append(self.handle)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class TorchTensor(Tensor):
        @property
        def device(self) -> tuple[str, int]:
            return ("cuda", self.ordinal)

        def __dlpack__(self, *, stream: Any = None) -> Any:
            if current[-1] != self.ordinal:
                raise BufferError("Can't export tensors on a different CUDA device index.")
            return super().__dlpack__(stream=stream)

    TorchTensor.__module__ = "torch.fake"
    torch = ModuleType("torch")
    torch.empty, torch.float32 = empty, "float32"  # type: ignore[attr-defined]
    torch.device = lambda kind, ordinal: (kind, ordinal)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        current_stream=lambda device: SimpleNamespace(cuda_stream=inside[-1]),
        ExternalStream=lambda handle, device: handle,
        stream=Entered,
        device=lambda device: OnDevice(device[1]),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    x, mask = example_inputs()
    inputs = (TorchTensor(driver, x), TorchTensor(driver, mask))
    with load(small_gpu) as model:
        for handle, given in (
            (stream, {}),
            (other, {"stream": SimpleNamespace(cuda_stream=other)}),
        ):
            y, total = model(*inputs, **given)
            assert made == {s: (handle, ("cuda", 0)) for s in (Y.shape, TOTAL.shape)}
            assert inputs[0].asked.pop() == y.asked.pop() == handle
            driver.sync(handle, 0)
            check((y.numpy(), total.numpy()), x, mask)
    # on a device that is not torch's current one, and beside a torch tensor of the host
    inside.append(driver.stream(1, NON_BLOCKING))
    with load(small_gpu, device=1) as model:
        on = [TorchTensor(driver, array, ordinal=1) for array in (x, mask)]
        y, total = model(*on)
        assert current == [0]
        driver.sync(inside[-1], 1)
        check((y.numpy(), total.numpy()), x, mask)
        host = TorchTensor(driver, x)
        monkeypatch.setattr(host, "__dlpack_device__", lambda: (1, 0), raising=False)
        with pytest.raises(InputError, match="'x' is not on a GPU, and this model runs on cuda:1"):
            model(host, on[1])
    driver.check()


def test_spellings_of_a_stream() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 70)

    assert stream_handle(Protocol(), []) == 70
    assert stream_handle(SimpleNamespace(ptr=71), []) == 71
    assert stream_handle(72, []) == 72 and stream_handle(None, []) == 0
    assert stream_handle(1, []) == 0  # the legacy default stream has two numbers
    with pytest.raises(InputError, match="stream is -1; give the number"):
        stream_handle(-1, [])  # DLPack's "no stream", which is a pointer to nowhere here
    with pytest.raises(InputError, match="stream is a str; give a"):
        stream_handle("first", [])


def test_two_devices_and_many_handles(driver: FakeDriver, small_gpu: Path) -> None:
    """Handles share weights and kernels on a device; the caller's context stays current."""
    driver.push(1)
    models = [load(small_gpu, device=n) for n in (0, 1, 0, 1)]
    assert driver.live().decode().splitlines()[0] == "6 pieces of memory"  # 2 x weights, 4 x arena
    for model in models:
        assert model.device is not None and driver.current() == 1
        inputs, outputs, arrays = tensors(driver, model.device)
        model(*inputs, out=outputs)
        driver.sync(None, model.device)
        check(tuple(t.numpy() for t in outputs), *arrays)
    errors: list[Exception] = []

    def work(model: Model, seed: int) -> None:
        try:
            for turn in range(10):
                inputs = example_inputs(seed + turn)
                check(model(*inputs), *inputs)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(m, 10 * n)) for n, m in enumerate([*models, *models])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model in models:
        model.close()
    assert driver.current() == 1
    driver.pop(1)
    driver.check()


def test_wrong_tensors_are_named(driver: FakeDriver, small_gpu: Path) -> None:
    x, mask = example_inputs()
    with load(small_gpu) as model:
        (on_x, on_mask), out, arrays = tensors(driver)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ((on_x, mask), {"out": out}, r"'mask' is not on a GPU, and this model runs on cuda:0"),
            ((on_x, Tensor(driver, mask, ordinal=1)), {"out": out}, r"'mask' is on cuda:1, and"),
            ((Tensor(driver, x.astype(np.float16)), on_mask), {"out": out}, "dtype float16, expec"),
            ((Tensor(driver, x[:5]), on_mask), {"out": out}, r"shape \(5, 40\), expected \(96, 40"),
            (
                (Tensor(driver, x, strides=(1, 96)), on_mask),
                {"out": out},
                "not dense and row-major",
            ),
            ((on_x, on_mask), {}, "gtco makes outputs for torch alone: pass tensors of your own"),
            ((on_x, on_mask), {"out": out[0]}, "out has 1 tensors; the model has 2"),
            ((on_x, on_mask), {"out": (Y, TOTAL)}, "output 'y' is not on a GPU"),
            ((on_x, on_mask), {"out": out, "stream": "main"}, "stream is a str"),
            ((x, mask), {"out": (Y, TOTAL)}, "out is for inputs on the device"),
            ((x, mask), {"stream": 0}, "stream is for inputs on the device"),
        ]
        for inputs, options, text in wrong:
            with pytest.raises(InputError, match=text):
                model(*inputs, **options)
        on_x.__class__.__dlpack__, ask = refuse, on_x.__class__.__dlpack__
        try:
            with pytest.raises(InputError, match=r"'x' cannot be read: Can't export.*x\.detach"):
                on_x.requires_grad = True
                model(on_x, on_mask, out=out)
        finally:
            on_x.__class__.__dlpack__ = ask
        with pytest.raises(ArtifactError, match="stream is not of the primary context of device 0"):
            model(on_x, on_mask, out=out, stream=driver.stream(1, NON_BLOCKING))
        with pytest.raises(ArtifactError, match="output 'total' overlaps 'y' in memory"):
            model(on_x, on_mask, out=(out[0], SubTensor(out[0])))
        dense = Tensor(driver, x, strides=(COLUMNS, 1))
        model(dense, on_mask, out=out)
        driver.sync(None, 0)
        check(tuple(t.numpy() for t in out), *arrays)
    driver.check()


def refuse(self: Any, *, stream: Any = None) -> Any:
    raise BufferError("Can't export tensors that require gradient")


class SubTensor(Tensor):
    """The first elements of another tensor."""

    def __init__(self, other: Tensor) -> None:
        vars(self).update(vars(other))
        self.array = TOTAL


def test_inputs_may_be_named_like_options(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    inputs = (TensorSpec("out", "float32", (ROWS, COLUMNS)), TensorSpec("stream", "int8", (ROWS,)))
    path = write_artifact(small_gpu_artifact(gpu_kernels, inputs=inputs), tmp_path / "m.so")
    x, mask = example_inputs()
    with load(path) as model:
        check(model(out=x, stream=mask), x, mask)


def test_weights_beside_the_library(driver: FakeDriver, gpu_kernels: Path, tmp_path: Path) -> None:
    path = write_artifact(
        small_gpu_artifact(gpu_kernels), tmp_path / "m.so", weights_inside_limit=10
    )
    inputs = example_inputs()
    with load(path) as model:
        check(model(*inputs), *inputs)
    next(tmp_path.glob("m.so.weights-*")).unlink()
    with pytest.raises(ArtifactError, match=r"weights file.*cannot be opened"):
        load(path)
    driver.check()


@pytest.mark.parametrize(
    ("major", "minor", "images", "loads"),
    [
        (8, 0, ("sm_80", "sm_90a"), "sm_80"),
        (8, 9, ("sm_80", "sm_90a"), "sm_80"),
        (8, 9, ("sm_80", "sm_89"), "sm_89"),
        (8, 6, ("sm_80", "sm_89"), "sm_80"),
        (9, 0, ("sm_90", "sm_90a"), "sm_90a"),
        (9, 0, ("sm_80", "sm_90"), "sm_90"),
        (7, 5, ("sm_80", "sm_90a"), None),
        (9, 1, ("sm_80", "sm_90a"), None),
        (10, 0, ("sm_80", "sm_90a"), None),
    ],
)
def test_picks_the_image_of_the_device(
    driver: FakeDriver,
    gpu_kernels: Path,
    tmp_path: Path,
    major: int,
    minor: int,
    images: tuple[str, ...],
    loads: str | None,
) -> None:
    """Only the image that should be picked can be loaded."""
    names = ("scale_rows", "mask_relu", "total")
    cubins = {
        arch: {n: image(arch, gpu_kernels) if arch == loads else b"damaged" for n in names}
        for arch in images
    }
    path = write_artifact(small_gpu_artifact(gpu_kernels, images=cubins), tmp_path / "m.so")
    driver.device(0, major, minor, 1 << 20)
    if loads is None:
        gpu = rf"this GPU \(Fake GPU 0, sm_{major}{minor}\)"
        text = f"machine code for {', '.join(images)}, which {gpu}"
        with pytest.raises(ArtifactError, match=text):
            load(path)
    else:
        inputs = example_inputs()
        with load(path) as model:
            check(model(*inputs), *inputs)
    driver.check()


def test_a_driver_that_cannot_read_the_image(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    damaged = {"sm_80": dict.fromkeys(("scale_rows", "mask_relu", "total"), b"\x7fELF of CUDA 99")}
    path = write_artifact(small_gpu_artifact(gpu_kernels, images=damaged), tmp_path / "m.so")
    driver.version(12040)
    text = r"cuModuleLoadData failed with CUDA_ERROR_INVALID_IMAGE"
    with pytest.raises(ArtifactError, match=rf"driver serves CUDA 12\.4.*{text}"):
        load(path)
    driver.check()


def test_a_gpu_with_less_shared_memory_than_the_image_takes(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """sm_80 has 163 KiB for a block; 8.6 runs the same image and has 99."""
    first, *rest = small_gpu_artifact(gpu_kernels).steps
    steps = (replace(first, shared=120 << 10), *rest)
    path = write_artifact(small_gpu_artifact(gpu_kernels, steps=steps), tmp_path / "m.so")
    load(path).close()
    driver.device(0, 8, 6, 1 << 20)
    text = r"122880 bytes of shared memory for kernel scale_rows.*--target cuda:sm_80,sm_89"
    with pytest.raises(ArtifactError, match=text):
        load(path)
    driver.check()


def test_no_memory_no_device_and_a_fault_leave_others_alive(
    driver: FakeDriver, small_gpu: Path
) -> None:
    inputs = example_inputs()
    with load(small_gpu) as model:
        driver.device(1, 8, 0, 30_000)
        with pytest.raises(
            ArtifactError, match=r"intermediate tensors on device 1 \(Fake GPU 1\), whi"
        ):
            load(small_gpu, device=1)
        driver.device(1, 8, 0, 100)
        text = r"needs 224 bytes for its weights .*100 of 100 bytes free.*CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(ArtifactError, match=text):
            load(small_gpu, device=1)
        for ordinal in (2, -1):
            with pytest.raises(
                ArtifactError, match=rf"no device {ordinal}: this process sees 2 GPU"
            ):
                load(small_gpu, device=ordinal)
        driver.device(1, 8, 0, 1 << 20)
        with load(small_gpu, device=1) as broken:
            driver.kernel_fault(2)
            for _ in range(2):  # the device stays lost to this process, as CUDA has it
                with pytest.raises(ArtifactError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                    broken(*inputs)
        check(model(*inputs), *inputs)


def test_out_of_memory_at_the_run(driver: FakeDriver, small_gpu: Path) -> None:
    inputs = example_inputs()
    with load(small_gpu) as model:
        driver.fail_call(b"cuGraphLaunch", 1, OUT_OF_MEMORY)
        text = "launching the model's graph: cuGraphLaunch failed with CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(ArtifactError, match=text):
            model(*inputs)
        driver.fail_call(b"cuStreamSynchronize", 1, ILLEGAL_ADDRESS)
        text = r"running model 'small' on device 0 \(Fake GPU 0\): cuStreamSynchronize failed with"
        with pytest.raises(ArtifactError, match=text):
            model(*inputs)
        check(model(*inputs), *inputs)
    driver.check()


def test_every_call_may_fail(driver: FakeDriver, small_gpu: Path) -> None:
    """The n-th call of the driver fails, for every n: an error that names the call, nothing that is
    not given back, and a handle that ran before goes on, with right results."""
    x, mask = example_inputs(1)
    tried = 0
    for n in range(1, 1000):
        driver.reset(2, 8, 0, n)
        other = load(small_gpu)
        stream = driver.stream(0, NON_BLOCKING)
        inputs, outputs, arrays = tensors(driver)
        with driver.failing(n):
            failed = None
            try:
                with load(small_gpu, device=1) as model:
                    on, to, _ = tensors(driver, 1)
                    model(x, mask)
                    model(*on, out=to)
                    driver.sync(None, 1)
                    model.timed([x, mask])
                other(*inputs, out=outputs, stream=stream)
            except ArtifactError as error:
                failed = str(error)
            name = driver.failed().decode()
        driver.sync(stream, 0)
        check(other(x, mask), x, mask)
        other(*inputs, out=outputs, stream=stream)
        driver.sync(stream, 0)
        check(tuple(t.numpy() for t in outputs), *arrays)
        other.close()
        if not name:
            break
        tried += 1
        quiet = ("Destroy", "Free", "Unload", "Release", "Pop", "EventSynchronize", "GetInfo")
        if failed is None:  # what is given back, and at closing
            assert any(word in name for word in quiet) or name == "cuCtxPushCurrent_v2", name
        else:
            assert (
                "CUDA_ERROR_UNKNOWN" in failed
                and name.split("_v2")[0].removesuffix("WithFlags") in failed
            ), failed
        if name != "cuCtxPushCurrent_v2":  # a context that is not to be had takes its things along
            driver.check()
    assert tried > 60


DESCRIBE = """
import sys, os
from gtco.runtime.module import load
from gtco.errors import ArtifactError
try:
    load(sys.argv[1])
except ArtifactError as error:
    print(error)
"""


def in_a_process(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_driver_and_one_too_old(small_gpu: Path, tmp_path: Path) -> None:
    from tests.cuda.fake_driver import build

    if not any(
        Path(p, "libcuda.so.1").exists() for p in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
    ):
        text = in_a_process(DESCRIBE, str(small_gpu))
        assert "runs on NVIDIA GPUs, and their driver cannot be opened (libcuda.so.1" in text
    build(tmp_path, "-DFAKE_OLD_DRIVER")
    text = in_a_process(DESCRIBE, str(small_gpu), LD_LIBRARY_PATH=str(tmp_path))
    assert "is too old: it serves CUDA 13.0 and lacks cuGraphAddKernelNode_v2" in text


def test_a_fork_ends_with_an_error_and_not_with_a_crash(
    driver: FakeDriver, small_gpu: Path
) -> None:
    inputs = example_inputs()
    model = load(small_gpu)
    calls = driver.calls()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for act in (lambda: model(*inputs), lambda: load(small_gpu)):
            try:
                act()
            except ArtifactError as error:
                said.append(str(error))
        model.close()
        said.append(str(driver.calls() - calls))  # nothing of the driver was called
        os.write(writes, "\n".join(said).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        first, second, count = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    for text in (first, second):
        assert "forked after the model was opened on a GPU, and CUDA does not survive" in text
    assert count == "0"
    check(model(*inputs), *inputs)
    model.close()
    driver.check()


def test_a_fork_after_the_last_handle_closed(driver: FakeDriver, small_gpu: Path) -> None:
    """No handle is open then, but the driver was started; so it is where torch started it."""
    load(small_gpu).close()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = "opened"
        try:
            load(small_gpu)
        except ArtifactError as error:
            said = str(error)
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert "does not survive a fork" in text and "CUDA_ERROR_NOT_INITIALIZED" in text
    with load(small_gpu) as model:
        inputs = example_inputs()
        check(model(*inputs), *inputs)
    driver.check()


def test_metadata_and_inspect_without_a_gpu(
    driver: FakeDriver,
    small_gpu: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = read_metadata(small_gpu)
    assert list(metadata["images"]) == ["sm_80", "sm_90a"]
    assert metadata["steps"][1]["grid"] == [ROWS // 2, 2, 1] and "tasks" not in metadata["steps"][1]
    assert metadata["steps"][0]["shared"] == 60000
    monkeypatch.setenv("COLUMNS", "200")
    for more in (["--no-profile"], []):  # without a GPU the reason is shown, and no times
        driver.reset(0, 8, 0, 1)
        assert main(["inspect", str(small_gpu), "--all", *more]) == 0
        shown = capsys.readouterr().out
        for text in ("multiply", "48x2", "128", "60000", "cuda:sm_80", "3 kernels", "sm_90a"):
            assert text in shown, text
        assert "--no-profile" in shown if more else "CUDA_ERROR_NO_DEVICE" in shown


def test_run_and_inspect_with_a_gpu(
    driver: FakeDriver,
    small_gpu: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", str(small_gpu), "--repeat", "2"]) == 0
    shown = capsys.readouterr().out
    assert "96x40" in shown and "2 calls: median" in shown
    assert main(["inspect", str(small_gpu), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert len(stages) == 3 and all(stage["measured_seconds"] > 0 for stage in stages)
    driver.check()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": {}}, "no image"),
        ({"images": {"sm_80": {}}}, "image for sm_80 lacks the kernels scale_rows"),
        ({"images": {"x86": {}}}, "'x86' is no architecture"),
        ({"grid": (1, 70000, 1)}, r"grid \(1, 70000, 1\)"),
        ({"threads": 1025}, "1025 threads"),
        ({"shared": 300_000}, "300000 bytes of shared memory"),
    ],
)
def test_what_no_gpu_takes_is_refused(
    gpu_kernels: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    base = small_gpu_artifact(gpu_kernels)
    if "images" not in changes:
        changes = {"steps": (replace(base.steps[0], **changes), *base.steps[1:])}
    with pytest.raises(BuildError, match=text):
        write_artifact(replace(base, **changes), tmp_path / "m.so")
