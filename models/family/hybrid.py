"""Convolutions and attention together: MaxViT, CoAtNet, EfficientViT, FastViT, EdgeNeXt, Next-ViT.

Every block takes and gives channels first, [B, C, H, W].
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import Mlp, SelfAttention, attend, merge_heads, split_heads
from .windows import RelativePositions, from_windows, to_windows


def conv_norm(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias that keeps the size (but for its stride), then BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class SqueezeExcite(nn.Module):
    """Channels weighted by a sigmoid of their mean (Hu et al. 2018)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class MbConv(nn.Module):
    """Inverted bottleneck, pre-norm: 1x1, depthwise 3x3, squeeze and excite, 1x1 (Tan 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, expand: int = 4) -> None:
        super().__init__()
        hidden = outputs * expand
        self.norm = nn.BatchNorm2d(inputs)
        self.conv1 = conv_norm(inputs, hidden)
        self.conv2 = conv_norm(hidden, hidden, 3, stride, groups=hidden)
        self.gate = SqueezeExcite(hidden, outputs // 4)
        self.conv3 = nn.Conv2d(hidden, outputs, 1)
        self.pool = nn.AvgPool2d(2) if stride == 2 else nn.Identity()
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.conv2(F.gelu(self.conv1(self.norm(x)))))
        return self.shortcut(self.pool(x)) + self.conv3(self.gate(y))


class PartitionAttention(nn.Module):
    """MaxViT's attention in windows (``grid`` false) or over a dilated grid, and its MLP."""

    def __init__(self, width: int, size: int, grid: bool, depth: int = 32) -> None:
        super().__init__()
        self.size, self.grid, self.heads = size, grid, width // depth
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.positions = RelativePositions(size, self.heads)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        height = x.shape[1]
        parts = to_windows(self.norm1(x), self.size, self.grid)
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(parts).chunk(3, dim=-1))
        scores = (q * 32**-0.5) @ k.transpose(-2, -1) + self.positions()
        parts = self.proj(merge_heads(scores.softmax(dim=-1) @ v))
        x = x + from_windows(parts, self.size, height, self.grid)
        return (x + self.mlp(self.norm2(x))).permute(0, 3, 1, 2)


class MaxVit(nn.Module):
    """MaxViT-T at 224 (Tu et al. 2022), one block a stage."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_norm(3, 64, 3, 2), nn.GELU(), nn.Conv2d(64, 64, 3, padding=1)
        )
        blocks: list[nn.Module] = []
        for inputs, outputs in zip((64, *widths[:-1]), widths, strict=True):
            blocks += [
                MbConv(inputs, outputs, 2),
                PartitionAttention(outputs, 7, grid=False),
                PartitionAttention(outputs, 7, grid=True),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.fc = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], widths[-1])
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.stem(image)).mean((2, 3))
        return self.head(torch.tanh(self.fc(self.norm(x))))


class CoAtNet(nn.Module):
    """CoAtNet-0 at 224 (Dai et al. 2021): MBConv, MBConv, attention, attention."""

    def __init__(self, widths: tuple[int, ...] = (64, 96, 192, 384, 768)) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 3, 2), nn.GELU(), conv_norm(64, 64, 3))
        self.convolutions = nn.Sequential(
            MbConv(widths[0], widths[1], 2), MbConv(widths[1], widths[2], 2)
        )
        self.pools = nn.ModuleList(
            nn.Conv2d(a, b, 1) for a, b in ((widths[2], widths[3]), (widths[3], widths[4]))
        )
        self.attention = nn.ModuleList(
            PartitionAttention(w, s, grid=False) for w, s in ((widths[3], 14), (widths[4], 7))
        )
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.convolutions(self.stem(image))
        for pool, attention in zip(self.pools, self.attention, strict=True):
            x = attention(pool(F.max_pool2d(x, 3, 2, 1)))
        return self.head(x.mean((2, 3)))


class LiteMla(nn.Module):
    """EfficientViT's linear attention (Cai et al. 2023): relu(q) (relu(k)^T v), multi-scale tokens
    by a grouped convolution.
    """

    def __init__(self, width: int, depth: int = 16) -> None:
        super().__init__()
        self.depth = depth
        self.qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.spread = nn.Conv2d(3 * width, 3 * width, 5, padding=2, groups=3 * width, bias=False)
        self.mix = nn.Conv2d(3 * width, 3 * width, 1, groups=3 * width // depth, bias=False)
        self.proj = conv_norm(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, columns = x.shape
        qkv = self.qkv(x)
        qkv = torch.cat([qkv, self.mix(self.spread(qkv))], dim=1)
        qkv = qkv.reshape(batch, -1, 3 * self.depth, height * columns)
        q, k, v = qkv.split(self.depth, dim=2)
        q, k = F.relu(q), F.relu(k)
        v = F.pad(v, (0, 0, 0, 1), value=1.0)
        y = (v @ k.transpose(-1, -2)) @ q
        y = y[:, :, :-1] / (y[:, :, -1:] + 1e-6)
        return x + self.proj(y.reshape(batch, -1, height, columns))


class EfficientMb(nn.Module):
    """EfficientViT's MBConv with hardswish; ``stride`` 2 drops the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.keep = stride == 1 and inputs == outputs
        self.conv1 = conv_norm(inputs, hidden)
        self.conv2 = conv_norm(hidden, hidden, 3, stride, groups=hidden)
        self.conv3 = conv_norm(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(F.hardswish(self.conv2(F.hardswish(self.conv1(x)))))
        return x + y if self.keep else y


class EfficientVit(nn.Module):
    """EfficientViT-B1 at 224 (Cai et al. 2023)."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128, 256)) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, widths[0], 3, 2), nn.Hardswish()]
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            layers.append(EfficientMb(inputs, outputs, 2))
            if i >= 2:
                layers += [LiteMla(outputs), EfficientMb(outputs, outputs)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(conv_norm(widths[-1], 1536), nn.Hardswish())
        self.classify = nn.Sequential(
            nn.Linear(1536, 1600), nn.LayerNorm(1600), nn.Hardswish(), nn.Linear(1600, 1000)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.head(self.layers(image)).mean((2, 3)))


class FastVitBlock(nn.Module):
    """FastViT after reparametrisation: a depthwise 3x3 or attention mixes tokens, then a
    convolutional MLP with a depthwise 7x7 (Vasu et al. 2023).
    """

    def __init__(self, width: int, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        if attention:
            self.norm, self.attn = nn.BatchNorm2d(width), SelfAttention(width, width // 32)
        else:
            self.mixer = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.conv = conv_norm(width, width, 7, groups=width)
        self.fc1, self.fc2 = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(3 * width, width, 1)
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.attention:
            batch, width, height, columns = x.shape
            tokens = self.attn(self.norm(x).flatten(2).transpose(1, 2))
            x = x + tokens.transpose(1, 2).reshape(batch, width, height, columns)
        else:
            x = self.mixer(x)
        return x + self.gamma * self.fc2(F.gelu(self.fc1(self.conv(x))))


class FastVit(nn.Module):
    """FastViT-SA12 at 256: a MobileOne stem, three stages of convolutions, one of attention."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        first = widths[0]
        layers: list[nn.Module] = [
            nn.Conv2d(3, first, 3, 2, 1),
            nn.GELU(),
            nn.Conv2d(first, first, 3, 2, 1, groups=first),
            nn.GELU(),
            nn.Conv2d(first, first, 1),
            nn.GELU(),
        ]
        for i, width in enumerate(widths):
            if i:
                layers += [
                    # grouped, not depthwise: each input channel makes two
                    nn.Conv2d(widths[i - 1], width, 7, 2, 3, groups=widths[i - 1]),
                    nn.GELU(),
                    nn.Conv2d(width, width, 1),
                    nn.GELU(),
                ]
            layers += [FastVitBlock(width, attention=i == 3)]
        self.layers = nn.Sequential(*layers)
        self.final = nn.Conv2d(widths[-1], 2 * widths[-1], 3, padding=1, groups=widths[-1])
        self.gate = SqueezeExcite(2 * widths[-1], widths[-1] // 8)
        self.head = nn.Linear(2 * widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = F.gelu(self.gate(self.final(self.layers(image))))
        return self.head(x.mean((2, 3)))


class SplitTranspose(nn.Module):
    """EdgeNeXt's encoder: channels in parts, each convolved with what the one before gave, then
    attention between channels (Maaz et al. 2022).
    """

    def __init__(self, width: int, parts: int, heads: int = 4) -> None:
        super().__init__()
        self.parts, self.heads = parts, heads
        part = width // parts
        self.convs = nn.ModuleList(
            nn.Conv2d(part, part, 3, padding=1, groups=part) for _ in range(parts - 1)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, columns = x.shape
        pieces = list(x.chunk(self.parts, dim=1))
        for i, conv in enumerate(self.convs):
            pieces[i] = conv(pieces[i] if i == 0 else pieces[i] + pieces[i - 1])
        tokens = torch.cat(pieces, dim=1).flatten(2).transpose(1, 2)
        qkv = self.qkv(self.norm1(tokens)).reshape(batch, -1, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind(0)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1) @ v
        tokens = tokens + self.proj(y.permute(0, 3, 1, 2).reshape(batch, -1, width))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return x + tokens.transpose(1, 2).reshape(batch, width, height, columns)


class ConvEncoder(nn.Module):
    """A ConvNeXt block: depthwise ``kernel``, LayerNorm over channels, MLP (Liu et al. 2022)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of [B, C, H, W], written as ConvNeXt writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        y = centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class EdgeNext(nn.Module):
    """EdgeNeXt-S at 256."""

    def __init__(self, widths: tuple[int, ...] = (48, 96, 160, 304)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for i, (width, kernel) in enumerate(zip(widths, (3, 5, 7, 9), strict=True)):
            if i:
                layers += [ChannelNorm(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)]
            layers.append(ConvEncoder(width, kernel))
            if i:
                layers.append(SplitTranspose(width, (2, 2, 4)[i - 1]))
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(image).mean((2, 3))))


class NextConv(nn.Module):
    """Next-ViT's NCB: a grouped 3x3 convolution (heads of 32 channels), then an MLP of 1x1s."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.group = nn.Sequential(
            conv_norm(width, width, 3, groups=width // 32), nn.ReLU(), nn.Conv2d(width, width, 1)
        )
        self.mlp = nn.Sequential(nn.BatchNorm2d(width), nn.Conv2d(width, 3 * width, 1), nn.ReLU())
        self.out = nn.Conv2d(3 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.group(x)
        return x + self.out(self.mlp(x))


class NextAttention(nn.Module):
    """Next-ViT's NTB, its attention over keys pooled by ``ratio``."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.heads, self.ratio = width // 32, ratio
        self.norm = nn.BatchNorm2d(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.local = NextConv(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, columns = x.shape
        tokens = self.norm(x).flatten(2)
        fewer = F.avg_pool1d(tokens, self.ratio**2, self.ratio**2) if self.ratio > 1 else tokens
        tokens, fewer = tokens.transpose(1, 2), fewer.transpose(1, 2)
        q = split_heads(self.q(tokens), self.heads)
        k, v = split_heads(self.k(fewer), self.heads), split_heads(self.v(fewer), self.heads)
        y = self.proj(attend(q, k, v, 32**-0.5))
        return self.local(x + y.transpose(1, 2).reshape(batch, width, height, columns))


class NextVit(nn.Module):
    """Next-ViT-S at 224 (Li et al. 2022)."""

    def __init__(self, widths: tuple[int, ...] = (96, 192, 384, 768)) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            conv_norm(3, 64, 3, 2),
            nn.ReLU(),
            conv_norm(64, 32, 3),
            nn.ReLU(),
            conv_norm(32, 64, 3, 2),
            nn.ReLU(),
        ]
        before = 64
        for i, width in enumerate(widths):
            if i:
                layers.append(nn.AvgPool2d(2))
            layers += [conv_norm(before, width), NextConv(width)]
            layers.append(NextAttention(width, (4, 4, 2, 1)[i]))
            before = width
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.BatchNorm2d(before), nn.Linear(before, 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(image)).mean((2, 3)))


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "maxvit": (MaxVit, 224),
    "coatnet": (CoAtNet, 224),
    "efficientvit": (EfficientVit, 224),
    "fastvit": (FastVit, 256),
    "edgenext": (EdgeNext, 256),
    "nextvit": (NextVit, 224),
}
