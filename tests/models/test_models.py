"""The model zoo: sizes, seeds, shapes, layers against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gtco.support.errors import OptionError
from models import MODELS, create, example_inputs
from models.detr import Detr, MultiheadAttention, sine_positions
from models.setr import PupHead, Setr
from models.swin import Swin, shift_mask
from models.vit import VisionTransformer
from models.weights import initialise

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

# The parameters of the others in timm, facebookresearch/dinov2 and transformers.
PUBLIC = {
    "vit-ti-16": 5_717_416,
    "vit-s-16": 22_050_664,
    "deit-s-16": 22_050_664,
    "swin-t": 28_288_354,
    "dinov2-s-14": 22_056_576 - 384,  # without the mask token, which only serves training
    "segformer-b0": 3_752_694,
}

# Models of our own, in the shape of others' that are trained on data of their own.
OWN = ("text-detector", "text-recognizer")

OUTPUTS = {
    **{name: [(1, 1000)] for name in MODELS if name.startswith(("vit", "deit", "swin"))},
    **{name: [(1, 100, 92), (1, 100, 4)] for name in MODELS if name.startswith("detr")},
    **{name: [(1, 19, 384, 384)] for name in MODELS if name.startswith("setr")},
    "dinov2-s-14": [(1, 384), (1, 1369, 384)],
    "segformer-b0": [(1, 150, 128, 128)],
    "text-detector": [(1, 1, 640, 640)],
    "text-recognizer": [(1, 40, 97)],
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
    assert set(MODELS) == {*TABLE_I, *PUBLIC, *OWN} == set(OUTPUTS)
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
        ("text-detector", (64, 96)),
        ("text-recognizer", (48, 64)),
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
