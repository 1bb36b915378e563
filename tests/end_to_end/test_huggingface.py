"""Hugging Face's own implementations, small and with random weights, through both ONNX exporters.

Their graphs are written differently from those of models/: masks made by IsNaN and Where, windows
padded at run time, relative positions gathered by index, resampled position embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from tests.end_to_end.test_models import check  # noqa: E402

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "patch_size": 8,
    "num_labels": 6,
}


class Plain(nn.Module):
    """Takes tensors, and gives the named fields of the output."""

    def __init__(self, model: nn.Module, *fields: str) -> None:
        super().__init__()
        self.model, self.fields = model, fields

    def forward(self, image: Tensor) -> Any:
        output = self.model(image)
        return tuple(output[name] for name in self.fields)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SMALL, image_size=40)
    return Plain(transformers.ViTForImageClassification(config), "logits")


def deit() -> nn.Module:
    config = transformers.DeiTConfig(**SMALL, image_size=40)
    model = transformers.DeiTForImageClassificationWithTeacher(config)
    return Plain(model, "logits", "cls_logits")


def beit() -> nn.Module:
    config = transformers.BeitConfig(**SMALL, image_size=40, use_relative_position_bias=True)
    return Plain(transformers.BeitForImageClassification(config), "logits")


def dinov2() -> nn.Module:
    config = transformers.Dinov2Config(**SMALL, image_size=40, mlp_ratio=2)
    return Plain(transformers.Dinov2Model(config), "last_hidden_state", "pooler_output")


def swin() -> nn.Module:
    """40 x 40 pixels in patches of 4 give 10 x 10 tokens, so windows of 4 need padding."""
    config = transformers.SwinConfig(
        image_size=40,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=6,
    )
    return Plain(transformers.SwinForImageClassification(config), "logits")


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 24, 40, 56], decoder_hidden_size=32, num_labels=6
    )
    return Plain(transformers.SegformerForSemanticSegmentation(config), "logits")


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="bottleneck",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        encoder_layers=1,
        decoder_layers=1,
        d_model=48,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=7,
        num_labels=6,
    )
    return Plain(transformers.DetrForObjectDetection(config), "logits", "pred_boxes")


MODELS = {
    "vit": (vit, (2, 3, 40, 40), "module"),
    "deit": (deit, (1, 3, 40, 40), "torchscript"),
    "beit": (beit, (1, 3, 40, 40), "dynamo"),
    "dinov2": (dinov2, (1, 3, 40, 40), "torchscript"),
    "swin": (swin, (2, 3, 40, 40), "torchscript"),
    "segformer": (segformer, (1, 3, 64, 96), "torchscript"),
    "detr": (detr, (1, 3, 70, 96), "torchscript"),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, tmp_path: Path) -> None:
    make, shape, route = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make().eval().requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():  # the usual 0.02 makes every softmax uniform
                if parameter.ndim > 1:
                    parameter.normal_(0, parameter[0].numel() ** -0.5)
        image = torch.randn(shape)
    check(model, (image,), route, tmp_path)
