"""Attention in windows: Twins-SVT, DaViT, CoaT-Lite and MViTv2, and the pieces MaxViT shares.

Tokens are channels last here, [B, H, W, C], and images square.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import Block, Mlp, SelfAttention, attend, split_heads


def to_windows(x: Tensor, size: int, grid: bool = False) -> Tensor:
    """[B, H, W, C] -> [B * windows, size * size, C]; with ``grid`` a window's tokens lie
    ``H / size`` apart instead of side by side.
    """
    batch, height, width, channels = x.shape
    if grid:
        x = x.reshape(batch, size, height // size, size, width // size, channels)
        x = x.permute(0, 2, 4, 1, 3, 5)
    else:
        x = x.reshape(batch, height // size, size, width // size, size, channels)
        x = x.permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, size * size, channels)


def from_windows(windows: Tensor, size: int, height: int, grid: bool = False) -> Tensor:
    """What :func:`to_windows` took apart, for an image of ``height`` x ``height``."""
    channels, count = windows.shape[-1], height // size
    x = windows.reshape(-1, count, count, size, size, channels)
    x = x.permute(0, 3, 1, 4, 2, 5) if grid else x.permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, height, height, channels)


class RelativePositions(nn.Module):
    """A learned bias for each head and difference of places: () -> [heads, size^2, size^2]."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        places = torch.stack(
            torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        ).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + size - 1
        self.register_buffer("index", (apart[0] * (2 * size - 1) + apart[1]).flatten())

    def forward(self) -> Tensor:
        count = self.size**2
        return self.table[self.index].reshape(count, count, -1).permute(2, 0, 1)


class Patches(nn.Module):
    """A strided convolution and LayerNorm, channels last on both sides."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(inputs, outputs, size, size), nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class PositionEncoding(nn.Module):
    """A depthwise 3x3 added to the tokens: conditional positions (Chu et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ReducedAttention(nn.Module):
    """Queries of all tokens, keys and values of an image ``ratio`` times smaller (PVT's)."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.reduce = Patches(width, width, ratio) if ratio > 1 else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q(x).flatten(1, 2), self.heads)
        k, v = (
            split_heads(t, self.heads)
            for t in self.kv(self.reduce(x)).flatten(1, 2).chunk(2, dim=-1)
        )
        return self.proj(attend(q, k, v, self.scale)).reshape(x.shape)


class TwinsBlock(nn.Module):
    """Attention in windows of 7, an MLP, global attention over fewer keys, an MLP."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.local = SelfAttention(width, heads)
        self.wide = ReducedAttention(width, heads, ratio)
        self.mlps = nn.ModuleList(Mlp(width, 4 * width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        local = self.local(to_windows(self.norms[0](x), 7))
        x = x + from_windows(local, 7, x.shape[1])
        x = x + self.mlps[0](self.norms[1](x))
        x = x + self.wide(self.norms[2](x))
        return x + self.mlps[1](self.norms[3](x))


class Twins(nn.Module):
    """Twins-SVT-S at 224 (Chu et al. 2021), one pair of layers a stage."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
            layers += [
                Patches(inputs, outputs, 2 if i else 4),
                TwinsBlock(outputs, outputs // 32, (8, 4, 2, 1)[i]),
                PositionEncoding(outputs),
            ]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.layers(image.permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


class ChannelAttention(nn.Module):
    """Attention between the channels of each group (Ding et al. 2022): d x d scores."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.groups, width // self.groups)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * tokens**-0.5).transpose(-2, -1) @ k
        y = (scores.softmax(dim=-1) @ v.transpose(-2, -1)).transpose(-2, -1)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class DaVitBlock(nn.Module):
    """Attention in windows, then between channels; a depthwise convolution before everything."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.places = nn.ModuleList(PositionEncoding(width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.window, self.channel = SelfAttention(width, heads), ChannelAttention(width, heads)
        self.mlps = nn.ModuleList(Mlp(width, 4 * width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.places[0](x)
        local = self.window(to_windows(self.norms[0](x), 7))
        x = self.places[1](x + from_windows(local, 7, x.shape[1]))
        x = x + self.mlps[0](self.norms[1](x))
        x = self.places[2](x)
        x = x + self.channel(self.norms[2](x).flatten(1, 2)).reshape(x.shape)
        x = self.places[3](x)
        return x + self.mlps[1](self.norms[3](x))


class DaVit(nn.Module):
    """DaViT-T at 224, one pair of layers a stage."""

    def __init__(self, widths: tuple[int, ...] = (96, 192, 384, 768)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
            layers += [Patches(inputs, outputs, 2 if i else 4), DaVitBlock(outputs, outputs // 32)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(image.permute(0, 2, 3, 1)).mean((1, 2))))


class FactorAttention(nn.Module):
    """CoaT's: q (softmax(k)^T v), plus q times v convolved depthwise (Xu et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        split = width // 4
        self.sizes = (split, 3 * split // 2, width - split - 3 * split // 2)
        self.convs = nn.ModuleList(
            nn.Conv2d(s, s, k, padding=k // 2, groups=s)
            for s, k in zip(self.sizes, (3, 5, 7), strict=True)
        )

    def forward(self, x: Tensor, side: int) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        factor = q @ (k.softmax(dim=2).transpose(-2, -1) @ v)
        image = v[:, :, 1:].transpose(-2, -1).reshape(batch, width, side, side)
        parts = image.split(self.sizes, dim=1)
        moved = torch.cat([conv(p) for conv, p in zip(self.convs, parts, strict=True)], dim=1)
        moved = moved.reshape(batch, self.heads, width // self.heads, tokens - 1)
        places = F.pad(q[:, :, 1:] * moved.transpose(-2, -1), (0, 0, 1, 0))
        y = self.scale * factor + places
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class CoatBlock(nn.Module):
    """A class token before the image's: positions by convolution, factorised attention, an MLP."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = PositionEncoding(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = FactorAttention(width, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[1]
        tokens = self.place(x).flatten(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1)
        tokens = tokens + self.attn(self.norm1(tokens), side)
        tokens = tokens + self.mlp(self.norm2(tokens))
        return tokens[:, 1:].reshape(x.shape)


class CoatLite(nn.Module):
    """CoaT-Lite Small at 224, one block a stage."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 320, 512)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
            layers += [Patches(inputs, outputs, 2 if i else 4), CoatBlock(outputs)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(image.permute(0, 2, 3, 1)).mean((1, 2))))


class DecomposedAttention(nn.Module):
    """MViTv2's attention (Li et al. 2022): pooled q, k and v, relative positions along height and
    width apart, the residual of the pooled query.
    """

    def __init__(self, width: int, heads: int, side: int, ratio: int) -> None:
        super().__init__()
        self.heads, self.side, self.fewer = heads, side, side // ratio
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        depth = width // heads
        self.pool_q = nn.Conv2d(depth, depth, 3, 1, 1, groups=depth)
        self.pool_k = nn.Conv2d(depth, depth, 3, ratio, 1, groups=depth)
        self.pool_v = nn.Conv2d(depth, depth, 3, ratio, 1, groups=depth)
        self.norms = nn.ModuleList(nn.LayerNorm(depth) for _ in range(3))
        self.rel_h = nn.Parameter(torch.zeros(2 * side - 1, depth))
        self.rel_w = nn.Parameter(torch.zeros(2 * side - 1, depth))
        apart = torch.arange(side)[:, None] - torch.arange(self.fewer)[None, :] * ratio + side - 1
        self.register_buffer("apart", apart.clamp(0, 2 * side - 2))

    def pooled(self, x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
        """[B, heads, side^2, d] -> [B, heads, pooled, d]."""
        batch, heads, _, depth = x.shape
        image = x.reshape(batch * heads, self.side, self.side, depth).permute(0, 3, 1, 2)
        image = conv(image).flatten(2).transpose(1, 2)
        return norm(image.reshape(batch, heads, -1, depth))

    def forward(self, x: Tensor) -> Tensor:
        parts = [split_heads(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1)]
        q, k, v = (
            self.pooled(t, conv, norm)
            for t, conv, norm in zip(
                parts, (self.pool_q, self.pool_k, self.pool_v), self.norms, strict=True
            )
        )
        batch, heads, _, depth = q.shape
        scores = (q * depth**-0.5) @ k.transpose(-2, -1)
        grid = q.reshape(batch, heads, self.side, self.side, depth)
        along = torch.einsum("bnhwc,hkc->bnhwk", grid, self.rel_h[self.apart])
        across = torch.einsum("bnhwc,wkc->bnhwk", grid, self.rel_w[self.apart])
        places = along[..., :, None] + across[..., None, :]
        scores = scores + places.reshape(scores.shape)
        y = scores.softmax(dim=-1) @ v + q
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class MVit(nn.Module):
    """Two stages of MViTv2-S at 224, with their pooled attention."""

    def __init__(self, width: int = 192, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 7, 4, 3)
        self.down = nn.Linear(width, 2 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in (width, width, 2 * width, 2 * width))
        self.attention = nn.ModuleList(
            [
                DecomposedAttention(width, heads, 56, 4),
                DecomposedAttention(2 * width, 2 * heads, 28, 2),
            ]
        )
        self.mlps = nn.ModuleList(Mlp(w, 4 * w) for w in (width, 2 * width))
        self.last = Block(2 * width, 2 * heads, 8 * width)
        self.head = nn.Linear(2 * width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = x + self.attention[0](self.norms[0](x))
        x = x + self.mlps[0](self.norms[1](x))
        grid = self.down(x).reshape(-1, 56, 56, self.head.in_features).permute(0, 3, 1, 2)
        x = F.max_pool2d(grid, 3, 2, 1).flatten(2).transpose(1, 2)
        x = x + self.attention[1](self.norms[2](x))
        x = x + self.mlps[1](self.norms[3](x))
        return self.head(self.last(x).mean(1))


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "twins": (Twins, 224),
    "davit": (DaVit, 224),
    "coat-lite": (CoatLite, 224),
    "mvitv2": (MVit, 224),
}
