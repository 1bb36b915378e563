"""Models compiled to libraries with images for GPUs, without a GPU, by the user's command."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from gtco import cli
from gtco.driver.compilation import Compilation, silent
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.report.gather import gather
from gtco.report.page import page
from gtco.runtime.library import read_metadata
from gtco.support.options import CompileOptions
from models import export_onnx
from models.vit import VisionTransformer
from models.weights import initialise
from tests.cuda.codegen.test_sass import FEW

EVERY = f"cuda:{','.join(ARCHITECTURES)}"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT as ONNX: 16 tokens and one, 48 wide, 2 layers."""
    model = VisionTransformer((64, 64), patch_size=16, width=48, depth=2, heads=3, classes=10)
    initialise(model.eval().requires_grad_(False), seed=1)
    path = tmp_path_factory.mktemp("vit") / "vit.onnx"
    export_onnx(model, (torch.zeros(1, 3, 64, 64),), path)
    return path


def test_one_library_for_every_architecture(vit: Path, tmp_path: Path, capsys) -> None:
    library = tmp_path / "vit.so"
    command = ["compile", str(vit), "-o", str(library), "--target", EVERY, "--precision", "fp16"]
    assert cli.main([*command, "--strict", "--dump", str(tmp_path / "dump")]) == 0
    sizes = read_metadata(library)["images"]
    assert list(sizes) == [*ARCHITECTURES, "compute_89"] and min(sizes.values()) > 0
    assert "note:" not in capsys.readouterr().out
    steps = read_metadata(library)["steps"]
    assert {step["schedule"]["sketch"] for step in steps} >= {"gemm", "attention", "rows"}
    for step in steps:
        assert set(step["registers"]) == set(ARCHITECTURES), step["name"]
        assert max(step["spilled_bytes"].values()) <= FEW, step["name"]
    products = [s for s in steps if s["schedule"]["sketch"] in ("gemm", "attention")]
    for step in products:  # both operands of a product are fp16, or are rounded when they are read
        short = [kind.startswith("float16") for kind in step["inputs"]]
        rounded = "cast" in step["operators"][:2]
        assert all(short) or sum(short) >= 2 or rounded, step["name"]
    # each different kernel in readable form, with its results
    kernels = {step["kernel"] for step in steps}
    texts = {path.stem.removeprefix("6-"): path for path in (tmp_path / "dump").glob("6-*.cu")}
    assert set(texts) == kernels and len(kernels) < len(steps)
    for name, path in texts.items():
        text = path.read_text()
        assert f"{name}(" in text and all(f"// {arch}: " in text for arch in ARCHITECTURES)
    capsys.readouterr()
    assert cli.main(["inspect", str(library), "--no-profile", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["metadata"]["target"]["images"] == list(ARCHITECTURES)
    assert seen["metadata"]["precision"] == "fp16"
    # the loops of each kernel, in the report and in words
    facts = gather(library)
    (model,) = facts.models
    for stage in model.stages:
        blocks = [line.extent for line in stage.loops if line.runs == "blocks"]
        assert prod(blocks) == stage.launch["grid"][0], stage.name  # two loops where k is split
        assert all(decision.words for decision in stage.config), stage.config
        if stage.sketch in ("gemm", "attention"):  # also where the inputs are float32, and are cast
            assert stage.number_format == "float16", stage.name
            assert stage.instructions.startswith("Tensor Cores, mma"), stage.name
        else:
            assert (stage.instructions, stage.number_format) == ("CUDA cores", "float32")
        assert any("-> output" in line.text for line in stage.loops), stage.name
    text = page(facts)
    assert text.count('class="blocks"') >= len(kernels) and "The loops of blocks, warps" in text
    assert "of the float16 peak" in text and "--verify-layers" not in text  # that is for CPUs
    assert cli.main(["inspect", str(library), "--no-profile", "--loops"]) == 0
    said = capsys.readouterr().out
    assert said.count(" (blocks):") >= len(kernels) and "no nest is described" not in said


def test_ptx_may_be_left_out(vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "vit.so"
    command = ["compile", str(vit), "-o", str(library), "--precision", "fp16"]
    for target, more, images in (
        ("sm_80", (), ["sm_80", "compute_80"]),
        ("sm_80", ("--no-ptx",), ["sm_80"]),
        ("sm_90a", (), ["sm_90a"]),
    ):
        assert cli.main([*command, "--target", f"cuda:{target}", *more]) == 0
        assert list(read_metadata(library)["images"]) == images
    capsys.readouterr()


def test_bfloat16_without_tensor_cores_is_noted(vit: Path) -> None:
    for target, noted in (("cuda:sm_75,sm_80", True), ("cuda:sm_80", False)):
        options = CompileOptions(target=target, precision="bf16")
        run = Compilation(vit, Path("model.so"), None, options, silent)
        run.to_stages(gpu_target(target))
        assert any("Tensor Cores of sm_75" in note for note in run.report.notes) is noted


def test_what_is_tuned_is_of_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(tmp_path / "no-such.onnx"), "--target", "cuda:sm_80"]) == 1
    said = capsys.readouterr().err
    assert "Leave it off" not in said
    assert "gtco candidates, which makes what gtco measure times" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--target cuda:sm_70", "CUDA 13 ended"),
        ("--target cuda:sm_80 --verify", "--verify (verify=True) runs the library, and no GPU"),
        ("--target cuda:sm_80 --threads 2", "is a GPU"),
        ("--target cuda:sm_80 --tune quick", "gtco candidates"),
        ("--target cuda:sm_80 --records r.sqlite", "the file does not exist"),
        ("--target x86-64-v3 --precision fp16", "fp16 is for GPUs"),
    ],
)
def test_what_does_not_go_together_is_said_at_once(
    tmp_path: Path, capsys, arguments: str, reason: str
) -> None:
    missing = tmp_path / "no-such.onnx"  # this would be the error if the file were looked for first
    assert cli.main(["compile", str(missing), *arguments.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and "Traceback" not in error
