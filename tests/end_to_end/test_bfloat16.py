"""Models compiled with ``precision="bf16"``: near PyTorch's float32, with the machine's own
instructions and with plain AVX2, and what ``verify`` says of right and of broken models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import gtco
from gtco.graph.graph import Graph
from gtco.graph.precision import narrow_operands
from gtco.machine.target import TARGETS, TILES, detect
from gtco.runtime.library import read_metadata
from gtco.support.errors import ArtifactError, OptionError, VerificationError
from gtco.verification import verify
from models.weights import initialise
from tests.end_to_end.nodes.runner import InProcess
from tests.end_to_end.test_models import swin, vit
from tests.end_to_end.test_verify import encoder, failing
from tests.kernels import EMULATED, runnable
from tests.random.engine import difference, in_process, run, wanted

# Relative to the output's largest magnitude. Each operand has an error of up to 2^-9. Through the
# dozen products of these models this adds up to 5e-3 to 2e-2; a float32 model has 1e-6.
BOUND, LEAST = 4e-2, 1e-4


class Convolutions(nn.Module):
    """A stem, a residual block with a depthwise convolution, a 1x1 one and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 7, 2, 3)
        self.norm = nn.BatchNorm2d(20)
        self.depthwise = nn.Conv2d(20, 20, 3, 1, 1, groups=20)
        self.wide = nn.Conv2d(20, 33, 1)
        self.narrow = nn.Conv2d(33, 20, 3, 1, 1)
        self.head = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.narrow(torch.relu(self.wide(self.depthwise(x))))
        return self.head(x.mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (lambda: vit((48, 80)), (1, 3, 48, 80)),
    "vit of many tokens": (lambda: vit((256, 272)), (1, 3, 256, 272)),
    "swin": (lambda: swin((56, 56)), (1, 3, 56, 56)),
    "convolutions": (Convolutions, (2, 3, 37, 29)),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    model = make().eval().requires_grad_(False)
    initialise(model, seed=len(name))
    return model, torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, which already has TVM."""
    monkeypatch.setattr("gtco.driver.making.Workers", InProcess)


@pytest.fixture(scope="module")
def classifier() -> gtco.CompiledModel:
    """The vit of ``MODELS``, verified."""
    model, image = made("vit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gtco.driver.making.Workers", InProcess)
        return gtco.compile_model(model, (image,), precision="bf16", verify=True)


def check(name: str, compiled: gtco.CompiledModel) -> None:
    """Checks that the outputs are near float32, and that no kernel is slow: no product may use the
    fallback.
    """
    model, image = made(name)
    assert not compiled.report.notes
    wanted, got = model(image).numpy(), compiled(image.numpy())
    assert got.dtype == np.float32 and got.shape == wanted.shape
    assert LEAST < np.abs(got - wanted).max() / np.abs(wanted).max() < BOUND
    assert "fallback" not in {s["schedule"]["sketch"] for s in compiled.stages}
    assert compiled.metadata["precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "target"),
    [("swin", "native"), ("convolutions", "native"), ("vit", "x86-64-v3")],
)
def test_models_are_near_float32(name: str, target: str) -> None:
    model, image = made(name)
    check(name, gtco.compile_model(model, (image,), precision="bf16", target=target))


@pytest.mark.parametrize(("name", "how"), [("convolutions", "module"), ("vit", "autocast")])
def test_modules_in_bfloat16(name: str, how: str) -> None:
    """ONNX has no Conv of bfloat16 at the exporter's opset, and no norm of two types, which
    autocast makes.
    """
    model, image = made(name)
    right = model(image)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        if how == "module":
            model, image = model.bfloat16(), image.bfloat16()
        theirs = model(image)
        compiled = gtco.compile_model(model, (image,))
    got = compiled(image)
    assert got.dtype == theirs.dtype == torch.bfloat16
    assert (got.float() - right).abs().max() / right.abs().max() < BOUND
    assert compiled.metadata["precision"] == "bf16"
    assert "fallback" not in {s["schedule"]["sketch"] for s in compiled.stages}


def test_a_model_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dense layers are multiplied in the tile unit, which is emulated, and the library does not
    ask for a real one.
    """
    monkeypatch.setitem(TARGETS, EMULATED, runnable(EMULATED))
    name = "vit of many tokens"  # with few, the weights' way from memory takes as long anyway
    model, image = made(name)
    compiled = gtco.compile_model(model, (image,), precision="bf16", target=EMULATED)
    check(name, compiled)
    tiles = [str(s["schedule"].get("tile")) for s in compiled.stages]
    assert sum(tile.startswith("tiles:") for tile in tiles) >= 4


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_library_needs_tiles_if_it_multiplies_in_them(precision: str, tmp_path: Path) -> None:
    """One of the same target without such a kernel needs only the other instructions."""
    model = nn.Linear(96, 64).requires_grad_(False)
    image, path = torch.randn(1, 197, 96), tmp_path / "linear.so"
    gtco.compile_to_file(model, path, (image,), precision=precision, target="sapphirerapids")
    needed, here = set(read_metadata(path)["cpu_features"]), set(detect().features)
    assert needed & {*TILES} == ({*TILES} if precision == "bf16" else set())
    if needed <= here:
        with gtco.load(path) as loaded:
            wanted, got = model(image).numpy(), loaded(image.numpy())
        assert np.abs(got - wanted).max() / np.abs(wanted).max() < BOUND
    else:
        lacking = ", ".join(sorted(needed - here))
        with pytest.raises(ArtifactError, match=f"compiled for {lacking}, which this machine"):
            gtco.load(path)


def test_a_classifier_is_verified(classifier: gtco.CompiledModel) -> None:
    check("vit", classifier)
    report = classifier.report.verification
    assert report.passed and report.tolerance == 0.1
    assert report.top1 is not None and report.top1.images == 32 and not report.top1.wrong
    assert "the same class first on" in str(report)


def test_half_of_the_weights_and_the_same_interface(
    classifier: gtco.CompiledModel, tmp_path: Path
) -> None:
    model, image = made("vit")
    plain = gtco.compile_model(model, (image,))
    assert plain.metadata["precision"] == "fp32"
    assert classifier.report.weights_bytes < 0.7 * plain.report.weights_bytes
    library = classifier.save(tmp_path / "vit.so")
    outputs = []
    for threads in (1, 2, 3):
        with gtco.load(library, threads=threads) as loaded:
            assert [s.dtype for s in (*loaded.inputs, *loaded.outputs)] == ["float32"] * 2
            outputs.append(loaded(image.numpy()))
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


def test_kernels_of_bfloat16_are_tuned() -> None:
    """In a separate process, which knows the type without TVM or onnx."""
    model, image = made("convolutions")
    compiled = gtco.compile_model(
        model, (image,), precision="bf16", tune=gtco.Tune(trials=16, seconds=20.0), verify=True
    )
    assert all("too noisy" in note for note in compiled.report.notes) and compiled.report.tuning
    assert compiled.report.verification.passed


def test_a_wrong_model_is_caught() -> None:
    """The values of two heads are exchanged, as in the test of fp32."""
    right = gtco.compile_model(encoder(), precision="bf16", simplify=False, threads=1)
    assert verify(right, encoder()).passed
    wrong = encoder(heads=(1, 0, 2))
    with pytest.raises(VerificationError, match="is too coarse for"):
        verify(right, wrong)
    assert "random" in failing(verify(right, wrong, check=False))


def test_a_kernel_that_drops_the_last_of_k_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the likely fault of kernels that multiply pairs of k: the last row of one product's
    weights counts as zero.
    """

    def broken(graph: Graph, dtype: str, *prices: object) -> Graph:
        made = narrow_operands(graph, dtype)
        op = next(o for o in made.operators.values() if o.kind == "matmul")
        (name,) = [made.producer(x).inputs[0] for x in op.inputs[1:]]  # type: ignore[union-attr]
        value = made.constants[name].copy()
        value[-1] = 0
        made.constants[name] = value
        return made

    monkeypatch.setattr("gtco.driver.canonical.narrow_operands", broken)
    compiled = gtco.compile_model(encoder(), precision="bf16", simplify=False, threads=1)
    assert "random" in failing(verify(compiled, encoder(), check=False))


def test_unknown_precisions_are_refused() -> None:
    model, image = made("convolutions")
    with pytest.raises(OptionError, match=r"'fp8': choose from fp32, bf16, fp16"):
        gtco.compile_model(model, (image,), precision="fp8")
    with pytest.raises(OptionError, match="precision fp16 is for GPUs"):
        gtco.compile_model(model, (image,), precision="fp16")


def test_a_task_is_never_negative() -> None:
    """Many batches of a transposed convolution. If a task's number could be the least int32, a
    position computed from it would lie beyond int32, and TVM would refuse the code.
    """
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        g (float[1,33,3,8] x) => (float[1,9,8,19] y) { y = ConvTranspose
        <group = 3, kernel_shape = [4, 4], dilations = [2, 1], strides = [1, 3],
         pads = [1, 2, 0, 4]>
        (x, w) }"""
    )
    weights = rng.standard_normal((33, 3, 4, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    feeds = {"x": rng.standard_normal((1, 33, 3, 8)).astype(np.float32)}
    want = wanted(model, feeds, "bf16")["y"]
    with in_process():
        assert difference(run(model, feeds, "bf16")["y"], want, smooth=True) == ""
