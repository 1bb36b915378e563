"""Members of the family from ``transformers`` that give results for places of the image: detection,
segmentation, depth, pose, correspondence. They are built as those of ``huggingface``.
"""

from __future__ import annotations

from .huggingface import LOGITS, SMALL, TWO, HuggingFace

BOXES = ("logits", "pred_boxes")
# What the backbones of transformers' detectors are, where timm is not used.
RESNET = {"depths": [1, 1, 1, 1], "out_features": ["stage4"]}
PYRAMID = {**RESNET, "out_features": ["stage2", "stage3", "stage4"]}
NO_TIMM = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
DETR = {**NO_TIMM, "encoder_layers": 1, "decoder_layers": 1}


MODELS: dict[str, HuggingFace] = {
    "sam-decoder": HuggingFace(
        "SamModel",
        "SamConfig",
        {},
        ("pred_masks", "iou_scores"),
        ("image_embeddings", "input_points"),
        nested={"vision_config": ("SamVisionConfig", {**TWO, "global_attn_indexes": [1]})},
        shapes=((1, 256, 64, 64), (1, 1, 2, 2)),
    ),
    "yolos": HuggingFace(
        "YolosForObjectDetection",
        "YolosConfig",
        {**SMALL, "image_size": [256, 256]},
        BOXES,
        shapes=((1, 3, 256, 256),),
    ),
    "detr": HuggingFace(
        "DetrForObjectDetection",
        "DetrConfig",
        DETR,
        BOXES,
        nested={"backbone_config": ("ResNetConfig", RESNET)},
        shapes=((1, 3, 480, 640),),
    ),
    "conditional-detr": HuggingFace(
        "ConditionalDetrForObjectDetection",
        "ConditionalDetrConfig",
        DETR,
        BOXES,
        nested={"backbone_config": ("ResNetConfig", RESNET)},
        shapes=((1, 3, 480, 640),),
    ),
    "deformable-detr": HuggingFace(
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        {**DETR, "decoder_layers": 2},
        BOXES,
        nested={
            "backbone_config": (
                "ResNetConfig",
                {**RESNET, "out_features": ["stage2", "stage3", "stage4"]},
            )
        },
        shapes=((1, 3, 480, 640),),
    ),
    "rt-detr": HuggingFace(
        "RTDetrForObjectDetection",
        "RTDetrConfig",
        {"decoder_layers": 2},
        BOXES,
        nested={"backbone_config": ("RTDetrResNetConfig", PYRAMID)},
        shapes=((1, 3, 640, 640),),
    ),
    "rt-detr-v2": HuggingFace(
        "RTDetrV2ForObjectDetection",
        "RTDetrV2Config",
        {"decoder_layers": 2},
        BOXES,
        nested={"backbone_config": ("RTDetrResNetConfig", PYRAMID)},
        shapes=((1, 3, 640, 640),),
    ),
    "d-fine": HuggingFace(
        "DFineForObjectDetection",
        "DFineConfig",
        {"decoder_layers": 2},
        BOXES,
        nested={
            "backbone_config": (
                "HGNetV2Config",
                {
                    "stage_num_blocks": [1, 1, 1, 1],
                    "out_features": ["stage2", "stage3", "stage4"],
                },
            )
        },
        shapes=((1, 3, 640, 640),),
    ),
    "mask2former": HuggingFace(
        # the models with a loss want scipy
        "Mask2FormerModel",
        "Mask2FormerConfig",
        {"encoder_layers": 1, "decoder_layers": 3},
        ("transformer_decoder_last_hidden_state", "masks_queries_logits"),
        nested={
            "backbone_config": (
                "SwinConfig",
                {
                    "depths": [1, 1, 1, 1],
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            )
        },
        shapes=((1, 3, 384, 384),),
    ),
    "maskformer": HuggingFace(
        "MaskFormerModel",
        "MaskFormerConfig",
        {},
        ("transformer_decoder_last_hidden_state", "pixel_decoder_last_hidden_state"),
        nested={
            "backbone_config": (
                "SwinConfig",
                {
                    "depths": [1, 1, 1, 1],
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            ),
            "decoder_config": ("DetrConfig", DETR),
        },
        shapes=((1, 3, 384, 384),),
    ),
    "vitpose": HuggingFace(
        "VitPoseForPoseEstimation",
        "VitPoseConfig",
        {},
        ("heatmaps",),
        nested={"backbone_config": ("VitPoseBackboneConfig", {**TWO, "out_indices": [2]})},
        shapes=((1, 3, 256, 192),),
    ),
    "dpt": HuggingFace(
        "DPTForDepthEstimation",
        "DPTConfig",
        {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "image_size": 384},
        ("predicted_depth",),
        shapes=((1, 3, 384, 384),),
    ),
    "depth-anything": HuggingFace(
        "DepthAnythingForDepthEstimation",
        "DepthAnythingConfig",
        {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64},
        ("predicted_depth",),
        nested={
            "backbone_config": (
                "Dinov2Config",
                {
                    **SMALL,
                    "num_hidden_layers": 4,
                    "image_size": 518,
                    "out_indices": [1, 2, 3, 4],
                    "apply_layernorm": True,
                    "reshape_hidden_states": False,
                },
            )
        },
        shapes=((1, 3, 518, 518),),
    ),
    # Shares of two softplus, a softmax over up to 1730: what those lose of their digits shows here.
    "zoedepth": HuggingFace(
        "ZoeDepthForDepthEstimation",
        "ZoeDepthConfig",
        {
            "neck_hidden_sizes": [48, 96, 192, 384],
            "fusion_hidden_size": 64,
            "bottleneck_features": 64,
        },
        ("predicted_depth",),
        nested={
            "backbone_config": (
                "BeitConfig",
                {
                    **SMALL,
                    "num_hidden_layers": 4,
                    "image_size": 384,
                    "use_relative_position_bias": True,
                    "reshape_hidden_states": False,
                    "out_indices": [1, 2, 3, 4],
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            )
        },
        shapes=((1, 3, 384, 384),),
    ),
    "glpn": HuggingFace(
        "GLPNForDepthEstimation",
        "GLPNConfig",
        {"depths": [1, 1, 1, 1]},
        ("predicted_depth",),
        shapes=((1, 3, 480, 640),),
    ),
    "upernet-swin": HuggingFace(
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        {"hidden_size": 128, "auxiliary_in_channels": 384},
        LOGITS,
        nested={
            "backbone_config": (
                "SwinConfig",
                {
                    "depths": [1, 1, 1, 1],
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            )
        },
        shapes=((1, 3, 512, 512),),
    ),
    "rf-detr": HuggingFace(
        "RfDetrForObjectDetection",
        "RfDetrConfig",
        {"decoder_layers": 2},
        BOXES,
        shapes=((1, 3, 560, 560),),
    ),
    "lw-detr": HuggingFace(
        "LwDetrForObjectDetection",
        "LwDetrConfig",
        {"decoder_layers": 2, "projector_scale_factors": [1.0]},
        BOXES,
        nested={
            "backbone_config": (
                "LwDetrViTConfig",
                {
                    "image_size": 640,
                    "hidden_size": 192,
                    "num_hidden_layers": 4,
                    "window_block_indices": [0, 2],
                    "out_indices": [2, 4],
                },
            )
        },
        shapes=((1, 3, 640, 640),),
    ),
    "seggpt": HuggingFace(
        "SegGptForImageSegmentation",
        "SegGptConfig",
        {
            "num_hidden_layers": 4,
            "hidden_size": 384,
            "num_attention_heads": 6,
            "image_size": [448, 224],
            "intermediate_hidden_state_indices": [0, 1, 2, 3],
            "merge_index": 0,
        },
        ("pred_masks",),
        ("pixel_values", "prompt_pixel_values", "prompt_masks"),
        shapes=((1, 3, 224, 224),) * 3,
    ),
    "efficientloftr": HuggingFace(
        "EfficientLoFTRModel",
        "EfficientLoFTRConfig",
        {"num_attention_layers": 2},
        ("feature_maps",),
        shapes=((1, 2, 3, 256, 320),),
    ),
}
