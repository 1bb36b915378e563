"""Swin Transformer (Liu et al. 2021): attention in windows, shifted in every second block.

Parameter names are timm's (``swin_tiny_patch4_window7_224``); the original Microsoft checkpoints
load too, see :meth:`Swin.adapt_state_dict`. Maps are [B, H, W, C] throughout.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Mlp, SelfAttention, merge_heads


class WindowAttention(SelfAttention):
    """Self-attention within windows, with a learned bias for each relative position.

    Windows [B * windows, window**2, width] -> same.
    """

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__(width, heads)
        self.tokens = window * window
        table = torch.zeros((2 * window - 1) ** 2, heads)
        self.relative_position_bias_table = nn.Parameter(table)
        index = relative_position_index(window)
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask`` is [windows, 1, window**2, window**2] of 0 and -100, the same for each image."""
        query, key, value = self.project(x)
        scores = (query * self.scale) @ key.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.reshape(self.tokens, self.tokens, self.heads).permute(2, 0, 1)
        scores = scores + bias
        if mask is not None:
            whole = scores.shape
            scores = (scores.reshape(-1, mask.shape[0], *whole[1:]) + mask).reshape(whole)
        return self.proj(merge_heads(torch.softmax(scores, dim=-1) @ value))


class SwinBlock(nn.Module):
    """Pre-norm block over (shifted) windows of a map of fixed size: [B, H, W, width] -> same."""

    mask: Tensor | None

    def __init__(
        self, grid: tuple[int, int], width: int, heads: int, window: int, shift: int
    ) -> None:
        super().__init__()
        self.grid = grid
        # A map no larger than the window is one window, without a shift.
        self.window = min(window, *grid)
        self.shift = shift if min(grid) > window else 0
        self.padding = tuple(-extent % self.window for extent in grid)
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, self.window)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)
        mask = shift_mask(self._padded(), self.window, self.shift) if self.shift else None
        self.register_buffer("mask", mask, persistent=False)

    def _padded(self) -> tuple[int, int]:
        return self.grid[0] + self.padding[0], self.grid[1] + self.padding[1]

    def _attend(self, x: Tensor) -> Tensor:
        """Pad, shift, attend within each window, shift back, crop."""
        batch, width = x.shape[0], x.shape[3]
        (rows, columns), window, shift = self._padded(), self.window, self.shift
        if any(self.padding):
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        if shift:
            x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        tiles = (rows // window, columns // window)
        x = x.reshape(batch, tiles[0], window, tiles[1], window, width).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch * tiles[0] * tiles[1], window * window, width)
        x = self.attn(x, self.mask)
        x = x.reshape(batch, *tiles, window, window, width).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, rows, columns, width)
        if shift:
            x = torch.roll(x, shifts=(shift, shift), dims=(1, 2))
        return x[:, : self.grid[0], : self.grid[1]] if any(self.padding) else x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Halve the map, double the width: [B, H, W, C] -> [B, H / 2, W / 2, 2 * C], rounded up."""

    def __init__(self, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        self.padding = (grid[0] % 2, grid[1] % 2)
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if any(self.padding):
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        batch, rows, columns, width = x.shape
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, width)
        # The order of the four neighbours is the original's: down before right.
        x = x.permute(0, 1, 3, 4, 2, 5).reshape(batch, rows // 2, columns // 2, 4 * width)
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Merging (but in the first stage), then blocks that alternate plain and shifted windows."""

    def __init__(
        self, grid: tuple[int, int], width: int, depth: int, heads: int, window: int, merge: bool
    ) -> None:
        super().__init__()
        self.downsample: nn.Module = nn.Identity()
        if merge:
            self.downsample = PatchMerging(grid, width // 2)
            grid = (-(-grid[0] // 2), -(-grid[1] // 2))
        self.grid = grid
        self.blocks = nn.Sequential(
            *(
                SwinBlock(grid, width, heads, window, shift=window // 2 if block % 2 else 0)
                for block in range(depth)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class SwinPatchEmbed(nn.Module):
    """4x4 patches and a norm: [B, 3, H, W] -> [B, H / 4, W / 4, width]; other sizes are padded."""

    def __init__(self, image_size: tuple[int, int], width: int) -> None:
        super().__init__()
        self.padding = tuple(-extent % 4 for extent in image_size)
        self.grid = (-(-image_size[0] // 4), -(-image_size[1] // 4))
        self.proj = nn.Conv2d(3, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        if any(self.padding):
            image = F.pad(image, (0, self.padding[1], 0, self.padding[0]))
        return self.norm(self.proj(image).permute(0, 2, 3, 1))


class Swin(nn.Module):
    """Image [B, 3, H, W] -> logits [B, classes]. Defaults are Swin-T's."""

    output_names = ("logits",)

    def __init__(
        self,
        image_size: tuple[int, int] = (224, 224),
        *,
        width: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        window: int = 7,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patch_embed = SwinPatchEmbed(image_size, width)
        grid, stages = self.patch_embed.grid, []
        for index, (depth, head) in enumerate(zip(depths, heads, strict=True)):
            stage = Stage(grid, width * 2**index, depth, head, window, merge=index > 0)
            grid = stage.grid
            stages.append(stage)
        self.layers = nn.Sequential(*stages)
        features = width * 2 ** (len(depths) - 1)
        self.norm = nn.LayerNorm(features)
        self.head = nn.ModuleDict({"fc": nn.Linear(features, classes)})

    def forward(self, image: Tensor) -> Tensor:
        features = self.norm(self.layers(self.patch_embed(image)))
        return self.head["fc"](features.mean(dim=(1, 2)))

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Microsoft's names -> timm's.

        Before: ``layers.0.downsample.*`` (merging ends a stage), ``head.*``, constants.
        After: ``layers.1.downsample.*`` (merging begins the next), ``head.fc.*``.
        """
        constants = ("relative_position_index", "attn_mask")
        state = {name: value for name, value in state.items() if not name.endswith(constants)}
        if "head.weight" not in state:
            return state

        def rename(name: str) -> str:
            name = re.sub(r"^head\.(?!fc\.)", "head.fc.", name)
            following = r"^layers\.(\d+)\.downsample"
            return re.sub(following, lambda m: f"layers.{int(m[1]) + 1}.downsample", name)

        return {rename(name): value for name, value in state.items()}


def relative_position_index(window: int) -> Tensor:
    """Row of the bias table for each pair of tokens in a window: [window**2, window**2], int64."""
    axis = torch.arange(window)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)
    offsets = points[:, :, None] - points[:, None, :] + window - 1
    return offsets[0] * (2 * window - 1) + offsets[1]


def shift_mask(grid: tuple[int, int], window: int, shift: int) -> Tensor:
    """-100 between tokens only the shift made neighbours: [windows, 1, window**2, window**2]."""

    def regions(extent: int) -> Tensor:
        position = torch.arange(extent)
        return (position >= extent - window).long() + (position >= extent - shift).long()

    labels = regions(grid[0])[:, None] * 3 + regions(grid[1])[None, :]
    tiles = (grid[0] // window, grid[1] // window)
    labels = labels.reshape(tiles[0], window, tiles[1], window).permute(0, 2, 1, 3)
    labels = labels.reshape(-1, window * window)
    differs = labels[:, None, :] != labels[:, :, None]
    return differs.float().mul(-100.0).unsqueeze(1)
