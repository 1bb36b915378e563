"""Members of the family from ``transformers`` that encode images or video: the towers of multimodal
models, backbones without a head. They are built as those of ``huggingface``.
"""

from __future__ import annotations

from .huggingface import SMALL, TWO, HuggingFace

MODELS: dict[str, HuggingFace] = {
    "pixtral-vision": HuggingFace(
        "PixtralVisionModel",
        "PixtralVisionConfig",
        {**SMALL, "image_size": 256},
        shapes=((1, 3, 256, 256),),
    ),
    "radio": HuggingFace("RadioModel", "RadioConfig", {**SMALL}, shapes=((1, 3, 224, 224),)),
    "llama4-vision": HuggingFace(
        "Llama4VisionModel",
        "Llama4VisionConfig",
        {
            **TWO,
            "hidden_size": 384,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "projector_input_dim": 512,
            "projector_output_dim": 512,
            "vision_output_dim": 512,
            "image_size": 336,
        },
        shapes=((1, 3, 336, 336),),
    ),
    "sam3-vit": HuggingFace(
        "Sam3ViTModel",
        "Sam3ViTConfig",
        {
            **SMALL,
            "image_size": 504,
            "pretrain_image_size": 336,
            "global_attn_indexes": [1],
            "window_size": 12,
        },
        shapes=((1, 3, 504, 504),),
    ),
    "florence2-vision": HuggingFace(
        "Florence2VisionBackbone",
        "Florence2VisionConfig",
        {
            "depths": [1, 1, 2, 1],
            "embed_dim": [96, 192, 384, 768],
            "num_heads": [3, 6, 12, 24],
            "num_groups": [3, 6, 12, 24],
        },
        ("last_hidden_state",),
        ("hidden_states",),
        shapes=((1, 3, 384, 384),),
    ),
    "vjepa2": HuggingFace(
        "VJEPA2Model",
        "VJEPA2Config",
        {**SMALL, "crop_size": 224, "frames_per_clip": 8, "pred_num_hidden_layers": 1},
        ("last_hidden_state",),
        ("pixel_values_videos",),
        {"skip_predictor": True},
        shapes=((1, 8, 3, 224, 224),),
    ),
}
