"""SETR: a ViT encoder and a convolutional decoder for semantic segmentation (Zheng et al. 2021).

The decoders are the paper's Naive (1x1 conv, norm, ReLU, 1x1 conv, one upsampling) and PUP (four
3x3 convs, each before a doubling of the resolution). Parameter names follow fudan-zvg/SETR,
auxiliary training heads left out.

Reading Table I:

- It prints MLP width 4096 for Naive-Base too. With 12 layers of width 768 that makes 105 M
  parameters; with 3072 the count agrees, so Naive-Base has 3072 here.
- Its counts agree with SETR's own Cityscapes models at 768x768, whose position embedding has 2305
  rows: with it Naive-Base has 87.6 M and Naive 305.7 M. At Table I's own 384x384 they have 86.3 and
  304.0 M, 1.6 and 0.6 % less.
- 310.57 M for PUP is 0.9 % above the 307.8 M counted here (SETR trains auxiliary heads that
  inference drops).
- The encoder's tokens are 576 = 24 * 24 patches: no class token, unlike the public code, which
  carries one through the encoder and drops it before the decoder. Its checkpoints therefore are
  rejected, not silently changed.
- 19 classes (Cityscapes); 150 would add 0.03 M.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block, PatchEmbed, upsample
from .vit import resample_positions


class Encoder(nn.Module):
    """ViT without class token and final norm: image [B, 3, H, W] -> tokens [B, h * w, width]."""

    def __init__(
        self, image_size: tuple[int, int], width: int, depth: int, heads: int, mlp_dim: int
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(image_size, 16, width)
        tokens = self.patch_embed.grid[0] * self.patch_embed.grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, mlp_dim) for _ in range(depth)))

    def forward(self, image: Tensor) -> Tensor:
        return self.blocks(self.patch_embed(image) + self.pos_embed)


class Head(nn.Module):
    """What both decoders begin with: norm, and tokens [B, h * w, width] -> map [B, width, h, w]."""

    def __init__(self, image_size: tuple[int, int], grid: tuple[int, int], width: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.grid = grid
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def as_map(self, tokens: Tensor) -> Tensor:
        batch, _, width = tokens.shape
        return self.norm(tokens).transpose(1, 2).reshape(batch, width, *self.grid)


class NaiveHead(Head):
    """Two 1x1 convolutions, then one upsampling by 16: tokens -> logits [B, classes, H, W]."""

    def __init__(
        self, image_size: tuple[int, int], grid: tuple[int, int], width: int, classes: int
    ) -> None:
        super().__init__(image_size, grid, width)
        self.conv_0 = nn.Conv2d(width, 256, 1)
        self.syncbn_fc_0 = nn.BatchNorm2d(256)
        self.conv_1 = nn.Conv2d(256, classes, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.syncbn_fc_0(self.conv_0(self.as_map(tokens))))
        return upsample(self.conv_1(x), self.image_size)


class PupHead(Head):
    """Progressive upsampling: four times a 3x3 convolution and a doubling.

    The 1x1 classifier comes before the last doubling. Tokens -> logits [B, classes, H, W].
    """

    def __init__(
        self, image_size: tuple[int, int], grid: tuple[int, int], width: int, classes: int
    ) -> None:
        super().__init__(image_size, grid, width)
        for step in range(4):
            self.add_module(
                f"conv_{step}", nn.Conv2d(width if step == 0 else 256, 256, 3, padding=1)
            )
            self.add_module(f"syncbn_fc_{step}", nn.BatchNorm2d(256))
        self.conv_4 = nn.Conv2d(256, classes, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.as_map(tokens)
        for step in range(4):
            conv, norm = getattr(self, f"conv_{step}"), getattr(self, f"syncbn_fc_{step}")
            x = F.relu(norm(conv(x)))
            if step == 3:
                x = self.conv_4(x)
            factor = 2 ** (step + 1)
            x = upsample(x, (self.grid[0] * factor, self.grid[1] * factor))
        return x


class Setr(nn.Module):
    """Image [B, 3, H, W] -> segmentation logits at full resolution [B, classes, H, W]."""

    output_names = ("logits",)

    def __init__(
        self,
        image_size: tuple[int, int] = (384, 384),
        *,
        head: type[NaiveHead] | type[PupHead] = NaiveHead,
        width: int = 1024,
        depth: int = 24,
        heads: int = 16,
        mlp_dim: int = 4096,
        classes: int = 19,
    ) -> None:
        super().__init__()
        self.backbone = Encoder(image_size, width, depth, heads, mlp_dim)
        self.decode_head = head(image_size, self.backbone.patch_embed.grid, width, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.decode_head(self.backbone(image))

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Position embeddings are resampled to this model's grid."""
        grid = self.backbone.patch_embed.grid
        return resample_positions(state, "backbone.pos_embed", grid, prefix_tokens=0)
