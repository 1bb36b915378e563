"""SegFormer (Xie et al. 2021): four stages with reduced keys and values, an all-MLP decoder.

Parameter names are those of the public checkpoints (``nvidia/segformer-b0-finetuned-ade-512-512``),
which load unchanged. The logits come at a quarter of the image's resolution, as in the public
implementations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import attend, split_heads, upsample


def to_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, h * w, C] -> [B, C, h, w]."""
    batch, _, width = tokens.shape
    return tokens.transpose(1, 2).reshape(batch, width, *grid)


def to_tokens(image: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h * w, C]."""
    return image.flatten(2).transpose(1, 2)


class OverlapPatchEmbed(nn.Module):
    """A strided convolution, then a norm: [B, C, H, W] -> [B, h * w, width] and (h, w).

    h = H / stride and w = W / stride.
    """

    def __init__(self, channels: int, width: int, patch_size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch_size, stride=stride, padding=patch_size // 2)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        embedded = self.proj(image)
        return self.layer_norm(to_tokens(embedded)), (embedded.shape[2], embedded.shape[3])


class ReducedAttention(nn.Module):
    """Attention whose keys and values come from the map reduced ``reduction`` times each way.

    Tokens [B, N, width] -> [B, N, width]; the scores are [B, heads, N, N / reduction**2].
    """

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.reduction = reduction
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        if reduction > 1:
            self.sr = nn.Conv2d(width, width, reduction, stride=reduction)
            self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        source = x
        if self.reduction > 1:
            source = self.layer_norm(to_tokens(self.sr(to_map(x, grid))))
        query, key, value = self.query(x), self.key(source), self.value(source)
        query, key, value = (split_heads(y, self.heads) for y in (query, key, value))
        return attend(query, key, value, self.scale)


class AttentionWithOutput(nn.Module):
    """``ReducedAttention`` and its output projection, nested as in the public state dict."""

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.add_module("self", ReducedAttention(width, heads, reduction))
        self.output = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.output["dense"](self.get_submodule("self")(x, grid))


class MixMlp(nn.Module):
    """Linear, 3x3 depthwise convolution over the map, GELU, linear: [B, N, width] -> same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense1 = nn.Linear(width, hidden)
        depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.dwconv = nn.ModuleDict({"dwconv": depthwise})
        self.dense2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        mixed = self.dwconv["dwconv"](to_map(self.dense1(x), grid))
        return self.dense2(F.gelu(to_tokens(mixed)))


class Layer(nn.Module):
    """Pre-norm layer of reduced attention and Mix-MLP: [B, N, width] -> same."""

    def __init__(self, width: int, heads: int, reduction: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm_1 = nn.LayerNorm(width)
        self.attention = AttentionWithOutput(width, heads, reduction)
        self.layer_norm_2 = nn.LayerNorm(width)
        self.mlp = MixMlp(width, hidden)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.attention(self.layer_norm_1(x), grid)
        return x + self.mlp(self.layer_norm_2(x), grid)


class Encoder(nn.Module):
    """Image [B, 3, H, W] -> four maps [B, widths[i], H / 2**(i + 2), W / 2**(i + 2)]."""

    def __init__(
        self,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        heads: tuple[int, ...],
        reductions: tuple[int, ...],
        mlp_ratio: int,
    ) -> None:
        super().__init__()
        channels = (3, *widths[:-1])
        self.patch_embeddings = nn.ModuleList(
            OverlapPatchEmbed(inputs, width, 7 if stage == 0 else 3, 4 if stage == 0 else 2)
            for stage, (inputs, width) in enumerate(zip(channels, widths, strict=True))
        )
        self.block = nn.ModuleList(
            nn.ModuleList(Layer(width, head, reduction, mlp_ratio * width) for _ in range(depth))
            for width, depth, head, reduction in zip(widths, depths, heads, reductions, strict=True)
        )
        self.layer_norm = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def forward(self, image: Tensor) -> list[Tensor]:
        maps = []
        x = image
        stages = zip(self.patch_embeddings, self.block, self.layer_norm, strict=True)
        for embed, layers, norm in stages:
            tokens, grid = embed(x)
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                tokens = layer(tokens, grid)
            x = to_map(norm(tokens), grid)
            maps.append(x)
        return maps


class DecodeHead(nn.Module):
    """Project each map to one width, upsample to the first map's size, concatenate, fuse, classify.

    Maps [B, widths[i], h_i, w_i] -> logits [B, classes, h_0, w_0].
    """

    def __init__(self, widths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.linear_c = nn.ModuleList(
            nn.ModuleDict({"proj": nn.Linear(inputs, width)}) for inputs in widths
        )
        self.linear_fuse = nn.Conv2d(width * len(widths), width, 1, bias=False)
        self.batch_norm = nn.BatchNorm2d(width)
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        size = (maps[0].shape[2], maps[0].shape[3])
        projected: list[Tensor] = []
        for linear, x in zip(self.linear_c, maps, strict=True):
            tokens = linear.get_submodule("proj")(to_tokens(x))
            y = to_map(tokens, (x.shape[2], x.shape[3]))
            projected.append(upsample(y, size) if projected else y)
        # The deepest map comes first in the public weights.
        fused = self.linear_fuse(torch.cat(projected[::-1], dim=1))
        return self.classifier(F.relu(self.batch_norm(fused)))


class SegFormer(nn.Module):
    """Image [B, 3, H, W] -> logits [B, classes, H / 4, W / 4].

    Defaults are SegFormer-B0's on ADE20K. Any image size works, since no parameter depends on it;
    ``image_size`` is the table's common argument.
    """

    output_names = ("logits",)

    def __init__(
        self,
        image_size: tuple[int, int] = (512, 512),
        *,
        widths: tuple[int, ...] = (32, 64, 160, 256),
        depths: tuple[int, ...] = (2, 2, 2, 2),
        heads: tuple[int, ...] = (1, 2, 5, 8),
        reductions: tuple[int, ...] = (8, 4, 2, 1),
        mlp_ratio: int = 4,
        decoder_width: int = 256,
        classes: int = 150,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        encoder = Encoder(widths, depths, heads, reductions, mlp_ratio)
        self.segformer = nn.ModuleDict({"encoder": encoder})
        self.decode_head = DecodeHead(widths, decoder_width, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.decode_head(self.segformer["encoder"](image))
