"""A model launched as one persistent kernel, on the fake driver: its tables, its launch, and what
happens if a GPU cannot do it. Two fake GPUs of sm_80 with 4 multiprocessors of 2 blocks.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime.library import read_metadata
from gtco.runtime.module import HELD_RUNS, load
from gtco.runtime.plan import TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from gtco.support.errors import ArtifactError, BuildError, OptionError
from gtco.tensor import cuda
from tests.cuda.device_tensor import TOTAL, Tensor, Y, check_replays, tensors
from tests.cuda.fake_driver import (
    NON_BLOCKING,
    FakeDriver,
    image,
    persistent_kernel,
    small_gpu_artifact,
)
from tests.runtime.test_models import check, example_inputs

BLOCKS = 4 * 2


@pytest.fixture(scope="module")
def whole(gpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = small_gpu_artifact(gpu_kernels, persistent=persistent_kernel(gpu_kernels))
    return write_artifact(artifact, tmp_path_factory.mktemp("whole") / "m.so")


def test_one_launch_on_arrays_of_the_host(driver: FakeDriver, whole: Path) -> None:
    with load(whole) as model:
        assert model.launches == f"persistent: {BLOCKS} blocks of 128 threads"
        for seed in range(3):
            inputs = example_inputs(seed)
            check(model(*inputs), *inputs)
        # the steps are timed as separate launches
        assert len(seconds := model.profile(*inputs, repeat=2)) == 3 and min(seconds) > 0
    driver.check()


def test_tensors_of_the_device_in_place(driver: FakeDriver, whole: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    with load(whole) as model:
        copies = driver.copies()
        for seed in range(HELD_RUNS + 2):
            inputs, outputs, arrays = tensors(driver, seed=seed)
            pending = driver.pending(stream, 0)
            model(*inputs, out=outputs, stream=stream)
            if seed < HELD_RUNS:  # it waits for the run before, launches, and records its end
                assert driver.pending(stream, 0) <= pending + 3 and driver.copies() == copies
            driver.sync(stream, 0)
            check(tuple(t.numpy() for t in outputs), *arrays)
        x, mask = example_inputs(5)
        offset = (Tensor(driver, x, offset=4), Tensor(driver, mask, offset=3))
        model(*offset, out=(Tensor(driver, Y, offset=8), last := Tensor(driver, TOTAL)))
        driver.sync(None, 0)
        wanted = np.maximum(model(x, mask)[0], 0).sum(0)
        assert np.array_equal(last.numpy(), wanted)
    driver.check()


def test_memory_that_is_gone_before_the_launch(driver: FakeDriver, whole: Path) -> None:
    """The launch fails, as on a GPU, and this process continues."""
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, _ = tensors(driver)
    with load(whole) as model:
        model(*inputs, out=outputs, stream=stream)
        driver.free(outputs[0].pointer)
        driver.sync(stream, 0)
        with pytest.raises(ArtifactError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            model(*example_inputs())
    faults = driver.faults().decode()
    driver.reset(2, 8, 0, 1)  # as it was found
    assert re.search(r"whole: pointer 0x\w+ \(1 bytes\) is freed", faults)


def test_becomes_part_of_a_captured_graph(driver: FakeDriver, whole: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, _ = tensors(driver)
    with load(whole) as model:
        driver.capture(stream, 1)
        model(*inputs, out=outputs, stream=stream)
        driver.capture(stream, 0)
        assert driver.pending(stream, 0) == 0
        check_replays(driver, stream, inputs, outputs)
    driver.check()


def test_overlapping_replays_do_not_spoil_later_runs(driver: FakeDriver, whole: Path) -> None:
    """An input that begins with 99 leaves the barrier in the state after two overlapping runs."""
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    spoiling = arrays[0].copy()
    spoiling.flat[0] = 99
    with load(whole) as model:
        driver.capture(stream, 1)
        model(*inputs, out=outputs, stream=stream)
        driver.capture(stream, 0)
        for x in (spoiling, arrays[0], spoiling):
            driver.write(inputs[0].pointer, x.ctypes.data, x.nbytes)
            driver.replay(stream)
            driver.sync(stream, 0)
            check(tuple(t.numpy() for t in outputs), x, arrays[1])
        check(model(*arrays), *arrays)
    driver.check()


def test_both_ways_of_one_library(driver: FakeDriver, whole: Path, small_gpu: Path) -> None:
    inputs = example_inputs()
    with load(whole, launches="graph") as graph, load(whole, launches="persistent") as one:
        assert graph.launches == "graph: 3 kernels" and one.launches.startswith("persistent")
        check(graph(*inputs), *inputs)
        check(one(*inputs), *inputs)
    with pytest.raises(ArtifactError, match=r"asked for.*was compiled without the persistent ker"):
        load(small_gpu, launches="persistent")
    with load(small_gpu) as model:
        assert model.launches == "graph: 3 kernels"
    with pytest.raises(OptionError, match="launches is 'fast'; choose from graph, persistent"):
        load(small_gpu, launches="fast")  # type: ignore[arg-type]
    driver.check()


@pytest.mark.parametrize(
    ("can", "room", "why"),
    [(0, 2, "this GPU launches no cooperative kernels"), (1, 0, "no multiprocessor of this GPU")],
)
def test_a_gpu_that_cannot_takes_the_graph(
    driver: FakeDriver, whole: Path, can: int, room: int, why: str
) -> None:
    inputs = example_inputs()
    driver.cooperative(0, can, room)
    with load(whole) as model:
        assert model.launches.startswith("graph: 3 kernels; ") and why in model.launches
        check(model(*inputs), *inputs)
    with pytest.raises(ArtifactError, match=f"{why}.*Fake GPU 0"):
        load(whole, launches="persistent")
    driver.check()


def test_a_gpu_with_too_little_shared_memory_for_it_takes_the_graph(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """A GPU of 8.6 runs the image of sm_80 and has 99 KiB for a block."""
    kernel = persistent_kernel(gpu_kernels, shared=120 << 10)
    path = write_artifact(small_gpu_artifact(gpu_kernels, persistent=kernel), tmp_path / "m.so")
    driver.device(0, 8, 6, 1 << 20)
    inputs = example_inputs()
    with load(path) as model:
        assert "takes 122880 bytes of shared memory, more than this GPU" in model.launches
        check(model(*inputs), *inputs)
    driver.check()


def test_a_gpu_that_runs_ptx_takes_the_graph(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """A driver would take half a minute to compile the kernel of a large model."""
    base = small_gpu_artifact(gpu_kernels, persistent=persistent_kernel(gpu_kernels))
    ptx = dict.fromkeys(("scale_rows", "mask_relu", "total"), image("compute_80", gpu_kernels))
    artifact = replace(base, images={**base.images, "compute_80": ptx})
    path = write_artifact(artifact, tmp_path / "m.so")
    assert read_metadata(path)["images"]["compute_80"] == sum(map(len, ptx.values()))
    inputs = example_inputs()
    driver.device(1, 10, 0, 1 << 20)
    with load(path) as old, load(path, device=1) as new:
        assert old.launches.startswith("persistent: ")
        assert new.launches.startswith("graph: 3 kernels; the persistent kernel has no PTX, and")
        check(old(*inputs), *inputs)
        check(new(*inputs), *inputs)
    with pytest.raises(ArtifactError, match=r"asked for.*has no PTX.*Fake GPU 1"):
        load(path, device=1, launches="persistent")
    driver.check()


def test_a_gpu_for_which_it_would_spill_takes_the_graph(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    """The library has its machine code only for other architectures."""
    kernel = persistent_kernel(gpu_kernels)
    kernel = replace(kernel, images={**kernel.images, "sm_90a": b""})
    path = write_artifact(small_gpu_artifact(gpu_kernels, persistent=kernel), tmp_path / "m.so")
    driver.device(1, 9, 0, 1 << 20)
    inputs = example_inputs()
    with load(path) as old, load(path, device=1) as new:
        assert old.launches.startswith("persistent: ")
        assert new.launches == (
            "graph: 3 kernels; the persistent kernel would spill registers on sm_90a, and was left "
            "out of its image"
        )
        check(old(*inputs), *inputs)
        check(new(*inputs), *inputs)
    with pytest.raises(ArtifactError, match=r"asked for.*would spill registers.*Fake GPU 1"):
        load(path, device=1, launches="persistent")
    driver.check()


def test_every_call_may_fail(driver: FakeDriver, whole: Path) -> None:
    """The error names the call, and everything is released."""
    x, mask = example_inputs(1)
    tried = 0
    for n in range(1, 200):
        driver.reset(2, 8, 0, n)
        inputs, outputs, arrays = tensors(driver)
        with driver.failing(n):
            try:
                with load(whole) as model:
                    check(model(x, mask), x, mask)
                    model(*inputs, out=outputs)
                    driver.sync(None, 0)
                    check(tuple(t.numpy() for t in outputs), *arrays)
            except ArtifactError as error:
                name = driver.failed().decode()
                assert "CUDA_ERROR_UNKNOWN" in str(error) and name.split("_v2")[0] in str(error)
            name = driver.failed().decode()
        if not name:
            break
        tried += 1
        if name != "cuCtxPushCurrent_v2":
            driver.check()
    assert tried > 40


def test_what_the_library_says_of_it(whole: Path, small_gpu: Path) -> None:
    metadata, other = read_metadata(whole), read_metadata(small_gpu)
    assert (metadata["launches"], other["launches"]) == ("persistent", "graph")
    assert metadata["persistent"] == {
        "registers": {"sm_80": 128, "sm_90a": 128},
        "kernel": "whole",
        "threads": 128,
        "shared": 60256,
        "prefetched_bytes": 160,
    }
    assert all(metadata["images"][arch] > other["images"][arch] for arch in other["images"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": {"sm_80": b""}}, "has no image for sm_90a"),
        ({"kernels": ("total",)}, "lacks the kernel scale_rows of step 0"),
        ({"prefetches": ()}, "prefetches for 0 steps of 3"),
        (
            {"prefetches": ((0, 8), (0, 0), (0, 0))},
            "prefetches 8 bytes of what is not a weight of step 0",
        ),
        (
            {"prefetches": ((1, 161), (0, 0), (0, 0))},
            "prefetches 161 bytes of what is not a weight of step 0",
        ),
        ({"threads": 1025}, "has 1025 threads"),
        ({"images": {"sm_80": b"", "sm_90a": b""}}, "has no machine code for any architecture"),
        ({"tasks": (1,)}, "has the tasks of 1 steps of 3"),
        ({"tasks": (1, 1, 0)}, "takes 1 to 2147483647 tasks a step, and step 2 has 0"),
    ],
)
def test_tables_that_cannot_be_are_refused(
    gpu_kernels: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    kernel = replace(persistent_kernel(gpu_kernels), **changes)
    with pytest.raises(BuildError, match=f"persistent kernel whole {text}"):
        write_artifact(small_gpu_artifact(gpu_kernels, persistent=kernel), tmp_path / "m.so")


def test_more_tensors_than_its_tables_have(gpu_kernels: Path, tmp_path: Path) -> None:
    base = small_gpu_artifact(gpu_kernels, persistent=persistent_kernel(gpu_kernels))
    more = tuple(TensorSpec(f"x{i}", "float32", (1,)) for i in range(61))
    with pytest.raises(BuildError, match="64 inputs and outputs at most, and the model has 65"):
        write_artifact(replace(base, inputs=(*base.inputs, *more)), tmp_path / "m.so")


def test_the_tables_types_are_those_of_the_device(tmp_path: Path) -> None:
    """Names, offsets and sizes: those in csrc/cuda/plan.h equal those that the kernel reads."""
    header = Path(cuda.__file__).parent / "device" / "gtco" / "persistent_tables.cuh"
    struct = re.search(r"struct Step \{(.*?)\};", header.read_text(), re.S)
    assert struct
    fields = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", struct[1]))
    most = re.search(r"MOST_TENSORS = (\d+);", header.read_text())
    assert most and len(fields) == 6
    said = "".join(f'offset("{f}", gtco_device_step, {f});' for f in fields)
    (tmp_path / "ours.c").write_text(
        f"""#include <stdio.h>
        #include "cuda/plan.h"
        #define offset(name, type, field) printf("%s %zu\\n", name, offsetof(type, field))
        #define sizes(a, b) printf("%zu %zu\\n", sizeof(a), sizeof(b))
        int main(void) {{ {said} sizes(gtco_device_step, gtco_device_tensors); }}"""
    )
    body = re.sub(r"#.*", "", header.read_text())
    said = "".join(f'offset("{f}", gtco::Step, {f});' for f in fields)
    (tmp_path / "theirs.cpp").write_text(
        f"""#include <cstddef>
        #include <cstdint>
        #include <cstdio>
        {body}
        #define offset(name, type, field) printf("%s %zu\\n", name, offsetof(type, field))
        int main() {{ {said} printf("%zu %zu\\n", sizeof(gtco::Step), sizeof(gtco::Tensors)); }}"""
    )
    results = []
    for compiler, name in ((c_compiler(), "ours.c"), ("g++", "theirs.cpp")):
        program = [compiler, f"-I{CSRC}", name, "-o", f"{name}.out"]
        subprocess.run(program, cwd=tmp_path, check=True)
        results.append(subprocess.run([tmp_path / f"{name}.out"], capture_output=True).stdout)
    assert results[0] == results[1] and results[0].count(b"\n") == 7
