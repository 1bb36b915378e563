"""Plain vision transformers: DeiT-3, CaiT, XCiT, EVA-02, CrossViT and PiT."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import (
    Block,
    LayerScale,
    Mlp,
    PatchEmbed,
    attend,
    merge_heads,
    split_heads,
)


class Deit3(nn.Module):
    """DeiT III (Touvron et al. 2022): layer scale, positions for the patches alone.

    DeiT III small at 224: ``width=384, heads=6``.
    """

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed((224, 224), 16, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, layer_scale=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image) + self.pos_embed
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TalkingHeads(nn.Module):
    """Self-attention whose heads are mixed before and after the softmax (Shazeer et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.proj_l, self.proj_w = nn.Linear(heads, heads), nn.Linear(heads, heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        scores = self.proj_w(scores.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj(merge_heads(scores @ v))


class ClassAttention(nn.Module):
    """The class token alone asks; all tokens answer: [B, N, width] -> [B, 1, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q(x[:, :1]), self.heads)
        k, v = split_heads(self.k(x), self.heads), split_heads(self.v(x), self.heads)
        return self.proj(attend(q, k, v, self.scale))


class Cait(nn.Module):
    """CaiT-XXS at 224 (Touvron et al. 2021): talking heads, then two layers of class attention."""

    def __init__(self, width: int = 192, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed((224, 224), 16, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(_cait(width, TalkingHeads(width, heads)) for _ in range(depth))
        self.tail = nn.ModuleList(_cait(width, ClassAttention(width, heads)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image) + self.pos_embed
        for part in self.blocks:
            x = x + part["ls1"](part["attn"](part["norm1"](x)))
            x = x + part["ls2"](part["mlp"](part["norm2"](x)))
        token = self.cls_token.expand(x.shape[0], -1, -1)
        for part in self.tail:
            token = token + part["ls1"](part["attn"](part["norm1"](torch.cat([token, x], dim=1))))
            token = token + part["ls2"](part["mlp"](part["norm2"](token)))
        return self.head(self.norm(token)[:, 0])


def _cait(width: int, attention: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm1": nn.LayerNorm(width, eps=1e-6),
            "attn": attention,
            "ls1": LayerScale(width),
            "norm2": nn.LayerNorm(width, eps=1e-6),
            "mlp": Mlp(width, 4 * width),
            "ls2": LayerScale(width),
        }
    )


class CrossCovariance(nn.Module):
    """Attention between channels (El-Nouby et al. 2021): softmax(t * K^T Q) over d x d."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind(0)  # [B, heads, d, N]
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = (q @ k.transpose(-2, -1)) * self.temperature
        y = scores.softmax(dim=-1) @ v
        return self.proj(y.permute(0, 3, 1, 2).reshape(batch, tokens, width))


class LocalPatches(nn.Module):
    """XCiT's LPI: two depthwise 3x3 convolutions over the grid of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor, side: int) -> Tensor:
        batch, tokens, width = x.shape
        grid = x.transpose(1, 2).reshape(batch, width, side, side)
        grid = self.conv2(self.bn(F.gelu(self.conv1(grid))))
        return grid.reshape(batch, width, tokens).transpose(1, 2)


class Xcit(nn.Module):
    """XCiT-T/S 16 at 224: a stem of 3x3 convolutions, cross-covariance attention, LPI."""

    def __init__(self, width: int = 192, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        for inputs, outputs in (
            (3, width // 8),
            (width // 8, width // 4),
            (width // 4, width // 2),
            (width // 2, width),
        ):
            stem += [
                nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.GELU(),
            ]
        self.stem = nn.Sequential(*stem[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(3 * depth))
        self.attention = nn.ModuleList(CrossCovariance(width, heads) for _ in range(depth))
        self.local = nn.ModuleList(LocalPatches(width) for _ in range(depth))
        self.mlps = nn.ModuleList(Mlp(width, 4 * width) for _ in range(depth))
        self.scales = nn.ModuleList(LayerScale(width) for _ in range(3 * depth))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        grid = self.stem(image)
        side = grid.shape[-1]
        x = grid.flatten(2).transpose(1, 2)
        for i, (attention, local, mlp) in enumerate(
            zip(self.attention, self.local, self.mlps, strict=True)
        ):
            norms, scales = self.norms[3 * i : 3 * i + 3], self.scales[3 * i : 3 * i + 3]
            x = x + scales[0](attention(norms[0](x)))
            x = x + scales[1](local(norms[1](x), side))
            x = x + scales[2](mlp(norms[2](x)))
        return self.head(self.norm(x).mean(dim=1))


class Eva02Attention(nn.Module):
    """Self-attention with rotary positions on all tokens but the first (Su et al. 2021)."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        depth = width // heads
        frequencies = 10000.0 ** (-torch.arange(0, depth // 4) / (depth // 4))
        along = torch.arange(side)[:, None] * frequencies
        angles = torch.cat(
            [
                along[:, None].expand(side, side, -1),
                along[None].expand(side, side, -1),
            ],
            dim=-1,
        ).reshape(side * side, depth // 2)
        angles = angles.repeat_interleave(2, dim=-1)
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())

    def rotate(self, x: Tensor) -> Tensor:
        token, patches = x[:, :, :1], x[:, :, 1:]
        half = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).reshape(patches.shape)
        return torch.cat([token, patches * self.cos + half * self.sin], dim=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = split_heads(self.q_proj(x), self.heads), split_heads(self.k_proj(x), self.heads)
        v = split_heads(self.v_proj(x), self.heads)
        return self.proj(attend(self.rotate(q), self.rotate(k), v, self.scale))


class SwiGlu(nn.Module):
    """silu(x W1) * (x W2), normalised, then a projection (Shazeer 2020; EVA-02 adds the norm)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g, self.fc1_x = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.norm, self.fc2 = nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(F.silu(self.fc1_g(x)) * self.fc1_x(x)))


class Eva02(nn.Module):
    """EVA-02 small at 224, patches of 14 (Fang et al. 2023)."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed((224, 224), 14, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 257, width))
        self.attention = nn.ModuleList(Eva02Attention(width, heads, 16) for _ in range(depth))
        self.mlps = nn.ModuleList(SwiGlu(width, width * 8 // 3) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2 * depth))
        self.fc_norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.fc_norm(x[:, 1:].mean(dim=1)))


class CrossVit(nn.Module):
    """CrossViT-S at 240 (Chen et al. 2021): patches of 12 and 16, class tokens that cross over."""

    widths, heads, patches = (192, 384), 6, (12, 16)

    def __init__(self) -> None:
        super().__init__()
        sizes = ((240, 240), (224, 224))
        self.embed = nn.ModuleList(
            PatchEmbed(size, patch, width)
            for size, patch, width in zip(sizes, self.patches, self.widths, strict=True)
        )
        self.tokens = nn.ParameterList(torch.zeros(1, 1, width) for width in self.widths)
        self.positions = nn.ParameterList(
            torch.zeros(1, 1 + (size[0] // patch) ** 2, width)
            for size, patch, width in zip(sizes, self.patches, self.widths, strict=True)
        )
        self.blocks = nn.ModuleList(Block(w, self.heads, 4 * w) for w in self.widths)
        self.into = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(a), nn.GELU(), nn.Linear(a, b))
            for a, b in zip(self.widths, self.widths[::-1], strict=True)
        )
        self.cross = nn.ModuleList(ClassAttention(w, self.heads) for w in self.widths[::-1])
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in self.widths[::-1])
        self.back = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(b), nn.GELU(), nn.Linear(b, a))
            for a, b in zip(self.widths, self.widths[::-1], strict=True)
        )
        self.final = nn.ModuleList(nn.LayerNorm(w) for w in self.widths)
        self.heads_out = nn.ModuleList(nn.Linear(w, 1000) for w in self.widths)

    def forward(self, image: Tensor) -> Tensor:
        smaller = F.interpolate(image, size=(224, 224), mode="bicubic", align_corners=False)
        branches = []
        for i, x in enumerate((image, smaller)):
            x = self.embed[i](x)
            x = torch.cat([self.tokens[i].expand(x.shape[0], -1, -1), x], dim=1)
            branches.append(self.blocks[i](x + self.positions[i]))
        mixed = []
        for i in range(2):
            token = self.into[i](branches[i][:, :1])
            joined = torch.cat([token, branches[1 - i][:, 1:]], dim=1)
            token = token + self.cross[i](self.norms[i](joined))
            mixed.append(torch.cat([self.back[i](token), branches[i][:, 1:]], dim=1))
        logits = [
            head(norm(x)[:, 0])
            for head, norm, x in zip(self.heads_out, self.final, mixed, strict=True)
        ]
        return (logits[0] + logits[1]) / 2


class Pit(nn.Module):
    """PiT-S at 224 (Heo et al. 2021): three stages of a ViT with depthwise convolutions between."""

    def __init__(self, base: int = 48, heads: tuple[int, ...] = (3, 6, 12)) -> None:
        super().__init__()
        widths = [base * h for h in heads]
        self.patch = nn.Conv2d(3, widths[0], 16, stride=8)
        self.pos_embed = nn.Parameter(torch.zeros(1, widths[0], 27, 27))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, widths[0]))
        self.blocks = nn.ModuleList(Block(w, h, 4 * w) for w, h in zip(widths, heads, strict=True))
        self.pools = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, groups=a) for a, b in itertools.pairwise(widths)
        )
        self.tokens = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        grid = self.patch(image) + self.pos_embed
        token = self.cls_token.expand(image.shape[0], -1, -1)
        for i, block in enumerate(self.blocks):
            batch, width, height, columns = grid.shape
            x = block(torch.cat([token, grid.flatten(2).transpose(1, 2)], dim=1))
            token, x = x[:, :1], x[:, 1:]
            grid = x.transpose(1, 2).reshape(batch, width, height, columns)
            if i < len(self.pools):
                grid, token = self.pools[i](grid), self.tokens[i](token)
        return self.head(self.norm(token)[:, 0])


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "deit3": (Deit3, 224),
    "cait": (Cait, 224),
    "xcit": (Xcit, 224),
    "eva02": (Eva02, 224),
    "crossvit": (CrossVit, 240),
    "pit": (Pit, 224),
}
