"""Every model of models/ and of its family, compiled for GPUs at its own sizes, without a GPU
(``make check-cuda``). Each precision gets one library with images for every architecture, and one
for each architecture alone, whose programs differ. The machine code must be as the policy expected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gtco.codegen.jobs import GpuKernel
from gtco.driver.linking.finishing import finish
from gtco.machine.gpu import ARCHITECTURES, GPUS
from gtco.runtime.library import read_metadata
from gtco.search.gpu.launches import MOST_THREADS
from models import MODELS, create, example_inputs, export_onnx
from models.family import FAMILY
from tests.cuda.codegen.test_sass import FEW, stages_are_as_reckoned
from tests.cuda.compiling import Compiling, Images, Once, persistent_kernel
from tests.cuda.models.test_compile_cuda import EVERY

pytestmark = pytest.mark.scheduled


def _each(*names: str) -> list[object]:
    """The models; the tests of one model run in one process."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.fixture(scope="module")
def compiling(root: Path) -> Compiling:
    """A compiler that asks NVRTC for nothing twice: models share stages, and targets share
    texts.
    """
    return Compiling(Images(root / "build" / "cuda-images").compiled)


@pytest.fixture(scope="module")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    name = request.param
    if name not in FAMILY:
        return Once(create(name), example_inputs(name))
    member = FAMILY[name]
    model, example = member.create(), member.inputs()
    if "dynamo" in member.exporters:
        return Once(model, example)
    path = tmp_path_factory.mktemp(name) / "model.onnx"
    return Once(export_onnx(model, example, path, opset=18, exporter=member.exporters[0]), None)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("once", _each(*MODELS), indirect=True, scope="module")
def test_images_for_every_architecture(
    once: Once, compiling: Compiling, tmp_path: Path, precision: str
) -> None:
    run, built = once.compiled(tmp_path, EVERY, compiling, precision=precision)
    assert not run.report.notes
    for key, kernel in built.generated.kernels.items():
        assert isinstance(kernel, GpuKernel) and set(kernel.images) == set(ARCHITECTURES)
        for arch, image in kernel.images.items():
            gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch)
            assert image.registers * kernel.threads <= gpu.registers_sm
            assert image.shared + kernel.shared <= gpu.shared
            assert image.spills <= FEW, built.generated.choices[key].config
    if precision == "fp16":  # the linked files differ only in bytes
        finish(run, built, tmp_path)
        metadata = read_metadata(run.output)
        assert metadata["target"]["images"] == list(ARCHITECTURES)
        assert len(metadata["steps"]) == len(built.generated.stages)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("once", _each("vit-ti-16", "swin-t"), indirect=True, scope="module")
def test_persistent_kernels_spill_nothing(
    once: Once, compiling: Compiling, tmp_path: Path, arch: str
) -> None:
    _, built = once.compiled(tmp_path, f"cuda:{arch}", compiling, precision="fp16")
    kernel = persistent_kernel(built, compiling)
    print(arch, kernel.threads, kernel.info)
    assert kernel.info["spilled_bytes"] == {arch: 0} and kernel.images[arch]
    assert kernel.threads <= MOST_THREADS


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("once", _each(*MODELS, *FAMILY), indirect=True, scope="module")
def test_machine_code_is_as_reckoned(
    once: Once, compiling: Compiling, tmp_path: Path, arch: str
) -> None:
    _, built = once.compiled(tmp_path, f"cuda:{arch}", compiling, precision="fp16")
    assert stages_are_as_reckoned(built, compiling)
