"""A model for GPUs in Python, on the fake driver: arrays on the host, handles, images, and the
command line. Two fake GPUs of sm_80.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gtco.cli import main
from gtco.machine.gpu import gpu_target
from gtco.runtime.library import read_metadata
from gtco.runtime.module import Model, load
from gtco.runtime.writing.linking import EXPORTS, write_artifact
from gtco.support.errors import ArtifactError, BuildError
from tests.cuda.device_tensor import tensors
from tests.cuda.fake_driver import (
    FakeDriver,
    image,
    small_gpu_artifact,
)
from tests.runtime.test_artifact import readelf
from tests.runtime.test_models import ROWS, check, example_inputs


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
        # the newest PTX, if no machine code fits
        (8, 6, ("sm_80", "compute_80"), "sm_80"),
        (9, 0, ("sm_80", "sm_90a", "compute_80"), "sm_90a"),
        (9, 0, ("sm_80", "compute_80"), "compute_80"),
        (10, 0, ("sm_80", "sm_90a", "compute_80"), "compute_80"),
        (12, 0, ("compute_75", "compute_80", "sm_90a"), "compute_80"),
        (8, 0, ("sm_75", "compute_75"), "compute_75"),
        (8, 6, ("sm_89", "compute_89"), None),
        (7, 5, ("sm_80", "compute_80"), None),
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
        text = f"code for {', '.join(images)}, which {gpu}"
        with pytest.raises(ArtifactError, match=text):
            load(path)
    else:
        inputs = example_inputs()
        with load(path) as model:
            check(model(*inputs), *inputs)
    driver.check()


@pytest.mark.parametrize(
    ("major", "minor", "advice"),
    [
        (6, 1, r"CUDA 13 ended GPUs older than sm_75"),
        (7, 0, r"CUDA 13 ended GPUs older than sm_75"),
        (7, 5, "--target cuda:sm_75"),
        (8, 0, "--target cuda:sm_80"),
        (8, 6, "--target cuda:sm_80,sm_89"),
        (8, 7, "--target cuda:sm_80"),
        (8, 9, "--target cuda:sm_89"),
        (9, 0, "--target cuda:sm_90a"),
        (10, 0, "sm_90a alone and --no-ptx leave out: compile it with --target cuda:sm_89"),
        (12, 0, "--target cuda:sm_89"),
    ],
)
def test_no_image_names_a_target_that_there_is(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path, major: int, minor: int, advice: str
) -> None:
    only = "sm_90a" if major < 9 else "sm_75"
    images = {only: dict.fromkeys(("scale_rows", "mask_relu", "total"), image(only, gpu_kernels))}
    path = write_artifact(small_gpu_artifact(gpu_kernels, images=images), tmp_path / "m.so")
    driver.device(0, major, minor, 1 << 20)
    with pytest.raises(ArtifactError, match=rf"sm_{major}{minor}\) does not run; .*{advice}") as it:
        load(path)
    named = re.search(r"--target (\S+)", str(it.value))
    assert not named or gpu_target(named[1]).kind == "cuda"
    driver.device(1, 9 if major < 9 else 7, 0 if major < 9 else 5, 1 << 20)
    with load(path, device=1) as model:  # the other GPU has its image
        check(model(*example_inputs()), *example_inputs())
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
    for more in (["--no-profile"], []):  # without a GPU the reason is shown instead of times
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
    driver.device(0, 8, 0, 100)  # its memory is full: only the second GPU takes the model
    assert main(["run", str(small_gpu)]) == 1
    assert "needs 224 bytes for its weights" in capsys.readouterr().err
    assert main(["run", str(small_gpu), "--device", "1"]) == 0
    assert "96x40" in capsys.readouterr().out
    assert main(["run", str(small_gpu), "--device", "2"]) == 1
    assert "no device 2: this process sees 2 GPUs" in capsys.readouterr().err
    driver.check()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": {}}, "no image"),
        ({"images": {"sm_80": {}}}, "image for sm_80 lacks the kernels scale_rows"),
        ({"images": {"x86": {}}}, "'x86' is not an architecture"),
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
