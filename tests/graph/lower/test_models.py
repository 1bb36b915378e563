"""Whole ONNX and PyTorch models as canonical graphs: which operators they become, by either
exporter, and their values against PyTorch.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.graph import Graph
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize
from gtco.support.errors import GtcoError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
HEADS = {"num_labels": 10}
LAYERS = {"attention": 2, "layer_norm": 5, "gelu": 2, "conv2d": 1, "softmax": 0, "multiply": 0}


def vit(attention: str) -> torch.nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**VIT, **HEADS, attn_implementation=attention)
    )


def deit(attention: str) -> torch.nn.Module:
    return transformers.DeiTForImageClassification(
        transformers.DeiTConfig(**VIT, **HEADS, attn_implementation=attention)
    )


def beit(attention: str) -> torch.nn.Module:
    return transformers.BeitForImageClassification(
        transformers.BeitConfig(
            **VIT, **HEADS, use_relative_position_bias=True, attn_implementation=attention
        )
    )


def dinov2(attention: str) -> torch.nn.Module:
    return transformers.Dinov2Model(
        transformers.Dinov2Config(**VIT, mlp_ratio=2, attn_implementation=attention)
    )


def swin(attention: str) -> torch.nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            **HEADS,
        )
    )


def segformer(attention: str) -> torch.nn.Module:
    return transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 16, 32, 32],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=32,
            **HEADS,
        )
    )


def detr(attention: str) -> torch.nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        layer_type="bottleneck",
        out_features=["stage4"],
    )
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            d_model=64,
            backbone_config=backbone,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            num_queries=10,
            num_labels=5,
            attn_implementation=attention,
        )
    )


SIZES = {detr: (64, 96), segformer: (64, 64)}


class Tensors(torch.nn.Module):
    """A Hugging Face model that gives tensors; all its parameters and statistics are random."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            for name, buffer in self.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(x)
        if "pred_boxes" in out:
            return out.logits, out.pred_boxes
        return (out.logits if "logits" in out else out.last_hidden_state,)


def make(
    build: Callable[[str], torch.nn.Module], attention: str
) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Tensors(build(attention)).eval()
    return model, torch.randn(1, 3, *SIZES.get(build, (32, 32)))


def export(model: torch.nn.Module, x: torch.Tensor, path: Path, dynamo: bool) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if dynamo:
            torch.onnx.export(
                model, (x,), path, dynamo=True, opset_version=20, external_data=False, verbose=False
            )
        else:
            buffer = io.BytesIO()
            torch.onnx.export(model, (x,), buffer, dynamo=False, opset_version=17)
            path.write_bytes(buffer.getvalue())


def expect(graph: Graph, wanted: dict[str, int]) -> None:
    kinds = graph.histogram()
    assert {kind: kinds.get(kind, 0) for kind in wanted} == wanted
    assert (
        not {"relax", "where", "isnan", "gather", "cast", "divide", "power", "erf"} & kinds.keys()
    )


# In the last block, the query of the class token has its own product.
CLASSIFIER = LAYERS | {"matmul": 10}
MODELS = [
    (vit, "sdpa", True, CLASSIFIER),
    (vit, "eager", False, CLASSIFIER),
    (deit, "eager", True, CLASSIFIER),
    (dinov2, "sdpa", True, LAYERS | {"matmul": 8, "multiply": 4}),
    (beit, "sdpa", False, LAYERS | {"multiply": 4}),
    (swin, "", True, {"attention": 4, "layer_norm": 11, "gelu": 4, "roll": 4, "softmax": 0}),
    (swin, "", False, {"attention": 4, "layer_norm": 11, "gelu": 4, "roll": 4, "softmax": 0}),
    (
        segformer,
        "",
        False,
        # the convolution that fuses four scales becomes one of each
        {"attention": 4, "gelu": 4, "conv2d": 16, "resize2d": 3, "softmax": 0, "multiply": 0},
    ),
    (detr, "eager", False, {"attention": 5, "conv2d": 17, "softmax": 0, "multiply": 0}),
]


@pytest.mark.parametrize("build, attention, dynamo, wanted", MODELS)
def test_exported_models(
    build: Callable[[str], torch.nn.Module],
    attention: str,
    dynamo: bool,
    wanted: dict[str, int],
    tmp_path: Path,
) -> None:
    model, x = make(build, attention)
    path = tmp_path / "model.onnx"
    export(model, x, path, dynamo)
    imported = load_onnx(path)
    assert imported.notes == ()
    graph = canonicalize(lower(imported).check())
    expect(graph, wanted)
    inputs = {name: x.numpy() for name in graph.inputs}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = list(graph.evaluate(inputs).values())
    for value, reference in zip(values, session.run(None, inputs), strict=True):
        assert value.dtype == reference.dtype
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "build, attention, wanted",
    [
        (vit, "sdpa", CLASSIFIER),
        (detr, "eager", {"attention": 5, "conv2d": 17, "softmax": 0, "multiply": 0}),
    ],
)
def test_pytorch_models(
    build: Callable[[str], torch.nn.Module], attention: str, wanted: dict[str, int]
) -> None:
    model, x = make(build, attention)
    model.train()
    with pytest.raises(GtcoError, match="example_inputs, and there are none"):
        load_pytorch(model)
    imported = load_pytorch(model, x)
    assert model.training and model.model.training
    graph = canonicalize(lower(imported).check())
    expect(graph, wanted)
    with torch.no_grad():
        wanted_values = model.eval()(x)
    values = list(graph.evaluate({graph.inputs[0]: x.numpy()}).values())
    for value, reference in zip(values, wanted_values, strict=True):
        np.testing.assert_allclose(value, reference.numpy(), rtol=1e-4, atol=1e-4)
