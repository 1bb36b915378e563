"""DETR with a ResNet-50 backbone and an encoder of 3, 6 or 12 layers (Table I's E3, E6, E12).

Source: Carion et al. 2020; parameter names are facebookresearch/detr's, whose checkpoints load
unchanged (``detr-r50-e632da11.pth`` into E6). The image fills its canvas, so the padding mask is
all-valid and drops out of the attention, and the sine position embedding is a constant of the
model.

Table I gives 37.40, 41.30 and 49.20 M parameters: those are the trained ones, without the 0.22 M of
the frozen stem and first stage. All of them are counted here: 37.58, 41.52 and 49.42 M.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import attend, split_heads
from .resnet import ResNet


class MultiheadAttention(nn.Module):
    """``nn.MultiheadAttention``'s parameters and result, batch first, without masks or dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, N, width], key and value [B, M, width] -> [B, N, width]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            split_heads(F.linear(x, weight, bias), self.heads)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return self.out_proj(attend(q, k, v, self.scale))


class EncoderLayer(nn.Module):
    """Post-norm encoder layer; positions enter query and key only. Tokens [B, N, width] -> same."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(width, heads)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        placed = x + positions
        x = self.norm1(x + self.self_attn(placed, placed, x))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: attention among the queries, to the memory, feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(width, heads)
        self.multihead_attn = MultiheadAttention(width, heads)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, placed_memory: Tensor, queries: Tensor) -> Tensor:
        """x [B, Q, width], both memories [B, N, width], queries [Q, width] -> [B, Q, width]."""
        placed = x + queries
        x = self.norm1(x + self.self_attn(placed, placed, x))
        x = self.norm2(x + self.multihead_attn(x + queries, placed_memory, memory))
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class Encoder(nn.Module):
    """A stack of encoder layers (module names as in the public state dict)."""

    def __init__(self, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(depth))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions)
        return x


class Decoder(nn.Module):
    """A stack of decoder layers and a final norm; the decoded objects start from zero."""

    def __init__(self, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, memory: Tensor, positions: Tensor, queries: Tensor) -> Tensor:
        placed_memory = memory + positions
        x = torch.zeros_like(queries).expand(memory.shape[0], -1, -1)
        for layer in self.layers:
            x = layer(x, memory, placed_memory, queries)
        return self.norm(x)


class Transformer(nn.Module):
    """Tokens [B, N, width], positions [N, width], queries [Q, width] -> [B, Q, width]."""

    def __init__(
        self, encoder_depth: int, decoder_depth: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.encoder = Encoder(encoder_depth, width, heads, hidden)
        self.decoder = Decoder(decoder_depth, width, heads, hidden)

    def forward(self, tokens: Tensor, positions: Tensor, queries: Tensor) -> Tensor:
        return self.decoder(self.encoder(tokens, positions), positions, queries)


class BoxHead(nn.Module):
    """Three linear layers, ReLU between and a sigmoid after: [..., width] -> [..., 4]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            (nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4))
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return torch.sigmoid(last(F.relu(second(F.relu(first(x))))))


class Detr(nn.Module):
    """Image [B, 3, H, W] -> class logits [B, queries, classes], boxes [B, queries, 4].

    A box is centre x, centre y, width, height, each as a fraction of the image.
    ``classes`` counts COCO's 91 ids and "no object". At 800x1333 the encoder sees 25 * 42 = 1050
    tokens.
    """

    output_names = ("logits", "boxes")

    def __init__(
        self,
        image_size: tuple[int, int] = (800, 1333),
        *,
        encoder_depth: int = 6,
        decoder_depth: int = 6,
        width: int = 256,
        heads: int = 8,
        hidden: int = 2048,
        queries: int = 100,
        classes: int = 92,
        backbone_depths: tuple[int, int, int, int] = (3, 4, 6, 3),
        backbone_width: int = 64,
    ) -> None:
        super().__init__()
        body = ResNet(backbone_depths, backbone_width)
        # The public state dict says "backbone.0.body.conv1.weight".
        self.backbone = nn.Sequential(nn.ModuleDict({"body": body}))
        self.input_proj = nn.Conv2d(body.channels, width, 1)
        self.query_embed = nn.Embedding(queries, width)
        self.transformer = Transformer(encoder_depth, decoder_depth, width, heads, hidden)
        self.class_embed = nn.Linear(width, classes)
        self.bbox_embed = BoxHead(width)
        grid = (math.ceil(image_size[0] / 32), math.ceil(image_size[1] / 32))
        self.register_buffer("positions", sine_positions(grid, width), persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.input_proj(self.backbone.get_submodule("0.body")(image))
        tokens = features.flatten(2).transpose(1, 2)
        decoded = self.transformer(tokens, self.positions, self.query_embed.weight)
        return self.class_embed(decoded), self.bbox_embed(decoded)


def sine_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Normalised sine embedding of an all-valid grid: [rows * columns, width], rows first."""
    half = width // 2
    exponents = (
        2 * torch.div(torch.arange(half, dtype=torch.float32), 2, rounding_mode="floor") / half
    )
    periods = 10000.0**exponents

    def embed(extent: int) -> Tensor:
        steps = torch.arange(1, extent + 1, dtype=torch.float32)
        angles = (steps / (extent + 1e-6) * 2 * math.pi)[:, None] / periods
        return torch.stack((angles[:, 0::2].sin(), angles[:, 1::2].cos()), dim=2).flatten(1)

    rows, columns = embed(grid[0]), embed(grid[1])
    rows = rows[:, None, :].expand(-1, grid[1], -1)
    columns = columns[None, :, :].expand(grid[0], -1, -1)
    return torch.cat((rows, columns), dim=2).flatten(0, 1)
