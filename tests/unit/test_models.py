"""The model zoo: sizes, seeds, shapes, layers against their definitions, checkpoints, export."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gtco.errors import ModelError, OptionError
from models import MODELS, create, example_inputs, export, export_onnx
from models.__main__ import main
from models.detr import Detr, MultiheadAttention, sine_positions
from models.setr import PupHead, Setr
from models.swin import Swin, shift_mask
from models.vit import DinoV2, VisionTransformer
from models.weights import initialise, load_checkpoint

# Copied from Table I of the paper, in millions.
TABLE_I = {
    "detr-resnet50-e3": 37.40,
    "detr-resnet50-e6": 41.30,
    "detr-resnet50-e12": 49.20,
    "setr-naive-base": 87.69,
    "setr-naive": 305.67,
    "setr-pup": 310.57,
    "vit-base-16": 86.00,
    "vit-large-16": 307.00,
    "vit-huge-14": 632.00,
}

# What timm, facebookresearch/dinov2 and transformers have for the others, in parameters.
PUBLIC = {
    "vit-ti-16": 5_717_416,
    "vit-s-16": 22_050_664,
    "deit-s-16": 22_050_664,
    "swin-t": 28_288_354,
    "dinov2-s-14": 22_056_576 - 384,  # without the mask token, which serves training alone
    "segformer-b0": 3_752_694,
}

OUTPUTS = {
    **{name: [(1, 1000)] for name in MODELS if name.startswith(("vit", "deit", "swin"))},
    **{name: [(1, 100, 92), (1, 100, 4)] for name in MODELS if name.startswith("detr")},
    **{name: [(1, 19, 384, 384)] for name in MODELS if name.startswith("setr")},
    "dinov2-s-14": [(1, 384), (1, 1369, 384)],
    "segformer-b0": [(1, 150, 128, 128)],
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name].constructor().eval()


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    initialise(model, seed)
    return model.eval().requires_grad_(False)


def tiny_vit(size: tuple[int, int] = (32, 48)) -> VisionTransformer:
    return VisionTransformer(size, patch_size=16, width=32, depth=2, heads=2, classes=10)


def tiny_swin() -> Swin:
    return Swin((56, 48), width=16, depths=(2, 2), heads=(2, 4), window=4, classes=10)


def tiny_detr() -> Detr:
    return Detr(
        (96, 70),
        encoder_depth=1,
        decoder_depth=2,
        width=32,
        heads=4,
        hidden=64,
        queries=5,
        classes=7,
        backbone_depths=(1, 1, 1, 1),
        backbone_width=8,
    )


def tiny_setr() -> Setr:
    return Setr((32, 48), head=PupHead, width=32, depth=1, heads=2, mlp_dim=64, classes=4)


TINY = {
    "vit": (tiny_vit, (2, 3, 32, 48)),
    "swin": (tiny_swin, (2, 3, 56, 48)),
    "detr": (tiny_detr, (2, 3, 96, 70)),
    "setr": (tiny_setr, (2, 3, 32, 48)),
}


def run_onnx(path: Path, image: Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: image.numpy()})


def check_against_torch(path: Path, model: nn.Module, image: Tensor) -> None:
    expected = as_tuple(model(image))
    actual = run_onnx(path, image)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def same_inputs_every_time() -> None:
    torch.manual_seed(0)


# --- the table ---


@pytest.mark.parametrize("name", TABLE_I)
def test_parameters_within_two_percent_of_table_1(name: str) -> None:
    assert MODELS[name].params_millions == TABLE_I[name]
    assert parameters(on_meta(name)) / 1e6 == pytest.approx(TABLE_I[name], rel=0.02)


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_equal_the_public_implementation(name: str) -> None:
    assert MODELS[name].params_millions is None
    assert parameters(on_meta(name)) == PUBLIC[name]


def test_trained_parameters_of_detr_are_those_it_publishes() -> None:
    model = on_meta("detr-resnet50-e6")
    frozen = ("backbone.0.body.conv1.", "backbone.0.body.layer1.")
    trained = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(frozen))
    assert trained == 41_302_368


def test_every_model_is_accounted_for() -> None:
    assert set(MODELS) == {*TABLE_I, *PUBLIC} == set(OUTPUTS)
    assert all(name == spec.name for name, spec in MODELS.items())


@pytest.mark.parametrize("name", MODELS)
def test_output_shapes(name: str) -> None:
    outputs = as_tuple(on_meta(name)(torch.empty(MODELS[name].input_shape, device="meta")))
    assert [tuple(output.shape) for output in outputs] == OUTPUTS[name]
    assert len(on_meta(name).output_names) == len(outputs)


@pytest.mark.parametrize(
    ("name", "block", "tokens"),
    [
        ("detr-resnet50-e3", "transformer.encoder.layers.0.linear1", 1050),
        ("detr-resnet50-e3", "transformer.decoder.layers.0.linear1", 100),
        ("setr-naive", "backbone.blocks.0.mlp.fc1", 576),
        ("vit-base-16", "blocks.0.mlp.fc1", 197),
        ("vit-huge-14", "blocks.0.mlp.fc1", 257),
    ],
)
def test_token_counts_are_table_1s(name: str, block: str, tokens: int) -> None:
    model, seen = on_meta(name), []
    model.get_submodule(block).register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    model(torch.empty(MODELS[name].input_shape, device="meta"))
    assert seen[0].shape[1] == tokens


# --- seeded weights ---


def test_a_seed_fixes_the_weights_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = create("vit-ti-16"), create("vit-ti-16", 0), create("vit-ti-16", 1)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for (name, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
        assert not torch.equal(a, b), f"{name} does not depend on the seed"
    assert not first.training


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit-ti-16", (224, 224)),
        ("swin-t", (112, 112)),
        ("dinov2-s-14", (112, 112)),
        ("segformer-b0", (128, 128)),
        ("detr-resnet50-e3", (224, 256)),
    ],
)
def test_outputs_are_sane_and_follow_the_input(name: str, size: tuple[int, int]) -> None:
    model = create(name, image_size=size)
    images = [example_inputs(name, image_size=size, seed=seed)[0] for seed in (0, 1)]
    assert images[0].shape == (1, 3, *size)
    for first, second in zip(*(as_tuple(model(image)) for image in images), strict=True):
        assert torch.isfinite(first).all()
        assert 0.01 < first.std() < 10
        assert (first - second).norm() > 0.02 * first.norm()


def test_activations_neither_vanish_nor_explode_through_depth() -> None:
    model = seeded(VisionTransformer((64, 64), width=64, depth=32, heads=4, classes=10))
    deviations = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: deviations.append(float(output.std())))
    model(example_inputs("vit-ti-16", image_size=(64, 64))[0])
    assert len(deviations) == 32
    assert 0.5 < min(deviations) and max(deviations) < 20


@pytest.mark.parametrize("kind", TINY)
def test_images_of_a_batch_do_not_meet(kind: str) -> None:
    constructor, shape = TINY[kind]
    model, images = seeded(constructor()), torch.randn(shape)
    together = as_tuple(model(images))
    alone = as_tuple(model(images[1:]))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[1:], b, rtol=1e-4, atol=1e-5)


def test_a_size_that_the_patches_do_not_tile_is_refused() -> None:
    with pytest.raises(OptionError, match="225x224 is not a multiple of the patch size 16"):
        create("vit-ti-16", image_size=(225, 224))


# --- layers against their definitions ---


def test_detr_attention_equals_torchs() -> None:
    ours = seeded(MultiheadAttention(32, 4))
    reference = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    reference.load_state_dict(ours.state_dict())
    query, key, value = torch.randn(2, 5, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    expected = reference(query, key, value, need_weights=False)[0]
    torch.testing.assert_close(ours(query, key, value), expected, rtol=1e-4, atol=1e-5)


def test_sine_positions_follow_the_formula() -> None:
    rows, columns, width = 3, 5, 8
    table = sine_positions((rows, columns), width).reshape(rows, columns, width)
    for row in range(rows):
        for column in range(columns):
            for channel in range(width):
                place, extent = (row, rows) if channel < width // 2 else (column, columns)
                index = channel % (width // 2)
                angle = 2 * math.pi * (place + 1) / (extent + 1e-6)
                angle /= 10000 ** (2 * (index // 2) / (width // 2))
                expected = math.cos(angle) if index % 2 else math.sin(angle)
                assert float(table[row, column, channel]) == pytest.approx(expected, abs=1e-5)


def test_shift_mask_separates_what_the_shift_brought_together() -> None:
    grid, window, shift = (8, 12), 4, 2
    mask = shift_mask(grid, window, shift)
    assert mask.shape == (2 * 3, 1, 16, 16)
    for tile in range(6):
        for a in range(16):
            for b in range(16):
                apart = False
                for axis, start in enumerate((tile // 3 * window, tile % 3 * window)):
                    places = [start + divmod(token, window)[axis] for token in (a, b)]
                    before = [(place + shift) % grid[axis] for place in places]
                    # The roll keeps distances, except across the seam.
                    apart |= before[0] - before[1] != places[0] - places[1]
                assert float(mask[tile, 0, a, b]) == (-100.0 if apart else 0.0)


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
    ("arguments", "message"),
    [
        (["nothing"], "unknown model 'nothing'"),
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
