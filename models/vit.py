"""Vision transformers with one class token: ViT, DeiT and DINOv2.

Sources: Dosovitskiy et al. 2021 (ViT), Touvron et al. 2021 (DeiT: ViT's shape, other training),
Oquab et al. 2023 (DINOv2: LayerScale, no classifier). Parameter names are timm's for ViT and DeiT
(``vit_base_patch16_224``, ``deit_small_patch16_224`` ...) and facebookresearch/dinov2's for DINOv2;
public checkpoints load unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block, PatchEmbed


class VisionTransformer(nn.Module):
    """ViT classifier: image [B, 3, H, W] -> logits [B, classes].

    The tokens are the class token and (H / patch) * (W / patch) patches: 197 for 224x224 and patch
    16.
    """

    output_names: tuple[str, ...] = ("logits",)

    def __init__(
        self,
        image_size: tuple[int, int] = (224, 224),
        *,
        patch_size: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_dim: int | None = None,
        classes: int = 1000,
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(image_size, patch_size, width)
        tokens = 1 + self.patch_embed.grid[0] * self.patch_embed.grid[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        hidden = mlp_dim or 4 * width
        self.blocks = nn.Sequential(
            *(Block(width, heads, hidden, layer_scale) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes) if classes else nn.Identity()

    def forward_features(self, image: Tensor) -> Tensor:
        """Image [B, 3, H, W] -> normalised tokens [B, 1 + patches, width], class token first."""
        patches = self.patch_embed(image)
        tokens = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        return self.norm(self.blocks(tokens + self.pos_embed))

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.head(self.forward_features(image)[:, 0])

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Public names and shapes -> this model's: resample the position embeddings to its grid."""
        return resample_positions(state, "pos_embed", self.patch_embed.grid)


class DinoV2(VisionTransformer):
    """DINOv2 features: image [B, 3, H, W] -> class token [B, width], patch tokens [B, N, width].

    These are ``x_norm_clstoken`` and ``x_norm_patchtokens`` of the public implementation.
    """

    output_names = ("class_token", "patch_tokens")

    def __init__(
        self,
        image_size: tuple[int, int] = (518, 518),
        *,
        patch_size: int = 14,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
    ) -> None:
        super().__init__(
            image_size,
            patch_size=patch_size,
            width=width,
            depth=depth,
            heads=heads,
            classes=0,
            layer_scale=True,
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.forward_features(image)
        return tokens[:, 0], tokens[:, 1:]

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """As for ViT; ``mask_token`` serves pre-training alone and is dropped."""
        kept = {name: value for name, value in state.items() if name != "mask_token"}
        return super().adapt_state_dict(kept)


def resample_positions(
    state: dict[str, Tensor], name: str, grid: tuple[int, int], prefix_tokens: int = 1
) -> dict[str, Tensor]:
    """Resample a square grid of position embeddings to ``grid``, unless the count fits already.

    Bicubic. ``state[name]`` is [1, prefix_tokens + n * n, width]; an embedding that is not a square
    is left as it is, and the loader then reports the shapes.
    """
    positions = state.get(name)
    if positions is None or positions.ndim != 3:
        return state
    count = positions.shape[1] - prefix_tokens
    side = round(max(count, 0) ** 0.5)
    if count == grid[0] * grid[1] or count <= 0 or side * side != count:
        return state
    prefix, patches = positions[:, :prefix_tokens], positions[:, prefix_tokens:]
    image = patches.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", align_corners=False, antialias=True)
    resampled = image.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)
    return {**state, name: torch.cat((prefix, resampled), dim=1)}
