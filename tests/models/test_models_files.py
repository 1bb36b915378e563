"""The model zoo's files: checkpoints, export, the command line.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gtco.support.errors import ModelError, OptionError
from models import MODELS, create, example_inputs, export, export_onnx
from models.__main__ import main
from models.vit import DinoV2
from models.weights import load_checkpoint
from tests.models.test_models import (
    TINY,
    as_tuple,
    seeded,
    tiny_swin,
    tiny_vit,
)


def run_onnx(path: Path, image: Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: image.numpy()})


def check_against_torch(path: Path, model: nn.Module, image: Tensor, rtol: float = 1e-4) -> None:
    expected = as_tuple(model(image))
    actual = run_onnx(path, image)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=rtol, atol=1e-5)


# --- checkpoints ---


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_checkpoint_round_trip(tmp_path: Path, suffix: str) -> None:
    source, path = seeded(tiny_vit(), 3), tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        state = {f"module.{name}": value for name, value in source.state_dict().items()}
        torch.save({"model": state, "epoch": 7}, path)
    else:
        save_file(source.state_dict(), path)
    target = tiny_vit().eval().requires_grad_(False)
    load_checkpoint(target, path)
    image = torch.randn(1, 3, 32, 48)
    assert torch.equal(target(image), source(image))


def test_create_takes_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "vit.pt"
    source = create("vit-ti-16", seed=9)
    torch.save(source.state_dict(), path)
    assert torch.equal(create("vit-ti-16", checkpoint=path).head.weight, source.head.weight)


def test_wrong_checkpoint_lists_the_keys(tmp_path: Path) -> None:
    path, state = tmp_path / "weights.pt", tiny_vit().state_dict()
    state["strange.weight"] = state.pop("norm.weight")
    state["head.bias"] = torch.zeros(11)
    torch.save(state, path)
    with pytest.raises(ModelError) as error:
        load_checkpoint(tiny_vit(), path)
    message = str(error.value)
    assert "missing: norm.weight (1)" in message
    assert "unexpected: strange.weight (1)" in message
    assert "wrong shape: head.bias (11,) instead of (10,)" in message
    assert str(path) in message


def test_unreadable_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint at"):
        load_checkpoint(tiny_vit(), tmp_path / "absent.pt")
    for name in ("broken.pt", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"not a checkpoint")
        with pytest.raises(ModelError, match="cannot read"):
            load_checkpoint(tiny_vit(), tmp_path / name)
    torch.save(tiny_vit(), tmp_path / "module.pt")  # a pickled module is code, not weights
    with pytest.raises(ModelError, match="cannot read"):
        load_checkpoint(tiny_vit(), tmp_path / "module.pt")


def test_microsofts_swin_names_load() -> None:
    model = seeded(tiny_swin())
    state = dict(model.state_dict())
    original = {name: value for name, value in state.items() if "downsample" not in name}
    original = {name.replace("head.fc.", "head."): value for name, value in original.items()}
    for name in state.keys() - original.keys():
        if "downsample" in name:
            original[name.replace("layers.1.", "layers.0.")] = state[name]
    original["layers.0.blocks.1.attn_mask"] = torch.zeros(1)
    original["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(1)
    assert model.adapt_state_dict(original).keys() == state.keys()
    assert model.adapt_state_dict(state).keys() == state.keys()


def test_dinov2_checkpoint_of_another_size() -> None:
    large = seeded(DinoV2((56, 56), width=32, depth=1, heads=2))
    small = DinoV2((28, 42), width=32, depth=1, heads=2)
    state = {**large.state_dict(), "mask_token": torch.zeros(1, 32)}
    adapted = small.adapt_state_dict(state)
    assert adapted.keys() == small.state_dict().keys()
    assert adapted["pos_embed"].shape == (1, 1 + 2 * 3, 32)
    assert torch.equal(adapted["pos_embed"][:, 0], state["pos_embed"][:, 0])
    # A constant grid stays that constant at every size.
    state["pos_embed"] = torch.full_like(state["pos_embed"], 0.25)
    torch.testing.assert_close(
        small.adapt_state_dict(state)["pos_embed"], torch.full((1, 7, 32), 0.25)
    )





# --- export ---


@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 20), ("torchscript", 17)])
@pytest.mark.parametrize("kind", TINY)
def test_export_matches_torch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, exporter: str, opset: int
) -> None:
    constructor, shape = TINY[kind]
    model, image = seeded(constructor()), torch.randn(shape)
    path = export_onnx(model, (image,), tmp_path / "m.onnx", opset=opset, exporter=exporter)
    assert capfd.readouterr() == ("", "")
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    assert {entry.domain: entry.version for entry in graph.opset_import}[""] == opset
    assert [value.name for value in graph.graph.input] == ["image"]
    assert [value.name for value in graph.graph.output] == list(model.output_names)
    check_against_torch(path, model, image)


@pytest.mark.parametrize("exporter", export.EXPORTERS)
def test_large_weights_go_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: str
) -> None:
    monkeypatch.setattr(export, "EMBEDDED_BYTES_MAX", 1000)
    model, image = seeded(tiny_vit()), torch.randn(1, 3, 32, 48)
    path = export_onnx(model, (image,), tmp_path / "m.onnx", exporter=exporter)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert path.stat().st_mode == path.with_name("m.onnx.data").stat().st_mode
    check_against_torch(path, model, image)


def test_simplified_export(tmp_path: Path) -> None:
    model, image = seeded(tiny_vit()), torch.randn(1, 3, 32, 48)
    path = tmp_path / "m.onnx"
    export_onnx(model, (image,), path, opset=17, exporter="torchscript")
    plain = len(onnx.load(path).graph.node)
    export_onnx(model, (image,), path, opset=17, exporter="torchscript", simplify=True)
    assert len(onnx.load(path).graph.node) < plain
    check_against_torch(path, model, image)


@pytest.mark.parametrize("exporter", export.EXPORTERS)
def test_a_failed_export_leaves_the_old_file(tmp_path: Path, exporter: str) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no forward today")

    path = tmp_path / "m.onnx"
    path.write_text("old")
    with pytest.raises(ModelError, match=f"Failing cannot be exported with the {exporter}"):
        export_onnx(Failing(), (torch.zeros(1),), path, exporter=exporter)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_unknown_exporter(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="choose one of: dynamo, torchscript"):
        export_onnx(tiny_vit(), (torch.zeros(1),), tmp_path / "m.onnx", exporter="caffe")





# --- command line ---


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError) as error:
        create("vit-base")
    message = str(error.value)
    assert "unknown model 'vit-base'. Did you mean vit-base-16?" in message
    assert all(name in message for name in MODELS)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(MODELS)


def test_command_line_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sub" / "vit.onnx"
    arguments = ["export", "vit-ti-16", "-o", str(path), "--batch", "2", "--image-size", "64", "96"]
    assert main([*arguments, "--seed", "4"]) == 0
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 1 and captured.err == ""
    (image,) = example_inputs("vit-ti-16", batch=2, image_size=(64, 96))
    check_against_torch(path, create("vit-ti-16", seed=4, image_size=(64, 96)), image)


@pytest.mark.parametrize(
    ("exporter", "name", "size", "axes"),
    [
        ("dynamo", "text-recognizer", (48, 96), {0: "batch", 3: "width"}),
        ("torchscript", "text-detector", (96, 64), {0: "batch", 2: "height", 3: "width"}),
    ],
)
def test_sizes_that_stay_open(
    tmp_path: Path, exporter: str, name: str, size: tuple[int, int], axes: dict[int, str]
) -> None:
    path = tmp_path / "open.onnx"
    arguments = ["export", name, "-o", str(path), "--exporter", exporter]
    assert main([*arguments, "--open", ",".join(axes.values())]) == 0
    dims = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert {at: dims[at].dim_param for at in range(4) if dims[at].dim_param} == axes
    # Errors of 1e-5 in scores are as large, relatively, in small probabilities.
    check_against_torch(path, create(name), example_inputs(name, 3, size)[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown model 'nothing'"),
        (["vit-ti-16", "--open", "batch,height"], "of vit-ti-16 that can stay open are batch"),
        (["vit-ti-16", "--checkpoint", "absent.pt"], "no checkpoint at absent.pt"),
        (["vit-ti-16", "--batch", "0"], "give a batch of 1 or more"),
        (["vit-ti-16", "--image-size", "100", "100"], "not a multiple of the patch size"),
    ],
)
def test_command_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["export", *arguments, "-o", str(tmp_path / "m.onnx")]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
