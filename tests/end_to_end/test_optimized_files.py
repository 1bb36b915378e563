"""Files that ONNX Runtime's optimizers wrote: that of its session, and
``onnxruntime.transformers``.

Small members of the family are exported and optimized. They become the canonical operators and the
stages of the plain export, and their results are those of ONNX Runtime on the plain export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.transformers import optimizer
from torch import nn
from transformers import BertConfig, BertModel, CLIPVisionConfig, CLIPVisionModel

from gtco import compile_model
from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites.pipeline import canonicalize
from models.export import export_onnx
from models.family.huggingface import Plain
from models.swin import Swin
from models.vit import VisionTransformer
from models.weights import initialise
from tests.few_nodes import by_onnxruntime

VIT = {"patch_size": 8, "width": 24, "depth": 2, "heads": 3, "classes": 10}
SWIN = {"width": 12, "depths": (2,), "heads": (3,), "window": 4, "classes": 10}

HEAVY = {"matmul", "conv2d", "attention", "softmax", "layer_norm", "group_norm", "gelu"}
# Movement, and the ways to read a mask.
LIGHT = {"reshape", "permute", "slice", "less", "greater", "sum", "logical_and"}


class Mixed(nn.Module):
    """Convolutions with activations, and a token mixer by transposed products."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.LeakyReLU(0.1),
            nn.Conv2d(8, 16, 1),
            nn.Hardsigmoid(),
        )
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.body(image)).flatten(2)
        return 0.5 * x.transpose(1, 2) @ x


def bert() -> nn.Module:
    """Token ids and a mask of them -> tokens."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48}
    config = BertConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    config._attn_implementation = "eager"
    return BertModel(config, add_pooling_layer=False)


def clip() -> nn.Module:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48}
    config = CLIPVisionConfig(image_size=32, patch_size=8, num_hidden_layers=2, **sizes)
    config._attn_implementation = "eager"
    return CLIPVisionModel(config)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The plain export of a model by its name, made once."""
    folder = tmp_path_factory.mktemp("exports")
    image = (torch.randn(1, 3, 32, 32),)
    mask = (torch.arange(12) < 9).long().expand(2, -1).contiguous()
    texts = (torch.randint(0, 50, (2, 12)), mask)
    fields = ("last_hidden_state",)
    makes: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], str, int]] = {
        "vit": (lambda: VisionTransformer((32, 32), **VIT), image, "dynamo", 20),
        "old vit": (lambda: VisionTransformer((32, 32), **VIT), image, "torchscript", 14),
        "swin": (lambda: Swin((32, 32), **SWIN), image, "torchscript", 17),
        "mixed": (Mixed, image, "torchscript", 17),
        "clip": (lambda: Plain(clip(), ("pixel_values",), fields, {}), image, "dynamo", 18),
        "bert": (
            lambda: Plain(bert(), ("input_ids", "attention_mask"), fields, {}),
            texts,
            "torchscript",
            14,
        ),
    }

    def path(name: str) -> Path:
        made = folder / f"{name}.onnx"
        if not made.exists():
            build, inputs, exporter, opset = makes[name]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = build().eval()
                initialise(module, 0)
            export_onnx(module, inputs, made, exporter=exporter, opset=opset)
        return made

    return path


def optimized(path: Path, by: str) -> onnx.ModelProto:
    """Optimized by the session, or by ``onnxruntime.transformers`` for a type of model. The latter
    runs without the session's fusions, because after them it finds no attention.
    """
    if by != "session":
        sizes = {"num_heads": 3, "hidden_size": 24}
        return optimizer.optimize_model(str(path), model_type=by, opt_level=0, **sizes).model
    target = path.with_suffix(".optimized.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(target)


def drawn(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            arrays[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in value.name or len(arrays):
            arrays[value.name] = (np.arange(shape[1]) < 9).astype(np.int64) * np.ones(
                shape, np.int64
            )
        else:
            arrays[value.name] = rng.integers(0, 50, shape)
    return arrays


def domains(model: onnx.ModelProto) -> Counter[str]:
    foreign = [n.op_type for n in model.graph.node if n.domain == "com.microsoft"]
    return Counter(foreign)


@pytest.mark.parametrize(
    ("name", "by", "wrote"),
    [
        ("vit", "session", {"FusedMatMul": 2, "SkipLayerNormalization": 1}),
        ("vit", "vit", {"SkipLayerNormalization": 4, "BiasGelu": 2}),
        ("old vit", "session", {"FusedMatMul": 2, "Gelu": 2}),
        ("old vit", "unet", {"NhwcConv": 1, "Gelu": 2}),
        ("swin", "session", {}),
        ("swin", "swin", {"BiasGelu": 2}),
        ("mixed", "session", {"FusedConv": 3, "FusedMatMul": 1}),
        ("clip", "session", {"FusedMatMul": 2, "QuickGelu": 2}),
        ("clip", "clip", {"Attention": 2, "QuickGelu": 2}),
        ("bert", "session", {"FusedMatMul": 2, "Gelu": 2}),
        ("bert", "bert", {"Attention": 2, "SkipLayerNormalization": 4}),
    ],
)
def test_optimized_files_become_the_graph_of_the_plain_export(
    exports: Callable[[str], Path], name: str, by: str, wrote: dict[str, int]
) -> None:
    """``wrote`` is what the optimizer must have written, so that the test checks something."""
    path = exports(name)
    plain, model = onnx.load(path), optimized(path, by)
    assert wrote.items() <= domains(model).items()
    arrays = drawn(plain)
    graphs = [canonicalize(lower(load_onnx(proto)).check()) for proto in (plain, model)]
    for wanted, got in zip(
        by_onnxruntime(plain, arrays), graphs[1].evaluate(arrays).values(), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())
    before, after = (graph.histogram() for graph in graphs)
    for kind in (set(before) | set(after)) - LIGHT:
        if kind in HEAVY:
            assert after.get(kind, 0) == before.get(kind, 0), kind
        else:
            assert after.get(kind, 0) <= before.get(kind, 0), kind


@pytest.mark.parametrize(
    ("name", "by"), [("vit", "session"), ("mixed", "session"), ("clip", "clip")]
)
def test_optimized_files_compile_to_as_many_stages(
    exports: Callable[[str], Path], name: str, by: str
) -> None:
    path = exports(name)
    plain, model = onnx.load(path), optimized(path, by)
    arrays = drawn(plain)
    compiled = [compile_model(proto, tune="off") for proto in (plain, model)]
    assert len(compiled[0].stages) >= len(compiled[1].stages)
    got = compiled[1].run(None, arrays)
    for ours, theirs in zip(got, by_onnxruntime(plain, arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
