"""Members of the family from ``transformers``: configurations with random weights, no download.

True structure and typical widths and resolutions, few layers. Where the library's default
configuration is the published base model, only its depth is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """Tensors in, the named fields of the output out; ``constants`` are further arguments."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[str, ...],
        fields: tuple[str, ...],
        constants: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.fields, self.constants = model, inputs, fields, constants

    def forward(self, *tensors: Tensor) -> Any:
        named = dict(zip(self.inputs, tensors, strict=True))
        output = self.model(**named, **self.constants)
        values = tuple(output[name] for name in self.fields)
        # hidden states and feature maps are tuples themselves
        return tuple(t for v in values for t in (v if isinstance(v, tuple | list) else (v,)))


@dataclass(frozen=True)
class HuggingFace:
    """One model.

    - ``model`` and ``config``: names of ``transformers``
    - ``fields``: the outputs that are used
    - ``constants``: arguments of the call that are not inputs
    - ``part``: the attribute of the built model that is exported; empty for the model itself
    - ``shapes``: of the inputs; the last ``masks`` of them are integers that mark padding
    - ``nested``: configurations inside the configuration, argument -> (class, arguments)
    """

    model: str
    config: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ("last_hidden_state",)
    inputs: tuple[str, ...] = ("pixel_values",)
    constants: Mapping[str, Any] = field(default_factory=dict)
    nested: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    part: str = ""
    shapes: tuple[tuple[int, ...], ...] = ((1, 3, 224, 224),)
    masks: int = 0

    def __call__(self) -> nn.Module:
        import transformers

        nested = {
            name: getattr(transformers, config)(**arguments)
            for name, (config, arguments) in self.nested.items()
        }
        config = getattr(transformers, self.config)(**self.arguments, **nested)
        model = getattr(transformers, self.model)(config)
        if self.part:
            model = model.get_submodule(self.part)
        return Plain(model, self.inputs, self.fields, self.constants)


LOGITS = ("logits",)
TWO = {"num_hidden_layers": 2}
SMALL = {**TWO, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}

MODELS: dict[str, HuggingFace] = {
    "vit": HuggingFace("ViTForImageClassification", "ViTConfig", TWO, LOGITS),
    "deit": HuggingFace(
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", TWO, ("logits", "cls_logits")
    ),
    "beit": HuggingFace(
        "BeitForImageClassification",
        "BeitConfig",
        {**TWO, "use_relative_position_bias": True},
        LOGITS,
    ),
    "data2vec": HuggingFace(
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        {**TWO, "use_relative_position_bias": True},
        LOGITS,
    ),
    "dinov2": HuggingFace("Dinov2Model", "Dinov2Config", {**TWO, "image_size": 224}),
    "dinov2-registers": HuggingFace(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**SMALL, "image_size": 224}
    ),
    "dinov3": HuggingFace("DINOv3ViTModel", "DINOv3ViTConfig", SMALL),
    "dinov3-plus": HuggingFace(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {**SMALL, "use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 4},
    ),
    "dinov3-convnext": HuggingFace(
        "DINOv3ConvNextModel", "DINOv3ConvNextConfig", {"depths": [1, 1, 2, 1]}
    ),
    "swin": HuggingFace(
        "SwinForImageClassification", "SwinConfig", {"depths": [2, 2, 2, 2]}, LOGITS
    ),
    "swinv2": HuggingFace(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"depths": [2, 2, 2, 2], "image_size": 256, "window_size": 8},
        LOGITS,
        shapes=((1, 3, 256, 256),),
    ),
    "swin2sr": HuggingFace(
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        {"depths": [2, 2], "num_heads": [6, 6], "upsampler": "pixelshuffle", "upscale": 2},
        ("reconstruction",),
        shapes=((1, 3, 64, 64),),
    ),
    "pvt": HuggingFace("PvtForImageClassification", "PvtConfig", {"depths": [1, 1, 1, 1]}, LOGITS),
    "pvtv2": HuggingFace(
        "PvtV2ForImageClassification", "PvtV2Config", {"depths": [1, 1, 1, 1]}, LOGITS
    ),
    "pvtv2-linear": HuggingFace(
        "PvtV2ForImageClassification",
        "PvtV2Config",
        {"depths": [1, 1, 1, 1], "linear_attention": True},
        LOGITS,
    ),
    "segformer": HuggingFace(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"depths": [1, 1, 1, 1]},
        LOGITS,
        shapes=((1, 3, 512, 512),),
    ),
    "mobilevit": HuggingFace(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {"image_size": 256},
        LOGITS,
        shapes=((1, 3, 256, 256),),
    ),
    "mobilevit-seg": HuggingFace(
        "MobileViTForSemanticSegmentation",
        "MobileViTConfig",
        {"image_size": 256},
        LOGITS,
        shapes=((1, 3, 256, 256),),
    ),
    "mobilevitv2": HuggingFace(
        "MobileViTV2ForImageClassification",
        "MobileViTV2Config",
        {"image_size": 256},
        LOGITS,
        shapes=((1, 3, 256, 256),),
    ),
    "levit": HuggingFace(
        "LevitForImageClassification", "LevitConfig", {"depths": [2, 2, 2]}, LOGITS
    ),
    "cvt": HuggingFace("CvtForImageClassification", "CvtConfig", {"depth": [1, 2, 3]}, LOGITS),
    "vit-msn": HuggingFace("ViTMSNForImageClassification", "ViTMSNConfig", TWO, LOGITS),
    "vit-mae": HuggingFace(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {**TWO, "decoder_num_hidden_layers": 1},
        LOGITS,
        ("pixel_values", "noise"),
        shapes=((1, 3, 224, 224), (1, 196)),
    ),
    "ijepa": HuggingFace("IJepaModel", "IJepaConfig", {**TWO, "image_size": 224}),
    "siglip": HuggingFace(
        "SiglipVisionModel", "SiglipVisionConfig", TWO, ("last_hidden_state", "pooler_output")
    ),
    "siglip2": HuggingFace(
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        TWO,
        ("last_hidden_state", "pooler_output"),
        ("pixel_values", "pixel_attention_mask"),
        {"spatial_shapes": torch.tensor([[16, 16]])},
        shapes=((1, 256, 768), (1, 256)),
        masks=1,
    ),
    "clip": HuggingFace(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", TWO, ("image_embeds",)
    ),
    "aimv2": HuggingFace("Aimv2VisionModel", "Aimv2VisionConfig", {**SMALL, "image_size": 224}),
    "sam-encoder": HuggingFace(
        "SamVisionModel",
        "SamVisionConfig",
        {**TWO, "global_attn_indexes": [1], "image_size": 512},
        shapes=((1, 3, 512, 512),),
    ),
    "sam2-hiera": HuggingFace(
        "Sam2HieraDetModel",
        "Sam2HieraDetConfig",
        {
            "image_size": [512, 512],
            "blocks_per_stage": [1, 2, 3, 2],
            "global_attention_blocks": [4],
        },
        shapes=((1, 3, 512, 512),),
    ),
    "hiera": HuggingFace(
        "HieraForImageClassification", "HieraConfig", {"depths": [1, 2, 2, 1]}, LOGITS
    ),
    "vitdet": HuggingFace(
        "VitDetModel",
        "VitDetConfig",
        {
            **SMALL,
            "image_size": 512,
            "window_size": 14,
            "window_block_indices": [0],
            "use_relative_position_embeddings": True,
        },
        shapes=((1, 3, 512, 512),),
    ),
    "poolformer": HuggingFace(
        "PoolFormerForImageClassification", "PoolFormerConfig", {"depths": [1, 1, 2, 1]}, LOGITS
    ),
    "swiftformer": HuggingFace(
        "SwiftFormerForImageClassification", "SwiftFormerConfig", {}, LOGITS
    ),
    "focalnet": HuggingFace(
        "FocalNetForImageClassification", "FocalNetConfig", {"depths": [1, 1, 2, 1]}, LOGITS
    ),
    "convnext": HuggingFace(
        "ConvNextForImageClassification", "ConvNextConfig", {"depths": [1, 1, 2, 1]}, LOGITS
    ),
    "convnextv2": HuggingFace(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", {"depths": [1, 1, 2, 1]}, LOGITS
    ),
    "bit": HuggingFace("BitForImageClassification", "BitConfig", {"depths": [1, 1, 1, 1]}, LOGITS),
    "resnet": HuggingFace(
        "ResNetForImageClassification", "ResNetConfig", {"depths": [1, 1, 1, 1]}, LOGITS
    ),
    "regnet": HuggingFace(
        "RegNetForImageClassification", "RegNetConfig", {"depths": [1, 1, 2, 1]}, LOGITS
    ),
    "textnet": HuggingFace("TextNetForImageClassification", "TextNetConfig", {}, LOGITS),
    "mobilenetv2": HuggingFace(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {}, LOGITS
    ),
}
