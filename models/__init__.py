"""The vision transformers of the GTCO paper's Table I and their kin, in plain PyTorch.

>>> model = create("vit-s-16", seed=0)
>>> logits = model(*example_inputs("vit-s-16"))  # [1, 1000]

Weights are drawn from a seed, or loaded from a public or own checkpoint. ``python -m models list``
shows the table, ``python -m models export NAME -o FILE.onnx`` writes one of them as ONNX.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gtco.support.errors import OptionError, installing

try:
    import torch
    from torch import Tensor, nn
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"the models need torch: {installing('torch')}") from None

from .detr import Detr
from .export import export_onnx
from .layers import upsample
from .segformer import SegFormer
from .setr import NaiveHead, PupHead, Setr
from .swin import Swin
from .text import TextDetector, TextRecognizer
from .vit import DinoV2, VisionTransformer
from .weights import initialise, load_checkpoint

__all__ = ["MODELS", "ModelSpec", "create", "example_inputs", "export_onnx"]


@dataclass(frozen=True)
class ModelSpec:
    """One row of the table.

    ``constructor(image_size=(height, width))`` builds the module; ``input_shape`` is [1, 3, height,
    width]; ``params_millions`` is what Table I prints, None for models outside it. ``open``: the
    axes of the input whose size an ONNX file may leave open, with their names.
    """

    name: str
    constructor: Callable[..., nn.Module]
    input_shape: tuple[int, int, int, int]
    source: str
    params_millions: float | None = None
    open: Mapping[int, str] = field(default_factory=lambda: {0: "batch"})


def _square(side: int) -> tuple[int, int, int, int]:
    return (1, 3, side, side)


_VIT = "Dosovitskiy et al. 2021; timm "
_SETR = "Zheng et al. 2021; fudan-zvg/SETR "
_DETR = "Carion et al. 2020; facebookresearch/detr "

_SPECS = (
    ModelSpec(
        "detr-resnet50-e3",
        partial(Detr, encoder_depth=3),
        (1, 3, 800, 1333),
        _DETR + "with 3 encoder layers",
        37.40,
    ),
    ModelSpec(
        "detr-resnet50-e6",
        partial(Detr, encoder_depth=6),
        (1, 3, 800, 1333),
        _DETR + "detr_resnet50",
        41.30,
    ),
    ModelSpec(
        "detr-resnet50-e12",
        partial(Detr, encoder_depth=12),
        (1, 3, 800, 1333),
        _DETR + "with 12 encoder layers",
        49.20,
    ),
    ModelSpec(
        "setr-naive-base",
        partial(Setr, head=NaiveHead, width=768, depth=12, heads=12, mlp_dim=3072),
        _square(384),
        _SETR + "SETR_Naive_Base",
        87.69,
    ),
    ModelSpec(
        "setr-naive", partial(Setr, head=NaiveHead), _square(384), _SETR + "SETR_Naive", 305.67
    ),
    ModelSpec("setr-pup", partial(Setr, head=PupHead), _square(384), _SETR + "SETR_PUP", 310.57),
    ModelSpec("vit-base-16", VisionTransformer, _square(224), _VIT + "vit_base_patch16_224", 86.00),
    ModelSpec(
        "vit-large-16",
        partial(VisionTransformer, width=1024, depth=24, heads=16),
        _square(224),
        _VIT + "vit_large_patch16_224",
        307.00,
    ),
    ModelSpec(
        "vit-huge-14",
        partial(VisionTransformer, patch_size=14, width=1280, depth=32, heads=16),
        _square(224),
        _VIT + "vit_huge_patch14_224",
        632.00,
    ),
    ModelSpec(
        "vit-ti-16",
        partial(VisionTransformer, width=192, heads=3),
        _square(224),
        _VIT + "vit_tiny_patch16_224",
    ),
    ModelSpec(
        "vit-s-16",
        partial(VisionTransformer, width=384, heads=6),
        _square(224),
        _VIT + "vit_small_patch16_224",
    ),
    ModelSpec(
        "deit-s-16",
        partial(VisionTransformer, width=384, heads=6),
        _square(224),
        "Touvron et al. 2021; timm deit_small_patch16_224 (no distillation token)",
    ),
    ModelSpec("swin-t", Swin, _square(224), "Liu et al. 2021; timm swin_tiny_patch4_window7_224"),
    ModelSpec(
        "dinov2-s-14", DinoV2, _square(518), "Oquab et al. 2023; facebookresearch/dinov2 vits14"
    ),
    ModelSpec(
        "segformer-b0",
        SegFormer,
        _square(512),
        "Xie et al. 2021; nvidia/segformer-b0-finetuned-ade-512-512",
    ),
    ModelSpec(
        "text-detector",
        TextDetector,
        _square(640),
        "Liao et al. 2020 (DB with a ResNet-18)",
        open={0: "batch", 2: "height", 3: "width"},
    ),
    ModelSpec(
        "text-recognizer",
        TextRecognizer,
        (1, 3, 48, 320),
        "Li et al. 2022 (PP-OCRv3), Du et al. 2022 (SVTR)",
        open={0: "batch", 3: "width"},
    ),
)

MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def find(name: str) -> ModelSpec:
    """The spec called ``name``; :class:`OptionError` with the known names otherwise."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise OptionError(f"unknown model {name!r}.{hint} Known models: {', '.join(MODELS)}")
    return MODELS[name]


def create(
    name: str,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    image_size: tuple[int, int] | None = None,
) -> nn.Module:
    """Build a model for inference, with weights from ``seed`` or from ``checkpoint``.

    It is in eval mode and without gradients; the global random state is left as it was.
    ``image_size`` (height, width) replaces the spec's. Raises :class:`OptionError` for an unknown
    name or an impossible size and :class:`ModelError` for a checkpoint that does not fit.
    """
    spec = find(name)
    with torch.random.fork_rng(devices=[]):
        model = spec.constructor(image_size=image_size or spec.input_shape[2:])
    if checkpoint is None:
        initialise(model, seed)
    else:
        load_checkpoint(model, checkpoint)
    return model.eval().requires_grad_(False)


def example_inputs(
    name: str, batch: int = 1, image_size: tuple[int, int] | None = None, seed: int = 0
) -> tuple[Tensor]:
    """One image batch [batch, 3, H, W] in float32, about normal, with large and small structure.

    White noise alone would average out in every convolution and pooling, and hide errors.
    """
    height, width = image_size or find(name).input_shape[2:]
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 8, 8, generator=generator)
    fine = torch.randn(batch, 3, height, width, generator=generator)
    return (upsample(coarse, (height, width)) + 0.5 * fine,)
