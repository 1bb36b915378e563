"""Failures under a model for GPUs: drivers, memory, kernels, forks, and each call in turn. Two fake
GPUs of sm_80.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.module import load
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, OptionError
from tests.cuda.device_tensor import tensors
from tests.cuda.fake_driver import (
    ILLEGAL_ADDRESS,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    FakeDriver,
    ptx,
    small_gpu_artifact,
)
from tests.runtime.test_models import check, example_inputs


def test_a_driver_that_cannot_read_the_image(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    damaged = {"sm_80": dict.fromkeys(("scale_rows", "mask_relu", "total"), b"\x7fELF of CUDA 99")}
    path = write_artifact(small_gpu_artifact(gpu_kernels, images=damaged), tmp_path / "m.so")
    driver.version(12040)
    text = r"cuModuleLoadDataEx failed with CUDA_ERROR_INVALID_IMAGE"
    with pytest.raises(ArtifactError, match=rf"driver serves CUDA 12\.4.*{text}"):
        load(path)
    driver.check()


def test_ptx_that_the_driver_does_not_compile(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """The error has the words of the driver's compiler, and both versions if the PTX is newer."""
    names = ("scale_rows", "mask_relu", "total")

    def library(*written: str) -> Path:
        images = {
            "sm_80": dict.fromkeys(names, b"damaged"),
            "compute_80": dict.fromkeys(names, ptx("compute_80", *written)),
        }
        return write_artifact(small_gpu_artifact(gpu_kernels, images=images), tmp_path / "m.so")

    driver.device(0, 12, 0, 1 << 20)
    path = library("Entry function 'scale_rows' uses too much shared data")
    said = "the driver says: ptxas fatal   : Entry function 'scale_rows' uses too much shared data"
    called = r"ptxas fatal   : Ptx assembly aborted.* failed with CUDA_ERROR_INVALID_PTX \(218, "
    with pytest.raises(ArtifactError, match=f"kernel scale_rows.*compute_80.*{said} {called}"):
        load(path)
    path = library(str(gpu_kernels), "9.1")
    text = r"PTX is of version 9\.1, .*serves CUDA 13\.0, .*CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    with pytest.raises(ArtifactError, match=text):
        load(path)
    driver.version(13010)
    with load(path) as model:
        check(model(*example_inputs()), *example_inputs())
    driver.check()


def test_a_newer_gpu_with_less_shared_memory_than_the_ptx_takes(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """sm_80 has 163 KiB for a block, and sm_120 has 99."""
    base = small_gpu_artifact(gpu_kernels)
    steps = (replace(base.steps[0], shared=120 << 10), *base.steps[1:])
    names = ("scale_rows", "mask_relu", "total")
    images = {"compute_80": dict.fromkeys(names, ptx("compute_80", str(gpu_kernels)))}
    artifact = replace(base, steps=steps, images=images)
    path = write_artifact(artifact, tmp_path / "m.so")
    driver.device(0, 12, 0, 1 << 20)
    text = r"122880 bytes of shared memory for kernel scale_rows.*--target cuda:sm_80,sm_89"
    with pytest.raises(ArtifactError, match=text):
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
        with pytest.raises(ArtifactError, match="no device 2: this process sees 2 GPU"):
            load(small_gpu, device=2)
        driver.device(1, 8, 0, 1 << 20)
        with load(small_gpu, device=1) as broken:
            driver.kernel_fault(2)
            for _ in range(2):  # the device stays lost to this process, as in CUDA
                with pytest.raises(ArtifactError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                    broken(*inputs)
        check(model(*inputs), *inputs)


def test_a_device_is_a_number(driver: FakeDriver, small_gpu: Path) -> None:
    for wrong in ("cuda:1", -1, 1.0):
        with pytest.raises(OptionError, match=f"device={wrong!r}: give a whole number"):
            load(small_gpu, device=wrong)  # type: ignore[arg-type]
    with load(small_gpu, device=np.int64(1)) as model:  # type: ignore[arg-type]
        assert model.device == 1


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
    """The n-th call of the driver fails, for every n. The error names the call, everything is
    released, and a handle that ran before continues with right results.
    """
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
        quiet += ("ExchangeStreamCaptureMode",)  # without a capture it has nothing to do
        if failed is None:  # released memory, and calls at closing
            assert any(word in name for word in quiet) or name == "cuCtxPushCurrent_v2", name
        else:
            assert (
                "CUDA_ERROR_UNKNOWN" in failed
                and name.split("_v2")[0].removesuffix("WithFlags") in failed
            ), failed
        if name != "cuCtxPushCurrent_v2":  # an unavailable context takes its resources with it
            driver.check()
    assert tried > 60


DESCRIBE = """
import sys, os
from gtco.runtime.module import load
from gtco.support.errors import ArtifactError
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
    build(tmp_path, "-DFAKE_OLD_DRIVER", "-O0")
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
        said.append(str(driver.calls() - calls))  # no function of the driver was called
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
    """No handle is open then, but the driver was started, as it is when torch started it."""
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
