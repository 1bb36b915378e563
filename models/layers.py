"""Layers that several of the families share: patch embedding, MLP, self-attention, pre-norm block.

Attribute names follow timm (``qkv``, ``proj``, ``fc1`` ...), so that public state dicts load
unchanged. Attention is written as matmul, softmax, matmul: both ONNX exporters turn it into exactly
these operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.support.errors import OptionError


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale * query @ key^T) @ value, with the heads merged at the end.

    Shapes: query [B, heads, N, d], key and value [B, heads, M, d]; returns [B, N, heads * d].
    """
    scores = (query * scale) @ key.transpose(-2, -1)
    return merge_heads(torch.softmax(scores, dim=-1) @ value)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, heads * d] -> [B, heads, N, d]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, N, d] -> [B, N, heads * d]."""
    batch, heads, tokens, depth = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * depth)


class PatchEmbed(nn.Module):
    """Non-overlapping patches as tokens: [B, 3, H, W] -> [B, (H / patch) * (W / patch), width]."""

    def __init__(self, image_size: tuple[int, int], patch_size: int, width: int) -> None:
        super().__init__()
        if any(extent % patch_size for extent in image_size):
            raise OptionError(
                f"image size {image_size[0]}x{image_size[1]} is not a multiple of the patch size "
                f"{patch_size}; choose a height and width that are"
            )
        self.grid = (image_size[0] // patch_size, image_size[1] // patch_size)
        self.proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    """Linear, exact (erf) GELU, linear: [..., width] -> [..., width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SelfAttention(nn.Module):
    """Multi-head self-attention, query, key and value in one projection: [B, N, width] -> same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Tokens [B, N, width] -> query, key and value, each [B, heads, N, d]."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return self.proj(attend(query, key, value, self.scale))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (Touvron et al. 2021, CaiT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm transformer encoder layer: x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x)))."""

    def __init__(self, width: int, heads: int, hidden: int, layer_scale: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.ls1 = LayerScale(width) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)
        self.ls2 = LayerScale(width) if layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, half-pixel centres: [B, C, h, w] -> [B, C, *size]."""
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
